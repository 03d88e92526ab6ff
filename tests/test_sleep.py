"""Engines that give their GPU's memory back: what callers, pushes and the supervisor then see.

The engine's side of it is in `tests/engine/test_weights.py` (vLLM on the CPU) and `tests/gpu`.
"""

import asyncio
import contextlib
import functools

import anyio
import pytest

from agoge_async import (
    EngineBusyError,
    EngineDiedError,
    EngineError,
    FakeBackend,
    InferenceRequest,
    NoReplicaError,
    Router,
    TokenRequest,
    UnsupportedError,
    WeightSyncError,
)
from agoge_async.engine.messages import CommandKind
from tests.engine_doubles import LocalDouble, unfrozen

pytestmark = pytest.mark.timeout(30)

WAKE_ALL = 'wake_up ["weights","kv_cache"]'
WAIT_S = 10.0


@pytest.fixture
def local():
    return LocalDouble()


@pytest.fixture
async def router(local):
    with unfrozen():
        async with Router({"m": local}) as router:
            yield router


async def generate(router):
    return await router.generate(TokenRequest(model="m", prompt_token_ids=[1], timeout_s=WAIT_S))


@contextlib.asynccontextmanager
async def begun(call):
    """A call that is under way; it must end within the block, or soon after."""
    async with anyio.create_task_group() as group:
        done = asyncio.Event()

        async def run() -> None:
            await call()
            done.set()

        group.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        yield done


async def until(condition) -> None:
    with anyio.fail_after(WAIT_S):
        while not condition():
            await anyio.sleep(0.001)


async def running(local, count: int = 1) -> None:
    await until(lambda: local.serving.calls == count)


async def push(local, version: int) -> None:
    """What `ParamSyncer` does with one engine."""
    local.weight_shape()
    await local.begin_push("{}", 1)
    await local.load_push(version, 1)
    await local.commit_push(version, 1)


# Callers


@pytest.mark.parametrize("level", [1, 2])
async def test_requests_wait_for_an_engine_that_sleeps(router, local, level):
    """In the router: the engine has none when it gives its memory back, and gets none."""
    await router.sleep("m", level=level)
    assert "asleep" == router.statistics().models["m"].backends["m/0"].state
    async with begun(lambda: generate(router)) as answered:
        assert (1, 0) == (router.statistics().open_requests, local.serving.calls)
        await router.wake_up("m")
        if level == 2:
            await anyio.wait_all_tasks_blocked()
            assert ("stale", 0) == (local.status.state, local.serving.calls)
            await push(local, 1)
        with anyio.fail_after(WAIT_S):
            await answered.wait()
    assert "serving" == local.status.state
    assert [f"sleep {level}", WAKE_ALL] == local.serving.commands[:2]


async def test_what_runs_is_finished_first(router, local):
    """And what comes meanwhile waits."""
    local.serving.gate.clear()
    async with begun(lambda: generate(router)) as first:
        await running(local)
        async with begun(lambda: router.sleep("m")) as asleep, begun(lambda: generate(router)):
            assert ("asleep", []) == (local.status.state, local.serving.commands)
            local.serving.gate.set()
            with anyio.fail_after(WAIT_S):
                await asleep.wait()
            assert first.is_set()
            assert (1, ["sleep 1"]) == (local.serving.calls, local.serving.commands)
            await router.wake_up("m")


async def test_what_runs_can_be_ended(router, local):
    """It ends with what it has."""
    local.serving.gate.clear()
    async with begun(lambda: generate(router)) as first:
        await running(local)
        await router.sleep("m", mode="abort")
        assert first.is_set()
    assert ["end_requests", "sleep 1"] == local.serving.commands


