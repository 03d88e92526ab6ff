"""Engines that die, and engines that can't start: typed errors, nothing lost, nothing left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import psutil
import pytest

from agoge_async import ConfigError, EngineDiedError, EngineStartError, NoReplicaError, Router
from agoge_async.engine.group import group_members
from tests.engine.conftest import ask, backends, vllm_processes
from tests.engine.test_load import wait_idle

# A killed engine of `pair` is followed by another one, which outlives the test.
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
    answers, errors = [], []

    async def call():
        answers.append(await router.chat(ask(**LONG)))

    async def read():
        try:
            async for _ in router.stream(ask(**LONG)):
                pass
        except EngineDiedError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        for reader in (read, read, *[call] * 16):
            group.start_soon(reader)
        while (await engine.load()).unfinished < 8:
            await anyio.sleep(0.02)
        os.kill(choose(engine), signal.SIGKILL)
    return answers, errors, engine


async def kill_when_busy(engine):
    """Kill an engine's child once it generates."""
    while (await engine.load()).unfinished == 0:
        await anyio.sleep(0.01)
    os.kill(engine.pid, signal.SIGKILL)


def assert_gone(engine):
    """Nothing of a dead engine is left: no process, no folder."""
    assert [] == group_members(engine.pid)
    assert not Path(engine.spec.work_dir).exists()


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
    assert_gone(dead)
    await wait_serving(pair)
    assert backends(pair)[0].engine.pid != dead.pid
    assert "stop" == (await pair.chat(ask())).choices[0].finish_reason
    await wait_idle(pair)
    assert len(os.listdir("/dev/shm")) <= len(before)


async def test_two_replicas_share_the_load(pair):
    """Both answer; what one has in flight the other has not."""
    await wait_serving(pair)
    answers = await pair.chat_many([ask(temperature=1.0) for _ in range(32)])
    used = [answer.backend for answer in answers]
    assert {"tiny/0": 16, "tiny/1": 16} == {name: used.count(name) for name in set(used)}


@replaces_engine
async def test_an_idle_engine_that_dies_is_noticed(pair):
    """No request is needed to find out."""
    await wait_serving(pair)
    backend = backends(pair)[1]
    dead = backend.engine
    os.kill(vllm_processes(dead)[0].pid, signal.SIGKILL)
    with anyio.fail_after(10):
        while backend.is_serving or group_members(dead.pid):
            await anyio.sleep(0.02)
    assert_gone(dead)


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
        assert_gone(engine)


START_FAILURES = {
    "not a model": ({"model": "{empty}"}, 200, "config|model"),
    "unknown argument": ({"max_modl_len": 5}, 200, "max_modl_len.*max_model_len"),
    "bad argument": ({"dtype": "float33"}, 200, "float33|dtype"),
    "too little memory": ({"kv_cache_memory_bytes": 1000}, 200, "[Mm]emory|KV cache"),
    "too slow": ({}, 2, "not ready within 2 s"),
}


@pytest.mark.parametrize("case", START_FAILURES)
async def test_an_engine_that_cant_start_says_why_in_one_line(case, tmp_path):
    """The cause is one line, within the deadline, and nothing is left."""
    arguments, timeout_s, pattern = START_FAILURES[case]
    arguments = json.loads(json.dumps(arguments).replace("{empty}", str(tmp_path)))
    config = {"models": {"tiny": {"engine_args": arguments, "start_timeout_s": timeout_s}}}
    children = set(psutil.Process().children(recursive=True))
    router = Router.from_config(["tiny", config])
    began = time.monotonic()
    with pytest.raises(EngineStartError, match=pattern) as caught:
        await router.start()
    assert time.monotonic() - began < timeout_s + 20
    assert "\n" not in caught.value.cause
    assert 1 == str(caught.value).count("tiny/0")
    left = set(psutil.Process().children(recursive=True)) - children
    assert [] == [p for p in left if "resource_tracker" not in " ".join(p.cmdline())]


def test_a_model_path_that_isnt_there_is_told_before_any_start():
    """A path is not taken for a hub's name."""
    with pytest.raises(ConfigError, match=r"engine_args\.model: no folder /no/such/model"):
        Router.from_config({"models": {"m": {"engine_args": {"model": "/no/such/model"}}}})


PARENT = """
import asyncio
from agoge_async import Router

async def main():
    async with Router.from_config("tiny") as router:
        print(router.pool("tiny").backends[0].engine.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("kill_child_too", [False, True])
def test_a_killed_parent_leaves_nothing(kill_child_too, tmp_path):
    """kill -9 of the router's process ends child, EngineCore and worker within 5 s."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        parent.stdin.write(PARENT.encode())
        parent.stdin.close()
        child = int(parent.stdout.readline())
        members = group_members(child)
        assert len(members) >= 3
        parent.kill()
        if kill_child_too:
            os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while group_members(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [] == group_members(child)
