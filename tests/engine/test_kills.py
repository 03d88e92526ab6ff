"""Engines that are killed: nothing lost, nothing left, and others in their place."""

import os
import signal
from pathlib import Path

import anyio
import pytest

from agoge_async import EngineDiedError, NoReplicaError, Router
from agoge_async.engine.group import group_members
from tests.engine.conftest import ask, backends, vllm_processes
from tests.engine.test_load import wait_idle

# A killed engine of `pair` is followed by another one, which outlives the test.
pytestmark = pytest.mark.slow
replaces_engine = pytest.mark.may_leave("processes", "tasks", "descriptors", "shared memory")
LONG = {"ignore_eos": True, "max_tokens": 300, "temperature": 1.0}


async def wait_serving(router):
    """Wait until every replica serves again."""
    with anyio.fail_after(200):
        while not all(backend.is_serving for backend in backends(router)):
            await anyio.sleep(0.1)


async def kill_while_generating(router, choose):
    """Kill a process of the first replica under 16 chats and a stream on each replica.

    Gives the answers, the streams' errors, and the dead engine.
    """
    engine = backends(router)[0].engine
    answers, errors, begun = [], [], set()

    async def call():
        answers.append(await router.chat(ask(**LONG)))

    async def read():
        try:
            async for chunk in router.stream(ask(**LONG)):
                begun.add(chunk.id)
        except EngineDiedError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for reader in (read, read, *[call] * 16):
            group.start_soon(reader)
        while len(begun) < 2 or (await engine.load()).unfinished < 8:
            await anyio.sleep(0.02)
        os.kill(choose(engine), signal.SIGKILL)
    return answers, errors, engine


async def kill_when_busy(engine):
    """Kill an engine's child once it generates."""
    while (await engine.load()).unfinished == 0:
        await anyio.sleep(0.01)
    os.kill(engine.pid, signal.SIGKILL)


def is_left(engine):
    """Say whether anything of a dead engine is left: a process, or its folder."""
    return bool(group_members(engine.pid)) or Path(engine.spec.work_dir).exists()


async def test_without_another_replica_the_error_says_what_died():
    """EngineDiedError names the engine and brings its log; max_restarts 0 leaves it down."""
    once = {"models": {"tiny": {"restart": {"max_restarts": 0}}}}
    async with Router.from_config(["tiny", once]) as router:
        engine = backends(router)[0].engine
        async with anyio.create_task_group() as group:
            group.start_soon(kill_when_busy, engine)
            with pytest.raises(EngineDiedError, match="tiny/0") as caught:
                await router.chat(ask(**LONG))
        assert -signal.SIGKILL == caught.value.exit_code
        assert caught.value.log_tail
        with pytest.raises(NoReplicaError, match=r"no replica of tiny can serve.*died"):
            await router.chat(ask())
        assert not is_left(engine)


async def test_two_replicas_share_the_load(pair):
    """Both answer; what one has in flight the other has not."""
    answers = await pair.chat_many([ask(temperature=1.0) for _ in range(32)])
    used = [answer.backend for answer in answers]
    assert {"tiny/0": 16, "tiny/1": 16} == {name: used.count(name) for name in set(used)}


@replaces_engine
@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda engine: engine.pid, id="child"),
        pytest.param(lambda engine: vllm_processes(engine)[0].pid, id="core"),
        pytest.param(lambda engine: vllm_processes(engine)[-1].pid, id="worker"),
    ],
)
async def test_requests_of_a_killed_engine_move_to_the_other_replica(pair, choose):
    """kill -9 of any of its processes: chats are answered, it is restarted, nothing is left.

    A stream that had begun can't move: it gets the error, with the end of the engine's log.
    """
    before = os.listdir("/dev/shm")
    await wait_serving(pair)
    answers, stream_errors, dead = await kill_while_generating(pair, choose)
    assert 16 == len(answers)
    assert ["tiny/0"] == [error.backend for error in stream_errors]
    assert stream_errors[0].log_tail
    assert 8 <= sum(answer.attempts == 2 for answer in answers)
    assert not is_left(dead)
    await wait_serving(pair)
    assert backends(pair)[0].engine.pid != dead.pid
    assert "stop" == (await pair.chat(ask())).choices[0].finish_reason
    await wait_idle(pair)
    assert len(os.listdir("/dev/shm")) <= len(before)


@replaces_engine
async def test_an_idle_engine_that_dies_is_noticed(pair):
    """No request is needed to find out."""
    dead = backends(pair)[1].engine
    os.kill(vllm_processes(dead)[0].pid, signal.SIGKILL)
    with anyio.fail_after(10):
        while backends(pair)[1].is_serving or is_left(dead):
            await anyio.sleep(0.02)
    assert not is_left(dead)
