"""The router's own logic, over backends without a model."""

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading

import anyio
import psutil
import pytest

from agoge_async import (
    AssistantMessage,
    BackendError,
    BackendStatus,
    Capabilities,
    EngineDiedError,
    EngineError,
    FakeBackend,
    ForkedProcessError,
    GenerationError,
    InferenceRequest,
    NoReplicaError,
    Outcome,
    Pool,
    QueueFullError,
    RequestTimeoutError,
    Router,
    RouterClosedError,
    TokenRequest,
    ToolCall,
    UnknownModelError,
    UnsupportedError,
    WrongLoopError,
)
from agoge_async.limits import Slots
from agoge_async.routing import RoundRobin

pytestmark = pytest.mark.timeout(30)


def ask(text: str = "hi", **fields) -> InferenceRequest:
    return InferenceRequest(model="m", messages=text, **fields)


def echo(request: InferenceRequest) -> str:
    return f"you said: {request.messages[-1].content}"


def died(name: str = "fake") -> EngineDiedError:
    return EngineDiedError(f"engine {name} died", backend=name)


def failed(name: str = "fake") -> GenerationError:
    return GenerationError(f"engine {name} failed the request", backend=name)


class Breaking(FakeBackend):
    """Streams this many chunks of its answer, then raises; `None`: all of them, then waits."""

    def __init__(self, chunks: int, error: Exception | None, *, name: str = "fake") -> None:
        super().__init__(echo, name=name)
        self.chunks = chunks
        self.error = error
        self.closed_streams = 0

    async def stream(self, request):
        whole = await super().stream(request)
        return BreakingStream(self, whole)


class BreakingStream:
    def __init__(self, backend: Breaking, whole) -> None:
        self.summary = whole.summary
        self._backend = backend
        self._whole = whole
        self._left = backend.chunks

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._left == 0:
            if self._backend.error is not None:
                raise self._backend.error
            await anyio.sleep_forever()
        self._left -= 1
        return await anext(self._whole)

    async def aclose(self) -> None:
        self._backend.closed_streams += 1
        await self._whole.aclose()


class Staged(FakeBackend):
    """Does what a test says: waits with its start, serves, restarts, crashes."""

    def __init__(self, handler=echo, *, name: str = "fake") -> None:
        super().__init__(handler, name=name)
        self.may_start = asyncio.Event()
        self.crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, started):
        try:
            await self.may_start.wait()
            self.set_state("serving")
            started()
            await self.crash
        finally:
            self.crash.cancel()
            self.set_state("closed")

    def set_state(self, state: str, error=None) -> None:
        self._status = BackendStatus(state=state, error=error)
        self.on_change()


def is_idle(router: Router) -> bool:
    statistics = router.statistics()
    models = statistics.models.values()
    backends = [backend for model in models for backend in model.backends.values()]
    return not (
        statistics.open_requests
        or any(model.in_flight or model.queued for model in models)
        or any(backend.in_flight for backend in backends)
    )


def outcomes(router: Router) -> dict[Outcome, int]:
    return {outcome: count for outcome, count in router.statistics().outcomes.items() if count}


async def read_stream(router: Router, request, chunks: list | None = None) -> None:
    """Read a stream to its end; `chunks` gets what comes, also before an error."""
    async for chunk in router.stream(request):
        if chunks is not None:
            chunks.append(chunk)


async def start_request(group, router: Router, request=None) -> asyncio.Future:
    """Ask in a task of the group; gives what will come of it."""
    result = asyncio.get_running_loop().create_future()

    async def run() -> None:
        try:
            result.set_result(await router.chat(request or ask()))
        except Exception as error:  # noqa: BLE001
            result.set_exception(error)
        finally:
            result.cancel()

    group.start_soon(run)
    await anyio.wait_all_tasks_blocked()
    return result


# Answers


async def first_chunk(router):
    """Get the first piece of a stream."""
    return await anext(aiter(router.stream(ask())))


async def test_chat_gives_the_answer_of_the_backend():
    """The text comes back, with who answered, at which attempt, and how long it took."""
    async with Router({"m": FakeBackend(echo)}) as router:
        response = await router.chat(ask("hello"))
    assert "you said: hello" == response.text
    assert ("fake", 1) == (response.backend, response.attempts)
    assert 0 <= response.timings.waiting_s <= response.timings.total_s


async def test_generate_gives_token_ids():
    """Token ids in, token ids out."""
    backend = FakeBackend(lambda request: [token + 1 for token in request.prompt_token_ids])
    async with Router({"m": backend}) as router:
        response = await router.generate(TokenRequest(model="m", prompt_token_ids=[1, 2], n=2))
    assert [[2, 3], [2, 3]] == [choice.token_ids for choice in response.choices]
    assert ("fake", 1) == (response.backend, response.attempts)


async def test_each_model_has_its_own_backend():
    """The request's model picks the backend."""
    models = {name: FakeBackend(lambda _, name=name: f"I am {name}") for name in ("a", "b")}
    async with Router(models) as router:
        answer = await router.chat(InferenceRequest(model="b", messages="who?"))
    assert ("I am b", ["a", "b"]) == (answer.text, router.models)


