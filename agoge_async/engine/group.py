"""Process groups: an engine is one group, led by the child, and ends as a whole.

Linux keeps the number of a group taken until its last process is gone, so a group that we made
can't be mistaken for a stranger's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

GROUP_VARIABLE = "AGOGE_ENGINE_GROUP"
"""Environment variable that holds an engine's group in all of its processes."""
GROUP_POLL_S = 0.5
"""How often a process looks whether the one that it depends on is alive."""


def own_group() -> int:
    """Give the group of this process; it is its leader's pid too."""
    return os.getpgrp()


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    fields = _stat_fields(pid)
    return fields is not None and fields[0] not in "ZX"


def group_members(group: int) -> list[int]:
    """List the live processes of a group."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat_fields(int(entry.name))
            if fields is not None and fields[0] not in "ZX" and int(fields[2]) == group:
                members.append(int(entry.name))
    return members


def kill_group(group: int) -> bool:
    """Send SIGKILL to every process of a group; False when there is none left."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_group_gone(group: int, timeout_s: float) -> bool:
    """Wait until no process of a group lives; False when some still do."""
    deadline = time.monotonic() + timeout_s
    while group_members(group):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def shared_memory_of(pids: list[int]) -> set[Path]:
    """List what `multiprocessing` keeps in /dev/shm and these processes have mapped.

    vLLM's processes talk over such segments and semaphores; killed ones leave them behind. They are
    told by their inodes: the C library maps a new semaphore under a name that it then drops.
    """
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it is gone
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                    inodes.add(int(fields[4]))
    found = set()
    for pattern in ("psm_*", "sem.mp-*"):
        for path in Path("/dev/shm").glob(pattern):
            with contextlib.suppress(OSError):
                if path.stat().st_ino in inodes:
                    found.add(path)
    return found


def end_own_group() -> None:
    """End this process and its whole group, and what it has in shared memory."""
    group = own_group()
    for segment in shared_memory_of(group_members(group)):
        segment.unlink(missing_ok=True)
    kill_group(group)
