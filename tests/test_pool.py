"""A pool: which replica is next, and what is counted."""

import asyncio

import anyio
import pytest

from agoge_async import BackendStatus, FakeBackend, NoReplicaError, Pool
from agoge_async.routing import PrefixAffinity, RoundRobin, RoutingContext, StickySession

ANYBODY = RoutingContext()


class Backend(FakeBackend):
    """One whose state a test sets; it serves from the start."""

    def __init__(self, name: str, state: str = "serving") -> None:
        super().__init__(lambda _: "ok", name=name)
        self._status = BackendStatus(state=state)

    def become(self, state: str, error=None, restarts: int = 0) -> None:
        self._status = BackendStatus(state=state, error=error, restarts=restarts)
        self.on_change()


def make(*names: str, **options) -> tuple[Pool, list[Backend]]:
    backends = [Backend(name) for name in names]
    return Pool("m", backends, **options), backends


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a", "b", "a"]])
def test_replicas_need_different_names(names):
    """Statistics and failover know them by name; none at all is refused too."""
    with pytest.raises(ValueError, match="model 'm' needs backends of different names"):
        make(*names)


async def test_a_choice_is_counted_until_it_is_released():
    """In flight while it runs; attempts for good."""
    pool, _ = make("a")
    replica = await pool.choose(ANYBODY, ())
    during = pool.statistics().backends["a"]
    pool.release(replica)
    after = pool.statistics().backends["a"]
    assert (1, 1) == (during.in_flight, during.attempts)
    assert (0, 1) == (after.in_flight, after.attempts)


async def test_the_idlest_replica_is_chosen_by_default():
    """Least in flight."""
    pool, _ = make("a", "b", "c")
    held = [await pool.choose(ANYBODY, ()) for _ in range(3)]
    pool.release(held[1])
    again = await pool.choose(ANYBODY, ())
    assert 3 == len({replica.backend.name for replica in held})
    assert held[1] is again


async def test_the_policy_chooses_among_those_that_serve():
    """It never sees the others."""
    pool, backends = make("a", "b", "c", policy=RoundRobin())
    backends[1].become("restarting")
    names = [(await pool.choose(ANYBODY, ())).backend.name for _ in range(4)]
    assert ["a", "c", "a", "c"] == names


async def test_excluded_replicas_are_not_chosen():
    """A request doesn't go where it has failed."""
    pool, _ = make("a", "b")
    names = {(await pool.choose(ANYBODY, {"a"})).backend.name for _ in range(4)}
    assert {"b"} == names


async def test_a_session_sticks_through_the_pool():
    """The context reaches the policy."""
    pool, _ = make("a", "b", policy=StickySession())
    context = RoutingContext(session_id="s")
    homes = {(await pool.choose(context, ())).backend.name for _ in range(6)}
    assert 1 == len(homes)


async def test_choosing_waits_for_a_replica_that_starts():
    """It goes on as soon as one serves."""
    backend = Backend("a", "starting")
    pool = Pool("m", [backend])
    async with anyio.create_task_group() as group:
        chosen = []

        async def choose() -> None:
            chosen.append(await pool.choose(ANYBODY, ()))

        group.start_soon(choose)
        await anyio.wait_all_tasks_blocked()
        assert [] == chosen
        backend.become("serving")
    assert chosen[0].backend is backend


async def test_all_who_wait_go_on_when_a_replica_serves():
    """A change wakes every one of them."""
    backend = Backend("a", "restarting")
    pool = Pool("m", [backend])
    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(pool.choose, ANYBODY, ())
        await anyio.wait_all_tasks_blocked()
        backend.become("restarting", restarts=1)  # a change, but not the one they wait for
        await anyio.wait_all_tasks_blocked()
        backend.become("serving")
    assert 100 == pool.statistics().backends["a"].in_flight


async def test_a_cancelled_wait_for_a_replica_counts_nothing():
    """Nothing was chosen."""
    pool = Pool("m", [Backend("a", "starting")])
    with anyio.move_on_after(0):
        await pool.choose(ANYBODY, ())
    statistics = pool.statistics().backends["a"]
    assert (0, 0) == (statistics.in_flight, statistics.attempts)


async def test_no_replica_left_is_an_error():
    """It names each replica, its state and its error."""
    pool, (first, second) = make("a", "b")
    first.become("failed", NoReplicaError("out of memory", backend="a"))
    second.become("closed")
    with pytest.raises(NoReplicaError, match=r"a failed \(out of memory\); b closed") as caught:
        await pool.choose(ANYBODY, ())
    assert "m" == caught.value.backend


async def test_a_wait_ends_when_the_last_hope_fails():
    """Not a hang."""
    backend = Backend("a", "restarting")
    pool = Pool("m", [backend])
    waiting = asyncio.get_running_loop().create_task(pool.choose(ANYBODY, ()))
    await anyio.wait_all_tasks_blocked()
    backend.become("failed")
    await asyncio.wait([waiting])
    assert isinstance(waiting.exception(), NoReplicaError)


async def test_a_replica_that_failed_before_is_better_than_none():
    """Excluded ones are taken when no other can be waited for."""
    pool, (_, second) = make("a", "b")
    second.become("failed")
    assert "a" == (await pool.choose(ANYBODY, {"a"})).backend.name


def test_has_other_counts_those_that_serve():
    """Those that failed the request, or don't serve, are no others."""
    pool, (_, second) = make("a", "b")
    before = pool.has_other({"a"}), pool.has_other({"a", "b"})
    second.become("failed")
    assert (True, False, False) == (*before, pool.has_other({"a"}))


@pytest.mark.parametrize(
    ("names", "policy", "expected"),
    [
        (["a", "b"], PrefixAffinity(), True),
        (["a"], PrefixAffinity(), False),
        (["a", "b"], None, False),
    ],
)
def test_prompts_are_looked_at_only_when_that_matters(names, policy, expected):
    """Writing a conversation as text costs time."""
    pool, _ = make(*names, policy=policy)
    assert pool.uses_prefixes is expected


def test_statistics_tell_state_restarts_and_error():
    """What a user needs to see of a replica."""
    pool, (backend,) = make("a")
    backend.become("restarting", NoReplicaError("it died", backend="a"), restarts=2)
    statistics = pool.statistics().backends["a"]
    assert ("restarting", 2, "it died") == (statistics.state, statistics.restarts, statistics.error)
