"""The router: one call for every model request of a program.

An onion: a request's deadline and record, around its attempts, around one attempt: slot, replica,
call, release. A router belongs to one event loop; its backends run in a task of its own, so that it
may be opened and closed by different tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import enum
import functools
import logging
import os
import time
import warnings
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from agoge_async.assembly import join_chunks
from agoge_async.backends.base import Backend, ChunkStream
from agoge_async.errors import (
    AgogeError,
    BackendError,
    ForkedProcessError,
    RequestError,
    RequestTimeoutError,
    RouterClosedError,
    UnknownModelError,
    WrongLoopError,
)
from agoge_async.metrics import Outcome, RequestRecord, RouterStatistics
from agoge_async.pool import Pool, Replica
from agoge_async.progress import StartDisplay, batch_progress
from agoge_async.requests import BaseRequest, InferenceRequest, TokenRequest
from agoge_async.responses import (
    ChatChunk,
    InferenceResponse,
    StreamSummary,
    Timings,
    TokenResponse,
    Usage,
)
from agoge_async.routing import RoutingContext

if TYPE_CHECKING:
    from agoge_async.config import ConfigSource

CLOSE_S = 60.0
"""How long closing waits for backends to end; each bounds its own steps below this."""

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer", InferenceResponse, TokenResponse)
RecordHook = Callable[[RequestRecord], None]


class _State(enum.Enum):
    NEW = "not started; use `async with router:` or await router.start()"
    STARTING = "starting; wait for `async with` or start()"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class _Trip:
    """One request on its way: what its record will say."""

    def __init__(self, request: BaseRequest, pool: Pool, timeout_s: float) -> None:
        self.request = request
        self.pool = pool
        self.timeout_s = timeout_s
        self.deadline = anyio.current_time() + timeout_s
        self.started = time.perf_counter()
        self.attempts = 0
        self.backend: str | None = None
        self.waiting_s = 0.0
        self.usage: Usage | None = None

    def timings(self) -> Timings:
        return Timings(total_s=time.perf_counter() - self.started, waiting_s=self.waiting_s)

    def whereabouts(self) -> str:
        if self.backend is None:
            return "it was waiting for a slot or a replica"
        return f"it was with {self.backend}, attempt {self.attempts}"


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
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._on_record = on_record
        self._state = _State.NEW
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_error: BaseException | None = None
        self._close_requested = asyncio.Event()
        self._trips: set[_Trip] = set()
        self._scopes: set[anyio.CancelScope] = set()
        self._outcomes = dict.fromkeys(Outcome, 0)
        self._idle = asyncio.Event()
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
        """Close."""
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
                if drain_s > 0 and self._trips:
                    with anyio.move_on_after(drain_s):
                        await self._idle.wait()
            finally:
                for scope in self._scopes:
                    scope.cancel()
                self._close_requested.set()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + CLOSE_S):
            await asyncio.wait({self._owner})
        self._state = _State.CLOSED

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
            open_requests=len(self._trips),
            outcomes=dict(self._outcomes),
            models={name: pool.statistics() for name, pool in self._pools.items()},
        )

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

        return await self._submit(request, call)

    async def generate(self, request: TokenRequest) -> TokenResponse:
        """Answer token ids with token ids; raises as `chat` does."""

        async def call(backend: Backend) -> TokenResponse:
            backend.capabilities.check_tokens(backend.name)
            return await backend.generate(request)

        return await self._submit(request, call)

    def stream(self, request: InferenceRequest) -> ChatStream:
        """Answer a chat request in pieces.

        Iterating raises as `chat` does. A replica that fails before its first piece is replaced;
        after that the failure is raised. Leaving the loop early aborts the rest.
        """
        return ChatStream(self._stream(request, summary := _StreamLog()), summary)

    async def chat_many(
        self,
        requests: Iterable[InferenceRequest],
        *,
        max_concurrency: int = 512,
        progress: bool = False,
        return_exceptions: bool = False,
    ) -> list[InferenceResponse | AgogeError]:
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

    async def _submit(
        self,
        request: BaseRequest,
        call: Callable[[Backend], Awaitable[_Answer]],
    ) -> _Answer:
        with self._trip(request) as trip:
            answer = await self._bounded(trip, lambda: self._attempt_all(trip, call))
            trip.usage = answer.usage
            answer.backend = trip.backend or ""
            answer.attempts = trip.attempts
            answer.timings = trip.timings()
            return answer

    @contextlib.contextmanager
    def _trip(self, request: BaseRequest) -> Iterator[_Trip]:
        """Account for a request from its call to its one outcome."""
        self._check_usable()
        timeout_s = request.timeout_s or self._request_timeout_s
        trip = _Trip(request, self.pool(request.model), timeout_s)
        self._trips.add(trip)
        self._idle.clear()
        error: BaseException | None = None
        try:
            yield trip
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._trips.discard(trip)
            if not self._trips:
                self._idle.set()
            self._record(trip, error)

    def _record(self, trip: _Trip, error: BaseException | None) -> None:
        outcome = _outcome_of(error)
        self._outcomes[outcome] += 1
        if self._on_record is None:
            return
        usage = trip.usage
        record = RequestRecord(
            model=trip.request.model,
            backend=trip.backend,
            outcome=outcome,
            attempts=trip.attempts,
            waiting_s=trip.waiting_s,
            total_s=time.perf_counter() - trip.started,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            error=error,
        )
        try:
            self._on_record(record)
        except Exception:
            logger.exception("on_record failed; the request isn't affected")

    async def _bounded(self, trip: _Trip, step: Callable[[], Awaitable[_Result]]) -> _Result:
        """Await a step of a request until its deadline, or until the router closes."""
        self._check_loop()
        if self._close_requested.is_set():
            raise self._closed_under_way()
        scope = anyio.CancelScope(deadline=trip.deadline)
        self._scopes.add(scope)
        try:
            with scope:
                return await step()
        finally:
            self._scopes.discard(scope)
        if self._close_requested.is_set():
            raise self._closed_under_way()
        raise RequestTimeoutError(
            f"no whole answer from {trip.request.model} within {trip.timeout_s:g} s (timeout_s); "
            f"{trip.whereabouts()}",
            timeout_s=trip.timeout_s,
        )

    def _closed_under_way(self) -> RouterClosedError:
        return RouterClosedError(f"{self!r} was closed while a request ran")

    async def _attempt_all(
        self, trip: _Trip, call: Callable[[Backend], Awaitable[_Result]]
    ) -> _Result:
        """Call one replica after the other until one answers, holding a slot for each try."""
        failed: set[str] = set()
        while True:
            async with self._attempt(trip, failed) as replica:
                try:
                    return await call(replica.backend)
                except BackendError as error:
                    failed.add(replica.backend.name)
                    if not self._may_retry(trip, error, failed):
                        raise

    def _may_retry(self, trip: _Trip, error: BackendError, failed: set[str]) -> bool:
        is_last = trip.attempts >= self._max_attempts or not trip.pool.has_other(failed)
        if error.retryable and not is_last:
            return True
        if trip.attempts > 1:
            error.add_note(f"after {trip.attempts} attempts, on {', '.join(sorted(failed))}")
        return False

    @contextlib.asynccontextmanager
    async def _attempt(self, trip: _Trip, failed: set[str]) -> AsyncGenerator[Replica, None]:
        """Hold a slot and a replica."""
        request, pool = trip.request, trip.pool
        await pool.slots.acquire()
        try:
            prefix = request.affinity_text() if pool.uses_prefixes else ""
            context = RoutingContext(
                session_id=request.session_id, group_id=request.group_id, prefix=prefix
            )
            replica = await pool.choose(context, failed)
            trip.attempts += 1
            trip.backend = replica.backend.name
            trip.waiting_s = time.perf_counter() - trip.started
            try:
                yield replica
            finally:
                pool.release(replica)
        finally:
            pool.slots.release()

    async def _stream(
        self, request: InferenceRequest, log: _StreamLog
    ) -> AsyncGenerator[ChatChunk, None]:
        with self._trip(request) as trip:
            async with contextlib.AsyncExitStack() as held:
                source, chunk = await self._bounded(trip, lambda: self._open_stream(trip, held))
                while chunk is not None:
                    log.chunks.append(chunk)
                    if chunk.choices or _wants_usage(request):
                        yield chunk
                    chunk = await self._bounded(trip, lambda: anext(source, None))
                log.finish(source.summary, trip)

    async def _open_stream(
        self, trip: _Trip, held: contextlib.AsyncExitStack
    ) -> tuple[ChunkStream, ChatChunk | None]:
        """Get a stream's first chunk; `held` keeps what it holds until the stream has ended."""
        request = trip.request
        assert isinstance(request, InferenceRequest)
        failed: set[str] = set()
        while True:
            async with contextlib.AsyncExitStack() as tried:
                replica = await tried.enter_async_context(self._attempt(trip, failed))
                backend = replica.backend
                try:
                    backend.capabilities.check_chat(request, backend.name)
                    source = await backend.stream(request)
                    tried.push_async_callback(source.aclose)
                    chunk = await anext(source, None)
                except BackendError as error:
                    failed.add(backend.name)
                    if not self._may_retry(trip, error, failed):
                        raise
                    continue
                held.push_async_exit(tried.pop_all())
                return source, chunk


