"""Many requests at once, and many that nobody waits for any more."""

import anyio
import anyio.lowlevel
import pytest

from tests.engine.conftest import ask, backends


async def wait_idle(router):
    """Wait until no engine holds a request; gives the last loads."""
    with anyio.fail_after(10):
        while True:
            loads = [await backend.engine.load() for backend in backends(router)]
            if all(load.calls == load.unfinished == 0 for load in loads):
                return loads
            await anyio.sleep(0.02)  # the engines tell only when asked


async def test_cancelling_500_of_1000_leaves_nothing_running(router):
    """No slot is kept and the engine has no request left; the others are answered."""
    answered = []

    async def call(scope, number):
        with scope:
            await router.chat(ask(temperature=1.0, max_tokens=8, messages=f"What is {number}?"))
            answered.append(number)

    scopes = [anyio.CancelScope() for _ in range(1000)]
    with anyio.fail_after(240):
        async with anyio.create_task_group() as group:
            for number, scope in enumerate(scopes):
                group.start_soon(call, scope, number)
            while len(answered) < 100:
                await anyio.sleep(0.01)
            cancelled = [s for i, s in enumerate(scopes) if i not in set(answered)][:500]
            for scope in cancelled:
                scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert 500 == len(answered)
    statistics = router.statistics()
    assert 0 == statistics.open_requests
    assert (0, 0) == (statistics.models["tiny"].in_flight, statistics.models["tiny"].queued)
    await wait_idle(router)


async def test_leaving_a_stream_early_aborts_it(router):
    """The engine drops a request whose reader went away."""
    async for chunk in router.stream(ask(ignore_eos=True, max_tokens=1500)):
        if chunk.text:
            break
    await wait_idle(router)
    assert 0 == router.statistics().models["tiny"].in_flight


async def test_a_deadline_aborts_in_the_engine(router):
    """A request that took too long is not computed to its end."""
    with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
        await router.chat(ask(ignore_eos=True, max_tokens=1900, timeout_s=0.3))
    await wait_idle(router)


async def test_many_streams_at_once_are_each_whole(router):
    """Sixty-four streams, each joined from its own pieces."""
    texts = {}

    async def read(number):
        stream = router.stream(ask(messages=f"What is {number} plus 1?", max_tokens=16))
        pieces = [chunk.text async for chunk in stream]
        texts[number] = ("".join(pieces), stream.response.text)

    async with anyio.create_task_group() as group:
        for number in range(64):
            group.start_soon(read, number)
    assert 64 == len(texts)
    assert all(joined == whole for joined, whole in texts.values())
