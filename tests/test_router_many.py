"""Many requests at once: `chat_many`, and ten thousand."""

import asyncio
import contextlib
import gc
import sys

import anyio
import psutil
import pytest

from agoge_async import (
    FakeBackend,
    GenerationError,
    InferenceRequest,
    Outcome,
    Pool,
    Router,
)
from agoge_async.limits import Slots
from tests.router_doubles import ask, echo, is_idle, outcomes

pytestmark = pytest.mark.timeout(30)


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
