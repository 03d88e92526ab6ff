"""What callers get: OpenAI's response shapes, plus where, when and by which weights.

`openai.types.chat.ChatCompletion` and `ChatCompletionChunk` validate the dumps of
`InferenceResponse` and `ChatChunk`. Fields that OpenAI has none of have vLLM's names, where vLLM
has one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from agoge_async.messages import AssistantMessage


class ResponseModel(BaseModel):
    """Base of what callers read: fields that a backend adds are kept."""

    model_config = ConfigDict(extra="allow", defer_build=True)


class VersionSpan(ResponseModel):
    """Tokens `[start, end)` of an answer were sampled by the weights of `version`."""

    version: int
    """Policy version: the optimizer step that the weights were pushed at; 0 before any push."""
    start: int
    end: int


class Timings(ResponseModel):
    """Where the time of a request went, in seconds."""

    total_s: float
    """From the call of the router to its answer, all attempts included."""
    waiting_s: float = 0.0
    """Waiting for a slot and for a replica that serves; the time of failed attempts too."""


class PromptTokensDetails(ResponseModel):
    """Parts of `Usage.prompt_tokens`."""

    cached_tokens: int | None = None


class CompletionTokensDetails(ResponseModel):
    """Parts of `Usage.completion_tokens`."""

    reasoning_tokens: int | None = None


class Usage(ResponseModel):
    """Counts of tokens, summed over the choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(ResponseModel):
    """A token that could have come, and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    """A token that came, its log probability, and its likeliest rivals."""

    top_logprobs: list[TopLogprob] = []


class ChoiceLogprobs(ResponseModel):
    """Log probabilities of an answer's tokens, one item a token, in nats."""

    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class Choice(ResponseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    finish_reason: str
    """stop, length, tool_calls, content_filter, or abort (cut short in the engine)."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it, where one did."""
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    """The answer's tokens as sampled: never tokenized again. [T]"""
    policy_versions: list[VersionSpan] | None = None
    """Which weights sampled which of `token_ids`."""


class InferenceResponse(ResponseModel):
    """The answer to an `InferenceRequest`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    """The prompt as the model saw it."""
    backend: str = ""
    """Which backend (and replica) answered."""
    attempts: int = 1
    """How many backends were tried, the one that answered included."""
    time_to_first_token_s: float | None = None
    """Of a stream: from the request's arrival in the engine to its first token; None for an answer
    that came at once."""
    timings: Timings | None = None

    @property
    def text(self) -> str:
        """Text of the first choice; empty when it holds only tool calls."""
        content = self.choices[0].message.content
        return content if isinstance(content, str) else ""


class FunctionDelta(ResponseModel):
    """A piece of a function call."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ResponseModel):
    """A piece of a tool call; pieces of one call share `index`."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(ResponseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    refusal: str | None = None


class ChunkChoice(ResponseModel):
    """What a chunk adds to one choice."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None


class ChatChunk(ResponseModel):
    """A piece of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def text(self) -> str:
        """Text that this chunk adds to the first choice."""
        return next((c.delta.content or "" for c in self.choices if c.index == 0), "")


class StreamSummary(ResponseModel):
    """What is known when a stream has ended."""

    usage: Usage | None = None
    policy_versions: dict[int, list[VersionSpan]] = {}
    """By choice index."""
    time_to_first_token_s: float | None = None


class TokenChoice(ResponseModel):
    """One answer to a `TokenRequest`."""

    index: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    text: str | None = None
    """Only when the request asked to `detokenize`."""
    logprobs: list[float] | None = None
    """Log probability of each of `token_ids`. [T] [nats]"""
    top_logprobs: list[dict[int, float]] | None = None
    """Token id to log probability, for each position. [T]"""
    policy_versions: list[VersionSpan] | None = None


class TokenResponse(ResponseModel):
    """The answer to a `TokenRequest`."""

    id: str
    model: str
    prompt_token_ids: list[int]
    choices: list[TokenChoice]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """Token id to log probability for each token of the prompt; None for the first. [P]"""
    usage: Usage | None = None
    backend: str = ""
    attempts: int = 1
    timings: Timings | None = None