async def test_the_backend_gets_the_request_as_it_was_made():
    """The router changes nothing of a request."""
    backend = FakeBackend(echo)
    request = ask(temperature=0.5, session_id="s", stop=["."])
    before = request.model_copy(deep=True)
    async with Router({"m": backend}) as router:
        await router.chat(request)
    assert before == request
    assert [request] == backend.requests


async def test_two_answers_that_are_one_object_do_not_share_their_fields():
    """A backend may give the same response twice."""
    async with Router({"m": FakeBackend(echo)}) as router:
        shared = await router.chat(ask())
    pool = [FakeBackend(lambda _: shared, name="a"), FakeBackend(lambda _: shared, name="b")]
    async with Router({"m": Pool("m", pool, policy=RoundRobin())}) as router:
        first, second = await router.chat(ask()), await router.chat(ask())
    assert {"a", "b"} == {first.backend, second.backend}


async def test_requests_spread_over_replicas():
    """Eight held requests on two replicas: four each."""
    backends = [FakeBackend(echo, name=name) for name in ("a", "b")]
    for backend in backends:
        backend.hold()
    async with Router({"m": backends}) as router, anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(router.chat, ask())
        await anyio.wait_all_tasks_blocked()
        assert [4, 4] == [backend.in_flight for backend in backends]
        for backend in backends:
            backend.release()
    assert is_idle(router)


# Errors and attempts


async def test_a_backend_error_reaches_the_caller():
    """What the backend raises is raised, and counted once."""
    error = BackendError("no", backend="fake")
    async with Router({"m": FakeBackend(lambda _: error)}) as router:
        with pytest.raises(BackendError) as caught:
            await router.chat(ask())
    assert error is caught.value
    assert ({Outcome.FAILED: 1}, True) == (outcomes(router), is_idle(router))


async def test_a_bug_in_a_backend_reaches_the_caller():
    """An exception that isn't ours passes through unchanged."""
    async with Router({"m": FakeBackend(lambda _: 1 / 0)}) as router:
        with pytest.raises(ZeroDivisionError):
            await router.chat(ask())
    assert ({Outcome.FAILED: 1}, True) == (outcomes(router), is_idle(router))


async def test_a_retryable_failure_goes_to_another_replica():
    """The caller gets the second replica's answer, and sees that it took two attempts."""
    backends = [FakeBackend(lambda _: died("a"), name="a"), FakeBackend(echo, name="b")]
    pool = Pool("m", backends, policy=RoundRobin())
    async with Router({"m": pool}) as router:
        response = await router.chat(ask("x"))
    assert ("you said: x", "b", 2) == (response.text, response.backend, response.attempts)
    assert ({Outcome.OK: 1}, True) == (outcomes(router), is_idle(router))


async def test_the_last_error_tells_where_the_request_has_been():
    """After every replica failed, the error of the last one carries a note."""
    names = ["a", "b", "c"]
    backends = [FakeBackend(lambda _, name=name: failed(name), name=name) for name in names]
    async with Router({"m": Pool("m", backends, policy=RoundRobin())}) as router:
        with pytest.raises(GenerationError) as caught:
            await router.chat(ask())
    assert ["after 3 attempts, on a, b, c"] == caught.value.__notes__
    assert [1, 1, 1] == [len(backend.requests) for backend in backends]


async def test_a_request_that_kills_engines_kills_two_at_most():
    """Others are left to serve, whatever `max_attempts` says."""
    backends = [FakeBackend(lambda _, n=n: died(n), name=n) for n in ("a", "b", "c")]
    async with Router({"m": backends}) as router:
        with pytest.raises(EngineDiedError):
            await router.chat(ask())
    assert 2 == sum(len(backend.requests) for backend in backends)


async def test_a_failover_keeps_its_slot():
    """A queue that is full can't refuse the second attempt."""
    first = FakeBackend(lambda _: failed("a"), name="a")
    second = FakeBackend(lambda _: "b", name="b")
    pool = Pool(
        "m", [first, second], policy=RoundRobin(), slots=Slots("m", capacity=1, max_queued=1)
    )
    first.hold()
    async with Router({"m": pool}) as router, anyio.create_task_group() as group:
        answers = []

        async def call():
            answers.append((await router.chat(ask())).text)

        group.start_soon(call)
        await first.wait_arrived(1)
        group.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        first.release()
    assert ["b", "b"] == answers


async def test_a_backend_under_two_names_is_refused():
    """It would be run twice."""
    backend = FakeBackend(echo)
    with pytest.raises(ValueError, match="serves one model"):
        Router({"m": backend, "n": backend})


async def test_an_error_of_the_only_replica_has_no_note():
    """Nothing to tell after one attempt."""
    async with Router({"m": FakeBackend(lambda _: died())}) as router:
        with pytest.raises(EngineDiedError) as caught:
            await router.chat(ask())
    assert [] == getattr(caught.value, "__notes__", [])


