"""Deadlines of requests: whose cancellation it is, and what is left of it."""

import asyncio
import gc
import weakref

import anyio
import pytest

from agoge_async.deadlines import Deadline

FAR_S = 60.0


class LateError(Exception):
    pass


async def test_it_ends_a_step_that_runs():
    """With its own error, and the task isn't cancelled afterwards."""
    deadline = Deadline(0.0, LateError)
    with pytest.raises(LateError), deadline:
        await anyio.sleep_forever()
    assert 0 == asyncio.current_task().cancelling()
    await asyncio.sleep(0)


async def test_steps_in_time_are_left_alone():
    """However many there are, by whichever task."""
    deadline = Deadline(FAR_S, LateError)

    async def step() -> None:
        for _ in range(3):
            with deadline:
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        await group.create_task(step())
        await step()
    deadline.close()


async def test_it_passes_between_two_steps():
    """The next one doesn't begin."""
    deadline = Deadline(FAR_S, LateError)
    with deadline:
        await asyncio.sleep(0)
    deadline.end_with(LateError())
    with pytest.raises(LateError), deadline:
        pytest.fail("the step began")


async def test_the_first_error_counts():
    """Closing a router doesn't change what came before it."""
    deadline = Deadline(FAR_S, LateError)
    deadline.end_with(KeyError("first"))
    deadline.end_with(LateError())
    with pytest.raises(KeyError, match="first"), deadline:
        pytest.fail("the step began")
    deadline.close()


@pytest.mark.parametrize("is_late", [True, False])
async def test_a_cancellation_of_the_callers_stays_one(is_late):
    """Alone or with the deadline's: whoever cancelled the task must see it end cancelled."""
    deadline = Deadline(FAR_S, LateError)

    async def step() -> None:
        with deadline:
            await anyio.sleep_forever()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(step())
        await asyncio.sleep(0)
        task.cancel()
        if is_late:
            deadline.end_with(LateError())
    assert task.cancelled()
    deadline.close()


async def test_an_error_of_the_step_is_its_own():
    """Though it fails because of the deadline; the task isn't cancelled afterwards."""
    deadline = Deadline(0.0, LateError)

    async def step() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), deadline:
        await step()
    assert 0 == asyncio.current_task().cancelling()
    await asyncio.sleep(0)


async def test_a_closed_one_leaves_nothing():
    """Neither a timer that fires nor one that keeps it alive."""
    called = []
    deadline = Deadline(0.0, lambda: called.append(1) or LateError())
    deadline.close()
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, later.set)
    await later.wait()
    assert not called
    gone = weakref.ref(deadline)
    del deadline
    gc.collect()
    assert gone() is None
