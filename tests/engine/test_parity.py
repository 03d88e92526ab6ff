"""A chat through the router gives what transformers gives, and what was asked for."""

import json
import re

import openai.types.chat
import pytest

from agoge_async import InferenceRequest, TokenRequest
from tests.engine.conftest import QUESTION, ask

QUESTIONS = [
    QUESTION,
    "What is 12 minus 5?",
    "There are 4 rows of 6 chairs. How many chairs are there?",
    "Grüße! Was ist 3 + 4? 🙂",
]
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}


def greedy(model_and_tokenizer, prompt_ids, max_tokens):
    """Generate with transformers; gives ids and the log probability of each."""
    import torch

    model, tokenizer = model_and_tokenizer
    ids = list(prompt_ids)
    chosen, logprobs = [], []
    with torch.no_grad():
        for _ in range(max_tokens):
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(scores.argmax())
            chosen.append(token)
            logprobs.append(float(scores[token]))
            ids.append(token)
            if token == tokenizer.eos_token_id:
                break
    return chosen, logprobs


@pytest.mark.parametrize("question", QUESTIONS)
async def test_greedy_chat_equals_transformers(router, transformers_model, question):
    """Prompt ids, answer ids, text and log probabilities are those of transformers in fp32."""
    response = await router.chat(ask(messages=question, logprobs=True, max_tokens=40))
    _, tokenizer = transformers_model
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    ids, logprobs = greedy(transformers_model, prompt, 40)
    choice = response.choices[0]
    assert prompt == response.prompt_token_ids
    assert ids == choice.token_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == response.text
    ours = [token.logprob for token in choice.logprobs.content]
    assert ours == pytest.approx(logprobs, abs=1e-4)


async def test_token_ids_go_in_and_come_out_unchanged(router, transformers_model):
    """A token request's prompt is not tokenized again, and its answer is transformers'."""
    prompt = [257, *b"user\nWhat is 2 plus 2?", 258, 10, 257, *b"assistant\n"]
    response = await router.generate(
        TokenRequest(
            model="tiny", prompt_token_ids=prompt, max_tokens=20, temperature=0, logprobs=0
        )
    )
    ids, logprobs = greedy(transformers_model, prompt, 20)
    assert prompt == response.prompt_token_ids
    assert ids == response.choices[0].token_ids
    assert response.choices[0].logprobs == pytest.approx(logprobs, abs=1e-4)
    assert len(ids) == response.usage.completion_tokens


async def test_prompt_logprobs_are_transformers(router, transformers_model):
    """Each token of the prompt but the first has its log probability."""
    import torch

    prompt = list(b"What is 2 plus 2?")
    response = await router.generate(
        TokenRequest(model="tiny", prompt_token_ids=prompt, max_tokens=1, prompt_logprobs=0)
    )
    with torch.no_grad():
        scores = transformers_model[0](torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(scores[i, token]) for i, token in enumerate(prompt[1:])]
    assert response.prompt_logprobs[0] is None
    ours = [
        entry[token] for entry, token in zip(response.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    assert ours == pytest.approx(expected, abs=1e-4)


async def test_n_samples_differ_and_are_all_there(router):
    """Sixteen samples of one request come back complete, in order, and not all alike."""
    response = await router.chat(ask(n=16, temperature=1.0, seed=1))
    assert list(range(16)) == [choice.index for choice in response.choices]
    assert all(choice.token_ids for choice in response.choices)
    assert len({choice.message.content for choice in response.choices}) > 1
    assert sum(len(c.token_ids) for c in response.choices) == response.usage.completion_tokens


async def test_a_seed_repeats(router):
    """The same seed gives the same answer, whatever runs beside it."""
    request = ask(temperature=1.5, seed=7)
    alone = await router.chat(request)
    crowd = await router.chat_many([request, *(ask(temperature=1.0) for _ in range(7))])
    assert alone.text == crowd[0].text


async def test_a_stop_string_ends_the_answer(router):
    """The answer ends before the stop string, which is named."""
    response = await router.chat(ask(stop="####"))
    assert "####" not in response.text
    assert ("stop", "####") == (response.choices[0].finish_reason, response.choices[0].stop_reason)


async def test_max_tokens_ends_the_answer_with_length(router):
    """A cut answer says so."""
    response = await router.chat(ask(max_tokens=3))
    assert ("length", 3) == (response.choices[0].finish_reason, response.usage.completion_tokens)


async def test_the_model_calls_a_tool_and_uses_its_result(router):
    """Two turns: a tool call of the model's choice, then the final answer with the result."""
    first = await router.chat(ask(tools=[CALCULATOR]))
    message = first.choices[0].message
    assert "tool_calls" == first.choices[0].finish_reason
    call = message.tool_calls[0]
    assert "calculator" == call.function.name
    assert isinstance(json.loads(call.function.arguments)["expression"], str)
    result = {"role": "tool", "content": "12", "tool_call_id": call.id}
    history = [{"role": "user", "content": QUESTION}, message, result]
    second = await router.chat(ask(messages=history, tools=[CALCULATOR]))
    assert re.search(r"#### 12$", second.text)


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "calculator"}}])
async def test_a_forced_tool_call_has_valid_arguments(router, choice):
    """Forced calls follow the tool's schema, whatever the model would say."""
    response = await router.chat(ask(messages="Hi", tools=[CALCULATOR], tool_choice=choice))
    call = response.choices[0].message.tool_calls[0]
    assert "calculator" == call.function.name
    assert {"expression"} == set(json.loads(call.function.arguments))