async def test_max_attempts_limits_the_replicas_tried():
    """Two attempts of three replicas."""
    backends = [FakeBackend(lambda _, n=n: died(n), name=n) for n in ("a", "b", "c")]
    async with Router({"m": backends}, max_attempts=2) as router:
        with pytest.raises(EngineDiedError):
            await router.chat(ask())
    assert 2 == sum(len(backend.requests) for backend in backends)


@pytest.mark.parametrize(
    "error",
    [
        BackendError("no", backend="a"),
        EngineError("no", backend="a"),
        UnsupportedError("no", capability="tools"),
        ValueError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_that_is_not_retryable_is_not_retried(error):
    """Another replica would fail too, or might do the work twice."""
    backends = [FakeBackend(lambda _: error, name="a"), FakeBackend(lambda _: error, name="b")]
    async with Router({"m": backends}) as router:
        with pytest.raises(type(error)):
            await router.chat(ask())
    assert 1 == sum(len(backend.requests) for backend in backends)


async def test_when_all_replicas_are_down_for_good_requests_fail_at_once():
    """NoReplicaError names the model, each replica, its state and its error."""
    backends = [FakeBackend(echo, name="a"), FakeBackend(echo, name="b")]
    async with Router({"m": backends}) as router:
        backends[0].fail_from_now_on(died("a"))
        backends[1].fail_from_now_on(None)
        with pytest.raises(
            NoReplicaError, match=r"no replica of m .*a failed \(engine a died\); b failed"
        ) as caught:
            await router.chat(ask())
    assert ("m", True) == (caught.value.backend, is_idle(router))


async def test_a_request_waits_for_a_replica_that_restarts():
    """It is sent once the replica serves again."""
    backend = Staged()
    backend.may_start.set()
    async with Router({"m": backend}) as router, anyio.create_task_group() as group:
        backend.set_state("restarting", died())
        result = await start_request(group, router)
        assert ([], 1) == (backend.requests, router.statistics().open_requests)
        backend.set_state("serving")
        response = await result
    assert ("you said: hi", 1) == (response.text, response.attempts)


async def test_a_request_that_waits_for_a_restart_fails_when_that_fails():
    """No hang when the replica stays down after all."""
    backend = Staged()
    backend.may_start.set()
    async with Router({"m": backend}) as router, anyio.create_task_group() as group:
        backend.set_state("restarting")
        result = await start_request(group, router)
        backend.set_state("failed", died())
        with pytest.raises(NoReplicaError, match="engine fake died"):
            await result
    assert is_idle(router)


async def test_a_request_skips_a_replica_that_restarts():
    """The one that serves takes it."""
    backend = Staged(name="a")
    backend.may_start.set()
    async with Router({"m": [backend, FakeBackend(echo, name="b")]}) as router:
        backend.set_state("restarting")
        answers = [(await router.chat(ask())).backend for _ in range(3)]
    assert ["b"] * 3 == answers


# Requests that no backend sees


async def test_an_unknown_model_is_refused_with_the_nearest_names():
    """The message helps with a typo."""
    backend = FakeBackend(echo)
    async with Router({"judge": backend, "policy": backend.__class__(echo)}) as router:
        with pytest.raises(UnknownModelError, match=r"'jugde'.*did you mean 'judge'") as caught:
            await router.chat(InferenceRequest(model="jugde", messages="hi"))
    assert ("jugde", ("judge", "policy"), "model") == (
        caught.value.model,
        caught.value.known,
        caught.value.parameter,
    )


async def test_an_unknown_model_without_a_near_one_is_refused_with_all_names():
    """The message lists what there is."""
    async with Router({"judge": FakeBackend(echo)}) as router:
        with pytest.raises(UnknownModelError, match="there are 'judge'"):
            await router.chat(ask())


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("capability", "parameter", "fields"),
    [
        ("vision", "messages", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("tools", "tools", {"messages": "hi", "tools": [TOOL]}),
        ("logprobs", "logprobs", {"messages": "hi", "logprobs": True}),
    ],
)
@pytest.mark.parametrize("answer", [Router.chat, read_stream], ids=["chat", "stream"])
async def test_what_a_backend_cannot_do_is_refused_before_it_is_sent(
    capability, parameter, fields, answer
):
    """UnsupportedError names the capability and the field; the backend sees nothing."""
    backend = FakeBackend(echo, capabilities=Capabilities(tools=False))
    request = InferenceRequest(model="m", **fields)
    async with Router({"m": backend}) as router:
        with pytest.raises(UnsupportedError) as caught:
            await answer(router, request)
    assert (capability, parameter) == (caught.value.capability, caught.value.parameter)
    assert ([], {Outcome.INVALID: 1}) == (backend.requests, outcomes(router))


async def test_token_ids_are_refused_where_only_text_is_taken():
    """The backend sees nothing of it."""
    backend = FakeBackend(echo, capabilities=Capabilities())
    async with Router({"m": backend}) as router:
        with pytest.raises(UnsupportedError) as caught:
            await router.generate(TokenRequest(model="m", prompt_token_ids=[1]))
    assert ("token_ids", []) == (caught.value.capability, backend.requests)


async def test_a_full_queue_refuses_at_once():
    """QueueFullError; the others aren't affected."""
    backend = FakeBackend(echo)
    backend.hold()
    pool = Pool("m", [backend], slots=Slots("m", capacity=1, max_queued=1))
    async with Router({"m": pool}) as router, anyio.create_task_group() as group:
        first = await start_request(group, router)
        second = await start_request(group, router)
        with pytest.raises(QueueFullError):
            await router.chat(ask())
        backend.release()
        assert "you said: hi" == (await first).text == (await second).text
    assert is_idle(router)


# Deadlines and cancellation


async def test_a_deadline_ends_a_request():
    """RequestTimeoutError tells the limit and where the request was; the slot is free again."""
    backend = FakeBackend(echo)
    backend.hold()
    async with Router({"m": backend}) as router:
        with pytest.raises(RequestTimeoutError, match=r"0\.05 s .*with fake, attempt 1") as caught:
            await router.chat(ask(timeout_s=0.05))
        assert (0, True) == (backend.in_flight, is_idle(router))
    assert (0.05, {Outcome.TIMED_OUT: 1}) == (caught.value.timeout_s, outcomes(router))


async def test_the_default_deadline_is_the_routers():
    """A request that brings none gets `request_timeout_s`."""
    backend = FakeBackend(echo)
    backend.hold()
    async with Router({"m": backend}, request_timeout_s=0.05) as router:
        with pytest.raises(RequestTimeoutError):
            await router.chat(ask())


async def test_a_deadline_covers_the_wait_for_a_slot():
    """A request in the queue times out there; the one before it isn't affected."""
    backend = FakeBackend(echo)
    backend.hold()
    pool = Pool("m", [backend], slots=Slots("m", capacity=1))
    async with Router({"m": pool}) as router, anyio.create_task_group() as group:
        first = await start_request(group, router)
        with pytest.raises(RequestTimeoutError, match="waiting for a slot or a replica"):
            await router.chat(ask(timeout_s=0.05))
        backend.release()
        assert "you said: hi" == (await first).text
    assert ({Outcome.OK: 1, Outcome.TIMED_OUT: 1}, True) == (outcomes(router), is_idle(router))


async def test_a_deadline_covers_all_attempts():
    """Retries get no time of their own."""

    async def slow_death(_):
        await anyio.sleep(0.01)
        return failed()

    backends = [FakeBackend(slow_death, name=str(number)) for number in range(100)]
    async with Router({"m": backends}, max_attempts=100) as router:
        with pytest.raises(RequestTimeoutError):
            await router.chat(ask(timeout_s=0.2))
    assert sum(len(backend.requests) for backend in backends) < 100


async def test_a_deadline_covers_a_whole_stream():
    """Chunks that come in time don't move it."""
    backend = Breaking(3, None)
    async with Router({"m": backend}) as router:
        chunks = []
        with pytest.raises(RequestTimeoutError):
            await read_stream(router, ask(timeout_s=0.3), chunks)
        assert (3, 1, True) == (len(chunks), backend.closed_streams, is_idle(router))
    assert {Outcome.TIMED_OUT: 1} == outcomes(router)


async def test_a_cancelled_caller_frees_its_slot():
    """The request ends as cancelled; the next one gets the slot."""
    backend = FakeBackend(echo)
    backend.hold()
    pool = Pool("m", [backend], slots=Slots("m", capacity=1))
    async with Router({"m": pool}) as router:
        async with anyio.create_task_group() as group:
            await start_request(group, router)
            group.cancel_scope.cancel()
        assert (0, True) == (backend.in_flight, is_idle(router))
        backend.release()
        await router.chat(ask())
    assert {Outcome.CANCELLED: 1, Outcome.OK: 1} == outcomes(router)


async def test_a_native_cancellation_of_the_caller_passes_through():
    """`task.cancel()` cancels the task, and nothing turns that into an error."""
    backend = FakeBackend(echo)
    backend.hold()
    async with Router({"m": backend}) as router:
        task = asyncio.get_running_loop().create_task(router.chat(ask()))
        await backend.wait_arrived(1)
        task.cancel()
        await asyncio.wait([task])
    assert (True, {Outcome.CANCELLED: 1}) == (task.cancelled(), outcomes(router))


async def test_a_callers_own_timeout_is_a_cancellation():
    """Not a RequestTimeoutError: the caller's deadline is the caller's business."""
    backend = FakeBackend(echo)
    backend.hold()
    async with Router({"m": backend}) as router:
        with anyio.move_on_after(0.05) as scope:
            await router.chat(ask())
    assert (True, {Outcome.CANCELLED: 1}) == (scope.cancelled_caught, outcomes(router))


# Streams


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


# Many at once


async def test_chat_many_keeps_the_order():
    """Answers come in the order of the requests, whoever is done first."""

    async def slower_first(request):
        number = int(request.messages[0].content)
        for _ in range(20 - number):
            await asyncio.sleep(0)
        return str(number)

    async with Router({"m": FakeBackend(slower_first)}) as router:
        answers = await router.chat_many([ask(str(number)) for number in range(20)])
    assert [str(number) for number in range(20)] == [answer.text for answer in answers]


async def test_chat_many_of_nothing_gives_nothing():
    """An empty batch is no error."""
    async with Router({"m": FakeBackend(echo)}) as router:
        assert [] == await router.chat_many([])


def fail_odd(request):
    number = int(request.messages[0].content)
    return GenerationError(f"{number}", backend="fake") if number % 2 else str(number)


async def test_chat_many_can_give_errors_in_place():
    """`return_exceptions` puts each error where its answer would be."""
    async with Router({"m": FakeBackend(fail_odd)}) as router:
        answers = await router.chat_many(
            [ask(str(number)) for number in range(6)], return_exceptions=True
        )
    kinds = [type(answer).__name__ for answer in answers]
    assert ["InferenceResponse", "GenerationError"] * 3 == kinds
    assert ["1", "3", "5"] == [str(answer) for answer in answers[1::2]]


async def test_the_first_error_of_chat_many_aborts_the_rest():
    """It is raised when it happens, and nothing runs on."""

    async def answer(request):
        if request.messages[0].content == "bad":
            return GenerationError("bad", backend="fake")
        return await anyio.sleep_forever()

    backend = FakeBackend(answer)
    async with Router({"m": backend}) as router:
        with pytest.raises(GenerationError, match="bad"), anyio.fail_after(5):
            await router.chat_many([ask(), ask("bad"), *[ask()] * 8])
        assert (0, True) == (backend.in_flight, is_idle(router))


@pytest.mark.parametrize("return_exceptions", [False, True])
async def test_a_bug_in_a_backend_ends_chat_many(return_exceptions):
    """An exception that isn't ours is raised: never a hang, never a value."""
    backend = FakeBackend(lambda request: 1 / int(request.messages[0].content))
    async with Router({"m": backend}) as router:
        with pytest.raises(ZeroDivisionError), anyio.fail_after(5):
            await router.chat_many([ask("0")] * 3, return_exceptions=return_exceptions)
        assert is_idle(router)


async def test_chat_many_keeps_to_max_concurrency():
    """At most that many are with the backend at once."""

    async def answer(_):
        await asyncio.sleep(0)
        return "ok"

    backend = FakeBackend(answer)
    async with Router({"m": backend}) as router:
        await router.chat_many([ask()] * 100, max_concurrency=7)
    assert (100, 7) == (len(backend.requests), backend.peak_in_flight)


@pytest.mark.parametrize("max_concurrency", [0, -1])
async def test_chat_many_refuses_a_concurrency_that_could_never_finish(max_concurrency):
    """With nobody to work, it would wait for ever."""
    async with Router({"m": FakeBackend(echo)}) as router:
        with pytest.raises(ValueError, match="max_concurrency"), anyio.fail_after(2):
            await router.chat_many([ask()], max_concurrency=max_concurrency)


async def test_a_cancelled_chat_many_leaves_nothing_running():
    """Its requests are aborted before the cancellation goes on."""
    backend = FakeBackend(echo)
    backend.hold()
    async with Router({"m": backend}) as router:
        with anyio.move_on_after(0.3):
            await router.chat_many([ask()] * 10)
        assert (10, 0, True) == (len(backend.requests), backend.in_flight, is_idle(router))


async def test_as_completed_gives_answers_as_they_come():
    """Each with the index of its request."""
    gates = [asyncio.Event() for _ in range(3)]

    async def answer(request):
        number = int(request.messages[0].content)
        await gates[number].wait()
        return str(number)

    seen = []
    gates[2].set()
    async with Router({"m": FakeBackend(answer)}) as router:
        async for index, response in router.chat_as_completed([ask(str(n)) for n in range(3)]):
            seen.append((index, response.text))
            gates[{2: 0, 0: 1, 1: 1}[index]].set()
    assert [(2, "2"), (0, "0"), (1, "1")] == seen


async def test_as_completed_gives_errors_as_values():
    """One failure doesn't end the others."""
    async with Router({"m": FakeBackend(fail_odd)}) as router:
        requests = [ask(str(number)) for number in range(4)]
        results = {i: type(a).__name__ async for i, a in router.chat_as_completed(requests)}
    assert {
        0: "InferenceResponse",
        1: "GenerationError",
        2: "InferenceResponse",
        3: "GenerationError",
    } == results


async def test_leaving_as_completed_early_aborts_the_rest():
    """In `aclosing`, nothing runs any more after the block."""

    async def answer(request):
        if request.messages[0].content == "quick":
            return "done"
        return await anyio.sleep_forever()

    backend = FakeBackend(answer)
    async with Router({"m": backend}) as router:
        completed = router.chat_as_completed([ask(), ask("quick"), ask()])
        async with contextlib.aclosing(completed):
            async for index, _ in completed:
                assert 1 == index
                break
        assert (0, True) == (backend.in_flight, is_idle(router))
    assert {Outcome.OK: 1, Outcome.CANCELLED: 2} == outcomes(router)


# Life cycle


async def test_a_router_is_unusable_before_its_start():
    """The error says how to start it."""
    router = Router({"m": FakeBackend(echo)})
    with pytest.raises(RouterClosedError, match=r"not started.*async with"):
        await router.chat(ask())
    with pytest.raises(RouterClosedError):
        await first_chunk(router)
    with pytest.raises(RouterClosedError):
        await router.chat_many([ask()])


async def test_a_router_is_unusable_after_its_end():
    """Closing is final."""
    async with Router({"m": FakeBackend(echo)}) as router:
        pass
    with pytest.raises(RouterClosedError, match="closed"):
        await router.chat(ask())
    with pytest.raises(RouterClosedError):
        await first_chunk(router)


async def test_a_router_starts_once():
    """Neither while it runs nor after its end."""
    router = Router({"m": FakeBackend(echo)})
    async with router:
        with pytest.raises(RouterClosedError, match=r"open.*make a new one"):
            await router.start()
        assert "you said: hi" == (await router.chat(ask())).text
    with pytest.raises(RouterClosedError, match=r"closed.*make a new one"):
        await router.start()


async def test_closing_twice_is_no_error():
    """In turn, or both at once."""
    router = Router({"m": FakeBackend(echo)})
    await router.start()
    async with anyio.create_task_group() as group:
        group.start_soon(router.aclose)
        group.start_soon(router.aclose)
    await router.aclose()
    assert "<Router ['m'] closed>" == repr(router)


async def test_closing_a_router_that_never_started_is_no_error():
    """And it can't be started afterwards."""
    router = Router({"m": FakeBackend(echo)})
    await router.aclose()
    with pytest.raises(RouterClosedError):
        await router.start()


async def test_start_waits_for_every_backend():
    """Also where two models' backends have the same name."""
    ready, late = FakeBackend(echo), Staged()
    router = Router({"ready": ready, "late": late})
    async with anyio.create_task_group() as group:
        group.start_soon(router.start)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RouterClosedError, match="starting"):
            await router.chat(InferenceRequest(model="ready", messages="hi"))
        late.may_start.set()
    response = await router.chat(InferenceRequest(model="late", messages="hi"))
    await router.aclose()
    assert "you said: hi" == response.text


async def test_closing_while_it_starts_ends_the_start():
    """Whoever waits for the start gets RouterClosedError, and the router stays closed."""
    router = Router({"m": Staged()})
    errors = []

    async def start() -> None:
        try:
            await router.start()
        except RouterClosedError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(start)
        await anyio.wait_all_tasks_blocked()
        await router.aclose()
    assert (1, "<Router ['m'] closed>") == (len(errors), repr(router))


async def test_a_cancelled_start_ends_the_backends():
    """Nothing is left running, and the router is closed."""
    backend = Staged()
    router = Router({"m": backend})
    with anyio.move_on_after(0.05):
        await router.start()
    assert ("closed", "<Router ['m'] closed>") == (backend.status.state, repr(router))


async def test_a_backend_that_cannot_start_ends_the_others():
    """Its error is raised; the rest has been ended again."""

    class Hopeless(FakeBackend):
        async def run(self, started):
            raise BackendError("no GPU", backend=self.name)

    other = FakeBackend(echo, name="b")
    router = Router({"m": [Hopeless(echo, name="a"), other]})
    with pytest.raises(BackendError, match="no GPU"):
        await router.start()
    assert ("closed", "<Router ['m'] closed>") == (other.status.state, repr(router))


async def test_a_backend_that_crashes_later_fails_the_requests_that_follow(caplog):
    """A bug in a backend is logged; callers get NoReplicaError, not a hang."""
    backend = Staged()
    backend.may_start.set()
    async with Router({"m": backend}) as router:
        backend.crash.set_exception(OSError("disk full"))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(NoReplicaError):
            await router.chat(ask())
    assert "disk full" in caplog.text


async def test_start_and_close_may_come_from_different_tasks():
    """As test fixtures and web frameworks do."""
    router = Router({"m": FakeBackend(echo)})
    for step in (router.start, router.aclose):
        async with anyio.create_task_group() as group:
            group.start_soon(step)
    assert "<Router ['m'] closed>" == repr(router)


async def test_a_router_outlives_the_scope_that_started_it():
    """A scope around `start`, cancelled later, doesn't end the backends."""
    router = Router({"m": FakeBackend(echo)})
    with anyio.CancelScope() as scope:
        await router.start()
    scope.cancel()
    await anyio.wait_all_tasks_blocked()
    assert "you said: hi" == (await router.chat(ask())).text
    await router.aclose()


async def test_closing_ends_the_requests_that_run():
    """Those with a backend and those in the queue get RouterClosedError."""
    backend = FakeBackend(echo)
    backend.hold()
    pool = Pool("m", [backend], slots=Slots("m", capacity=1))
    async with Router({"m": pool}) as router, anyio.create_task_group() as group:
        results = [await start_request(group, router) for _ in range(2)]
        await router.aclose()
        for result in results:
            with pytest.raises(RouterClosedError, match="closed while a request ran"):
                await result
    assert ({Outcome.CLOSED: 2}, True, 0) == (outcomes(router), is_idle(router), backend.in_flight)


async def test_closing_ends_streams():
    """Those that wait for a chunk, and those whose reader is busy."""
    backend = Breaking(1, None)
    async with Router({"m": backend}) as router:
        stream = aiter(router.stream(ask()))
        await anext(stream)
        await router.aclose()
        with pytest.raises(RouterClosedError):
            await anext(stream)
    assert (1, {Outcome.CLOSED: 1}) == (backend.closed_streams, outcomes(router))


async def test_draining_lets_requests_finish():
    """New ones are refused at once, those that run get their answers."""
    backend = FakeBackend(echo)
    async with Router({"m": backend}) as router, anyio.create_task_group() as group:
        await router.chat(ask())  # the router has been idle before: that mustn't count
        backend.hold()
        result = await start_request(group, router)
        group.start_soon(lambda: router.aclose(drain_s=10))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RouterClosedError, match="closing"):
            await router.chat(ask())
        assert not result.done()
        backend.release()
        assert "you said: hi" == (await result).text
    assert {Outcome.OK: 2} == outcomes(router)


