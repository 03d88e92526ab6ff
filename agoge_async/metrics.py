"""What is counted: one record a request, and the totals of a router."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended; each ends in exactly one of these."""

    OK = "ok"
    INVALID = "invalid"
    """Refused: it would fail anywhere."""
    QUEUE_FULL = "queue_full"
    """Not taken: `max_queued` requests waited already."""
    FAILED = "failed"
    """The backends failed it."""
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    """The caller stopped waiting, or left a stream before its end."""
    CLOSED = "closed"
    """The router was closed while it ran."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One request, when it has ended; given to `on_record`."""

    model: str
    backend: str | None
    """Which backend tried last; None: none did."""
    outcome: Outcome
    attempts: int
    waiting_s: float
    total_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    error: BaseException | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PushRecord:
    """One push of weights that was committed, on every engine."""

    version: int
    gather: str
    transport: str
    num_bytes: int
    """Of the weights that were sent, once."""
    num_tensors: int
    num_buckets: int
    num_engines: int
    control_calls: int
    """Calls to all engines."""
    cast: tuple[str, ...]
    """Types of the trainer that were cast to the engines' before the send."""
    total_s: float
    transfer_s: float
    """Until all engines had everything, whole; of a push that isn't staged, until it was loaded."""
    gather_s: float
    """Of the rank that took longest: gathering, and writing to the buckets."""
    send_s: float
    """Of the rank that took longest: waiting for what was sent."""
    load_s: float
    """Of the engine that took longest: putting the weights into the model."""
    stall_s: float
    """Of the engine that took longest: generation stood still."""
    peak_extra_bytes: int
    """Memory that the push took on the rank that took most, beside the model, and beside what the
    engines read themselves: the segment of `shm` and `cuda_ipc` has the size of the weights, once.
    """

    @property
    def bytes_per_s(self) -> float:
        """Rate of the whole push."""
        return self.num_bytes / self.total_s


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyRecord:
    """What `ParamSyncer.verify` found."""

    version: int
    """Of the engines' weights."""
    num_tensors: int
    differing: dict[str, tuple[str, ...]]
    """Tensors that differ from the trainer's, by engine; an engine that has none isn't in it."""
    unchecked: tuple[str, ...]
    """Tensors that an engine holds in a form that they can't be read from."""
    total_s: float

    @property
    def is_equal(self) -> bool:
        """Whether every tensor of every engine was found to be equal to the trainer's."""
        return not self.differing and not self.unchecked


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendStatistics:
    """One backend in a `RouterStatistics`."""

    state: str
    in_flight: int
    attempts: int
    """Requests sent to it since the start."""
    restarts: int
    error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStatistics:
    """One model in a `RouterStatistics`."""

    in_flight: int
    """Requests that hold a slot."""
    queued: int
    """Requests that wait for one."""
    backends: dict[str, BackendStatistics]


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStatistics:
    """A snapshot of a router."""

    open_requests: int
    """Calls of the router that haven't ended."""
    outcomes: dict[Outcome, int]
    """Ended requests since the start."""
    models: dict[str, ModelStatistics]

    @property
    def ended_requests(self) -> int:
        """Requests that have ended since the start, however they did."""
        return sum(self.outcomes.values())
