"""What happens to one request: an onion.

Its deadline and record are outermost; inside are its attempts, each on another replica; inside an
attempt are slot, replica, call and release. The router makes one `Dispatcher` and owns the
backends; the dispatcher knows only pools.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Self, TypeVar

import anyio

from agoge_async.assembly import ChunkJoiner
from agoge_async.backends.base import Backend, ChunkStream
from agoge_async.deadlines import Deadline
from agoge_async.errors import (
    BackendError,
    EngineDiedError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    RouterClosedError,
)
from agoge_async.metrics import Outcome, RequestRecord
from agoge_async.pool import Pool, Replica
from agoge_async.requests import BaseRequest, InferenceRequest
from agoge_async.responses import (
    ChatChunk,
    InferenceResponse,
    StreamSummary,
    Timings,
    TokenResponse,
    Usage,
)
from agoge_async.routing import RoutingContext

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", InferenceResponse, TokenResponse)
RecordHook = Callable[[RequestRecord], None]


class _Trip:
    """One request on its way: what its record will say."""

    def __init__(self, request: BaseRequest, pool: Pool, timeout_s: float) -> None:
        self.request = request
        self.pool = pool
        self.timeout_s = timeout_s
        self.deadline = Deadline(timeout_s, self._too_late)
        self.started = time.perf_counter()
        self.attempts = 0
        self.failed: set[str] = set()
        self.deaths = 0
        self.backend: str | None = None
        self.waiting_s = 0.0
        self.usage: Usage | None = None

    def timings(self) -> Timings:
        return Timings(total_s=time.perf_counter() - self.started, waiting_s=self.waiting_s)

    def _too_late(self) -> RequestTimeoutError:
        whereabouts = (
            "waiting for a slot or a replica"
            if self.backend is None
            else f"with {self.backend}, attempt {self.attempts}"
        )
        return RequestTimeoutError(
            f"no whole answer from {self.request.model} within {self.timeout_s:g} s (timeout_s); "
            f"it was {whereabouts}",
            timeout_s=self.timeout_s,
        )


class Dispatcher:
    """Takes requests through their attempts, and counts how they end.

    Args:
        request_timeout_s: Deadline of requests that bring none.
        max_attempts: Replicas that a request may try.
        on_record: Called with the record of each request that has ended.
    """

    def __init__(
        self, *, request_timeout_s: float, max_attempts: int, on_record: RecordHook | None
    ) -> None:
        self.outcomes = dict.fromkeys(Outcome, 0)
        """Requests that have ended, by how they did."""
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._on_record = on_record
        self._trips: set[_Trip] = set()
        self._is_closed = False
        self._idle = anyio.Event()

    @property
    def num_open(self) -> int:
        """Requests that haven't ended."""
        return len(self._trips)

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        while self._trips:
            await self._idle.wait()

    def close(self) -> None:
        """End all open requests with `RouterClosedError`."""
        self._is_closed = True
        for trip in self._trips:
            trip.deadline.end_with(_closed_under_way())

    async def submit(
        self,
        pool: Pool,
        request: BaseRequest,
        call: Callable[[Backend], Awaitable[_Answer]],
    ) -> _Answer:
        """Get an answer from a replica of a pool.

        Raises:
            RequestTimeoutError: The request's deadline passed.
            BackendError: The last replica tried failed it.
            RouterClosedError: The router was closed meanwhile.
        """
        with self._trip(pool, request) as trip:
            with trip.deadline:
                answer = await self._attempt_all(trip, call)
            trip.usage = answer.usage
            answer.backend = trip.backend or ""
            answer.attempts = trip.attempts
            answer.timings = trip.timings()
            return answer

    @contextlib.contextmanager
    def _trip(self, pool: Pool, request: BaseRequest) -> Iterator[_Trip]:
        """Account for a request from its call to its one outcome."""
        trip = _Trip(request, pool, request.timeout_s or self._request_timeout_s)
        self._trips.add(trip)
        error: BaseException | None = None
        if self._is_closed:
            trip.deadline.end_with(_closed_under_way())
        try:
            yield trip
        except BaseException as raised:
            error = raised
            raise
        finally:
            trip.deadline.close()
            self._trips.discard(trip)
            if not self._trips:
                self._idle.set()
                self._idle = anyio.Event()
            self._record(trip, error)

    def _record(self, trip: _Trip, error: BaseException | None) -> None:
        outcome = _outcome_of(error)
        self.outcomes[outcome] += 1
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

    async def _attempt_all(
        self, trip: _Trip, call: Callable[[Backend], Awaitable[_Answer]]
    ) -> _Answer:
        """Call one replica after the other until one answers.

        Nothing is waited for between two attempts, so that one slot serves them all.
        """
        async with trip.pool.slots:
            while True:
                async with self._replica(trip) as replica:
                    try:
                        return await call(replica.backend)
                    except BackendError as error:
                        if not self._may_retry(trip, error):
                            raise

    def _may_retry(self, trip: _Trip, error: BackendError) -> bool:
        """Take note of a failure, and say whether another replica shall try."""
        trip.failed.add(trip.backend or "")
        # A request that engines die of must not go through them all.
        is_deadly = isinstance(error, EngineDiedError) and trip.deaths > 0
        trip.deaths += isinstance(error, EngineDiedError)
        is_last = trip.attempts >= self._max_attempts or not trip.pool.has_other(trip.failed)
        if error.retryable and not is_last and not is_deadly:
            return True
        if trip.attempts > 1:
            error.add_note(f"after {trip.attempts} attempts, on {', '.join(sorted(trip.failed))}")
        return False

    @contextlib.asynccontextmanager
    async def _replica(self, trip: _Trip) -> AsyncGenerator[Replica, None]:
        """Hold a replica that hasn't failed the request yet."""
        request, pool = trip.request, trip.pool
        prefix = request.affinity_text() if pool.uses_prefixes else ""
        context = RoutingContext(
            session_id=request.session_id, group_id=request.group_id, prefix=prefix
        )
        replica = await pool.choose(context, trip.failed)
        trip.attempts += 1
        trip.backend = replica.backend.name
        trip.waiting_s = time.perf_counter() - trip.started
        try:
            yield replica
        finally:
            pool.release(replica)

    def stream(self, pool: Pool, request: InferenceRequest) -> ChatStream:
        """Get an answer in pieces; iterating raises as `submit` does."""
        log = _StreamLog()
        return ChatStream(self._chunks(pool, request, log), log)

    async def _chunks(
        self, pool: Pool, request: InferenceRequest, log: _StreamLog
    ) -> AsyncGenerator[ChatChunk, None]:
        with self._trip(pool, request) as trip:
            async with contextlib.AsyncExitStack() as held:
                with trip.deadline:
                    source, chunk = await self._open(trip, request, held)
                while chunk is not None:
                    log.joiner.add(chunk)
                    if chunk.choices or _wants_usage(request):
                        yield chunk
                    with trip.deadline:
                        chunk = await anext(source, None)
                log.finish(source.summary, trip)

    async def _open(
        self, trip: _Trip, request: InferenceRequest, held: contextlib.AsyncExitStack
    ) -> tuple[ChunkStream, ChatChunk | None]:
        """Get a stream's first chunk; `held` keeps what it holds until the stream has ended."""
        await held.enter_async_context(trip.pool.slots)
        while True:
            async with contextlib.AsyncExitStack() as tried:
                replica = await tried.enter_async_context(self._replica(trip))
                backend = replica.backend
                try:
                    backend.capabilities.check_chat(request, backend.name)
                    source = await backend.stream(request)
                    tried.push_async_callback(source.aclose)
                    chunk = await anext(source, None)
                except BackendError as error:
                    if not self._may_retry(trip, error):
                        raise
                    continue
                held.push_async_exit(tried.pop_all())
                return source, chunk