async def test_draining_lets_streams_finish():
    """Each chunk that is left comes."""
    async with Router({"m": FakeBackend(echo)}) as router, anyio.create_task_group() as group:
        chunks = aiter(router.stream(ask()))
        text = (await anext(chunks)).text
        group.start_soon(lambda: router.aclose(drain_s=10))
        await anyio.wait_all_tasks_blocked()
        text += "".join([chunk.text async for chunk in chunks])
    assert ("you said: hi", {Outcome.OK: 1}) == (text, outcomes(router))


async def test_draining_has_an_end():
    """What isn't done by then gets RouterClosedError."""
    backend = FakeBackend(echo)
    backend.hold()
    async with Router({"m": backend}) as router, anyio.create_task_group() as group:
        result = await start_request(group, router)
        await router.aclose(drain_s=0.05)
        with pytest.raises(RouterClosedError):
            await result
    assert is_idle(router)


async def test_a_deadline_that_passes_while_draining_is_a_timeout():
    """The request had its time; closing isn't why it failed."""
    backend = FakeBackend(echo)
    backend.hold()
    async with Router({"m": backend}) as router, anyio.create_task_group() as group:
        result = await start_request(group, router, ask(timeout_s=0.3))
        await router.aclose(drain_s=10)
        with pytest.raises(RequestTimeoutError):
            await result
    assert {Outcome.TIMED_OUT: 1} == outcomes(router)


