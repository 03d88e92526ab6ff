"""Joining chunks into the answer that they are pieces of."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agoge_async import ChatChunk, InferenceResponse
from agoge_async.assembly import ChunkJoiner
from agoge_async.responses import StreamSummary, Usage, VersionSpan

NOTHING_MORE = StreamSummary()
USAGE = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)


def join_chunks(chunks: Sequence[ChatChunk], summary: StreamSummary) -> InferenceResponse:
    joiner = ChunkJoiner()
    for each in chunks:
        joiner.add(each)
    return joiner.join(summary)


def chunk(*choices: dict, **fields) -> ChatChunk:
    return ChatChunk.model_validate(
        {"id": "r", "created": 1, "model": "m", "choices": list(choices)} | fields
    )


def piece(index: int = 0, *, end: str | None = None, **delta) -> dict:
    return {"index": index, "delta": delta, "finish_reason": end}


def call(index: int, arguments: str, **fields) -> dict:
    function = {"arguments": arguments} | ({"name": fields.pop("name")} if "name" in fields else {})
    return piece(tool_calls=[{"index": index, "function": function, **fields}])


def test_pieces_of_text_make_the_text():
    """With the reason of the last."""
    chunks = [chunk(piece(role="assistant", content=""))]
    chunks += [chunk(piece(content=text)) for text in ("one", " two")]
    response = join_chunks([*chunks, chunk(piece(end="length"))], NOTHING_MORE)
    assert ("one two", "length") == (response.text, response.choices[0].finish_reason)
    assert ("r", 1, "m") == (response.id, response.created, response.model)


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=4)), min_size=1))
def test_choices_are_joined_apart(pieces):
    """However their pieces are mixed."""
    chunks = [chunk(piece(index, content=text)) for index, text in pieces]
    joined = {c.index: c.message.content for c in join_chunks(chunks, NOTHING_MORE).choices}
    expected = {index: "" for index, _ in sorted(pieces)}
    for index, text in pieces:
        expected[index] += text
    assert expected == joined
    assert list(joined) == sorted(joined)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.randoms())
def test_pieces_of_tool_calls_make_the_calls(pieces, chance):
    """Joined by index: the first piece of each names it."""
    seen: dict[int, str] = {}
    chunks = []
    for index in pieces:
        text = str(chance.randrange(100))
        first = {} if index in seen else {"id": f"id{index}", "name": f"f{index}"}
        chunks.append(chunk(call(index, text, **first)))
        seen[index] = seen.get(index, "") + text
    [choice] = join_chunks(chunks, NOTHING_MORE).choices
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        (f"id{index}", f"f{index}", seen[index]) for index in sorted(seen)
    ]
    assert choice.message.content is None


def test_text_beside_tool_calls_is_kept():
    """A model may say something first."""
    response = join_chunks(
        [chunk(piece(content="wait")), chunk(call(0, "{}", id="1", name="f"))], NOTHING_MORE
    )
    message = response.choices[0].message
    assert ("wait", 1) == (message.content, len(message.tool_calls))


def test_reasoning_is_kept_apart_from_the_text():
    """As `chat` gives it."""
    chunks = [chunk(piece(reasoning="so ")), chunk(piece(reasoning="2+2"), piece(content="4"))]
    message = join_chunks(chunks, NOTHING_MORE).choices[0].message
    assert ("so 2+2", "4") == (message.reasoning, message.content)


def test_an_answer_without_text_is_empty_text():
    """None is for tool calls."""
    message = join_chunks([chunk(piece(end="stop"))], NOTHING_MORE).choices[0].message
    assert ("", None, None) == (message.content, message.reasoning, message.tool_calls)


def test_token_ids_and_logprobs_are_appended():
    """Of each chunk that has some."""
    entries = [{"content": [{"token": t, "logprob": -1.0}]} for t in "ab"]
    chunks = [
        chunk(piece(content=token) | {"logprobs": entry, "token_ids": [number]})
        for number, (token, entry) in enumerate(zip("ab", entries, strict=True))
    ]
    [choice] = join_chunks([*chunks, chunk(piece(end="stop"))], NOTHING_MORE).choices
    assert [0, 1] == choice.token_ids
    assert ["a", "b"] == [entry.token for entry in choice.logprobs.content]


def test_what_was_not_reported_is_none():
    """Not an empty list: nobody asked for it."""
    [choice] = join_chunks([chunk(piece(content="x"))], NOTHING_MORE).choices
    assert (None, None, None) == (choice.token_ids, choice.logprobs, choice.policy_versions)


def test_the_stop_reason_is_kept():
    """A token id may be 0."""
    end = piece(end="stop") | {"stop_reason": 0}
    [choice] = join_chunks([chunk(piece(content="x")), chunk(end)], NOTHING_MORE).choices
    assert 0 == choice.stop_reason


@pytest.mark.parametrize(
    ("summary", "last"),
    [(StreamSummary(usage=USAGE), chunk()), (NOTHING_MORE, chunk(usage=USAGE.model_dump()))],
    ids=["summary", "chunk"],
)
def test_the_usage_comes_from_the_summary_or_a_chunk(summary, last):
    """Backends tell it in one way or the other."""
    assert join_chunks([chunk(piece(content="x")), last], summary).usage == USAGE


def test_versions_and_times_come_from_the_summary():
    """Each choice gets its own."""
    spans = [VersionSpan(version=3, start=0, end=1)]
    summary = StreamSummary(policy_versions={1: spans}, time_to_first_token_s=0.5)
    response = join_chunks([chunk(piece(0, content="x"), piece(1, content="y"))], summary)
    assert [choice.policy_versions for choice in response.choices] == [None, spans]
    assert 0.5 == response.time_to_first_token_s


def test_the_prompts_ids_and_the_fingerprint_are_kept():
    """Whichever chunk tells them."""
    chunks = [chunk(piece(content="x"), prompt_token_ids=[1, 2]), chunk(system_fingerprint="v1")]
    response = join_chunks(chunks, NOTHING_MORE)
    assert ([1, 2], "v1") == (response.prompt_token_ids, response.system_fingerprint)


def test_no_chunks_make_no_answer():
    """There is nothing to make it of."""
    with pytest.raises(ValueError, match="without chunks"):
        join_chunks([], NOTHING_MORE)