async def test_json_schema_holds_at_high_temperature(router):
    """Structured output follows its schema."""
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": ANSWER_SCHEMA},
    }
    response = await router.chat(
        ask(response_format=response_format, temperature=1.5, seed=3, n=8, max_tokens=120)
    )
    done = [c.message.content for c in response.choices if c.finish_reason == "stop"]
    assert done
    assert all(isinstance(json.loads(text)["answer"], int) for text in done)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [({"regex": r"[ab]{3}-\d\d"}, r"[ab]{3}-\d\d"), ({"choice": ["yes", "no"]}, "yes|no")],
)
async def test_structured_outputs_hold(router, constraint, pattern):
    """Regular expressions and choices are followed, by chat and by token requests."""
    chat = await router.chat(ask(structured_outputs=constraint, temperature=1.0))
    assert re.fullmatch(pattern, chat.text)
    tokens = await router.generate(
        TokenRequest(
            model="tiny",
            prompt_token_ids=chat.prompt_token_ids,
            structured_outputs=constraint,
            max_tokens=32,
            detokenize=True,
        )
    )
    assert re.fullmatch(pattern, tokens.choices[0].text)


async def test_stream_deltas_join_to_the_answer(router):
    """The pieces of a stream, joined, are what `chat` gives; ids, usage and versions too."""
    request = ask(logprobs=True)
    whole = await router.chat(request)
    stream = router.stream(request)
    chunks = [chunk async for chunk in stream]
    assert whole.text == "".join(chunk.text for chunk in chunks)
    assert whole.choices == stream.response.choices
    assert whole.prompt_token_ids == stream.response.prompt_token_ids
    assert whole.usage.total_tokens == stream.response.usage.total_tokens
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.model_dump())


async def test_a_streamed_tool_call_joins_to_the_call(router):
    """Tool calls in pieces join to the call that `chat` gives."""
    request = ask(tools=[CALCULATOR])
    whole = await router.chat(request)
    stream = router.stream(request)
    async for _ in stream:
        pass
    ours = stream.response.choices[0].message.tool_calls[0].function
    assert whole.choices[0].message.tool_calls[0].function == ours


async def test_only_a_stream_knows_when_its_first_token_came(router):
    """vLLM tells of an answer that comes at once when it ends: that isn't passed for the other."""
    assert (await router.chat(ask())).time_to_first_token_s is None
    stream = router.stream(ask())
    async for _ in stream:
        pass
    assert 0 < stream.response.time_to_first_token_s < stream.response.timings.total_s


async def test_answers_are_in_openais_shape_with_versions(router):
    """The SDK's model validates an answer, and each token is attributed to weights."""
    response = await router.chat(ask(logprobs=True, top_logprobs=2, n=1))
    openai.types.chat.ChatCompletion.model_validate(response.model_dump())
    choice = response.choices[0]
    spans = [(span.version, span.start, span.end) for span in choice.policy_versions]
    assert [(0, 0, len(choice.token_ids))] == spans
    assert "tiny/0" == response.backend


async def test_a_system_message_and_content_parts_reach_the_model(router):
    """Content in parts is the same prompt as the text in one."""
    parts = [{"type": "text", "text": "What is 3 "}, {"type": "text", "text": "plus 4?"}]
    request = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    response = await router.chat(
        InferenceRequest(
            **request,
            messages=[
                {"role": "system", "content": "Be terse."},
                {"role": "user", "content": parts},
            ],
        )
    )
    text = bytes(token for token in response.prompt_token_ids if token < 256).decode()
    assert "Be terse." in text
    assert "What is 3" in text
    assert "plus 4?" in text
