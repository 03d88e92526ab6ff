"""Every test must leave the process as it found it."""

import asyncio
import gc
import multiprocessing.resource_tracker
import os
import time
from pathlib import Path

import psutil
import pytest

SETTLE_S = 5.0
"""How long what a test has closed may take to be gone: a transport closes on the loop's next turn,
a killed process when the kernel is done with it."""

KINDS = ("processes", "tasks", "descriptors", "shared memory")

SHARED_MEMORY = Path("/dev/shm")

Resources = dict[str, dict[object, str]]


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        f"may_leave(*kinds): the test leaves resources of these kinds ({', '.join(KINDS)}) behind, "
        "because it changes a fixture that outlives it",
    )


def child_processes() -> dict[object, str]:
    """Describe the descendants; multiprocessing's tracker, one per process, is part of Python."""
    found: dict[object, str] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline()) or f"[{process.name()}]"
        except psutil.Error:
            continue
        if "multiprocessing.resource_tracker" not in command:
            found[process.pid, process.create_time()] = f"{process.pid} {command[:100]}"
    return found


def open_descriptors() -> dict[object, str]:
    """Describe the open descriptors; a number that is used again for something else is new."""
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None)
    found: dict[object, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the one that listed the folder
            continue
        if int(entry.name) != tracker:
            found[entry.name, target] = f"{entry.name} -> {target}"
    return found


def shared_memory() -> dict[object, str]:
    """Describe this user's segments in /dev/shm."""
    found: dict[object, str] = {}
    for path in SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ():
        try:
            if path.stat().st_uid == os.getuid():
                found[path] = str(path)
        except FileNotFoundError:
            continue
    return found


def do_strangers_share_memory() -> bool:
    """Say whether a program that isn't ours uses multiprocessing's shared memory.

    Nobody can tell then whose a new segment is: an engine that is killed leaves some that no
    process maps any more.
    """
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) not in ours:
            try:
                maps = (folder / "maps").read_text()
            except OSError:
                continue
            if "/dev/shm/psm_" in maps or "/dev/shm/sem.mp-" in maps:
                return True
    return False


def running_tasks(own: set[asyncio.Task]) -> dict[object, str]:
    """Describe the tasks of the running loop, but for the test's own."""
    return {task: repr(task)[:200] for task in asyncio.all_tasks() - own if not task.done()}


def take_stock(own: set[asyncio.Task]) -> Resources:
    return {
        "processes": child_processes(),
        "tasks": running_tasks(own),
        "descriptors": open_descriptors(),
        "shared memory": shared_memory(),
    }


def find_leaks(before: Resources, own: set[asyncio.Task], kinds: list[str]) -> list[str]:
    after = take_stock(own)
    leaks = {
        kind: [text for key, text in after[kind].items() if key not in before[kind]]
        for kind in kinds
    }
    if leaks.get("shared memory") and do_strangers_share_memory():
        leaks["shared memory"].clear()
    return [f"{kind}: {text}" for kind, texts in leaks.items() for text in texts]


@pytest.fixture(autouse=True)
async def no_leaks(request):
    """Fail a test that leaves a process, a task, a descriptor or a shared-memory segment behind.

    What there was before the test is the baseline. Fixtures of a wider scope are set up before this
    one, so a shared engine is no leak. A test that makes such an engine restart or grow says so:
    `@pytest.mark.may_leave("processes", "descriptors")`.
    """
    marker = request.node.get_closest_marker("may_leave")
    kinds = [kind for kind in KINDS if marker is None or kind not in marker.args]
    before = take_stock({asyncio.current_task()})
    yield
    own = {asyncio.current_task()}
    deadline = time.monotonic() + SETTLE_S
    while leaks := find_leaks(before, own, kinds):
        if time.monotonic() > deadline:
            pytest.fail("left behind:\n  " + "\n  ".join(leaks))
        gc.collect()
        await asyncio.sleep(0.01)
