"""A router's life: start, close, drain; loops and processes; what it counts."""

import asyncio
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading

import anyio
import pytest

from agoge_async import (
    BackendError,
    FakeBackend,
    ForkedProcessError,
    GenerationError,
    InferenceRequest,
    NoReplicaError,
    Outcome,
    Pool,
    RequestTimeoutError,
    Router,
    RouterClosedError,
    WrongLoopError,
)
from agoge_async.limits import Slots
from agoge_async.routing import RoundRobin
from tests.router_doubles import (
    Breaking,
    Staged,
    ask,
    died,
    echo,
    first_chunk,
    is_idle,
    outcomes,
    start_request,
)

pytestmark = pytest.mark.timeout(30)


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


async def test_a_fork_that_unwinds_leaves_the_router_of_its_parent_alone():
    """Leaving `async with` in a fork closes nothing and hides no error."""
    async with Router({"m": FakeBackend(echo)}) as router:
        pid = os.fork()
        if pid == 0:  # nothing of pytest's may run in here
            ended = drive(router.__aexit__(None, None, None))
            os._exit(7 if isinstance(ended, StopIteration) else 8)
        _, status = os.waitpid(pid, 0)  # noqa: ASYNC222
        response = await router.chat(ask())
    assert (7, "you said: hi") == (os.waitstatus_to_exitcode(status), response.text)


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
