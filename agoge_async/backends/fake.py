"""A backend without a model: a public test double for code that uses a router.

def answer(request):
    return "4" if "2 + 2" in request.messages[-1].content else BackendError(...)

async with Router({"judge": FakeBackend(answer)}) as router: ...
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel

from agoge_async.backends.base import Backend, BackendStatus, Capabilities
from agoge_async.messages import AssistantMessage, ToolCall
from agoge_async.requests import InferenceRequest, TokenRequest
from agoge_async.responses import (
    ChatChunk,
    Choice,
    ChunkChoice,
    Delta,
    FunctionDelta,
    InferenceResponse,
    StreamSummary,
    TokenChoice,
    TokenResponse,
    ToolCallDelta,
    Usage,
    VersionSpan,
)

FakeAnswer = str | list[ToolCall] | list[int] | AssistantMessage | InferenceResponse | Exception
"""Text, tool calls, token ids (for `generate`), a message, a response, or an error to raise."""

Handler = Callable[[Any], FakeAnswer | Awaitable[FakeAnswer]]


class FakeBackend(Backend):
    """Answers with what a function says.

    Args:
        handler: Given the request; returns (or awaits) the answer, or an exception to raise.
        name: As in `Router.statistics()`.
        capabilities: What it claims to do.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        name: str = "fake",
        capabilities: Capabilities | None = None,
    ) -> None:
        super().__init__(name)
        self.requests: list[InferenceRequest | TokenRequest] = []
        """What has come, in order."""
        self.in_flight = 0
        self.peak_in_flight = 0
        self._handler = handler
        self._capabilities = capabilities or Capabilities(
            token_ids=True, logprobs=True, versions=True, vision=True
        )
        self._status = BackendStatus(state="starting")
        self._gate = anyio.Event()
        self._gate.set()
        self._arrived = anyio.Event()
        self._ids = itertools.count()

    @classmethod
    def scripted(cls, answers: list[FakeAnswer], *, name: str = "fake") -> FakeBackend:
        """Make one that gives these answers in order; asked for more, it repeats the last."""
        last = len(answers) - 1
        counter = itertools.count()
        return cls(lambda _request: answers[min(next(counter), last)], name=name)

    def hold(self) -> None:
        """Keep requests that come from now on waiting, until `release`."""
        if self._gate.is_set():
            self._gate = anyio.Event()

    def release(self) -> None:
        """Let the waiting requests go on."""
        self._gate.set()

    async def wait_arrived(self, count: int) -> None:
        """Wait until this many requests have come in all."""
        while len(self.requests) < count:
            await self._arrived.wait()

    def fail_from_now_on(self, error: Any) -> None:
        """Stop serving, as a backend that died for good."""
        self._set_status(BackendStatus(state="failed", error=error))

    @property
    def capabilities(self) -> Capabilities:
        """What it claims to do."""
        return self._capabilities

    @property
    def status(self) -> BackendStatus:
        """How it is doing."""
        return self._status

    async def run(self, started: Callable[[], None]) -> None:
        """Serve until cancelled."""
        self._set_status(BackendStatus(state="serving"))
        started()
        try:
            await anyio.sleep_forever()
        finally:
            self._set_status(BackendStatus(state="closed"))

    def _set_status(self, status: BackendStatus) -> None:
        self._status = status
        self.on_change()

    async def _answer(self, request: InferenceRequest | TokenRequest) -> FakeAnswer:
        self.requests.append(request)
        self._arrived.set()
        self._arrived = anyio.Event()
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            await self._gate.wait()
            answer = self._handler(request)
            if inspect.isawaitable(answer):
                answer = await answer
        finally:
            self.in_flight -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def chat(self, request: InferenceRequest) -> InferenceResponse:
        """Answer a chat."""
        answer = await self._answer(request)
        if isinstance(answer, InferenceResponse):
            return answer.model_copy()
        message = _as_message(answer)
        return InferenceResponse(
            id=f"fake-{next(self._ids)}",
            created=0,
            model=request.model,
            choices=[
                Choice(
                    index=index,
                    message=message,
                    finish_reason="tool_calls" if message.tool_calls else "stop",
                )
                for index in range(request.n or 1)
            ],
            usage=_word_usage(request.affinity_text(), str(message.content or "")),
        )

    async def stream(self, request: InferenceRequest) -> FakeStream:
        """Answer a chat, word by word."""
        return FakeStream(await self.chat(request))

    async def generate(self, request: TokenRequest) -> TokenResponse:
        """Answer token ids with token ids."""
        answer = await self._answer(request)
        if not isinstance(answer, list) or not all(isinstance(item, int) for item in answer):
            raise TypeError(
                f"the handler must answer a TokenRequest with token ids, got {answer!r}"
            )
        ids = [item for item in answer if isinstance(item, int)]
        span = VersionSpan(version=0, start=0, end=len(ids))
        return TokenResponse(
            id=f"fake-{next(self._ids)}",
            model=request.model,
            prompt_token_ids=request.prompt_token_ids,
            choices=[
                TokenChoice(
                    index=index,
                    token_ids=ids,
                    finish_reason="stop",
                    logprobs=None if request.logprobs is None else [0.0] * len(ids),
                    policy_versions=[span],
                )
                for index in range(request.n or 1)
            ],
            usage=Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=len(ids),
                total_tokens=len(request.prompt_token_ids) + len(ids),
            ),
        )


