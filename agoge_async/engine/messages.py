"""The wire between a router and its engine: what the frames on the two sockets hold.

The data socket carries calls and replies. The control socket carries everything that mustn't wait
behind them: life-cycle events, cancellations, statistics. A frame is a length and a msgpack list of
messages; bodies inside are JSON bytes, made once by one side and read once by the other.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

import msgspec

MEMORY_TAGS = WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's names of what a sleeping engine gives back, in the order in which it takes it again."""


class CallKind(StrEnum):
    """What a `Call` asks for, and what its replies hold."""

    CHAT = "chat"
    """OpenAI chat request in; one `ChatCompletion` out."""
    CHAT_STREAM = "chat_stream"
    """OpenAI chat request in; `ChatCompletionChunk`s out, then a `StreamSummary`."""
    GENERATE = "generate"
    """`TokenRequest` in; one `TokenResponse` out."""


class ReplyKind(StrEnum):
    """Where a `Reply` stands in the answer to its call."""

    CHUNK = "chunk"
    """A piece of the answer; more follows."""
    RESULT = "result"
    """The answer, or the end of its pieces."""
    ERROR = "error"
    """The call failed; the body is a `Fault`."""


class FaultKind(StrEnum):
    """Whose fault a failed call is."""

    INVALID = "invalid"
    CONTEXT = "context"
    INTERNAL = "internal"


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a call failed."""

    kind: FaultKind
    message: str
    parameter: str | None = None
    prompt_tokens: int = 0
    max_model_len: int = 0


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """Parent to child, data: do this."""

    id: int
    kind: CallKind
    body: bytes


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    """Child to parent, data: (a piece of) what came of a call."""

    id: int
    kind: ReplyKind
    body: bytes


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    """Parent to child, control: nobody waits for this call any more."""

    id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """Parent to child, control: abort what runs and end."""


class Query(msgspec.Struct, frozen=True, tag="query", array_like=True):
    """Parent to child, control: how busy are you."""

    id: int


class CommandKind(StrEnum):
    """The steps of a push, in their order; then what an engine's sleep takes."""

    BEGIN = "begin"
    """Receive: the body is a manifest. Touches nothing."""
    READY = "ready"
    """Answer when the push is received and whole; vLLM has an adapter then, which nothing uses.
    Touches nothing. An adapter needs nothing more before COMMIT: HOLD and LOAD do nothing."""
    HOLD = "hold"
    """Hold generation; the body says what becomes of requests that run: wait (they finish), abort
    (they end with what they have) or keep (they go on afterwards)."""
    LOAD = "load"
    """Put the push into the model, as it comes if it isn't here yet; the body is its version."""
    COMPARE = "compare"
    """In place of LOAD: compare what was received with the model; answers with the names that
    differ, and those that can't be compared."""
    COMMIT = "commit"
    """Generate with it, under its version."""
    ABORT = "abort"
    """Give up what was begun and not loaded, and generate again; overtakes the steps before LOAD.
    Answers with what went wrong here, if anything."""

    END_REQUESTS = "end_requests"
    """Have the requests that run end with what they have."""
    SLEEP = "sleep"
    """Give memory back: the body is the level. Requests that come from now on wait."""
    WAKE_UP = "wake_up"
    """Take memory again: the body is a list of tags. Generates once it has all."""


class Command(msgspec.Struct, frozen=True, tag="command", array_like=True):
    """Parent to child, control: do this, after what was commanded before."""

    id: int
    kind: CommandKind
    body: str


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """Child to parent, control: start-up has come to this stage."""

    stage: str


class EngineInfo(msgspec.Struct, frozen=True):
    """What a started engine says about itself."""

    max_model_len: int
    vllm_version: str
    is_multimodal: bool
    has_tool_parser: bool
    devices: tuple[str, ...]
    """Where each process that holds a part of the weights has it: "cpu", or a GPU's UUID."""
    dtype: str
    """Of the weights, by torch's name."""
    no_sleep: str | None
    """Why it can't give its memory back; None: it can."""
    max_lora_rank: int = 0
    """0: the engine was started without LoRA."""


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """Child to parent, control: calls are welcome."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Child to parent, control: the engine can't start, or died; the child ends now."""

    cause: str


class EngineLoad(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """Child to parent, control: how busy the engine is."""

    id: int
    calls: int
    """Calls that the child is answering."""
    unfinished: int
    """Requests that vLLM has not finished."""
    adapters: tuple[int, ...] = ()
    """Versions of the LoRA adapters that vLLM has."""


class CommandDone(msgspec.Struct, frozen=True, tag="done", array_like=True):
    """Child to parent, control: what came of a command."""

    id: int
    body: str
    error: str | None = None


ToChildData = Call
ToParentData = Reply
ToChildControl = Cancel | Shutdown | Query | Command
ToParentControl = Progress | Ready | Failed | EngineLoad | CommandDone


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a child needs to know to become an engine: plain data, which spawn pickles."""

    name: str
    served_model: str
    engine_args: dict[str, Any]
    environment: dict[str, str]
    """The whole environment of the child, set before torch and vLLM load."""
    work_dir: str
    """Folder for the engine's sockets and temporary files; removed with it."""
    parent_pid: int
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    """A template, or the path of one."""

    def __repr__(self) -> str:
        """Name it only: environment and arguments may hold secrets."""
        return f"EngineSpec(name={self.name!r})"


def encode_fault(fault: Fault) -> bytes:
    """Write a fault as the body of an ERROR reply."""
    return msgspec.json.encode(fault)


def decode_fault(body: bytes) -> Fault:
    """Read the body of an ERROR reply."""
    return msgspec.json.decode(body, type=Fault)


def encode_json(value: Any) -> bytes:
    """Write plain data as a body."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
