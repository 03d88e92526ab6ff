"""Engines that die, and engines that can't start: typed errors, nothing lost, nothing left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from agoge_async import ConfigError, EngineDiedError, EngineStartError, Router
from agoge_async.engine.group import group_members
from tests.engine.conftest import ask, backends, vllm_processes

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


def assert_gone(engine):
    """Nothing of a dead engine is left: no process, no folder."""
    assert [] == group_members(engine.pid)
    assert not Path(engine.spec.work_dir).exists()


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
    assert 6 <= sum(answer.attempts == 2 for answer in answers)
    assert_gone(dead)
    assert "stop" == (await pair.chat(ask())).choices[0].finish_reason
    assert len(os.listdir("/dev/shm")) <= len(before)


@replaces_engine
async def test_an_idle_engine_that_dies_is_noticed(pair):
    """No request is needed to find out. (Both replicas are restarting after this one.)"""
    dead = backends(pair)[1].engine
    os.kill(vllm_processes(dead)[0].pid, signal.SIGKILL)
    with anyio.fail_after(20):
        while backends(pair)[1].is_serving or os.path.exists(dead.spec.work_dir):
            await anyio.sleep(0.02)
    assert_gone(dead)


START_FAILURES = {
    "not a model": ({"model": "{empty}"}, 200, "config|model"),
    "unknown argument": ({"max_modl_len": 5}, 200, "max_modl_len.*max_model_len"),
    "bad argument": ({"dtype": "float33"}, 200, "float33|dtype"),
    "too little memory": ({"kv_cache_memory_bytes": 1000}, 200, "[Mm]emory|KV cache"),
    "too slow": ({}, 2, "not ready within 2 s"),
}


async def fail_to_start(case, tmp_path):
    """Start an engine that can't be; its error must say why."""
    arguments, timeout_s, pattern = START_FAILURES[case]
    arguments = json.loads(json.dumps(arguments).replace("{empty}", str(tmp_path)))
    config = {"models": {"tiny": {"engine_args": arguments, "start_timeout_s": timeout_s}}}
    router = Router.from_config(["tiny", config])
    with pytest.raises(EngineStartError, match=pattern) as caught:
        await router.start()
    assert "\n" not in caught.value.cause
    assert caught.value.cause in str(caught.value)


async def test_an_engine_that_cant_start_says_why_in_one_line(tmp_path):
    """The cause is one line, within the deadline, and nothing is left (the fixture looks)."""
    with anyio.fail_after(220):
        async with anyio.create_task_group() as group:
            for case in START_FAILURES:
                group.start_soon(fail_to_start, case, tmp_path)


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


def start_parent(tmp_path):
    """Start a program with a router; gives it, and its engine's pid once that serves."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    parent.stdin.write(PARENT.encode())
    parent.stdin.close()
    return parent


def test_a_killed_parent_leaves_nothing(tmp_path):
    """kill -9 of the router's process, or of that and the child, ends all within 5 s."""
    with start_parent(tmp_path) as alone, start_parent(tmp_path) as with_child:
        children = [int(parent.stdout.readline()) for parent in (alone, with_child)]
        assert all(len(group_members(child)) >= 3 for child in children)
        alone.kill()
        with_child.kill()
        os.kill(children[1], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(map(group_members, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [[], []] == [group_members(child) for child in children]
