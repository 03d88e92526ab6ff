"""What of this machine an engine gets: GPUs, memory, a folder, an environment."""

from __future__ import annotations

import getpass
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agoge_async.errors import ConfigError
from agoge_async.requests import MAX_STOP_STRINGS

_TORCHRUN_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NCCL_ASYNC_ERROR_HANDLING",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    }
)
_TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_", "VLLM_DP_")
"""A trainer's distributed set-up, which would make vLLM join the trainer's group."""

_TMP_PATH_LIMIT = 50
"""A Unix socket's path may have 107 characters; to it we add 15, and vLLM a name of 37."""


def make_work_dir() -> str:
    """Make the folder of an engine, at a path that is short enough for its sockets.

    It is the engine's TMPDIR, where torch looks for the C++ headers that it has compiled, whatever
    the cache's folder is (torch 2.13, `codecache._HEADER_DIR`): a link leads to those of all.
    """
    parent = tempfile.gettempdir()
    work_dir = tempfile.mkdtemp(
        prefix="agoge-", dir=parent if len(parent) <= _TMP_PATH_LIMIT else "/tmp"
    )
    cache = Path(_compile_cache_dir())
    cache.mkdir(mode=0o700, exist_ok=True)
    Path(work_dir, cache.name).symlink_to(cache)
    return work_dir


def available_bytes() -> int:
    """Say how much memory new processes may take: what is free, or what the container has left."""
    limits = [
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:  # no version 2 control groups here
        limit = "max"
    if limit != "max":
        limits.append(max(0, int(limit) - used))
    return min(limits, default=0)


def _compile_cache_dir() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{tempfile.gettempdir()}/torchinductor_{user}"


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """List what CUDA_VISIBLE_DEVICES would name, without loading CUDA."""
    restricted = environment.get("CUDA_VISIBLE_DEVICES")
    if restricted is not None:
        named = [device.strip() for device in restricted.split(",")]
        # CUDA ignores all from the first name on that can't be one: -1 hides every GPU.
        return list(itertools.takewhile(lambda device: device and device[0] != "-", named))
    cards = Path("/proc/driver/nvidia/gpus")  # not there in every container
    found = list(cards.iterdir()) if cards.is_dir() else list(Path("/dev").glob("nvidia[0-9]*"))
    return [str(index) for index in range(len(found))]


def assign_gpus(
    wanted: Mapping[str, Sequence[Sequence[int]] | None],
    replicas: Mapping[str, int],
    gpus_per_replica: Mapping[str, int],
    num_visible: int,
) -> dict[str, list[list[int]]]:
    """Give each replica of each model its GPUs.

    Models that name theirs are served first; the others take the lowest free ones. Without any
    GPU, every replica gets an empty list: it runs on the CPU.

    Args:
        wanted: Model name to one list of indices a replica, or None: choose.
        replicas: Model name to its number of replicas.
        gpus_per_replica: Model name to tensor parallel size times pipeline parallel size.
        num_visible: How many GPUs there are; indices are 0 up to it.

    Raises:
        ConfigError: An index is used twice or doesn't exist, or there are too few GPUs.
    """
    assigned: dict[str, list[list[int]]] = {}
    taken: dict[int, str] = {}
    for model, lists in wanted.items():
        if lists is None:
            continue
        key = f"models.{model}.gpus"
        if len(lists) != replicas[model]:
            raise ConfigError(
                f"{key} has {len(lists)} lists for {replicas[model]} replicas (num_workers); "
                "give one list of GPU ids a replica",
                key=key,
            )
        for gpus in lists:
            _check_gpus(key, gpus, gpus_per_replica[model], num_visible, taken)
        assigned[model] = [list(gpus) for gpus in lists]
    free = [index for index in range(num_visible) if index not in taken]
    for model, lists in wanted.items():
        if lists is not None:
            continue
        size = gpus_per_replica[model] if num_visible else 0
        needed = size * replicas[model]
        if needed > len(free):
            raise ConfigError(
                f"models.{model}: {replicas[model]} replicas of {size} GPUs need {needed}, "
                f"free are {len(free)} of {num_visible}; lower num_workers or "
                "tensor_parallel_size",
                key=f"models.{model}.num_workers",
            )
        assigned[model] = [free[i * size : (i + 1) * size] for i in range(replicas[model])]
        free = free[needed:]
    return assigned


def _check_gpus(
    key: str, gpus: Sequence[int], size: int, num_visible: int, taken: dict[int, str]
) -> None:
    if len(gpus) != size:
        raise ConfigError(
            f"{key}: {list(gpus)} holds {len(gpus)} GPUs, but tensor_parallel_size x "
            f"pipeline_parallel_size is {size}; make them equal",
            key=key,
        )
    for index in gpus:
        if not 0 <= index < num_visible:
            there = f"0 to {num_visible - 1}" if num_visible else "none"
            raise ConfigError(
                f"{key}: GPU {index} doesn't exist; this process sees {there} "
                "(CUDA_VISIBLE_DEVICES counts)",
                key=key,
            )
        if index in taken:
            raise ConfigError(f"{key}: GPU {index} is given twice; {taken[index]} has it", key=key)
        taken[index] = key


def engine_environment(
    parent: Mapping[str, str],
    *,
    gpus: Sequence[int],
    num_threads: int,
    work_dir: str,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """Give the whole environment of an engine's child.

    Args:
        parent: The environment of this process; torchrun's variables are left out.
        gpus: Indices into the visible GPUs; empty: the CPU.
        num_threads: OpenMP threads of each process of a CPU engine.
        work_dir: The engine's own folder.
        extra: Variables from the configuration; they win.
    """
    environment = {
        name: value
        for name, value in parent.items()
        if name not in _TORCHRUN_NAMES and not name.startswith(_TORCHRUN_PREFIXES)
    }
    visible = visible_gpus(parent)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[index] for index in gpus)
    # Where torch keeps by default what it compiles; in TMPDIR it would go with the engine.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", _compile_cache_dir())
    environment["TMPDIR"] = work_dir
    environment["VLLM_RPC_BASE_PATH"] = work_dir
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("VLLM_MAX_STOP_STRINGS", str(MAX_STOP_STRINGS))  # vLLM's own limit: 4
    if not gpus:
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment["OMP_NUM_THREADS"] = str(num_threads)
    environment.update(extra)
    return environment
