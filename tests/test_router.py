"""One request on its way through the router: answers, attempts, refusals, deadlines."""

import asyncio

import anyio
import pytest

from agoge_async import (
    BackendError,
    Capabilities,
    EngineDiedError,
    EngineError,
    FakeBackend,
    GenerationError,
    InferenceRequest,
    NoReplicaError,
    Outcome,
    Pool,
    QueueFullError,
    RequestTimeoutError,
    Router,
    TokenRequest,
    UnknownModelError,
    UnsupportedError,
)
from agoge_async.limits import Slots
from agoge_async.routing import RoundRobin
from tests.router_doubles import (
    Breaking,
    Staged,
    ask,
    died,
    echo,
    failed,
    is_idle,
    outcomes,
    read_stream,
    start_request,
)

pytestmark = pytest.mark.timeout(30)


# Answers


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
