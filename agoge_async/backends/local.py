"""A backend that is one local vLLM engine, restarted when it dies.

One `LocalBackend` is one replica: it owns one `EngineProcess` at a time, in the task that runs
`run`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import anyio
import msgspec
from pydantic import ValidationError

from agoge_async.backends.base import (
    Backend,
    BackendStatus,
    Capabilities,
    WeightShape,
    cannot_sleep,
)
from agoge_async.engine.devices import make_work_dir
from agoge_async.engine.memory import EngineMemory
from agoge_async.engine.messages import (
    CallKind,
    CommandKind,
    EngineSpec,
    FaultKind,
    Reply,
    ReplyKind,
    decode_fault,
)
from agoge_async.engine.process import EngineProcess, EngineStream, start_error
from agoge_async.errors import (
    AgogeError,
    ContextLengthError,
    EngineDiedError,
    EngineStartError,
    GenerationError,
    InvalidRequestError,
    NoReplicaError,
)
from agoge_async.requests import InferenceRequest, TokenRequest
from agoge_async.responses import (
    ChatChunk,
    InferenceResponse,
    ResponseModel,
    StreamSummary,
    TokenResponse,
)

logger = logging.getLogger(__name__)

_Shape = TypeVar("_Shape", bound=ResponseModel)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """When a dead engine is started again."""

    max_restarts: int = 3
    """Deaths in a row after which the replica stays down; 0: never restart."""
    backoff_s: float = 1.0
    """Pause before the first restart; doubled for each that follows."""
    max_backoff_s: float = 60.0
    healthy_after_s: float = 600.0
    """An engine that served this long starts a new row."""

    def delay_s(self, restarts: int) -> float:
        """Give the pause before a restart.

        Args:
            restarts: Restarts in this row so far.
        """
        return min(self.max_backoff_s, self.backoff_s * 2.0**restarts)


SpecFactory = Callable[[str], EngineSpec]
"""Makes the specification of an engine, given its own work folder."""


class LocalBackend(Backend):
    """One replica of a model: a supervised local engine.

    Args:
        name: Of the replica, such as `tiny/0`.
        make_spec: Makes the engine's specification.
        start_timeout_s: How long a start may take.
        restart: When to start again.
        start_slots: Shared by replicas: how many may start at once.
        on_progress: Told of each stage of each start: replica, stage.
    """

    def __init__(
        self,
        name: str,
        make_spec: SpecFactory,
        *,
        start_timeout_s: float = 600.0,
        restart: RestartPolicy | None = None,
        start_slots: anyio.Semaphore | None = None,
        on_progress: Callable[[str, str], None] = lambda _name, _stage: None,
    ) -> None:
        super().__init__(name)
        self.make_spec = make_spec
        self._start_timeout_s = start_timeout_s
        self._restart = restart or RestartPolicy()
        self._start_slots = start_slots or anyio.Semaphore(1)
        self._report = on_progress
        self._memory: EngineMemory | None = None
        self._status = BackendStatus(state="starting")
        self._version = 0
        self.on_stale: Callable[[], None] = lambda: None
        """Set by a `ParamSyncer`; called when an engine runs without the weights of the last push.
        """

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do, as it said when it started."""
        info = self._memory.engine.info if self._memory is not None else None
        return Capabilities(
            token_ids=True,
            logprobs=True,
            versions=True,
            tools=info is not None and info.has_tool_parser,
            vision=info is not None and info.is_multimodal,
            sleep=info is not None and info.no_sleep is None,
        )

    @property
    def status(self) -> BackendStatus:
        """How the replica is doing."""
        return self._status

    @property
    def engine(self) -> EngineProcess:
        """The engine that serves now.

        Raises:
            NoReplicaError: None does.
        """
        return self._running().engine

    def _running(self) -> EngineMemory:
        if self._memory is None:
            raise NoReplicaError(f"replica {self.name} has no engine now", backend=self.name)
        return self._memory

    async def run(self, started: Callable[[], None]) -> None:
        """Keep an engine running until cancelled.

        Raises:
            EngineStartError: The first start failed.
        """
        restarts = total_restarts = 0
        try:
            while True:
                error, served_s = await self._serve_once(started, total_restarts)
                if served_s > self._restart.healthy_after_s:
                    restarts = 0
                if restarts >= self._restart.max_restarts:
                    self._set_status("failed", total_restarts, error)
                    logger.error("%s: stays down after %d restarts", self.name, restarts)
                    await anyio.sleep_forever()
                self._set_status("restarting", total_restarts, error)
                delay_s = self._restart.delay_s(restarts)
                logger.warning("%s; restart %d in %g s", error, restarts + 1, delay_s)
                await anyio.sleep(delay_s)
                restarts += 1
                total_restarts += 1
        finally:
            self._set_status("closed", total_restarts, None)

    async def _serve_once(
        self, started: Callable[[], None], total_restarts: int
    ) -> tuple[AgogeError, float]:
        """Start an engine and serve until its death; gives its error, and how long it served."""
        try:
            async with self._start_slots:
                engine = self._make_engine()
                info = await engine.start(self._start_timeout_s)
        except EngineStartError as error:
            if self._status.state == "starting":
                raise
            return error, 0.0
        served_from = anyio.current_time()
        # A restarted engine holds the weights of its checkpoint, not those that were pushed.
        self._memory = EngineMemory(engine, self._show_state, is_stale=self._version > 0)
        try:
            logger.info(
                "%s: serving with vLLM %s, pid %s", self.name, info.vllm_version, engine.pid
            )
            self._set_status(self._memory.state, total_restarts, None)
            started()
            if self._version:
                self.on_stale()
            await engine.wait_gone()
            self._set_status("restarting", total_restarts, None)
            return await engine.bury(), anyio.current_time() - served_from
        finally:
            self._memory = None
            await engine.aclose()

    @property
    def version(self) -> int:
        """Of the last push that was committed; 0 before any."""
        return self._version

    def weight_shape(self) -> WeightShape:
        """Say how the engine holds its weights.

        Raises:
            NoReplicaError: None runs now.
            WeightSyncError: They are asleep.
        """
        self._running().check_push()
        info = self.engine.info
        assert info is not None
        return WeightShape(
            incarnation=self.engine.pid,
            devices=info.devices,
            dtype=info.dtype,
            max_lora_rank=info.max_lora_rank,
        )

    async def begin_push(self, manifest: str, timeout_s: float) -> None:
        """Have the engine receive a push; touches nothing.

        Raises:
            WeightSyncError: It refuses.
            EngineError: It is dead, or doesn't answer.
        """
        self._running().begin_push()
        await self.engine.command(CommandKind.BEGIN, manifest, timeout_s)

    async def wait_push(self, timeout_s: float) -> None:
        """Wait until the engine has all of the push, whole; touches nothing.

        Raises:
            WeightSyncError: It didn't come, or was damaged.
            EngineError: It is dead, or doesn't answer.
        """
        await self.engine.command(CommandKind.READY, "", timeout_s)

    async def hold_push(self, mode: str, timeout_s: float) -> None:
        """Hold generation; `mode` says what becomes of requests that run: wait, abort or keep.

        Raises:
            EngineError: It is dead, or requests still run after `timeout_s`.
        """
        await self.engine.command(CommandKind.HOLD, mode, timeout_s)

    async def load_push(self, version: int, timeout_s: float) -> dict[str, float]:
        """Load what was received; gives seconds (receive_s, load_s).

        When it fails or is cancelled, the engine is torn and must be condemned.
        """
        answer = await self.engine.command(CommandKind.LOAD, str(version), timeout_s)
        return msgspec.json.decode(answer, type=dict[str, float])

    async def compare_push(self, timeout_s: float) -> tuple[list[str], list[str]]:
        """Compare what was received with the weights that the engine has; ends the push.

        Gives the names that differ, and those that can't be compared.
        """
        answer = await self.engine.command(CommandKind.COMPARE, "", timeout_s)
        found = msgspec.json.decode(answer, type=dict[str, list[str]])
        return found["differing"], found["unchecked"]

    async def commit_push(self, version: int, timeout_s: float) -> None:
        """Serve with what was loaded, once it is awake."""
        memory = self._running()
        await memory.engine.command(CommandKind.COMMIT, "", timeout_s)
        memory.end_push(is_committed=True)
        self._version = version
        self._set_status(memory.state, self._status.restarts, None)

    async def abort_push(self, timeout_s: float) -> str | None:
        """Give up what was begun and not loaded, and generate again.

        Gives what went wrong in the engine, if anything did.
        """
        memory = self._running()
        memory.end_push(is_committed=False)
        answer = await memory.engine.command(CommandKind.ABORT, "", timeout_s)
        return msgspec.json.decode(answer, type=str | None)

    def condemn(self, cause: str) -> None:
        """End an engine that was left in the middle of a load; it is restarted as a dead one is."""
        if self._memory is not None:
            self._memory.engine.condemn(cause)
            self._memory = None
            self._set_status("restarting", self._status.restarts, None)  # nothing is sent to it

    def check_sleep(self, level: int) -> None:
        """Refuse to sleep; does nothing where it can.

        Raises:
            UnsupportedError: The engine can't; says why.
            NoReplicaError: None runs now.
        """
        info = self.engine.info
        assert info is not None
        if info.no_sleep is not None:
            raise cannot_sleep(self.name, info.no_sleep)
        if level == 2 and info.max_lora_rank:
            raise cannot_sleep(
                self.name,
                "level 2 drops its base model's weights, which LoRA adapters don't bring back; "
                "take level=1",
            )

    async def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Give the GPU's memory back once nothing runs; see `Router.sleep`."""
        self.check_sleep(level)
        await self._running().sleep(level, mode, timeout_s)

    async def wake_up(self, tags: Collection[str], timeout_s: float) -> None:
        """Take it again; an engine that is restarted will be awake anyway."""
        if self._memory is not None:
            self.check_sleep(1)
            await self._memory.wake_up(tags, timeout_s)

    def _show_state(self) -> None:
        """Tell that the engine sleeps or is awake, unless it has died meanwhile."""
        if self._memory is not None and self._status.state in {"serving", "stale", "asleep"}:
            self._set_status(self._memory.state, self._status.restarts, None)

    def _make_engine(self) -> EngineProcess:
        try:
            spec = self.make_spec(make_work_dir())
        except Exception as error:
            raise start_error(self.name, error) from error
        return EngineProcess(spec, lambda stage: self._report(self.name, stage))

    def _set_status(self, state: str, restarts: int, error: AgogeError | None) -> None:
        self._status = BackendStatus(state=state, restarts=restarts, error=error)
        self._report(self.name, state)
        self.on_change()

    async def chat(self, request: InferenceRequest) -> InferenceResponse:
        """Answer a chat."""
        return _parse(InferenceResponse, await self._call(CallKind.CHAT, request), self.name)

    async def generate(self, request: TokenRequest) -> TokenResponse:
        """Answer token ids with token ids."""
        return _parse(TokenResponse, await self._call(CallKind.GENERATE, request), self.name)

    async def stream(self, request: InferenceRequest) -> LocalStream:
        """Begin to answer a chat in pieces."""
        stream = await self.engine.stream(CallKind.CHAT_STREAM, request.wire_json())
        return LocalStream(self.name, stream)

    async def _call(self, kind: CallKind, request: InferenceRequest | TokenRequest) -> Reply:
        reply = await self.engine.call(kind, request.wire_json())
        if reply.kind is ReplyKind.ERROR:
            raise _error_of(reply, self.name)
        return reply


