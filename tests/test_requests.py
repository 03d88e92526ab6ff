"""Requests: what is refused and how that is said, what is accepted, what is sent."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from pydantic import BaseModel

from agoge_async import (
    AssistantMessage,
    Chat,
    InferenceRequest,
    InferenceResponse,
    InvalidRequestError,
    StructuredOutputs,
    SystemMessage,
    TokenRequest,
    ToolMessage,
    UserMessage,
)


def ask(**fields) -> InferenceRequest:
    return InferenceRequest(**{"model": "m", "messages": "hi"} | fields)


def ask_tokens(**fields) -> TokenRequest:
    return TokenRequest(**{"model": "m", "prompt_token_ids": [1, 2]} | fields)


def wire(request) -> dict:
    return json.loads(request.wire_json())


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def tool(name: str = "add", **fields) -> dict:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> dict:
    """Give a schema of objects inside each other: two levels of JSON each."""
    schema: dict = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


CHOICE_OF_SUB = {"type": "function", "function": {"name": "sub"}}
SCHEMA = {"name": "answer", "schema": {"type": "object"}}

# Field, its value, what the message says beside the field's name.
BAD_VALUES = [
    ("n", 0, ["1", "got 0"]),
    ("n", 20_000, ["16384", "got 20000"]),
    ("n", "many", ["integer", "got 'many'"]),
    ("temperature", math.nan, ["finite", "got nan"]),
    ("temperature", math.inf, ["finite", "got inf"]),
    ("temperature", -0.1, ["0", "got -0.1"]),
    ("top_p", 0, ["greater than 0", "got 0"]),
    ("top_p", 1.5, ["1", "got 1.5"]),
    ("top_p", math.nan, ["got nan"]),
    ("min_p", -1, ["got -1"]),
    ("top_k", -2, ["got -2"]),
    ("max_tokens", 0, ["1", "got 0"]),
    ("max_tokens", -5, ["1", "got -5"]),
    ("max_completion_tokens", 0, ["got 0"]),
    ("repetition_penalty", 0, ["got 0"]),
    ("presence_penalty", 3, ["2", "got 3"]),
    ("frequency_penalty", math.nan, ["got nan"]),
    ("seed", 2**63, ["got 9223372036854775808"]),
    ("timeout_s", 0, ["greater than 0", "got 0"]),
    ("timeout_s", math.inf, ["finite", "got inf"]),
    ("stop", "a\0", ["NUL", "position 1"]),
    ("top_logprobs", 21, ["20", "got 21"]),
    ("messages", [], ["empty", "at least one"]),
    ("messages", 5, ["list", "got 5"]),
    ("tool_choice", "sometimes", ["'none', 'auto' or 'required'", "got 'sometimes'"]),
    ("tool_choice", "auto", ["'auto'", "needs tools"]),
    ("tool_choice", CHOICE_OF_SUB, ["sub", "needs tools"]),
    ("top_logprobs", 3, ["=3", "logprobs=True"]),
    ("response_format", {"type": "json_schema"}, ["json_schema", "together"]),
    ("response_format", {"type": "text", "json_schema": SCHEMA}, ["together"]),
    ("response_format", "json", ["got 'json'"]),
    ("structured_outputs", {"json": {}, "regex": "a"}, ["exactly one", "json_schema", "regex"]),
    ("structured_outputs", {}, ["exactly one", "none"]),
    ("reasoning_effort", "huge", ["'low'", "got 'huge'"]),
    ("chat_template_kwargs", {"x": object()}, ["not JSON"]),
    ("user", "\ud800", ["surrogate"]),
]


@pytest.mark.parametrize(("field", "value", "said"), BAD_VALUES)
def test_a_bad_value_is_refused_with_its_field_and_value(field, value, said):
    """The message says which field, what it got and what it takes; `parameter` is the field."""
    with pytest.raises(InvalidRequestError) as caught:
        ask(**{field: value})
    missing = [text for text in ["InferenceRequest", field, *said] if text not in str(caught.value)]
    assert [] == missing
    assert caught.value.parameter == field


# The whole fields, the path of the faulty one, what the message says.
BAD_PLACES = [
    ({"messages": user("a\0b")}, "messages.0.content", "NUL character at position 1; remove it"),
    ({"messages": user("a\udc80")}, "messages.0.content", "lone surrogate at position 1"),
    ({"messages": "a\0"}, "messages.0.content", "NUL"),
    (
        {"messages": user([{"type": "text", "text": "\0"}])},
        "messages.0.content.0.text",
        "NUL character at position 0",
    ),
    ({"messages": [{"content": "x"}]}, "messages.0", "messages.0.role is required"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0", "'robot'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
    ({"stop": ["ok", "\ud800"]}, "stop.1", "lone surrogate"),
    ({"logit_bias": {"7": 101}}, "logit_bias.7", "got 101"),
    ({"structured_outputs": {"regex": "a" * 10_001}}, "structured_outputs.regex", "10000"),
    ({"structured_outputs": {"json": nested(60)}}, "structured_outputs.json", "100 levels"),
    ({"tools": [tool(parameters=nested(5000))]}, "tools.0.function.parameters", "100 levels"),
    ({"chat_template_kwargs": nested(5000)}, "chat_template_kwargs", "100 levels"),
    ({"chat_template_kwargs": {"a": math.nan}}, "chat_template_kwargs", "not JSON"),
    ({"stop": ["x"] * 1025}, "stop", "at most 1024"),
    ({"top_k": 2**70}, "top_k", "9223372036854775807"),
    ({"priority": -(2**64)}, "priority", "-9223372036854775808"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    (
        {"tools": [tool(parameters={"type": "objekt"})]},
        "tools.0.function.parameters",
        "at type: 'objekt'",
    ),
    ({"tools": [tool(name="has space")]}, "tools.0.function.name", "got 'has space'"),
    ({"tools": [tool(), tool()]}, "tools", r"twice: \['add', 'add'\]; rename one"),
    ({"tools": [tool()], "tool_choice": CHOICE_OF_SUB}, "tool_choice", r"'sub'.*\['add'\]"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "=5 .*=6 differ"),
    (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "structured_outputs, not both",
    ),
]


@pytest.mark.parametrize(("fields", "parameter", "said"), BAD_PLACES)
def test_a_fault_deep_inside_is_refused_with_its_path(fields, parameter, said):
    """Lists and unions show in the path as a user wrote them."""
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ask(**fields)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("fields", "parameter", "said"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids", "is empty; give at least one"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids.1", r"got -1"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids", "list"),
        ({"stop": "x", "detokenize": False}, "stop", "stop='x' needs detokenize=True"),
        ({"logprobs": -1}, "logprobs", "got -1"),
        ({"temperature": math.nan}, "temperature", "TokenRequest: .*got nan"),
    ],
)
def test_a_bad_token_request_is_refused(fields, parameter, said):
    """As a chat request is."""
    with pytest.raises(InvalidRequestError, match=said) as caught:
        ask_tokens(**fields)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        ("max_token", "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ("frobnicate", "unknown field 'frobnicate'"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest(field, said):
    """A typo must not be dropped in silence."""
    with pytest.raises(InvalidRequestError) as caught:
        ask(**{field: 1})
    assert str(caught.value) == f"InferenceRequest: {said}"
    assert caught.value.parameter == field


def test_an_unknown_field_of_a_message_is_refused():
    """Its path is told."""
    with pytest.raises(InvalidRequestError, match=r"unknown field 'messages\.0\.mood'"):
        ask(messages=[{"role": "user", "content": "x", "mood": "good"}])


def test_all_faults_are_told_at_once():
    """One round of corrections is enough."""
    with pytest.raises(InvalidRequestError) as caught:
        ask(n=0, temperature=-1, frobnicate=2)
    assert ["n:", "temperature:", "'frobnicate'"] == [
        part.split()[-1] if "unknown" in part else part.split()[0]
        for part in str(caught.value).removeprefix("InferenceRequest: ").split("; ")
    ]


def test_what_is_required_is_named():
    """A request without model and messages."""
    with pytest.raises(InvalidRequestError, match="model is required; messages is required"):
        InferenceRequest()


def test_a_long_value_is_not_repeated():
    """An error message isn't the place for a whole prompt."""
    with pytest.raises(InvalidRequestError) as caught:
        ask(messages="x" * 10_000 + "\0")
    assert len(str(caught.value)) < 200


