"""From a configuration to the pools of a router: devices, environments, replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import anyio

from agoge_async.backends.local import LocalBackend, RestartPolicy
from agoge_async.config import RouterConfig, VLLMConfig
from agoge_async.engine.devices import assign_gpus, engine_environment, visible_gpus
from agoge_async.engine.messages import EngineSpec
from agoge_async.errors import ConfigError
from agoge_async.limits import Slots
from agoge_async.pool import Pool
from agoge_async.routing import make_policy

_START_BYTES = 3 << 30
"""What an engine's three processes hold while they start, weights and KV cache aside; measured at
2.4 GiB with vLLM 0.32 on the CPU (2026-11)."""

ProgressReport = Callable[[str, str], None]
"""Told of each stage of each replica's start: replica, stage."""


def make_pools(config: RouterConfig, on_progress: ProgressReport) -> dict[str, Pool]:
    """Make a pool for each configured model; nothing is started.

    Raises:
        ConfigError: GPUs are given wrongly, or a local model path doesn't exist.
    """
    models = config.models
    gpus = plan_gpus(config)
    num_replicas = sum(model.num_workers for model in models.values())
    starts = anyio.Semaphore(_concurrent_starts(_available_bytes()))
    threads = max(1, _usable_cores() // num_replicas)
    pools = {}
    for name, model in models.items():
        _check_model_path(name, model)
        backends = [
            LocalBackend(
                f"{name}/{index}",
                _spec_factory(name, index, model, gpus[name][index], threads),
                start_timeout_s=model.start_timeout_s,
                restart=RestartPolicy(
                    max_restarts=model.restart.max_restarts, backoff_s=model.restart.backoff_s
                ),
                start_slots=starts,
                on_progress=on_progress,
            )
            for index in range(model.num_workers)
        ]
        limits = model.limits
        slots = Slots(name, capacity=limits.max_concurrency, max_queued=limits.max_queued)
        pools[name] = Pool(name, backends, policy=make_policy(model.routing), slots=slots)
    return pools


def plan_gpus(config: RouterConfig) -> dict[str, list[list[int]]]:
    """Say which GPUs each replica of each model would get here; empty lists: the CPU.

    Raises:
        ConfigError: GPUs are given wrongly.
    """
    models = config.models
    return assign_gpus(
        {name: model.gpus for name, model in models.items()},
        {name: model.num_workers for name, model in models.items()},
        {name: model.gpus_per_replica for name, model in models.items()},
        len(visible_gpus(os.environ)),
    )


def _spec_factory(
    name: str, index: int, model: VLLMConfig, gpus: list[int], num_threads: int
) -> Callable[[str], EngineSpec]:
    def make_spec(work_dir: str) -> EngineSpec:
        environment = engine_environment(
            os.environ, gpus=gpus, num_threads=num_threads, work_dir=work_dir, extra=model.env
        )
        return EngineSpec(
            name=f"{name}/{index}",
            served_model=name,
            engine_args={"model": name} | dict(model.engine_args),
            environment=environment,
            work_dir=work_dir,
            parent_pid=os.getpid(),
            tool_call_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
            chat_template=model.chat_template,
        )

    return make_spec


def _check_model_path(name: str, model: VLLMConfig) -> None:
    """Refuse a path that isn't there before vLLM takes it for the name of a hub's model."""
    path = str(model.engine_args.get("model", name))
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"models.{name}.engine_args.model: no folder {path}; give a model's folder or a hub id",
            key=f"models.{name}.engine_args.model",
        )


def _concurrent_starts(available_bytes: int) -> int:
    return max(1, available_bytes // _START_BYTES)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _START_BYTES


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))
