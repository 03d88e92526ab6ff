"""Messages: what is read as one, and what isn't."""

import json

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import TypeAdapter, ValidationError

from agoge_async import (
    AssistantMessage,
    Chat,
    FunctionDefinition,
    SystemMessage,
    TextPart,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from agoge_async.messages import JSONSchema, Message

CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("role", "cls", "fields"),
    [
        ("system", SystemMessage, {}),
        ("developer", SystemMessage, {}),
        ("user", UserMessage, {}),
        ("assistant", AssistantMessage, {}),
        ("tool", ToolMessage, {"tool_call_id": "call-1"}),
    ],
)
def test_the_role_picks_the_class(role, cls, fields):
    """And the dump is what was read."""
    data = {"role": role, "content": "x", **fields}
    [message] = Chat(messages=[data]).messages
    assert type(message) is cls
    assert message.model_dump(exclude_none=True) == data


def test_a_string_is_one_turn_of_the_user():
    """The short form."""
    assert Chat(messages="hi").messages == [UserMessage(content="hi")]


def test_a_chat_is_read_as_its_messages():
    """A conversation may be given where messages are."""
    chat = Chat(messages=[SystemMessage(content="be brief"), UserMessage(content="hi")])
    assert Chat(messages=chat) == chat


def test_content_may_be_parts():
    """Text and images."""
    parts = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
    ]
    message = UserMessage(content=parts)
    assert isinstance(message.content[0], TextPart)
    assert message.model_dump()["content"] == parts


def test_a_message_of_openais_client_is_read():
    """With the empty fields that its dump carries, and those of servers such as vLLM."""
    theirs = ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "content": "4",
            "annotations": [],
            "audio": None,
            "tool_calls": [],
            "reasoning_content": "2 + 2",
        }
    )
    [message] = Chat(messages=[theirs]).messages
    assert message == AssistantMessage(content="4", reasoning="2 + 2")


def test_a_dump_of_openais_client_is_read():
    """A mapping with `None` for what isn't there."""
    dump = ChatCompletionMessage(role="assistant", content=None, tool_calls=[CALL]).model_dump()
    [message] = Chat(messages=[dump]).messages
    assert message == AssistantMessage(tool_calls=[ToolCall(**CALL)])


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"role": "user"}, "Field required"),
        ({"role": "user", "content": None}, "valid list"),
        ({"role": "tool", "content": "4"}, "tool_call_id"),
        ({"role": "robot", "content": "x"}, "robot"),
        ({"content": "x"}, "role"),
        ({"role": "user", "content": "x", "mood": "good"}, "mood"),
        ({"role": "user", "content": [{"type": "sound", "text": "x"}]}, "sound"),
        ({"role": "user", "content": "a\0b"}, "NUL character at position 1"),
        ({"role": "user", "content": "a\ud800"}, "lone surrogate at position 1"),
        ({"role": "system", "content": [{"type": "text", "text": "\0"}]}, "NUL"),
        ({"role": "tool", "content": "\0", "tool_call_id": "1"}, "NUL"),
    ],
)
def test_a_bad_message_is_refused(message, fault):
    """The fault is named."""
    with pytest.raises(ValidationError, match=fault):
        Chat(messages=[message])


def test_what_a_model_said_may_hold_a_nul():
    """Byte-level models do say it: an answer that can't be read would be lost."""
    message = AssistantMessage.model_validate_json(r'{"content": "a\u0000b"}')
    [again] = Chat(messages=[message]).messages
    assert "a\0b" == again.content


@pytest.mark.parametrize(
    "call",
    [
        {**CALL, "id": "\ud800"},
        {**CALL, "function": {"name": "\udfff", "arguments": "{}"}},
        {**CALL, "function": {"name": "f", "arguments": '"\udc00"'}},
    ],
)
def test_text_that_has_no_utf8_form_is_refused_in_tool_calls(call):
    """It couldn't be sent."""
    with pytest.raises(ValidationError, match="lone surrogate"):
        AssistantMessage(tool_calls=[call])


def test_arguments_of_a_call_need_not_be_json():
    """A model may write what it likes; the caller reads it."""
    call = ToolCall(id="1", function={"name": "f", "arguments": "{broken"})
    assert "{broken" == call.function.arguments


@pytest.mark.parametrize("name", ["", "has space", "a" * 65, "semi;colon", "a\n"])
def test_a_tool_needs_a_name_that_servers_take(name):
    """Letters, digits and a few signs, at most 64."""
    with pytest.raises(ValidationError, match="pattern"):
        Tool(function={"name": name})


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "objekt"}, "at type: 'objekt' is not valid"),
        ({"properties": {"x": {"minimum": "one"}}}, "at properties/x/minimum: 'one' is not"),
        ({"required": "x"}, "at required"),
        ({"default": object()}, "is not JSON"),
        ({"title": "\ud800"}, "is not JSON"),
    ],
)
def test_a_bad_schema_is_refused_with_the_place_of_its_fault(schema, fault):
    """Servers would refuse it too, or hang on it."""
    with pytest.raises(ValidationError, match=fault):
        FunctionDefinition(name="f", parameters=schema)


def test_a_good_schema_is_kept_as_it_is():
    """Nulls, nesting and order included."""
    schema = {"type": "object", "properties": {"b": {"enum": [1, None]}, "a": {"default": None}}}
    kept = TypeAdapter(JSONSchema).validate_python(schema)
    assert json.dumps(kept) == json.dumps(schema)


def test_messages_can_be_told_apart_by_their_role_alone():
    """The union reads JSON as well."""
    message = TypeAdapter(Message).validate_json('{"role": "user", "content": "hi"}')
    assert message == UserMessage(content="hi")