# What is accepted


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        Chat(messages="hi"),
        [UserMessage(content="hi")],
        ({"role": "user", "content": "hi"},),
        [{"role": "user", "content": "hi"}],
    ],
    ids=["string", "Chat", "models", "tuple of mappings", "mappings"],
)
def test_messages_may_be_given_in_many_forms(messages):
    """All mean the same."""
    assert ask(messages=messages).messages == [UserMessage(content="hi")]


def test_a_history_may_mix_forms():
    """Ours, mappings and OpenAI's objects in one list."""
    theirs = ChatCompletionMessage(role="assistant", content="4")
    request = ask(messages=[SystemMessage(content="s"), {"role": "user", "content": "u"}, theirs])
    assert [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "4"},
    ] == wire(request)["messages"]


CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}]
ANSWER = {
    "id": "a",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "logprobs": None,
            "message": {"role": "assistant", "content": None, "tool_calls": CALLS},
        }
    ],
}


@pytest.mark.parametrize("cls", [InferenceResponse, ChatCompletion])
def test_an_answers_message_goes_into_the_next_request(cls):
    """With its tool calls, whether it is ours or of OpenAI's client."""
    message = cls.model_validate(ANSWER).choices[0].message
    result = ToolMessage(content="2", tool_call_id="1")
    request = ask(messages=[UserMessage(content="1 + 1?"), message, result])
    assert wire(request)["messages"] == [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]


