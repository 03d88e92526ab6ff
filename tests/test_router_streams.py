"""Streams through the router."""

import contextlib
import gc

import anyio
import pytest

from agoge_async import (
    AssistantMessage,
    EngineDiedError,
    FakeBackend,
    Outcome,
    Pool,
    Router,
    ToolCall,
)
from agoge_async.limits import Slots
from agoge_async.routing import RoundRobin
from tests.router_doubles import (
    Breaking,
    ask,
    died,
    echo,
    is_idle,
    outcomes,
    read_stream,
    start_request,
)

pytestmark = pytest.mark.timeout(30)


async def test_the_chunks_of_a_stream_make_the_answer():
    """Their text is the whole text, in order."""
    async with Router({"m": FakeBackend(lambda _: "one  two\nthree ")}) as router:
        text = "".join([chunk.text async for chunk in router.stream(ask())])
    assert "one  two\nthree " == text


def without_times(response) -> dict:
    return response.model_dump(exclude={"id", "timings", "time_to_first_token_s"})


@pytest.mark.parametrize(
    "answer",
    [
        "a b c",
        "",
        AssistantMessage(content="yes", reasoning="let me think"),
        AssistantMessage(
            tool_calls=[ToolCall(id="1", function={"name": "f", "arguments": '{"x": 1}'})]
        ),
    ],
    ids=["text", "nothing", "reasoning", "tool calls"],
)
async def test_a_streams_response_is_what_chat_gives(answer):
    """After the end of a stream, `response` holds the same as `chat` would have given."""
    async with Router({"m": FakeBackend(lambda _: answer)}) as router:
        stream = router.stream(ask(n=2))
        before = stream.response
        async for _ in stream:
            pass
        expected = await router.chat(ask(n=2))
    assert before is None
    assert without_times(expected) == without_times(stream.response)


@pytest.mark.parametrize(
    ("stream_options", "expected"),
    [(None, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)],
)
async def test_a_usage_chunk_comes_only_when_it_is_asked_for(stream_options, expected):
    """As in OpenAI's API: the last chunk, without choices."""
    async with Router({"m": FakeBackend(echo)}) as router:
        chunks = [c async for c in router.stream(ask(stream_options=stream_options))]
    assert expected == len([chunk for chunk in chunks if not chunk.choices])
    assert expected == len([chunk for chunk in chunks if chunk.usage])
    assert bool(expected) is (chunks[-1].usage is not None)


async def test_a_stream_tells_the_usage_in_its_response_anyway():
    """Not asked for in the chunks, it is still counted."""
    records = []
    async with Router({"m": FakeBackend(lambda _: "a b")}, on_record=records.append) as router:
        stream = router.stream(ask())
        async for _ in stream:
            pass
    assert 2 == stream.response.usage.completion_tokens == records[0].completion_tokens


async def test_closing_a_stream_early_aborts_it():
    """The backend's stream is closed and the slot is free when `aclose` returns."""
    backend = Breaking(2, None)
    async with Router({"m": backend}) as router:
        async with contextlib.aclosing(router.stream(ask())) as stream:
            async for _ in stream:
                break
        assert (1, True) == (backend.closed_streams, is_idle(router))
        assert stream.response is None
    assert {Outcome.CANCELLED: 1} == outcomes(router)


async def test_leaving_a_stream_early_aborts_it():
    """Without `aclosing` it is done soon after, when nothing refers to the stream any more."""
    backend = Breaking(2, None)
    async with Router({"m": backend}) as router:
        async for _ in router.stream(ask()):
            break
        gc.collect()
        await anyio.wait_all_tasks_blocked()
        assert (1, True) == (backend.closed_streams, is_idle(router))


async def test_a_cancelled_reader_of_a_stream_aborts_it():
    """A cancellation between two chunks."""
    backend = Breaking(2, None)
    chunks = []
    async with Router({"m": backend}) as router:
        with anyio.move_on_after(0.3):
            async with contextlib.aclosing(router.stream(ask())) as stream:
                async for chunk in stream:
                    chunks.append(chunk)  # noqa: PERF401
        assert (2, 1, True) == (len(chunks), backend.closed_streams, is_idle(router))


async def test_a_stream_that_fails_before_its_first_chunk_goes_to_another_replica():
    """Nothing has been seen of it, so it may start again."""
    backends = [Breaking(0, died("a"), name="a"), FakeBackend(echo, name="b")]
    async with Router({"m": Pool("m", backends, policy=RoundRobin())}) as router:
        stream = router.stream(ask())
        text = "".join([chunk.text async for chunk in stream])
    assert ("you said: hi", "b", 2) == (text, stream.response.backend, stream.response.attempts)
    assert (1, True) == (backends[0].closed_streams, is_idle(router))


async def test_a_stream_that_fails_later_fails():
    """The caller has seen chunks: they get the error, and nothing is sent twice."""
    backends = [Breaking(2, died("a"), name="a"), FakeBackend(echo, name="b")]
    chunks = []
    async with Router({"m": Pool("m", backends, policy=RoundRobin())}) as router:
        with pytest.raises(EngineDiedError):
            await read_stream(router, ask(), chunks)
        assert is_idle(router)
    assert (2, [], {Outcome.FAILED: 1}) == (len(chunks), backends[1].requests, outcomes(router))


async def test_a_stream_holds_its_slot_until_its_end():
    """A stream counts against `max_concurrency` between its chunks too."""
    backend = FakeBackend(echo)
    pool = Pool("m", [backend], slots=Slots("m", capacity=1))
    async with Router({"m": pool}) as router, anyio.create_task_group() as group:
        chunks = aiter(router.stream(ask()))
        await anext(chunks)
        other = await start_request(group, router)
        assert 1 == len(backend.requests)
        async for _ in chunks:
            pass
        await other
    assert 2 == len(backend.requests)