async def test_a_drain_that_is_cancelled_still_closes():
    """Whoever gives up on draining has a closed router, not one that can't be closed."""
    backend = FakeBackend(echo)
    backend.hold()
    async with Router({"m": backend}) as router, anyio.create_task_group() as group:
        result = await start_request(group, router)
        with anyio.move_on_after(0.05):
            await router.aclose(drain_s=60)
        with anyio.fail_after(5):
            await router.aclose()
            with pytest.raises(RouterClosedError):
                await result
    assert "closed" == backend.status.state


async def test_an_error_in_the_block_is_not_hidden_by_closing():
    """`async with` closes and lets the error out."""
    backend = FakeBackend(echo)
    with pytest.raises(ZeroDivisionError):
        async with Router({"m": backend}):
            raise ZeroDivisionError
    assert "closed" == backend.status.state


def test_a_router_needs_a_model():
    """An empty mapping is refused, without noise from the half-made object."""
    with pytest.raises(ValueError, match="at least one model"):
        Router({})
    gc.collect()


FORGETFUL = """
import asyncio, gc, warnings
from agoge_async import FakeBackend, Router

async def main():
    await Router({"m": FakeBackend(lambda _: "x")}).start()
    gc.collect()

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    asyncio.run(main())
    gc.collect()
print(*[f"{w.category.__name__}: {w.message}" for w in caught])
"""