class LocalStream:
    """A chat's answer in pieces, from a local engine."""

    def __init__(self, backend: str, stream: EngineStream) -> None:
        self.summary = StreamSummary()
        self._backend = backend
        self._stream = stream
        self._is_open = True

    def __aiter__(self) -> AsyncIterator[ChatChunk]:
        """Iterate over the pieces."""
        return self

    async def __anext__(self) -> ChatChunk:
        """Wait for the next piece.

        Raises:
            EngineDiedError: The engine died.
            RequestError: The engine refuses the request.
        """
        if not self._is_open:
            raise StopAsyncIteration
        try:
            reply = await self._stream.next()
        except EngineDiedError:
            self._is_open = False
            raise
        if reply.kind is ReplyKind.CHUNK:
            return _parse(ChatChunk, reply, self._backend)
        self._is_open = False
        if reply.kind is ReplyKind.ERROR:
            raise _error_of(reply, self._backend)
        self.summary = _parse(StreamSummary, reply, self._backend)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort what is left in the engine."""
        if self._is_open:
            self._is_open = False
            self._stream.cancel()


def _parse(shape: type[_Shape], reply: Reply, backend: str) -> _Shape:
    """Read a reply; one that can't be read is the engine's failure, not the caller's."""
    try:
        return shape.model_validate_json(reply.body)
    except ValidationError as error:
        raise GenerationError(
            f"engine {backend} gave an answer that can't be read: {error}", backend=backend
        ) from error


def _error_of(reply: Reply, backend: str) -> AgogeError:
    fault = decode_fault(reply.body)
    if fault.kind is FaultKind.CONTEXT:
        return ContextLengthError(
            fault.message,
            prompt_tokens=fault.prompt_tokens,
            max_model_len=fault.max_model_len,
        )
    if fault.kind is FaultKind.INVALID:
        return InvalidRequestError(fault.message, parameter=fault.parameter)
    return GenerationError(f"engine {backend} failed the request: {fault.message}", backend=backend)