class FakeStream:
    """A response, cut into chunks."""

    def __init__(self, response: InferenceResponse) -> None:
        self.summary = StreamSummary()
        self._response = response
        self._chunks = iter(list(_chunks(response)))

    def __aiter__(self) -> AsyncIterator[ChatChunk]:
        """Iterate over the chunks."""
        return self

    async def __anext__(self) -> ChatChunk:
        """Give the next chunk."""
        await anyio.lowlevel.checkpoint()
        chunk = next(self._chunks, None)
        if chunk is None:
            self.summary = StreamSummary(usage=self._response.usage)
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Drop what is left."""
        self._chunks = iter(())


def _as_message(answer: FakeAnswer) -> AssistantMessage:
    if isinstance(answer, AssistantMessage):
        return answer
    if isinstance(answer, str):
        return AssistantMessage(content=answer)
    if isinstance(answer, list) and answer and isinstance(answer[0], ToolCall):
        return AssistantMessage.model_validate({"role": "assistant", "tool_calls": answer})
    raise TypeError(
        f"the handler must answer a chat with text, tool calls or a message: {answer!r}"
    )


def _word_usage(prompt: str, answer: str) -> Usage:
    counts = len(prompt.split()), len(answer.split())
    return Usage(prompt_tokens=counts[0], completion_tokens=counts[1], total_tokens=sum(counts))


def _chunks(response: InferenceResponse) -> list[ChatChunk]:
    def chunk(choices: list[ChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=response.id,
            created=response.created,
            model=response.model,
            choices=choices,
            usage=usage,
        )

    chunks = []
    for choice in response.choices:
        text = choice.message.content if isinstance(choice.message.content, str) else ""
        deltas = [Delta(role="assistant", content="")]
        deltas += [Delta(content=piece) for piece in re.findall(r"\s*\S+|\s+$", text)]
        if choice.message.reasoning:
            deltas.insert(1, Delta(reasoning=choice.message.reasoning))
        deltas += [_tool_delta(i, call) for i, call in enumerate(choice.message.tool_calls or ())]
        chunks += [chunk([ChunkChoice(index=choice.index, delta=delta)]) for delta in deltas]
        end = ChunkChoice(index=choice.index, delta=Delta(), finish_reason=choice.finish_reason)
        chunks.append(chunk([end]))
    if response.usage is not None:
        chunks.append(chunk([], response.usage))
    return chunks


def _tool_delta(index: int, call: ToolCall) -> Delta:
    function = FunctionDelta(name=call.function.name, arguments=call.function.arguments)
    delta = ToolCallDelta(index=index, id=call.id, type="function", function=function)
    return Delta(tool_calls=[delta])