class _StreamLog:
    """What has come of a stream."""

    def __init__(self) -> None:
        self.joiner = ChunkJoiner()
        self.response: InferenceResponse | None = None

    def finish(self, summary: StreamSummary, trip: _Trip) -> None:
        response = self.joiner.join(summary)
        trip.usage = response.usage
        response.backend = trip.backend or ""
        response.attempts = trip.attempts
        response.timings = trip.timings()
        self.response = response


class ChatStream:
    """The pieces of an answer: `async for chunk in stream`, once.

    Leaving the loop early aborts the rest when the stream is dropped; `async with stream` or
    `aclose()` does it at once.
    """

    def __init__(self, chunks: AsyncGenerator[ChatChunk, None], log: _StreamLog) -> None:
        self._chunks = chunks
        self._log = log

    def __aiter__(self) -> AsyncGenerator[ChatChunk, None]:
        """Iterate over the pieces."""
        return self._chunks

    async def __aenter__(self) -> Self:
        """Give the stream itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Abort what is left."""
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is left; does nothing after the end."""
        await self._chunks.aclose()

    @property
    def response(self) -> InferenceResponse | None:
        """The whole answer, as `chat` would have given it; None before the stream's end."""
        return self._log.response


def _outcome_of(error: BaseException | None) -> Outcome:
    if error is None:
        return Outcome.OK
    if not isinstance(error, Exception):
        return Outcome.CANCELLED
    named: dict[type[Exception], Outcome] = {
        RequestError: Outcome.INVALID,
        QueueFullError: Outcome.QUEUE_FULL,
        RequestTimeoutError: Outcome.TIMED_OUT,
        RouterClosedError: Outcome.CLOSED,
    }
    return next((named[kind] for kind in named if isinstance(error, kind)), Outcome.FAILED)


def _wants_usage(request: InferenceRequest) -> bool:
    return bool(request.stream_options and request.stream_options.get("include_usage"))


def _closed_under_way() -> RouterClosedError:
    return RouterClosedError("the router was closed while a request ran")