async def test_an_engine_stays_awake_when_requests_do_not_end_in_time(router, local):
    """Sleeping is given up, not the requests."""
    local.serving.gate.clear()
    async with begun(lambda: generate(router)) as first:
        await running(local)
        with pytest.raises(EngineBusyError, match=r"m/0 doesn't sleep: .*0.05 s.* 1 requests"):
            await router.sleep("m", timeout_s=0.05)
        assert ("serving", []) == (local.status.state, local.serving.commands)
        async with begun(lambda: generate(router)):
            await running(local, 2)
            assert not first.is_set()
            local.serving.gate.set()


async def test_a_cancelled_sleep_is_given_up(router, local):
    """While it waits for requests nothing was done yet."""
    local.serving.gate.clear()
    async with begun(lambda: generate(router)):
        await running(local)
        with anyio.move_on_after(0.05):
            await router.sleep("m")
        assert ("serving", []) == (local.status.state, local.serving.commands)
        local.serving.gate.set()


async def test_a_stream_that_nobody_reads_keeps_no_engine_awake(router, local):
    """The engine has done its part; the rest waits in this process."""
    async with router.stream(InferenceRequest(model="m", messages="hi")) as stream:
        await anext(aiter(stream))
        await router.sleep("m", timeout_s=WAIT_S)
        assert [] == [chunk async for chunk in stream]
    assert ["sleep 1"] == local.serving.commands


async def test_sleep_and_wake_up_may_be_repeated(router, local):
    """What is so already is left alone."""
    await router.wake_up("m")
    await router.sleep("m")
    await router.sleep("m", level=2)
    await router.wake_up("m", tags=["weights"])
    await router.wake_up("m", tags=["weights"])
    assert "asleep" == local.status.state
    await router.wake_up("m")
    await router.wake_up("m", tags=["kv_cache"])
    assert "serving" == local.status.state
    assert ["sleep 1", 'wake_up ["weights"]', 'wake_up ["kv_cache"]'] == local.serving.commands


async def test_an_engine_half_awake_may_sleep_again(router, local):
    """The trainer may have failed before its push."""
    await router.sleep("m", level=2)
    await router.wake_up("m", tags=["weights"])
    await router.sleep("m", level=2)
    await router.wake_up("m")
    assert "stale" == local.status.state
    assert ["sleep 2", 'wake_up ["weights"]', "sleep 2", WAKE_ALL] == local.serving.commands


# Pushes


async def test_weights_are_pushed_before_the_cache_is_awake(router, local):
    """vLLM's order for one GPU: the cache takes its memory when nothing else needs it."""
    await router.sleep("m", level=2)
    await router.wake_up("m", tags=["weights"])
    await push(local, 1)
    assert ("asleep", 1) == (local.status.state, local.version)
    await router.wake_up("m", tags=["kv_cache"])
    assert "serving" == local.status.state
    await generate(router)


async def test_weights_that_sleep_take_no_push(router, local):
    """vllm#57853: it would end the engine. The error says what to do."""
    await router.sleep("m")
    with pytest.raises(WeightSyncError, match=r'm/0 is asleep.*tags=\["weights"\]') as caught:
        local.weight_shape()
    assert "m/0" == caught.value.culprit
    with pytest.raises(WeightSyncError, match="m/0 is asleep"):
        await local.begin_push("{}", 1)
    assert ["sleep 1"] == local.serving.commands
    await router.wake_up("m")
    await push(local, 1)


async def test_memory_stays_as_it_is_during_a_push(router, local):
    """Neither sleep nor a generation that wakes up comes between its steps."""
    await router.sleep("m")
    await router.wake_up("m", tags=["weights"])
    await local.begin_push("{}", 1)
    with pytest.raises(EngineBusyError, match="m/0 takes a push of weights now; sleep when"):
        await router.sleep("m")
    with pytest.raises(EngineBusyError, match="m/0 takes a push of weights now; wake it up when"):
        await router.wake_up("m")
    await local.abort_push(1)
    await router.wake_up("m")
    assert "serving" == local.status.state


# Engines that die, or fail


