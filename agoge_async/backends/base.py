"""What the router needs to know of a backend, and the contract that every backend keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agoge_async.errors import AgogeError, UnsupportedError
from agoge_async.requests import InferenceRequest, TokenRequest
from agoge_async.responses import (
    ChatChunk,
    InferenceResponse,
    StreamSummary,
    TokenResponse,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend can do; what it can't is refused before a request leaves."""

    token_ids: bool = False
    """Takes token ids, and reports those of prompts and answers."""
    logprobs: bool = False
    """Reports log probabilities."""
    versions: bool = False
    """Reports which weights sampled which token."""
    tools: bool = True
    """Calls tools."""
    vision: bool = False
    """Understands images."""
    sleep: bool = False
    """Gives its GPU's memory back for a while."""

    def check_chat(self, request: InferenceRequest, backend: str) -> None:
        """Refuse a chat that needs what is missing.

        Raises:
            UnsupportedError: Names the capability and the field that needs it.
        """
        if request.has_images() and not self.vision:
            raise _unsupported(backend, "vision", "messages", "doesn't take images; send text only")
        if request.logprobs and not self.logprobs:
            raise _unsupported(backend, "logprobs", "logprobs", "reports no log probabilities")
        if request.tools and request.tool_choice != "none" and not self.tools:
            raise _unsupported(
                backend,
                "tools",
                "tools",
                "has no parser for tool calls; set the model's tool_call_parser (for Qwen: "
                'hermes), or tool_choice="none"',
            )

    def check_tokens(self, backend: str) -> None:
        """Refuse a `TokenRequest` where token ids aren't taken.

        Raises:
            UnsupportedError: The backend takes text only.
        """
        if not self.token_ids:
            raise _unsupported(backend, "token_ids", "prompt_token_ids", "doesn't take token ids")


def cannot_sleep(backend: str, why: str) -> UnsupportedError:
    """Say why a backend can't give its GPU's memory back."""
    return UnsupportedError(f"backend {backend} can't sleep: {why}", capability="sleep")


def _unsupported(backend: str, capability: str, parameter: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"backend {backend} {why}", capability=capability, parameter=parameter)


class ChunkStream(Protocol):
    """An answer in pieces, as a backend gives it."""

    summary: StreamSummary
    """Complete once the pieces have ended."""

    def __aiter__(self) -> AsyncIterator[ChatChunk]:
        """Iterate over the pieces."""
        ...

    async def __anext__(self) -> ChatChunk:
        """Wait for the next piece."""
        ...

    async def aclose(self) -> None:
        """Abort what is left; does nothing after the end."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendStatus:
    """How a backend is doing, for `Router.statistics()`."""

    state: str
    """starting, serving, restarting, stale (waits for a push), asleep (waits for `wake_up`), failed
    or closed."""
    restarts: int = 0
    error: AgogeError | None = None
    """Why it doesn't serve, where it doesn't."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightShape:
    """How a backend's engine holds its weights."""

    incarnation: object
    """Another one after each restart."""
    devices: tuple[str, ...]
    """Where each process that holds a part of the weights has it: "cpu", or a GPU's UUID."""
    dtype: str
    """torch's name, such as bfloat16."""
    max_lora_rank: int = 0
    """Of the LoRA adapters that it takes in place of whole weights; 0: it takes none."""

    @property
    def num_workers(self) -> int:
        """Number of those processes."""
        return len(self.devices)


@runtime_checkable
class WeightTarget(Protocol):
    """Something that weights can be pushed to; `ParamSyncer` calls these in this order.

    Every method raises `WeightSyncError`, or a `BackendError` when the engine is gone.
    """

    name: str
    on_stale: Callable[[], None]
    """Set by a `ParamSyncer`; called when an engine runs without what was pushed."""

    @property
    def status(self) -> BackendStatus:
        """How it is doing."""
        ...

    @property
    def version(self) -> int:
        """Of the last push that was committed; 0 before any."""
        ...

    def weight_shape(self) -> WeightShape:
        """Say how the engine that runs now holds its weights.

        Raises:
            NoReplicaError: None runs now.
        """
        ...

    async def begin_push(self, manifest: str, timeout_s: float) -> None:
        """Have the engine receive a push; touches nothing."""
        ...

    async def wait_push(self, timeout_s: float) -> None:
        """Wait until the engine has all of the push, whole; touches nothing."""
        ...

    async def hold_push(self, mode: str, timeout_s: float) -> None:
        """Hold generation; `mode` says what becomes of requests that run: wait, abort or keep."""
        ...

    async def load_push(self, version: int, timeout_s: float) -> dict[str, float]:
        """Load what was received; gives seconds (receive_s, load_s).

        When it fails or is cancelled, the engine is torn and must be condemned.
        """
        ...

    async def compare_push(self, timeout_s: float) -> tuple[list[str], list[str]]:
        """Compare what was received with the weights that the engine has; ends the push.

        Gives the names that differ, and those that can't be compared.
        """
        ...

    async def commit_push(self, version: int, timeout_s: float) -> None:
        """Generate with what was loaded, under its version."""
        ...

    async def abort_push(self, timeout_s: float) -> str | None:
        """Give up what was begun and not loaded, and generate again.

        Gives what went wrong in the engine, if anything did.
        """
        ...

    def condemn(self, cause: str) -> None:
        """End an engine that was left in the middle of a load; it is restarted as a dead one is."""
        ...


@runtime_checkable
class SleepTarget(Protocol):
    """Something that gives its GPU's memory back; `Router.sleep` and `wake_up` say what each does.

    Every method raises `UnsupportedError` where it can't, with the reason, or a `BackendError`.
    """

    name: str

    def check_sleep(self, level: int) -> None:
        """Refuse to sleep, where it can't now or never can."""
        ...

    async def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Give memory back once nothing runs."""
        ...

    async def wake_up(self, tags: Collection[str], timeout_s: float) -> None:
        """Take it again; does nothing for what is awake."""
        ...


class Backend(ABC):
    """Something that answers requests: one engine, one server, one API account.

    The router calls `run` once, in a task of its own, and the other methods only while
    `is_serving`. Every method but `run` may be cancelled at any time and then leaves nothing
    running.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_change: Callable[[], None] = lambda: None
        """Set by the router; a backend calls it when `is_serving` or its status changed."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do; valid while it serves."""

    @property
    @abstractmethod
    def status(self) -> BackendStatus:
        """How it is doing."""

    @property
    def is_serving(self) -> bool:
        """Whether requests may be sent to it now."""
        return self.status.state == "serving"

    @property
    def may_serve_later(self) -> bool:
        """Whether waiting for it makes sense."""
        return self.status.state in {"starting", "restarting", "stale", "asleep"}

    @abstractmethod
    async def run(self, started: Callable[[], None]) -> None:
        """Own the backend's resources until cancelled.

        Args:
            started: Called once, when requests may come.

        Raises:
            BackendError: It couldn't be started.
        """

    @abstractmethod
    async def chat(self, request: InferenceRequest) -> InferenceResponse:
        """Answer a chat."""

    @abstractmethod
    async def stream(self, request: InferenceRequest) -> ChunkStream:
        """Begin to answer a chat in pieces."""

    @abstractmethod
    async def generate(self, request: TokenRequest) -> TokenResponse:
        """Answer token ids with token ids."""
