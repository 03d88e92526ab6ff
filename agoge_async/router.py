"""The router: one call for every model request of a program.

`Router` is what users hold: it starts and ends the backends and looks models up. What happens to a
request is `dispatch`'s. A router belongs to one event loop; its backends run in a task of its own,
so that it may be opened and closed by different tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import enum
import functools
import logging
import os
import warnings
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import anyio

from agoge_async.backends.base import Backend, SleepTarget, cannot_sleep
from agoge_async.dispatch import ChatStream, Dispatcher, RecordHook
from agoge_async.engine.messages import MEMORY_TAGS
from agoge_async.errors import (
    AgogeError,
    ForkedProcessError,
    RouterClosedError,
    UnknownModelError,
    WrongLoopError,
)
from agoge_async.metrics import RouterStatistics
from agoge_async.pool import Pool
from agoge_async.progress import StartDisplay, batch_progress
from agoge_async.requests import InferenceRequest, TokenRequest
from agoge_async.responses import InferenceResponse, TokenResponse
from agoge_async.tasks import await_all

if TYPE_CHECKING:
    from agoge_async.config import ConfigSource

CLOSE_S = 60.0
"""How long closing waits for backends to end; each bounds its own steps below this."""

logger = logging.getLogger(__name__)


class _State(enum.Enum):
    NEW = "not started; use `async with router:` or await router.start()"
    STARTING = "starting; wait for `async with` or start()"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Router:
    """Answers every model request of a program.

    Example:
        >>> async with Router.from_config("tiny") as router:
        ...     response = await router.chat(InferenceRequest(model="tiny", messages="Hi"))

    Leaving `async with` while requests run ends them with `RouterClosedError`; `aclose(drain_s=)`
    lets them finish first.

    Args:
        models: Model name to its backend, its replicas, or a `Pool`.
        request_timeout_s: Deadline of requests that bring none.
        max_attempts: Replicas that a request may try.
        on_record: Called with the record of each request that has ended. Must be quick.
    """

    _owner: asyncio.Task[None] | None = None  # of the class: `__del__` sees half-made routers too

    def __init__(
        self,
        models: Mapping[str, Backend | Sequence[Backend] | Pool],
        *,
        request_timeout_s: float = 600.0,
        max_attempts: int = 3,
        on_record: RecordHook | None = None,
    ) -> None:
        if not models:
            raise ValueError("a router needs at least one model")
        self._pools = {name: _as_pool(name, model) for name, model in models.items()}
        backends = [id(backend) for pool in self._pools.values() for backend in pool.backends]
        if len(set(backends)) != len(backends):
            raise ValueError("a backend serves one model; make another one for the second")
        self._dispatcher = Dispatcher(
            request_timeout_s=request_timeout_s, max_attempts=max_attempts, on_record=on_record
        )
        self._state = _State.NEW
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_error: BaseException | None = None
        self._close_requested = asyncio.Event()
        self._display: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    @classmethod
    def from_config(
        cls,
        config: ConfigSource | Sequence[ConfigSource] | None = None,
        *,
        on_record: RecordHook | None = None,
        progress: bool | None = None,
        **sections: Any,
    ) -> Self:
        """Make a router from a configuration; nothing is started before `async with`.

        Args:
            config: A YAML file's path, a preset's name, a mapping, an OmegaConf node, or a list of
                these, merged in order.
            on_record: As for `Router`.
            progress: Show on stderr how engines start; None: when that is a terminal.
            **sections: Top-level keys of the configuration, such as `models`: merged last. Lets
                Hydra instantiate a `_target_: agoge_async.Router.from_config` node.

        Raises:
            ConfigError: The configuration can't be used.
        """
        # Loaded when it is needed: `import agoge_async` stays light.
        from agoge_async.config import as_sources, load_config
        from agoge_async.launch import make_pools

        sources = [] if config is None else as_sources(config)
        parsed = load_config([*sources, sections])
        display = StartDisplay(progress)
        router = cls(
            make_pools(parsed, display.report),
            request_timeout_s=parsed.request_timeout_s,
            max_attempts=parsed.max_attempts,
            on_record=on_record,
        )
        router._display = display
        return router

    async def __aenter__(self) -> Self:
        """Start all backends."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close; a fork that unwinds leaves the router of its parent alone."""
        if os.getpid() == self._pid:
            await self.aclose()

    async def start(self) -> None:
        """Start all backends and wait until every one serves.

        Raises:
            BackendError: One can't be started; the others have been ended again.
            RouterClosedError: The router was started before.
        """
        if self._state is not _State.NEW:
            raise RouterClosedError(f"this router is {self._state.value}; make a new one")
        self._state = _State.STARTING
        self._loop = asyncio.get_running_loop()
        settled = asyncio.Event()
        # A task of the router's own, awaited by `aclose`: scopes of a task group can't be entered
        # by one task and left by another, as test fixtures and frameworks do.
        self._owner = self._loop.create_task(self._own_backends(settled))
        try:
            with self._display:
                await settled.wait()
        except BaseException:
            await self.aclose()
            raise
        if self._start_error is not None:
            await self.aclose()
            raise self._start_error
        if self._state is not _State.STARTING:
            raise RouterClosedError(f"{self!r} was closed while it started")
        self._state = _State.OPEN

    async def aclose(self, *, drain_s: float = 0.0) -> None:
        """Stop taking requests, end those that run, and end all backends.

        Args:
            drain_s: How long requests that run may take to finish; those that are left then fail
                with `RouterClosedError`. [seconds]
        """
        if self._state is _State.NEW:
            self._state = _State.CLOSED
        if self._owner is None or self._state is _State.CLOSED:
            return
        self._check_loop()
        if self._state is not _State.CLOSING:
            self._state = _State.CLOSING
            try:
                with anyio.move_on_after(drain_s):
                    await self._dispatcher.wait_idle()
            finally:
                self._dispatcher.close()
                self._close_requested.set()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_S):
            await asyncio.wait({self._owner})
        if self._owner.done():
            self._state = _State.CLOSED
        else:
            logger.error("%r: backends did not end within %g s", self, CLOSE_S)

    async def _own_backends(self, settled: asyncio.Event) -> None:
        backends = [backend for pool in self._pools.values() for backend in pool.backends]
        waiting = set(backends)

        def started(backend: Backend) -> None:
            waiting.discard(backend)
            if not waiting:
                settled.set()

        try:
            async with anyio.create_task_group() as group:
                for backend in backends:
                    group.start_soon(backend.run, functools.partial(started, backend))
                await self._close_requested.wait()
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            self._start_error = _first_error(errors)
            if settled.is_set():
                logger.critical("the router's backends ended", exc_info=self._start_error)
        finally:
            settled.set()

    def __del__(self) -> None:
        """Warn of a router that was never closed."""
        is_running = self._owner is not None and not self._owner.done()
        if is_running and os.getpid() == self._pid:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        """Name the models and the state."""
        return f"<Router {list(self._pools)} {self._state.name.lower()}>"

    @property
    def models(self) -> list[str]:
        """Names that requests may use."""
        return list(self._pools)

    def pool(self, model: str) -> Pool:
        """Give the replicas of a model.

        Raises:
            UnknownModelError: There is no such model.
        """
        pool = self._pools.get(model)
        if pool is not None:
            return pool
        near = difflib.get_close_matches(model, self._pools, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "there are"
        known = "" if near else f" {', '.join(map(repr, self._pools))}"
        raise UnknownModelError(
            f"no model {model!r}; {hint}{known}", model=model, known=list(self._pools)
        )

    def statistics(self) -> RouterStatistics:
        """Count what goes on now, and what has ended since the start."""
        return RouterStatistics(
            open_requests=self._dispatcher.num_open,
            outcomes=dict(self._dispatcher.outcomes),
            models={name: pool.statistics() for name, pool in self._pools.items()},
        )

    async def sleep(
        self,
        model: str,
        *,
        level: Literal[1, 2] = 1,
        mode: Literal["drain", "abort"] = "drain",
        timeout_s: float = 300.0,
    ) -> None:
        """Have a model's engines give their GPUs' memory back, for a trainer on the same GPUs.

        New requests wait in the router until `wake_up`; an engine that sleeps already stays as it
        is. When one fails, the others may be asleep: `wake_up` wakes them.

        Args:
            model: Its name.
            level: 1: the weights move to the host's memory. 2: they are dropped; the engines serve
                again once they are awake and the next push is committed.
            mode: What becomes of requests that run: `drain` (finish first), `abort` (end with what
                they have).
            timeout_s: How long requests may take to end; the engines stay awake when they don't.
                How long an engine may take to sleep then.

        Raises:
            UnsupportedError: A backend of the model can't sleep; nothing was done.
            EngineBusyError: Requests didn't end in time, or weights are being pushed.
            BackendError: An engine isn't running, died or failed.
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r}")
        if mode not in ("drain", "abort"):
            raise ValueError(f"mode must be drain or abort, got {mode!r}")
        targets = self._sleep_targets(model)
        for target in targets:
            target.check_sleep(level)
        await await_all(*(functools.partial(t.sleep, level, mode, timeout_s) for t in targets))

    async def wake_up(
        self, model: str, *, tags: Sequence[str] | None = None, timeout_s: float = 300.0
    ) -> None:
        """Have a model's engines take back memory that they gave in `sleep`.

        They serve again when they have all of it and, after level 2, new weights. To push weights
        before the KV cache takes its memory: `tags=["weights"]`, push, `tags=["kv_cache"]`.

        Args:
            model: Its name.
            tags: What to take: `weights`, `kv_cache`; None: both. What is awake stays so.
            timeout_s: How long an engine may take.

        Raises:
            UnsupportedError: A backend of the model can't sleep.
            EngineBusyError: Weights are being pushed, or an engine didn't answer in time.
            BackendError: An engine died or failed; there may be too little memory.
        """
        chosen = MEMORY_TAGS if tags is None else tags
        if not chosen or isinstance(chosen, str) or not set(chosen) <= set(MEMORY_TAGS):
            raise ValueError(f"tags must be a list of {' and '.join(MEMORY_TAGS)}, got {tags!r}")
        targets = self._sleep_targets(model)
        await await_all(*(functools.partial(t.wake_up, chosen, timeout_s) for t in targets))

    def _sleep_targets(self, model: str) -> list[SleepTarget]:
        self._check_usable()
        targets: list[SleepTarget] = []
        for backend in self.pool(model).backends:
            if not isinstance(backend, SleepTarget):
                raise cannot_sleep(backend.name, "only local engines can")
            targets.append(backend)
        return targets

    async def chat(self, request: InferenceRequest) -> InferenceResponse:
        """Answer a chat request.

        Raises:
            RequestError: The request is at fault: unknown model, bad value, too long a prompt.
            RequestTimeoutError: Its deadline passed.
            BackendError: Every replica tried failed it.
            RouterStateError: The router is closed, or belongs to another loop or process.
        """

        async def call(backend: Backend) -> InferenceResponse:
            backend.capabilities.check_chat(request, backend.name)
            return await backend.chat(request)

        self._check_usable()
        return await self._dispatcher.submit(self.pool(request.model), request, call)

    async def generate(self, request: TokenRequest) -> TokenResponse:
        """Answer token ids with token ids; raises as `chat` does."""

        async def call(backend: Backend) -> TokenResponse:
            backend.capabilities.check_tokens(backend.name)
            return await backend.generate(request)

        self._check_usable()
        return await self._dispatcher.submit(self.pool(request.model), request, call)

    def stream(self, request: InferenceRequest) -> ChatStream:
        """Answer a chat request in pieces.

        A closed router and an unknown model are told at once, all else by iterating, as by `chat`.
        A replica that fails before its first piece is replaced; after that the failure is raised.
        Leaving the loop early aborts the rest, at the latest when the stream is dropped; with
        `async with router.stream(request) as stream` at once.
        """
        self._check_usable()
        return self._dispatcher.stream(self.pool(request.model), request)

    @overload
    async def chat_many(
        self,
        requests: Iterable[InferenceRequest],
        *,
        max_concurrency: int = ...,
        progress: bool = ...,
        return_exceptions: Literal[False] = ...,
    ) -> list[InferenceResponse]: ...

    @overload
    async def chat_many(
        self,
        requests: Iterable[InferenceRequest],
        *,
        max_concurrency: int = ...,
        progress: bool = ...,
        return_exceptions: bool,
    ) -> list[InferenceResponse | AgogeError]: ...

    async def chat_many(
        self,
        requests: Iterable[InferenceRequest],
        *,
        max_concurrency: int = 512,
        progress: bool = False,
        return_exceptions: bool = False,
    ) -> list[InferenceResponse] | list[InferenceResponse | AgogeError]:
        """Answer many chat requests; gives the answers in the order of the requests.

        Args:
            requests: What to answer.
            max_concurrency: Requests on their way at once.
            progress: Show a bar on stderr.
            return_exceptions: Put errors in the list; else the first one is raised, and the
                requests that still run are aborted.
        """
        listed = list(requests)
        answers: list[InferenceResponse | AgogeError | None] = [None] * len(listed)
        completed = self.chat_as_completed(listed, max_concurrency=max_concurrency)
        with batch_progress(len(listed), shown=progress) as advance:
            async with contextlib.aclosing(completed):
                async for index, answer in completed:
                    if isinstance(answer, AgogeError) and not return_exceptions:
                        raise answer
                    answers[index] = answer
                    advance()
        return [answer for answer in answers if answer is not None]

    async def chat_as_completed(
        self, requests: Iterable[InferenceRequest], *, max_concurrency: int = 512
    ) -> AsyncGenerator[tuple[int, InferenceResponse | AgogeError], None]:
        """Answer many chat requests; gives (index, answer or error) as they complete.

        Leaving the loop early aborts the rest; wrap the call in `contextlib.aclosing` to have that
        done on leaving, not soon after.
        """
        self._check_usable()
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")
        listed = list(requests)
        todo = iter(enumerate(listed))
        done: asyncio.Queue[tuple[int, InferenceResponse | Exception]] = asyncio.Queue()

        async def work() -> None:
            for index, request in todo:
                try:
                    done.put_nowait((index, await self.chat(request)))
                except Exception as error:  # noqa: BLE001  # goes to whoever reads the answers
                    done.put_nowait((index, error))

        # A generator must not yield inside a task group (its scopes would leak into the caller);
        # the `finally` below is what a task group would do.
        loop = asyncio.get_running_loop()
        count = min(max_concurrency, len(listed))
        workers = {loop.create_task(work()) for _ in range(count)}
        try:
            for _ in listed:
                index, answer = await done.get()
                if isinstance(answer, Exception) and not isinstance(answer, AgogeError):
                    raise answer  # a bug, not an outcome
                yield index, answer
        finally:
            for worker in workers:
                worker.cancel()
            if workers:
                await asyncio.wait(workers)

    def _check_loop(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"{self!r} was made in process {self._pid}, this is its fork {os.getpid()}; make a "
                "router of its own in the fork"
            )
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise WrongLoopError(
                f"{self!r} runs on another event loop; use it on the loop that started it, or make "
                "one router a loop"
            )

    def _check_usable(self) -> None:
        self._check_loop()
        if self._state is not _State.OPEN:
            raise RouterClosedError(f"{self!r} is {self._state.value}")


def _as_pool(name: str, model: Backend | Sequence[Backend] | Pool) -> Pool:
    if isinstance(model, Pool):
        return model
    return Pool(name, [model] if isinstance(model, Backend) else model)


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