def test_a_program_that_forgets_to_close_ends_all_the_same():
    """asyncio.run cancels the router's task: no hang and no traceback at exit."""
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=60, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)


# Loops, processes, records


async def test_another_event_loop_is_refused():
    """In a thread with a loop of its own: WrongLoopError, for every call."""
    async with Router({"m": FakeBackend(echo)}) as router:
        errors = []

        async def use() -> None:
            for call in (router.chat(ask()), first_chunk(router), router.aclose()):
                try:
                    await call
                except WrongLoopError as error:
                    errors.append(str(error))

        thread = threading.Thread(target=asyncio.run, args=(use(),))
        thread.start()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)
        response = await router.chat(ask())
    assert (3, "you said: hi") == (len(errors), response.text)
    assert "one router a loop" in errors[0]


def drive(coroutine) -> BaseException | None:
    """Run a coroutine to its first wait, without a loop; gives what it raised."""
    try:
        coroutine.send(None)
    except BaseException as error:  # noqa: BLE001
        return error
    return None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_process_is_refused():
    """ForkedProcessError names both processes; the parent's router goes on."""
    async with Router({"m": FakeBackend(echo)}) as router:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:  # nothing of pytest's may run in here
            errors = [drive(router.chat(ask())), drive(router.aclose())]
            os.write(writer, pickle.dumps(errors))
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:  # noqa: ASYNC230
            errors = pickle.loads(pipe.read())
        os.waitpid(pid, 0)  # noqa: ASYNC222
        response = await router.chat(ask())
    assert [ForkedProcessError] * 2 == [type(error) for error in errors]
    assert ("you said: hi", True) == (response.text, str(pid) in str(errors[0]))


