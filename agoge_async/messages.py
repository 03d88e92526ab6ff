"""Chat messages and tools, in OpenAI's shape.

Used by requests (what the caller says) and responses (what the model says): an answer's message is
an `AssistantMessage`, so it can be appended to the history as it is.
"""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)


def _check_unicode(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"holds a lone surrogate at position {error.start}, which has no UTF-8 form; "
                "remove it"
            ) from error
    return text


def _check_text(text: str) -> str:
    position = text.find("\0")
    if position >= 0:
        raise ValueError(f"holds a NUL character at position {position}; remove it")
    return _check_unicode(text)


Unicode = Annotated[str, AfterValidator(_check_unicode)]
"""Text that can be sent: no lone surrogate. What a model wrote may hold NUL."""

Text = Annotated[str, AfterValidator(_check_text)]
"""Text for a prompt: no NUL either."""


MAX_JSON_DEPTH = 100
"""Lists and mappings inside each other, in schemas and in variables for a chat template."""


def _tag_one_or_many(value: Any) -> str:
    return "[one]" if isinstance(value, str) else "[many]"


OneOrMany = Discriminator(_tag_one_or_many)
"""Tells a string from a list, so that a fault in one isn't reported as a fault in both."""


@functools.lru_cache(maxsize=1024)
def _schema_fault(schema_json: str) -> str | None:
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(json.loads(schema_json))
    except SchemaError as error:
        where = "/".join(str(step) for step in error.absolute_path) or "its top level"
        return f"is not a valid JSON schema: at {where}: {error.message}"
    return None


def _as_json(value: Any) -> str:
    _check_depth(value)
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    return text


def _check_depth(value: Any) -> None:
    """Refuse what would exhaust the stack of those who walk through it: pydantic, the engine."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, dict | list | tuple)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return
    raise ValueError(f"is nested deeper than {MAX_JSON_DEPTH} levels")


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    _as_json(value)
    return value


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    fault = _schema_fault(_as_json(schema))
    if fault is not None:
        raise ValueError(fault)
    return schema


JSONObject = Annotated[dict[str, Any], AfterValidator(_check_json)]
"""A mapping that JSON can hold."""

JSONSchema = Annotated[dict[str, Any], AfterValidator(_check_schema)]
"""A mapping that is a valid JSON schema, draft 2020-12."""


class StrictModel(BaseModel):
    """Base of what callers write: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class TextPart(StrictModel):
    """Text, as one part of a message's content."""

    type: Literal["text"] = "text"
    text: Text


class ImageURL(StrictModel):
    """Where an image is: an `https:` or `data:` URL."""

    url: Unicode
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(StrictModel):
    """An image, as one part of a message's content; needs a model that sees."""

    type: Literal["image_url"] = "image_url"
    image_url: ImageURL


ContentPart = Annotated[TextPart | ImagePart, Discriminator("type")]
Content = Annotated[
    Annotated[Text, Tag("[one]")] | Annotated[list[ContentPart], Tag("[many]")], OneOrMany
]
"""Text, or a list of parts."""
SaidContent = Annotated[
    Annotated[Unicode, Tag("[one]")] | Annotated[list[ContentPart], Tag("[many]")], OneOrMany
]
"""The same from a model."""


class FunctionCall(StrictModel):
    """Which function the model calls, and with what."""

    model_config = ConfigDict(extra="ignore")  # providers add fields

    name: Unicode
    arguments: Unicode
    """JSON text as the model wrote it; not necessarily valid."""


class ToolCall(StrictModel):
    """One call of a tool by the model."""

    model_config = ConfigDict(extra="ignore")  # providers add fields

    id: Unicode
    type: Literal["function"] = "function"
    function: FunctionCall


class SystemMessage(StrictModel):
    """Instructions to the model."""

    role: Literal["system", "developer"] = "system"
    content: Content
    name: Unicode | None = None


class UserMessage(StrictModel):
    """What the user says."""

    role: Literal["user"] = "user"
    content: Content
    name: Unicode | None = None


class AssistantMessage(StrictModel):
    """What the model said."""

    model_config = ConfigDict(extra="ignore")  # providers add fields

    role: Literal["assistant"] = "assistant"
    content: SaidContent | None = None
    reasoning: Unicode | None = None
    """The model's thinking, where a reasoning parser set it apart."""
    tool_calls: list[ToolCall] | None = None
    refusal: Unicode | None = None
    name: Unicode | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_sdk_dump(cls, data: Any) -> Any:
        """Drop the empty fields that an SDK's dump carries; read `reasoning_content`."""
        if not isinstance(data, dict):
            return data
        data = {key: value for key, value in data.items() if value not in (None, [])}
        if "reasoning_content" in data:
            data.setdefault("reasoning", data.pop("reasoning_content"))
        return data


class ToolMessage(StrictModel):
    """What a tool answered."""

    role: Literal["tool"] = "tool"
    content: Content
    tool_call_id: Unicode
    """`ToolCall.id` of the call that this answers."""
    name: Unicode | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Discriminator("role")
]


def _as_messages(value: Any) -> Any:
    """Read a `Chat`, a string, or a list of messages, mappings and SDK objects as messages."""
    if isinstance(value, Chat):
        return value.messages
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list | tuple):
        return [_as_message(item) for item in value]
    return value


def _as_message(value: Any) -> Any:
    is_foreign = isinstance(value, BaseModel) and not isinstance(value, StrictModel)
    return value.model_dump(exclude_none=True) if is_foreign else value


Messages = Annotated[list[Message], BeforeValidator(_as_messages), Field(min_length=1)]
"""At least one message: a `Chat`, a list of messages or mappings, or a string (a user's turn)."""


class Chat(StrictModel):
    """A conversation."""

    messages: Messages


class FunctionDefinition(StrictModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Unicode | None = None
    parameters: JSONSchema | None = None
    """JSON schema of its arguments; left out: it takes none."""
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(StrictModel):
    """The name in a `NamedToolChoice`."""

    name: str


class NamedToolChoice(StrictModel):
    """Makes the model call this function."""

    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
