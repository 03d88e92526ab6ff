"""Process groups, with small trees of real processes."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from agoge_async.engine.group import (
    group_members,
    is_alive,
    kill_group,
    own_group,
    shared_memory_of,
    wait_group_gone,
)

# A leader with two children, one of which has one of its own: all in the leader's group.
TREE = "sleep 300 & sh -c 'sleep 300 & echo ready; wait' & wait"
TREE_SIZE = 4


@contextlib.contextmanager
def tree(script: str = TREE):
    """Start a process group and wait until all of it is there."""
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        try:
            assert b"ready\n" == leader.stdout.readline()
            yield leader
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGKILL)


def wait_for_end(pid: int) -> None:
    """Wait until a child has ended, and leave it a zombie."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_this_process_is_alive_and_in_its_group():
    """The simplest case."""
    assert is_alive(os.getpid())
    assert os.getpid() in group_members(own_group())


def test_a_zombie_is_not_alive():
    """It has ended; only its parent hasn't asked yet."""
    with subprocess.Popen(["true"], start_new_session=True) as process:
        wait_for_end(process.pid)
        state = psutil.Process(process.pid).status()
        alive, members = is_alive(process.pid), group_members(process.pid)
    assert (psutil.STATUS_ZOMBIE, False, []) == (state, alive, members)


def test_a_process_that_is_gone_is_not_alive():
    """Its number is free again."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not is_alive(process.pid)


def test_a_name_with_spaces_and_brackets_is_read(tmp_path):
    """The kernel writes it unquoted, in brackets."""
    program = tmp_path / "a) Z 1 ("
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "300"], start_new_session=True) as process:
        try:
            assert is_alive(process.pid)
            assert group_members(process.pid) == [process.pid]
        finally:
            process.kill()


def test_group_members_are_the_whole_tree():
    """Children of children too."""
    with tree() as leader:
        members = group_members(leader.pid)
        children = psutil.Process(leader.pid).children(recursive=True)
    assert {leader.pid, *(child.pid for child in children)} == set(members)
    assert len(members) == TREE_SIZE


def test_killing_a_group_ends_the_whole_tree():
    """Nothing of it is left."""
    with tree() as leader:
        killed = kill_group(leader.pid)
        leader.wait(10)
        gone = wait_group_gone(leader.pid, 10)
    assert (True, True, []) == (killed, gone, group_members(leader.pid))
    assert leader.returncode == -signal.SIGKILL


def test_a_group_without_its_leader_can_be_killed():
    """What a killed engine leaves."""
    with tree() as leader:
        leader.kill()
        leader.wait(10)
        orphans = group_members(leader.pid)
        killed = kill_group(leader.pid)
        gone = wait_group_gone(leader.pid, 10)
    assert (True, True, True) == (len(orphans) == TREE_SIZE - 1, killed, gone)


def test_killing_a_group_that_is_gone_does_nothing():
    """It says so."""
    with tree("echo ready") as leader:
        leader.wait(10)
    assert not kill_group(leader.pid)


def test_waiting_for_a_group_that_lives_ends():
    """At its deadline, with False."""
    with tree() as leader:
        assert not wait_group_gone(leader.pid, 0.05)


def test_a_process_that_left_the_group_is_no_member():
    """It has a session of its own: it isn't ours to kill."""
    with tree("setsid sh -c 'echo ready; exec sleep 300' & wait") as leader:
        [leaver] = psutil.Process(leader.pid).children()
        members = group_members(leader.pid)
        leaver.kill()
    assert members == [leader.pid]


@pytest.fixture
def segment():
    """A segment of shared memory."""
    memory = SharedMemory(create=True, size=4096)
    yield memory
    memory.close()
    with contextlib.suppress(FileNotFoundError):
        memory.unlink()


def test_shared_memory_of_a_process_is_found(segment):
    """Its path, so that it can be removed when the process is killed."""
    assert Path("/dev/shm", segment.name) in shared_memory_of([os.getpid()])


def test_a_semaphore_is_found_under_its_last_name():
    """The C library maps it under another name, and renames it then."""
    lock = multiprocessing.get_context("spawn").Lock()
    name = f"sem.{lock._semlock.name.removeprefix('/')}"
    assert Path("/dev/shm", name) in shared_memory_of([os.getpid()])


def test_removed_shared_memory_is_not_listed(segment):
    """There is nothing left to remove."""
    segment.unlink()
    assert Path("/dev/shm", segment.name) not in shared_memory_of([os.getpid()])


def test_a_process_that_is_gone_has_no_shared_memory():
    """And asking is no error."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert shared_memory_of([process.pid]) == set()


LEADER = """
import multiprocessing, os
from multiprocessing.shared_memory import SharedMemory
from agoge_async.engine.group import end_own_group
os.setsid()
memory = SharedMemory(create=True, size=16)
print(memory.name, os.getpid(), flush=True)
input()
end_own_group()
"""


def test_a_group_that_ends_itself_leaves_no_shared_memory():
    """Nobody is left to remove it."""
    with subprocess.Popen(
        [sys.executable, "-c", LEADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as leader:
        name, group = leader.stdout.readline().split()
        there = Path("/dev/shm", name).exists()
        leader.communicate("\n")
    assert (True, -signal.SIGKILL) == (there, leader.returncode)
    assert not Path("/dev/shm", name).exists()
    assert wait_group_gone(int(group), 5)


def test_the_context_that_spawns_engines_is_torchs():
    """Taken from the standard library, so that the caller needn't load torch."""
    torch_multiprocessing = pytest.importorskip("torch.multiprocessing")
    assert multiprocessing.get_context("spawn") is torch_multiprocessing.get_context("spawn")