async def test_each_request_makes_one_record():
    """Whatever comes of it: exactly one, with its outcome."""
    records = []
    answers = {"ok": "fine", "bad": GenerationError("bad", backend="fake")}
    backend = FakeBackend(lambda request: answers[request.messages[0].content])
    async with Router({"m": backend}, on_record=records.append) as router:
        await router.chat(ask("ok"))
        with pytest.raises(GenerationError):
            await router.chat(ask("bad"))
        async for _ in router.stream(ask("ok")):
            pass
        backend.hold()
        with pytest.raises(RequestTimeoutError):
            await router.chat(ask("ok", timeout_s=0.05))
    assert ["ok", "failed", "ok", "timed_out"] == [record.outcome for record in records]
    assert [None, GenerationError, None, RequestTimeoutError] == [
        type(record.error) if record.error else None for record in records
    ]


async def test_a_record_tells_what_the_request_cost():
    """Model, backend, attempts, tokens and times."""
    records = []
    backends = [FakeBackend(lambda _: died("a"), name="a"), FakeBackend(echo, name="b")]
    pool = Pool("m", backends, policy=RoundRobin())
    async with Router({"m": pool}, on_record=records.append) as router:
        response = await router.chat(ask())
    [record] = records
    assert ("m", "b", 2) == (record.model, record.backend, record.attempts)
    assert (response.usage.prompt_tokens, 3) == (record.prompt_tokens, record.completion_tokens)
    assert 0 <= record.waiting_s <= record.total_s


