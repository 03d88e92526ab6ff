"""Responses: their dumps are OpenAI's."""

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agoge_async import ChatChunk, InferenceResponse, TokenResponse

LOGPROBS = {
    "content": [
        {
            "token": "4",
            "logprob": -0.1,
            "bytes": [52],
            "top_logprobs": [{"token": "5", "logprob": -2.5, "bytes": [53]}],
        }
    ]
}
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}]
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
}
SPANS = [{"version": 0, "start": 0, "end": 1}, {"version": 3, "start": 1, "end": 2}]


def response(*choices: dict, **fields) -> InferenceResponse:
    numbered = [{"index": index, **choice} for index, choice in enumerate(choices)]
    return InferenceResponse.model_validate(
        {"id": "r", "created": 1, "model": "m", "choices": numbered, "usage": USAGE} | fields
    )


def said(content: str | None = None, **fields) -> dict:
    return {"message": {"content": content, **fields}, "finish_reason": "stop"}


RESPONSES = {
    "text": response(said("4")),
    "n=2": response(said("4"), said("four")),
    "tool calls": response(said(tool_calls=CALLS) | {"finish_reason": "tool_calls"}),
    "logprobs": response(said("4") | {"logprobs": LOGPROBS}),
    "reasoning": response(said("4", reasoning="2 + 2")),
    "all of ours": response(
        said("4") | {"stop_reason": 7, "token_ids": [4, 7], "policy_versions": SPANS},
        prompt_token_ids=[1, 2],
        backend="m/0",
        attempts=2,
        timings={"total_s": 1.0},
    ),
    "without usage": response(said("4"), usage=None),
}


@pytest.mark.parametrize("name", RESPONSES)
@pytest.mark.parametrize("exclude_none", [False, True])
def test_a_response_is_a_chat_completion(name, exclude_none):
    """OpenAI's class validates the dump, and reads the same answers from it."""
    ours = RESPONSES[name]
    theirs = ChatCompletion.model_validate(ours.model_dump(exclude_none=exclude_none))
    assert [c.message.content for c in ours.choices] == [c.message.content for c in theirs.choices]
    assert [c.finish_reason for c in ours.choices] == [c.finish_reason for c in theirs.choices]
    assert [c.index for c in ours.choices] == [c.index for c in theirs.choices]


def test_tool_calls_and_logprobs_are_read_by_openais_class():
    """Name, arguments, and the rivals of each token."""
    calls, logprobs = (
        ChatCompletion.model_validate(RESPONSES[name].model_dump()).choices[0]
        for name in ("tool calls", "logprobs")
    )
    assert '{"x": 1}' == calls.message.tool_calls[0].function.arguments
    assert -2.5 == logprobs.logprobs.content[0].top_logprobs[0].logprob


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_survives_json(name):
    """It comes from the engine that way, and users store it that way."""
    ours = RESPONSES[name]
    assert InferenceResponse.model_validate_json(ours.model_dump_json()) == ours


def chunk(*choices: dict, **fields) -> ChatChunk:
    return ChatChunk.model_validate(
        {"id": "r", "created": 1, "model": "m", "choices": list(choices)} | fields
    )


CALL_PIECE = {"index": 0, "id": "1", "type": "function", "function": {"name": "add"}}
CHUNKS = {
    "role": chunk({"index": 0, "delta": {"role": "assistant", "content": ""}}),
    "text of choice 1": chunk({"index": 1, "delta": {"content": "4"}}),
    "tool call": chunk({"index": 0, "delta": {"tool_calls": [CALL_PIECE]}}),
    "logprobs": chunk({"index": 0, "delta": {"content": "4"}, "logprobs": LOGPROBS}),
    "end": chunk({"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": "."}),
    "usage": chunk(usage=USAGE),
    "reasoning": chunk({"index": 0, "delta": {"reasoning": "2 + 2"}, "token_ids": [5]}),
}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("exclude_none", [False, True])
def test_a_chunk_is_a_chat_completion_chunk(name, exclude_none):
    """OpenAI's class validates the dump."""
    ours = CHUNKS[name]
    theirs = ChatCompletionChunk.model_validate(ours.model_dump(exclude_none=exclude_none))
    assert [c.delta.content for c in ours.choices] == [c.delta.content for c in theirs.choices]
    assert [c.finish_reason for c in ours.choices] == [c.finish_reason for c in theirs.choices]


def test_text_is_that_of_the_first_choice():
    """The short way to the answer."""
    assert "4" == RESPONSES["n=2"].text
    assert "" == RESPONSES["tool calls"].text


def test_text_of_a_chunk_is_that_of_the_first_choice():
    """Pieces of other choices add nothing to it."""
    texts = [CHUNKS[name].text for name in ("role", "text of choice 1", "logprobs", "usage")]
    assert ["", "", "4", ""] == texts


def test_an_answer_with_a_nul_can_be_read():
    """Models do say it."""
    ours = InferenceResponse.model_validate_json(response(said("x")).model_dump_json())
    body = ours.model_dump_json().replace('"x"', r'"a\u0000"')
    assert "a\0" == InferenceResponse.model_validate_json(body).text


def test_fields_that_a_backend_adds_are_kept():
    """Nothing that was said is lost."""
    ours = response(said("4"), service_tier="fast")
    assert "fast" == ours.model_dump()["service_tier"]


def test_a_token_response_survives_json():
    """Keys of its logprobs are token ids again, not text."""
    ours = TokenResponse.model_validate(
        {
            "id": "r",
            "model": "m",
            "prompt_token_ids": [1, 2],
            "prompt_logprobs": [None, {2: -0.5}],
            "choices": [
                {
                    "index": 0,
                    "token_ids": [3],
                    "finish_reason": "length",
                    "logprobs": [-0.25],
                    "top_logprobs": [{3: -0.25, 4: -2.0}],
                    "policy_versions": SPANS,
                }
            ],
        }
    )
    assert TokenResponse.model_validate_json(ours.model_dump_json()) == ours
