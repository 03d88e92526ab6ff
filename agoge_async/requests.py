"""What callers ask for: `InferenceRequest` (chat) and `TokenRequest` (token in, token out).

Names of fields are OpenAI's, and vLLM's where OpenAI has none. A bad value is refused when the
request is made, with an `InvalidRequestError` that names the field, its value and what to change.
"""

from __future__ import annotations

import difflib
import reprlib
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    model_validator,
)

from agoge_async.errors import InvalidRequestError
from agoge_async.messages import (
    ImagePart,
    JSONObject,
    JSONSchema,
    Messages,
    NamedToolChoice,
    OneOrMany,
    StrictModel,
    Text,
    Tool,
    ToolChoice,
    Unicode,
)

INT64_MAX = 2**63 - 1
MAX_STOP_STRINGS = 1024
MAX_REGEX_LENGTH = 10_000

Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT64_MAX)]


class _FieldError(ValueError):
    """A value that is wrong beside those of other fields."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class NamedSchema(StrictModel):
    """The schema in a `ResponseFormat`."""

    model_config = ConfigDict(populate_by_name=True)

    name: Unicode
    description: Unicode | None = None
    json_schema: JSONSchema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_when_needed(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type 'json_schema' and the field json_schema go together")
        return self


def _as_response_format(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, BaseModel):
        schema = {"name": value.__name__, "schema": value.model_json_schema()}
        return {"type": "json_schema", "json_schema": schema}
    return value


class StructuredOutputs(StrictModel):
    """A grammar that the answer must follow; exactly one of the fields. vLLM's names."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: JSONSchema | None = Field(default=None, alias="json")
    regex: Annotated[Unicode, Field(max_length=MAX_REGEX_LENGTH)] | None = None
    """In the engine's dialect: xgrammar's, without look-around."""
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Unicode | None = None
    """EBNF, in xgrammar's dialect."""
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"takes exactly one constraint, got {given or 'none'}")
        return self


