"""The fake backend, which users test with."""

import anyio
import anyio.lowlevel
import pytest

from agoge_async import (
    AssistantMessage,
    BackendError,
    FakeBackend,
    FunctionCall,
    NoReplicaError,
    Router,
    TokenRequest,
    ToolCall,
)
from tests.router_doubles import ask


def ask_tokens(**fields) -> TokenRequest:
    return TokenRequest(model="m", prompt_token_ids=[1, 2, 3], **fields)


CALL = ToolCall(id="1", function=FunctionCall(name="add", arguments='{"x": 1}'))


@pytest.mark.parametrize(
    ("answer", "expected", "reason"),
    [
        ("four", AssistantMessage(content="four"), "stop"),
        ("", AssistantMessage(content=""), "stop"),
        ([CALL], AssistantMessage(tool_calls=[CALL]), "tool_calls"),
        (AssistantMessage(content="4", reasoning="2+2"), None, "stop"),
    ],
    ids=["text", "no text", "tool calls", "message"],
)
async def test_a_handlers_answer_becomes_a_message(answer, expected, reason):
    """With the reason why it ended."""
    async with Router({"m": FakeBackend(lambda _: answer)}) as router:
        [choice] = (await router.chat(ask())).choices
    assert choice.message == (expected or answer)
    assert choice.finish_reason == reason


async def test_a_handler_may_be_a_coroutine_function():
    """It may wait for something."""

    async def answer(request):
        await anyio.lowlevel.checkpoint()
        return request.messages[0].content.upper()

    async with Router({"m": FakeBackend(answer)}) as router:
        assert "LOUD" == (await router.chat(ask("loud"))).text


async def test_a_handler_may_give_a_whole_response():
    """Any field of it can be set."""
    async with Router({"m": FakeBackend(lambda _: "x")}) as router:
        made = (await router.chat(ask())).model_copy(update={"id": "mine"})
    async with Router({"m": FakeBackend(lambda _: made)}) as router:
        assert "mine" == (await router.chat(ask())).id


@pytest.mark.parametrize("method", ["chat", "generate"])
async def test_a_handler_may_give_or_raise_an_error(method):
    """Both reach the caller."""

    def answer(request):
        if request.session_id == "raise":
            raise BackendError("raised", backend="fake")
        return BackendError("given", backend="fake")

    make = ask if method == "chat" else ask_tokens
    async with Router({"m": FakeBackend(answer)}) as router:
        for session in ("raise", "give"):
            with pytest.raises(BackendError, match=session[:3]):
                await getattr(router, method)(make(session_id=session))


async def test_n_answers_are_given():
    """All the same."""
    async with Router({"m": FakeBackend(lambda _: "x")}) as router:
        choices = (await router.chat(ask(n=3))).choices
    assert [
        (0, "x"),
        (1, "x"),
        (2, "x"),
    ] == [(choice.index, choice.message.content) for choice in choices]


async def test_token_ids_come_with_what_was_asked_for():
    """Ids, logprobs, versions and counts."""
    async with Router({"m": FakeBackend(lambda _: [7, 8])}) as router:
        response = await router.generate(ask_tokens(logprobs=0))
    [choice] = response.choices
    assert ([7, 8], [0.0, 0.0]) == (choice.token_ids, choice.logprobs)
    assert [(0, 0, 2)] == [(span.version, span.start, span.end) for span in choice.policy_versions]
    assert (3, 5) == (response.usage.prompt_tokens, response.usage.total_tokens)


@pytest.mark.parametrize(
    ("method", "request_", "answer"),
    [("chat", ask(), 5), ("chat", ask(), [1, 2]), ("generate", ask_tokens(), "text")],
)
async def test_an_answer_of_the_wrong_kind_is_a_type_error(method, request_, answer):
    """A mistake in a test is told as one."""
    async with Router({"m": FakeBackend(lambda _: answer)}) as router:
        with pytest.raises(TypeError, match="the handler must answer"):
            await getattr(router, method)(request_)


async def test_scripted_answers_come_in_order():
    """The last is repeated; errors may be among them."""
    backend = FakeBackend.scripted(["a", BackendError("b", backend="fake"), "c"])
    async with Router({"m": backend}) as router:
        answers = await router.chat_many([ask()] * 4, max_concurrency=1, return_exceptions=True)
    assert ["a", "error", "c", "c"] == [getattr(answer, "text", "error") for answer in answers]


async def test_requests_are_kept_in_order():
    """A test can look at them."""
    backend = FakeBackend(lambda _: "x")
    requests = [ask(str(number)) for number in range(5)]
    async with Router({"m": backend}) as router:
        await router.chat_many(requests, max_concurrency=1)
    assert requests == backend.requests


async def test_held_requests_wait_until_they_are_released():
    """Those that came before a second `hold` too."""
    backend = FakeBackend(lambda _: "x")
    async with Router({"m": backend}) as router, anyio.create_task_group() as group:
        for count in (1, 2):
            backend.hold()
            group.start_soon(router.chat, ask())
            await backend.wait_arrived(count)
        await anyio.wait_all_tasks_blocked()
        assert 2 == backend.in_flight
        backend.release()
    assert (0, 2) == (backend.in_flight, backend.peak_in_flight)


async def test_many_may_wait_for_arrivals():
    """Each for its own number."""
    backend = FakeBackend(lambda _: "x")
    async with Router({"m": backend}) as router:
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                for count in (1, 2, 2, 1):
                    group.start_soon(backend.wait_arrived, count)
                await anyio.wait_all_tasks_blocked()
                await router.chat(ask())
                await router.chat(ask())
    assert 2 == len(backend.requests)


async def test_it_can_fail_for_good():
    """As an engine that died too often."""
    backend = FakeBackend(lambda _: "x")
    async with Router({"m": backend}) as router:
        backend.fail_from_now_on(BackendError("burnt", backend="fake"))
        with pytest.raises(NoReplicaError, match="burnt"):
            await router.chat(ask())


async def test_a_stream_has_the_form_of_openais():
    """The role first, then pieces, then the reason, one usage chunk at the end."""
    options = {"include_usage": True}
    async with Router({"m": FakeBackend(lambda _: "one two")}) as router:
        chunks = [chunk async for chunk in router.stream(ask(stream_options=options))]
    deltas = [(c.delta.role, c.delta.content, c.finish_reason) for k in chunks for c in k.choices]
    assert [
        ("assistant", "", None),
        (None, "one", None),
        (None, " two", None),
        (None, None, "stop"),
    ] == deltas
    assert ([], 2) == (chunks[-1].choices, chunks[-1].usage.completion_tokens)


def test_it_can_be_made_before_there_is_a_loop():
    """A test's module may make it at its top."""
    backend = FakeBackend(lambda _: "x")

    async def use() -> str:
        async with Router({"m": backend}) as router:
            return (await router.chat(ask())).text

    assert "x" == anyio.run(use)