async def test_a_record_hook_that_fails_does_not_fail_the_request(caplog):
    """Its exception is logged."""

    def hook(_):
        raise ZeroDivisionError

    async with Router({"m": FakeBackend(echo)}, on_record=hook) as router:
        assert "you said: hi" == (await router.chat(ask())).text
    assert "ZeroDivisionError" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR


async def test_statistics_tell_what_goes_on():
    """Open requests, slots, the queue, and each backend."""
    backend = FakeBackend(echo)
    backend.hold()
    pool = Pool("m", [backend], slots=Slots("m", capacity=2))
    async with Router({"m": pool}) as router, anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(router.chat, ask())
        await anyio.wait_all_tasks_blocked()
        busy = router.statistics()
        backend.release()
    assert (5, 2, 3) == (busy.open_requests, busy.models["m"].in_flight, busy.models["m"].queued)
    assert ("serving", 2, 2) == (
        busy.models["m"].backends["fake"].state,
        busy.models["m"].backends["fake"].in_flight,
        busy.models["m"].backends["fake"].attempts,
    )
    assert (5, True) == (router.statistics().ended_requests, is_idle(router))


# Load


async def ask_many(router: Router, requests: list[InferenceRequest]) -> set[str]:
    texts: set[str] = set()

    async def run(request) -> None:
        texts.add((await router.chat(request)).text)

    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(run, request)
    return texts


@pytest.mark.parametrize("capacity", [None, 100])
async def test_ten_thousand_requests_at_once_are_all_answered(capacity, record_testsuite_property):
    """None is lost or mixed up, the limit holds, and nothing is kept of them afterwards."""
    backends = [FakeBackend(echo, name=name) for name in ("a", "b")]
    requests = [ask(str(number)) for number in range(10_000)]
    pool = Pool("m", backends, slots=Slots("m", capacity=capacity))
    async with Router({"m": pool}) as router:
        await ask_many(router, requests[:100])
        blocks, rss = memory_in_use()
        texts = await ask_many(router, requests)
        lost = {f"you said: {number}" for number in range(10_000)} - texts
        del texts
        blocks_now, rss_now = memory_in_use()
        more_blocks, more_rss = blocks_now - blocks, rss_now - rss
        record_testsuite_property(f"blocks_kept_{capacity}", more_blocks)
        record_testsuite_property(f"rss_grown_bytes_{capacity}", more_rss)
        assert (set(), {Outcome.OK: 10_100}, True) == (lost, outcomes(router), is_idle(router))
    assert more_blocks < 5_000, "less than one object is kept for two requests"
    assert more_rss < 200 << 20, "20 KiB a request, what they all hold at once included"
    assert capacity is None or max(backend.peak_in_flight for backend in backends) <= capacity


def memory_in_use() -> tuple[int, int]:
    """Give how many small objects there are, and the resident bytes of the process."""
    gc.collect()
    return sys.getallocatedblocks(), psutil.Process().memory_info().rss


async def test_ten_thousand_requests_of_a_batch_keep_to_its_limit():
    """`max_concurrency=100` of `chat_many`."""
    backend = FakeBackend(echo)
    async with Router({"m": backend}) as router:
        answers = await router.chat_many(
            [ask(str(number)) for number in range(10_000)], max_concurrency=100
        )
    assert 10_000 == len(answers)
    assert "you said: 9999" == answers[-1].text
    assert backend.peak_in_flight <= 100