class _StreamLog:
    """What has come of a stream."""

    def __init__(self) -> None:
        self.chunks: list[ChatChunk] = []
        self.response: InferenceResponse | None = None

    def finish(self, summary: StreamSummary, trip: _Trip) -> None:
        response = join_chunks(self.chunks, summary)
        trip.usage = response.usage
        response.backend = trip.backend or ""
        response.attempts = trip.attempts
        response.timings = trip.timings()
        self.response = response


class ChatStream:
    """The pieces of an answer: `async for chunk in stream`, once."""

    def __init__(self, chunks: AsyncGenerator[ChatChunk, None], log: _StreamLog) -> None:
        self._chunks = chunks
        self._log = log

    def __aiter__(self) -> AsyncGenerator[ChatChunk, None]:
        """Iterate over the pieces."""
        return self._chunks

    async def aclose(self) -> None:
        """Abort what is left; does nothing after the end."""
        await self._chunks.aclose()

    @property
    def response(self) -> InferenceResponse | None:
        """The whole answer, as `chat` would have given it; None before the stream's end."""
        return self._log.response


def _as_pool(name: str, model: Backend | Sequence[Backend] | Pool) -> Pool:
    if isinstance(model, Pool):
        return model
    return Pool(name, [model] if isinstance(model, Backend) else model)


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _outcome_of(error: BaseException | None) -> Outcome:
    if error is None:
        return Outcome.OK
    if isinstance(error, RequestError):
        return Outcome.INVALID
    if isinstance(error, RequestTimeoutError):
        return Outcome.TIMED_OUT
    if isinstance(error, RouterClosedError):
        return Outcome.CLOSED
    return Outcome.FAILED if isinstance(error, Exception) else Outcome.CANCELLED


def _wants_usage(request: InferenceRequest) -> bool:
    return bool(request.stream_options and request.stream_options.get("include_usage"))
