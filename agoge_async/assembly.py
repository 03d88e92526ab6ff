"""Joins the chunks of a stream into the response that the same request would have got at once."""

from __future__ import annotations

from agoge_async.messages import AssistantMessage, FunctionCall, ToolCall
from agoge_async.responses import (
    ChatChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    InferenceResponse,
    StreamSummary,
    TokenLogprob,
    ToolCallDelta,
)


class ChunkJoiner:
    """Takes the chunks of one stream in order; keeps their content, not the chunks."""

    def __init__(self) -> None:
        self._response: InferenceResponse | None = None
        self._choices: dict[int, _ChoiceParts] = {}

    def add(self, chunk: ChatChunk) -> None:
        """Take the next chunk."""
        response = self._response
        if response is None:
            response = self._response = InferenceResponse(
                id=chunk.id, created=chunk.created, model=chunk.model, choices=[]
            )
        if chunk.usage is not None:
            response.usage = chunk.usage
        if chunk.system_fingerprint is not None:
            response.system_fingerprint = chunk.system_fingerprint
        if chunk.prompt_token_ids is not None:
            response.prompt_token_ids = chunk.prompt_token_ids
        for piece in chunk.choices:
            parts = self._choices.get(piece.index)
            if parts is None:
                parts = self._choices[piece.index] = _ChoiceParts()
            parts.add(piece)

    def join(self, summary: StreamSummary) -> InferenceResponse:
        """Give the whole response, once the stream has ended.

        Raises:
            ValueError: There was no chunk.
        """
        response = self._response
        if response is None:
            raise ValueError("a stream without chunks has no response")
        response.choices = [self._choices[index].join(index) for index in sorted(self._choices)]
        for choice in response.choices:
            choice.policy_versions = summary.policy_versions.get(choice.index)
        response.usage = summary.usage or response.usage
        response.time_to_first_token_s = summary.time_to_first_token_s
        return response


class _ChoiceParts:
    """What has come of one choice."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.refusal: list[str] = []
        self.calls: dict[int, ToolCall] = {}
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason = ""
        self.stop_reason: int | str | None = None

    def add(self, piece: ChunkChoice) -> None:
        delta = piece.delta
        if delta.content:
            self.content.append(delta.content)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        if delta.refusal:
            self.refusal.append(delta.refusal)
        for call in delta.tool_calls or ():
            self._add_call(call)
        if piece.token_ids:
            self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += piece.logprobs.content or ()
        self.finish_reason = self.finish_reason or piece.finish_reason or ""
        if self.stop_reason is None:
            self.stop_reason = piece.stop_reason

    def _add_call(self, delta: ToolCallDelta) -> None:
        """Join pieces of a call by its index; the first id and name count."""
        call = self.calls.setdefault(
            delta.index, ToolCall(id="", function=FunctionCall(name="", arguments=""))
        )
        call.id = call.id or delta.id or ""
        if delta.function is not None:
            call.function.name = call.function.name or delta.function.name or ""
            call.function.arguments += delta.function.arguments or ""

    def join(self, index: int) -> Choice:
        text = "".join(self.content)
        return Choice(
            index=index,
            message=AssistantMessage(
                content=text if text or not self.calls else None,
                reasoning="".join(self.reasoning) or None,
                refusal="".join(self.refusal) or None,
                tool_calls=[self.calls[key] for key in sorted(self.calls)] or None,
            ),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else ChoiceLogprobs(content=self.logprobs),
            token_ids=self.token_ids or None,
        )
