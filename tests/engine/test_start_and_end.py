"""Engines that can't start, and programs that are killed: a cause in one line, nothing left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import anyio
import pytest

from agoge_async import ConfigError, EngineStartError, Router
from agoge_async.engine.group import group_members, wait_group_gone

START_FAILURES = {
    "not a model": ({"model": "{empty}"}, 200, "config|model"),
    "bad argument": ({"dtype": "float33"}, 200, "float33|dtype"),
    "too little memory": ({"kv_cache_memory_bytes": 1000}, 200, "[Mm]emory|KV cache"),
    "too slow": ({}, 2, "not ready within 2 s"),
}


async def fail_to_start(case, tmp_path):
    """Start an engine that can't be; its error must say why."""
    arguments, timeout_s, pattern = START_FAILURES[case]
    (tmp_path / "config.json").write_text("{}")
    arguments = json.loads(json.dumps(arguments).replace("{empty}", str(tmp_path)))
    config = {"models": {"tiny": {"engine_args": arguments, "start_timeout_s": timeout_s}}}
    router = Router.from_config(["tiny", config])
    began = time.monotonic()
    with pytest.raises(EngineStartError, match=pattern) as caught:
        await router.start()
    assert time.monotonic() - began < timeout_s + 20
    assert "\n" not in caught.value.cause
    assert 1 == str(caught.value).count("tiny/0")
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


@contextlib.contextmanager
def program(tmp_path):
    """Run a program with a router; gives it, and its engine's pid once that serves."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        try:
            parent.stdin.write(PARENT.encode())
            parent.stdin.close()
            yield parent
        finally:
            parent.kill()


def test_a_killed_parent_leaves_nothing(tmp_path):
    """kill -9 of the router's process, or of that and the child, ends all within 5 s."""
    with program(tmp_path) as alone, program(tmp_path) as with_child:
        children = [int(parent.stdout.readline()) for parent in (alone, with_child)]
        assert all(len(group_members(child)) >= 3 for child in children)
        alone.kill()
        with_child.kill()
        os.kill(children[1], signal.SIGKILL)
    deadline = time.monotonic() + 5
    assert all(wait_group_gone(child, deadline - time.monotonic()) for child in children)
