"""Slots: order, limits, and what a cancelled waiter leaves."""

import asyncio
import random

import anyio
import pytest

from agoge_async import QueueFullError
from agoge_async.limits import Slots


async def take_turn(slots: Slots, number: int, order: list[int]) -> None:
    await slots.acquire()
    order.append(number)
    slots.release()


async def test_waiters_get_slots_in_order_of_arrival():
    """First come, first served."""
    slots = Slots("m", capacity=1)
    await slots.acquire()
    order: list[int] = []
    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(take_turn, slots, number, order)
        await anyio.wait_all_tasks_blocked()
        slots.release()
    assert list(range(100)) == order


async def test_a_newcomer_does_not_overtake_a_waiter():
    """A slot that is given back belongs to who waits, even before they run."""
    slots = Slots("m", capacity=1)
    await slots.acquire()
    order: list[int] = []
    async with anyio.create_task_group() as group:
        group.start_soon(take_turn, slots, 1, order)
        await anyio.wait_all_tasks_blocked()
        slots.release()
        await take_turn(slots, 2, order)
    assert [1, 2] == order


async def test_capacity_is_never_exceeded():
    """With many holders that come and go, at most `capacity` hold a slot at once."""
    slots = Slots("m", capacity=7)
    holders, peaks = [], []

    async def hold() -> None:
        await slots.acquire()
        holders.append(None)
        peaks.append(len(holders))
        for _ in range(random.Random(len(peaks)).randrange(4)):
            await asyncio.sleep(0)
        holders.pop()
        slots.release()

    async with anyio.create_task_group() as group:
        for _ in range(500):
            group.start_soon(hold)
    assert (7, 0, 0) == (max(peaks), slots.in_use, slots.queued)


async def test_without_capacity_nobody_waits():
    """None means no limit; the count goes on."""
    slots = Slots("m")
    for _ in range(10_000):
        await slots.acquire()
    assert (10_000, 0) == (slots.in_use, slots.queued)


async def test_a_full_queue_refuses():
    """More than `max_queued` waiters: the next one gets QueueFullError with the numbers."""
    slots = Slots("tiny", capacity=1, max_queued=2)
    await slots.acquire()
    async with anyio.create_task_group() as group:
        group.start_soon(slots.acquire)
        group.start_soon(slots.acquire)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(
            QueueFullError, match=r"2 requests wait for tiny .*max_queued"
        ) as caught:
            await slots.acquire()
        group.cancel_scope.cancel()
    assert ("tiny", 2) == (caught.value.model, caught.value.max_queued)


async def test_a_queue_of_zero_still_hands_out_free_slots():
    """`max_queued=0` refuses only those that would wait."""
    slots = Slots("m", capacity=2, max_queued=0)
    await slots.acquire()
    await slots.acquire()
    with pytest.raises(QueueFullError):
        await slots.acquire()
    slots.release()
    await slots.acquire()
    assert 2 == slots.in_use


async def test_a_waiter_that_gave_up_frees_its_place_in_the_queue():
    """Cancelling a waiter makes room for another."""
    slots = Slots("m", capacity=1, max_queued=1)
    await slots.acquire()
    with anyio.move_on_after(0):
        await slots.acquire()
    async with anyio.create_task_group() as group:
        group.start_soon(slots.acquire)
        await anyio.wait_all_tasks_blocked()
        assert 1 == slots.queued
        slots.release()
    assert (1, 0) == (slots.in_use, slots.queued)


async def hold_when_told(slots: Slots, done: anyio.Event, scopes: list[anyio.CancelScope]) -> None:
    with anyio.CancelScope() as scope:
        scopes.append(scope)
        await slots.acquire()
        try:
            await done.wait()
        finally:
            slots.release()


@pytest.mark.parametrize("seed", range(3))
async def test_cancelling_half_of_the_waiters_leaves_exactly_the_capacity(seed):
    """500 of 1000 cancelled at random, while slots are handed on: none is lost, none is made."""
    chance = random.Random(seed)
    slots = Slots("m", capacity=10)
    done, scopes = anyio.Event(), []
    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(hold_when_told, slots, done, scopes)
        await anyio.wait_all_tasks_blocked()
        for number, scope in enumerate(chance.sample(scopes, 500)):
            scope.cancel()
            if number % 50 == 0:
                await asyncio.sleep(0)
        await anyio.wait_all_tasks_blocked()
        assert (10, 490) == (slots.in_use, slots.queued)
        done.set()
    await assert_capacity_is(slots, 10)


async def assert_capacity_is(slots: Slots, capacity: int) -> None:
    assert (0, 0) == (slots.in_use, slots.queued)
    for _ in range(capacity):
        with anyio.fail_after(1):
            await slots.acquire()
    with pytest.raises(TimeoutError), anyio.fail_after(0.01):
        await slots.acquire()


async def test_a_slot_handed_to_a_waiter_that_is_cancelled_goes_on():
    """A slot given back and its receiver's cancellation in one turn of the loop."""
    slots = Slots("m", capacity=1)
    await slots.acquire()
    tasks = [asyncio.get_running_loop().create_task(slots.acquire()) for _ in range(2)]
    await anyio.wait_all_tasks_blocked()
    slots.release()
    tasks[0].cancel()
    await asyncio.wait(tasks)
    assert (True, None, 1) == (tasks[0].cancelled(), tasks[1].exception(), slots.in_use)


def test_slots_can_be_made_before_there_is_a_loop():
    """A router is often made at import time."""
    slots = Slots("m", capacity=1, max_queued=0)

    async def use() -> int:
        await slots.acquire()
        with pytest.raises(QueueFullError):
            await slots.acquire()
        slots.release()
        return slots.in_use

    assert 0 == anyio.run(use)