class BaseRequest(StrictModel, ABC):
    """Sampling parameters and routing hints that every kind of request takes.

    Sampling parameters left at None are the model's own defaults (its generation config).
    """

    model: str
    """A configured model's name."""
    n: Annotated[int, Field(ge=1, le=16384)] | None = None
    """Answers to sample for the one prompt."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    """0 or -1: all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    """Longest answer; None: up to the end of the context. [tokens]"""
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    stop: (
        Annotated[
            Annotated[Text, Tag("[one]")]
            | Annotated[list[Text], Field(max_length=MAX_STOP_STRINGS), Tag("[many]")],
            OneOrMany,
        ]
        | None
    ) = None
    """The answer ends before the first of these."""
    stop_token_ids: list[TokenId] | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: list[TokenId] | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Int64 | None = None
    """Lower is earlier; needs an engine with `scheduling_policy: priority`."""
    session_id: str | None = None
    """Requests of one session go to the replica that holds its prefix."""
    group_id: str | None = None
    """Requests that share a prompt, such as the samples of one GRPO group."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Total deadline, waiting and retries included; None: the router's `request_timeout_s`."""

    routing_fields: ClassVar[frozenset[str]] = frozenset(
        {"model", "session_id", "group_id", "timeout_s"}
    )

    @model_validator(mode="wrap")
    @classmethod
    def _raise_our_error(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            request = handler(data)
        except ValidationError as error:
            raise invalid_request(cls, error) from None
        try:
            request._check_together()
        except _FieldError as error:
            message = f"{cls.__name__}: {error}"
            raise InvalidRequestError(message, parameter=error.parameter) from None
        return request

    @abstractmethod
    def _check_together(self) -> None:
        """Check what no field can tell alone; raises `_FieldError`."""

    def wire_json(self) -> bytes:
        """Give what an engine is sent, as JSON: set fields, without the routing ones."""
        return self.model_dump_json(
            by_alias=True, exclude_none=True, exclude=set(self.routing_fields)
        ).encode()

    @abstractmethod
    def affinity_text(self) -> str:
        """Give text that starts alike for prompts that share a prefix."""


class InferenceRequest(BaseRequest):
    """A chat request.

    Example:
        >>> InferenceRequest(model="tiny", messages="What is 3 + 4?", max_tokens=32)

    Raises:
        InvalidRequestError: A field is unknown or holds a bad value.
    """

    messages: Messages
    """A `Chat`, a list of messages or mappings, or a string (one user turn)."""
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    """None: "auto" when there are tools."""
    parallel_tool_calls: bool | None = None
    response_format: Annotated[ResponseFormat | None, BeforeValidator(_as_response_format)] = None
    """OpenAI's shape, or a pydantic model class whose schema the answer must follow."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    """OpenAI's newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Report the log probability of each token of the answer. [nats]"""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """How many alternatives to report per token; needs `logprobs`."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Token id (as text) to a bias added to its logit."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: JSONObject | None = None
    """Variables for the model's chat template, such as `{"enable_thinking": False}`."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Continue the last assistant message instead of starting a new one."""
    stream_options: dict[str, bool] | None = None
    """`{"include_usage": True}`: the stream ends with a chunk that holds the usage."""
    user: Unicode | None = None

    def _check_together(self) -> None:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise _FieldError(
                    "max_tokens",
                    f"max_tokens={self.max_tokens} and max_completion_tokens="
                    f"{self.max_completion_tokens} differ; give one of them",
                )
            self.max_tokens, self.max_completion_tokens = self.max_completion_tokens, None
        if self.continue_final_message and self.add_generation_prompt is None:
            self.add_generation_prompt = False
        if self.top_logprobs and not self.logprobs:
            raise _FieldError(
                "top_logprobs", f"top_logprobs={self.top_logprobs} needs logprobs=True"
            )
        if self.response_format is not None and self.structured_outputs is not None:
            raise _FieldError(
                "response_format", "give response_format or structured_outputs, not both"
            )
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise _FieldError("tools", f"tools hold a name twice: {names}; rename one")
        if self.tool_choice in (None, "none"):
            return
        if not names:
            shown = self.model_dump(include={"tool_choice"})["tool_choice"]
            raise _FieldError("tool_choice", f"tool_choice={shown!r} needs tools; give some")
        if isinstance(self.tool_choice, NamedToolChoice):
            wanted = self.tool_choice.function.name
            if wanted not in names:
                raise _FieldError(
                    "tool_choice", f"tool_choice names {wanted!r}; name one of the tools, {names}"
                )

    def has_images(self) -> bool:
        """Say whether any message holds an image."""
        return any(
            isinstance(part, ImagePart)
            for message in self.messages
            if isinstance(message.content, list)
            for part in message.content
        )

    def affinity_text(self) -> str:
        """Give the conversation as text, oldest first, so that shared histories start alike."""
        return "\x1e".join(f"{message.role}\x1f{message.content}" for message in self.messages)


class TokenRequest(BaseRequest):
    """Token ids in, token ids out: no template, no text.

    Raises:
        InvalidRequestError: A field is unknown or holds a bad value.
    """

    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0: of the sampled token only; k: of the k likeliest as well. [nats]"""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """The same for the tokens of the prompt; turns prefix-cache reads off."""
    detokenize: bool | None = None
    """Give `text` beside the ids; stop strings need it."""

    def _check_together(self) -> None:
        if self.stop is not None and self.detokenize is False:
            raise _FieldError(
                "stop", f"stop={self.stop!r} needs detokenize=True; or use stop_token_ids"
            )

    def affinity_text(self) -> str:
        """Give the ids as one character each, so that shared prefixes start alike."""
        return "".join(map(chr, (token % 0xD800 for token in self.prompt_token_ids)))


def invalid_request(cls: type[BaseRequest], error: ValidationError) -> InvalidRequestError:
    """Say in one line a fault what is wrong with a request, where, and what to change."""
    faults = [_describe_fault(cls, fault) for fault in error.errors(include_url=False)]
    first = error.errors(include_url=False)[0]
    parameter = _path(first["loc"]) or None
    return InvalidRequestError(f"{cls.__name__}: " + "; ".join(faults), parameter=parameter)


_UNION_TAGS = frozenset({"system", "developer", "user", "assistant", "tool", "text", "image_url"})


def _path(steps: tuple[int | str, ...]) -> str:
    """Name a field, without the union members that pydantic puts in between."""
    kept: list[str] = []
    for before, step in zip(("", *steps), steps, strict=False):
        is_tag = isinstance(before, int) and step in _UNION_TAGS
        if not is_tag and "[" not in str(step):
            kept.append(str(step))
    return ".".join(kept)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100


def _describe_fault(cls: type[BaseRequest], fault: Any) -> str:
    where = _path(fault["loc"])
    if fault["type"] == "extra_forbidden":
        name = str(fault["loc"][-1])
        known = cls.model_fields if len(fault["loc"]) == 1 else ()
        near = difflib.get_close_matches(name, known, n=1)
        return f"unknown field {where!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if fault["type"] == "missing":
        return f"{where} is required"
    if fault["type"] == "union_tag_not_found":
        return f"{where}.{fault['ctx']['discriminator'].strip(chr(39))} is required"
    if fault["type"] == "too_short" and where in {"messages", "prompt_token_ids"}:
        return f"{where} is empty; give at least one"
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    value = _SHORT.repr(fault["input"])
    shown = f" (got {value})" if where and len(value) <= 60 else ""
    return f"{where}: {message}{shown}" if where else message
