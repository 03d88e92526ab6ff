"""Backends and helpers that the tests of the router share."""

import asyncio

import anyio

from agoge_async import (
    BackendStatus,
    EngineDiedError,
    FakeBackend,
    GenerationError,
    InferenceRequest,
    Outcome,
    Router,
)


def ask(text: str = "hi", **fields) -> InferenceRequest:
    return InferenceRequest(model="m", messages=text, **fields)


def echo(request: InferenceRequest) -> str:
    return f"you said: {request.messages[-1].content}"


def died(name: str = "fake") -> EngineDiedError:
    return EngineDiedError(f"engine {name} died", backend=name)


def failed(name: str = "fake") -> GenerationError:
    return GenerationError(f"engine {name} failed the request", backend=name)


class Breaking(FakeBackend):
    """Streams this many chunks of its answer, then raises; `None`: all of them, then waits."""

    def __init__(self, chunks: int, error: Exception | None, *, name: str = "fake") -> None:
        super().__init__(echo, name=name)
        self.chunks = chunks
        self.error = error
        self.closed_streams = 0

    async def stream(self, request):
        whole = await super().stream(request)
        return BreakingStream(self, whole)


class BreakingStream:
    def __init__(self, backend: Breaking, whole) -> None:
        self.summary = whole.summary
        self._backend = backend
        self._whole = whole
        self._left = backend.chunks

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._left == 0:
            if self._backend.error is not None:
                raise self._backend.error
            await anyio.sleep_forever()
        self._left -= 1
        return await anext(self._whole)

    async def aclose(self) -> None:
        self._backend.closed_streams += 1
        await self._whole.aclose()


class Staged(FakeBackend):
    """Does what a test says: waits with its start, serves, restarts, crashes."""

    def __init__(self, handler=echo, *, name: str = "fake") -> None:
        super().__init__(handler, name=name)
        self.may_start = asyncio.Event()
        self.crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, started):
        try:
            await self.may_start.wait()
            self.set_state("serving")
            started()
            await self.crash
        finally:
            self.crash.cancel()
            self.set_state("closed")

    def set_state(self, state: str, error=None) -> None:
        self._status = BackendStatus(state=state, error=error)
        self.on_change()


def is_idle(router: Router) -> bool:
    statistics = router.statistics()
    models = statistics.models.values()
    backends = [backend for model in models for backend in model.backends.values()]
    return not (
        statistics.open_requests
        or any(model.in_flight or model.queued for model in models)
        or any(backend.in_flight for backend in backends)
    )


def outcomes(router: Router) -> dict[Outcome, int]:
    return {outcome: count for outcome, count in router.statistics().outcomes.items() if count}


async def read_stream(router: Router, request, chunks: list | None = None) -> None:
    """Read a stream to its end; `chunks` gets what comes, also before an error."""
    async for chunk in router.stream(request):
        if chunks is not None:
            chunks.append(chunk)


async def start_request(group, router: Router, request=None) -> asyncio.Future:
    """Ask in a task of the group; gives what will come of it."""
    result = asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            result.set_result(await router.chat(request or ask()))
        except Exception as error:  # noqa: BLE001
            result.set_exception(error)
        finally:
            result.cancel()

    group.start_soon(run)
    await anyio.wait_all_tasks_blocked()
    return result


async def first_chunk(router):
    """Get the first piece of a stream."""
    return await anext(aiter(router.stream(ask())))