class City(BaseModel):
    """A schema that a user wrote."""

    name: str
    people: int


@pytest.mark.parametrize("name", ["response_format"])
def test_a_pydantic_class_is_a_response_format(name):
    """Its schema is sent, under its name."""
    wired = wire(ask(**{name: City}))[name]
    assert wired == {
        "type": "json_schema",
        "json_schema": {"name": "City", "schema": City.model_json_schema()},
    }


def test_max_completion_tokens_is_max_tokens():
    """Either name, or both when they agree."""
    requests = [
        ask(max_tokens=5),
        ask(max_completion_tokens=5),
        ask(max_tokens=5, max_completion_tokens=5),
    ]
    assert [5, 5, 5] == [wire(request)["max_tokens"] for request in requests]
    assert not any("max_completion_tokens" in wire(request) for request in requests)


@pytest.mark.parametrize("choice", ["none", None])
def test_no_tools_and_no_choice_go_together(choice):
    """`none` and nothing need no tools."""
    assert ask(tool_choice=choice).tools is None


def test_has_images_sees_images_only():
    """Text parts are no images."""
    text = {"type": "text", "text": "x"}
    image = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}
    assert not ask(messages=user([text])).has_images()
    assert ask(messages=user([text, image])).has_images()


# What is sent


def test_only_what_is_set_is_sent():
    """The model's own defaults stay its own."""
    assert {"messages": [{"role": "user", "content": "hi"}]} == wire(ask())


def test_routing_fields_are_not_sent():
    """The engine needs to know of none of them."""
    request = ask(session_id="s", group_id="g", timeout_s=1, temperature=0)
    assert {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
    } == wire(request)


def test_what_is_sent_has_the_names_of_the_api():
    """`json` and `schema`, where Python has other names."""
    structured = ask(structured_outputs=StructuredOutputs(json_schema={"type": "object"}))
    formatted = ask(response_format={"type": "json_schema", "json_schema": SCHEMA})
    assert {"json": {"type": "object"}} == wire(structured)["structured_outputs"]
    assert wire(formatted)["response_format"]["json_schema"] == SCHEMA


def test_nulls_inside_schemas_and_template_variables_are_sent():
    """They mean something there."""
    schema = {"properties": {"x": {"default": None}}}
    wired = wire(ask(tools=[tool(parameters=schema)], chat_template_kwargs={"tools": None}))
    assert wired["tools"][0]["function"]["parameters"] == schema
    assert {"tools": None} == wired["chat_template_kwargs"]


def test_a_token_request_is_sent_whole():
    """Ids and sampling parameters."""
    request = ask_tokens(logprobs=0, detokenize=False, stop_token_ids=[7], n=2)
    assert {
        "prompt_token_ids": [1, 2],
        "logprobs": 0,
        "detokenize": False,
        "stop_token_ids": [7],
        "n": 2,
    } == wire(request)


plain_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(plain_text)
def test_any_text_goes_through_unchanged(text):
    """All of Unicode but NUL and surrogates: as a string, a mapping and a part."""
    forms = [text, user(text), [AssistantMessage(content=text)]]
    sent = [wire(ask(messages=form))["messages"][0]["content"] for form in forms]
    parts = wire(ask(messages=user([{"type": "text", "text": text}])))["messages"][0]["content"]
    assert [text] * 4 == [*sent, parts[0]["text"]]
    assert json.loads(json.dumps(sent, ensure_ascii=False).encode()) == sent


@given(st.text(max_size=20), st.sampled_from(["\0", "\ud800", "\udfff"]), st.text(max_size=20))
def test_no_text_with_a_nul_or_a_surrogate_goes_through(before, bad, after):
    """Wherever it stands."""
    with pytest.raises(InvalidRequestError):
        ask(messages=before + bad + after)


@given(st.lists(st.integers(0, 200_000), min_size=1), st.integers(0, 50))
def test_affinity_text_shares_the_prefix_that_the_ids_share(ids, length):
    """One character an id, so that prefix routing sees what the cache sees."""
    whole = ask_tokens(prompt_token_ids=ids).affinity_text()
    start = ask_tokens(prompt_token_ids=[*ids[:length], 1]).affinity_text()
    assert len(ids) == len(whole)
    assert whole[:length] == start[:-1]
    assert whole.encode().decode() == whole


def test_affinity_text_of_a_longer_history_starts_with_the_shorter():
    """A conversation that goes on goes where it was."""
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    shorter = ask(messages=history[:1]).affinity_text()
    assert ask(messages=history).affinity_text().startswith(shorter)


def test_continuing_the_last_message_needs_no_second_switch():
    """A prompt can't ask for a new message and continue the last one."""
    assert wire(ask(continue_final_message=True))["add_generation_prompt"] is False


def test_schemas_may_be_as_deep_as_people_write_them():
    """Forty objects inside each other."""
    assert ask(structured_outputs={"json": nested(40)}).structured_outputs is not None
