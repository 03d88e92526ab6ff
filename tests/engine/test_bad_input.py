"""What only the engine can tell is wrong comes back as a typed error that says what to change."""

import pytest

from agoge_async import (
    ContextLengthError,
    InvalidRequestError,
    TokenRequest,
    UnknownModelError,
    UnsupportedError,
)
from tests.engine.conftest import ask

IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]


async def test_a_prompt_longer_than_the_context_names_both_numbers(router):
    """The true length of the prompt is told, not where tokenization stopped."""
    with pytest.raises(ContextLengthError, match="2048") as caught:
        await router.chat(ask(messages="x" * 5000))
    assert 5000 < caught.value.prompt_tokens < 5050
    assert 2048 == caught.value.max_model_len


async def test_token_ids_longer_than_the_context_name_both_numbers(router):
    """Token requests are told the same."""
    with pytest.raises(ContextLengthError, match=r"3000.*2048"):
        await router.generate(TokenRequest(model="tiny", prompt_token_ids=[65] * 3000))


async def test_a_token_outside_the_vocabulary_is_named(router):
    """An id that the model doesn't know can't crash the engine."""
    with pytest.raises(InvalidRequestError, match=r"100000.*272") as caught:
        await router.generate(TokenRequest(model="tiny", prompt_token_ids=[65, 100_000]))
    assert "prompt_token_ids" == caught.value.parameter


async def test_an_image_for_a_text_model_is_refused(router):
    """Nothing is sent."""
    with pytest.raises(UnsupportedError, match="images"):
        await router.chat(ask(messages=[{"role": "user", "content": IMAGE}]))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("(?=a)b", "look-ahead"), ("(a", "."), ("(" * 5000 + "a" + ")" * 4999, ".")],
)
async def test_a_regex_that_the_engine_cant_follow_is_refused(router, pattern, said):
    """Its dialect isn't Python's; the engine lives on."""
    with pytest.raises(InvalidRequestError, match=said):
        await router.chat(ask(structured_outputs={"regex": pattern}))
    assert (await router.chat(ask())).text


async def test_tools_count_in_a_prompt_that_is_too_long(router):
    """Not the messages alone."""
    function = {"name": "add", "description": "x" * 9000, "parameters": {"type": "object"}}
    with pytest.raises(ContextLengthError) as caught:
        await router.chat(ask(tools=[{"type": "function", "function": function}]))
    assert 9000 < caught.value.prompt_tokens < 10_000


async def test_a_request_may_have_many_stop_strings(router):
    """More than the four that vLLM allows of itself."""
    response = await router.chat(ask(stop=[f"no{n}" for n in range(100)] + ["="]))
    assert "=" == response.choices[0].stop_reason


async def test_greedy_with_n_above_one_is_refused(router):
    """VLLM's own word on parameters that don't go together gets through."""
    with pytest.raises(InvalidRequestError, match="greedy"):
        await router.chat(ask(n=2))


async def test_an_unknown_model_names_the_near_one(router):
    """A typing error is told by name."""
    with pytest.raises(UnknownModelError, match="did you mean 'tiny'"):
        await router.chat(ask(model="tinny"))


async def test_faults_in_a_stream_are_raised_like_in_a_chat(router):
    """A stream's request is checked by the same rules."""
    with pytest.raises(ContextLengthError, match="2048"):
        async for _ in router.stream(ask(messages="x" * 5000)):
            pass


@pytest.mark.parametrize("text", ["\x01\x02", "é" * 50, "🙂" * 30, "<|im_end|><|im_start|>", " "])
async def test_odd_text_is_answered(router, text):
    """Control characters, emoji, and the template's own marks are text like any other."""
    response = await router.chat(ask(messages=text, max_tokens=4))
    assert response.usage.completion_tokens <= 4


async def test_the_engine_serves_on_after_bad_requests(router):
    """None of the above has hurt it."""
    response = await router.chat(ask())
    assert "stop" == response.choices[0].finish_reason
    load = await router.pool("tiny").backends[0].engine.load()
    assert (0, 0) == (load.calls, load.unfinished)