@pytest.mark.parametrize(("version", "state"), [(0, "serving"), (1, "stale")])
async def test_an_engine_that_dies_asleep_is_restarted_awake(router, local, version, state):
    """With its checkpoint's weights, which serve when no others were pushed."""
    if version:
        await push(local, version)
    await router.sleep("m", level=2)
    dead = local.serving
    dead.is_dead = True
    await until(lambda: local.serving is not dead and local.status.state == state)
    await router.wake_up("m")
    assert [] == local.serving.commands
    if version:
        await push(local, version + 1)
    await generate(router)


async def test_an_engine_that_dies_before_it_sleeps(router, local):
    """The caller is told, and its successor is awake."""

    async def fails(call) -> None:
        with pytest.raises(EngineDiedError, match="m/0 died: the test ended it"):
            await call()

    dead = local.serving
    dead.gate.clear()
    async with begun(lambda: fails(lambda: generate(router))):
        await running(local)
        async with begun(lambda: fails(lambda: router.sleep("m"))):
            dead.is_dead = True
    await until(lambda: local.serving is not dead and local.status.state == "serving")
    await generate(router)


async def test_an_engine_that_is_restarted_is_not_put_to_sleep(router, local):
    """It will be awake, so a trainer must not count on its memory."""
    local.condemn("the test condemned it")
    with pytest.raises(NoReplicaError, match="m/0 has no engine now"):
        await router.sleep("m")
    await router.wake_up("m")
    await generate(router)


@pytest.mark.parametrize("kind", [CommandKind.SLEEP, CommandKind.WAKE_UP])
async def test_an_engine_that_fails_half_way_is_restarted(router, local, kind):
    """Some of its memory is there, some isn't: only a new one is of use."""
    broken = local.serving
    broken.faults[kind] = RuntimeError("CUDA out of memory")
    if kind is CommandKind.WAKE_UP:
        await router.sleep("m")
    call = getattr(router, kind)
    verb = kind.replace("_", " ")
    with pytest.raises(EngineError, match=f"m/0: CUDA out of memory; it failed to {verb} and is"):
        await call("m")
    await until(lambda: local.serving is not broken and local.status.state == "serving")
    await generate(router)


# Who can't


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        (functools.partial(LocalDouble, no_sleep="not on the CPU"), "not on the CPU"),
        (functools.partial(FakeBackend, lambda request: "hi"), "only local engines can"),
    ],
    ids=["local", "fake"],
)
async def test_nothing_is_done_when_a_replica_cannot_sleep(local, backend, why):
    """It is named, with the reason."""
    with unfrozen():
        async with Router({"m": [local, backend(name="m/1")]}) as router:
            for call in (router.sleep, router.wake_up):
                with pytest.raises(UnsupportedError, match=f"m/1 can't sleep: {why}") as caught:
                    await call("m")
                assert "sleep" == caught.value.capability
            assert ("serving", []) == (local.status.state, local.serving.commands)


async def test_an_engine_that_takes_adapters_keeps_its_base_model():
    """No push would bring it back."""
    local = LocalDouble(max_lora_rank=8)
    with unfrozen():
        async with Router({"m": local}) as router:
            with pytest.raises(UnsupportedError, match=r"m/0 can't sleep: level 2 .*level=1"):
                await router.sleep("m", level=2)
            assert "serving" == local.status.state
            await router.sleep("m")
            await router.wake_up("m")


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        ("sleep", {"level": 3}, "level must be 1 or 2, got 3"),
        ("sleep", {"mode": "keep"}, "mode must be drain or abort, got 'keep'"),
        ("wake_up", {"tags": ["cache"]}, r"weights and kv_cache, got \['cache'\]"),
        ("wake_up", {"tags": "weights"}, "a list of weights and kv_cache, got 'weights'"),
        ("wake_up", {"tags": []}, r"got \[\]"),
    ],
)
async def test_arguments_that_cannot_be_are_refused(router, call, options, message):
    """With what could be."""
    with pytest.raises(ValueError, match=message):
        await getattr(router, call)("m", **options)
