"""From a configuration to the pools of a router: devices, environments, replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from agoge_async.backends.local import LocalBackend, RestartPolicy
from agoge_async.config import RouterConfig, VLLMConfig
from agoge_async.engine.arguments import check_engine_args
from agoge_async.engine.devices import (
    assign_gpus,
    available_bytes,
    engine_environment,
    visible_gpus,
)
from agoge_async.engine.messages import EngineSpec
from agoge_async.errors import ConfigError
from agoge_async.limits import Slots
from agoge_async.pool import Pool
from agoge_async.routing import make_policy

_ENGINE_BYTES = 3 << 30
"""Memory that an engine's processes take, the weights aside: the resident sets of three came to
2.2 GiB with vLLM 0.32 on the CPU, the tiny model and a KV cache of 256 MiB (2026-11)."""
_MAX_CPU_KV_CACHE_BYTES = 4 << 30
"""The KV cache of a CPU engine that is given none; vLLM's own default is half of all memory."""
_MODEL_FILES = ("config.json", "params.json")
"""What tells a model's folder: the configuration of transformers, or that of Mistral."""
_IN_ENGINE_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the one worker inside EngineCore."""

Arguments = dict[str, Any]
ProgressReport = Callable[[str, str], None]
"""Told of each stage of each replica's start: replica, stage."""


def make_pools(config: RouterConfig, on_progress: ProgressReport) -> dict[str, Pool]:
    """Make a pool for each configured model; nothing is started.

    Raises:
        ConfigError: GPUs are given wrongly, an engine argument is unknown, or a local model's
            folder doesn't exist or holds none.
    """
    models = config.models
    environ = dict(os.environ)  # as it is now: a restart must not find other GPUs under an index
    gpus = plan_gpus(config)
    replicas = [devices for name in models for devices in gpus[name]]
    memory = available_bytes()
    starts = anyio.Semaphore(max(1, memory // _ENGINE_BYTES))
    cpu_share = CPUShare.of(memory, replicas.count([]))
    pools = {}
    for name, model in models.items():
        check_engine_args(model.engine_args, f"models.{name}.engine_args")
        _check_model_path(name, model)
        backends = [
            LocalBackend(
                f"{name}/{index}",
                _spec_factory(f"{name}/{index}", name, model, devices, cpu_share, environ),
                start_timeout_s=model.start_timeout_s,
                restart=RestartPolicy(
                    max_restarts=model.restart.max_restarts, backoff_s=model.restart.backoff_s
                ),
                start_slots=starts,
                on_progress=on_progress,
            )
            for index, devices in enumerate(gpus[name])
        ]
        limits = model.limits
        slots = Slots(name, capacity=limits.max_concurrency, max_queued=limits.max_queued)
        pools[name] = Pool(name, backends, policy=make_policy(model.routing), slots=slots)
    return pools


@dataclass(frozen=True, kw_only=True, slots=True)
class CPUShare:
    """What of this machine a CPU engine gets, where its configuration doesn't say."""

    num_threads: int
    kv_cache_bytes: int

    @classmethod
    def of(cls, memory: int, num_engines: int) -> CPUShare:
        """Share all cores but one, and two fifths of the memory, among the CPU engines.

        The spare core is for what isn't computing, as in vLLM's own binding of threads: OpenMP
        threads that wait for a preempted one spin.
        """
        engines = max(1, num_engines)
        kv_cache_bytes = min(_MAX_CPU_KV_CACHE_BYTES, memory * 2 // 5 // engines)
        return cls(
            num_threads=max(1, (len(os.sched_getaffinity(0)) - 1) // engines),
            kv_cache_bytes=kv_cache_bytes,
        )

    def defaults(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str], *, num_workers: int
    ) -> Arguments:
        """Give the engine arguments of a CPU engine that differ from vLLM's defaults.

        vLLM takes a share of all memory, which must be free, for each engine. It gives a CPU
        engine's one worker a process of its own so that its threads can be bound; unbound, they
        need none, and the start and each step are a third quicker (0.32). Compiling with C++ takes
        a minute a start, and needs a compiler. And a request with a seed whose prefill is cut in
        chunks ends a CPU engine (0.32, `gpu_model_runner`).
        """
        defaults: Arguments = {"enable_chunked_prefill": False, "enforce_eager": True}
        sizes = {"kv_cache_memory_bytes", "gpu_memory_utilization", "VLLM_CPU_KVCACHE_SPACE"}
        if not sizes & (arguments.keys() | environment.keys()):
            defaults["kv_cache_memory_bytes"] = self.kv_cache_bytes
        if num_workers == 1 and environment.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            defaults["distributed_executor_backend"] = _IN_ENGINE_CORE
        return defaults


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
    replica: str,
    model_name: str,
    model: VLLMConfig,
    gpus: list[int],
    cpu_share: CPUShare,
    environ: Mapping[str, str],
) -> Callable[[str], EngineSpec]:
    def make_spec(work_dir: str) -> EngineSpec:
        environment = engine_environment(
            environ,
            gpus=gpus,
            num_threads=cpu_share.num_threads,
            work_dir=work_dir,
            extra={key: value.get_secret_value() for key, value in model.env.items()},
        )
        arguments = {"model": model_name} | model.engine_args
        if not gpus:
            defaults = cpu_share.defaults(
                arguments, environment, num_workers=model.gpus_per_replica
            )
            arguments = defaults | arguments
            if arguments["enforce_eager"]:
                # vLLM leaves some helpers compiled, which cost the first callers of log
                # probabilities 12 s (0.32).
                environment.setdefault("TORCH_COMPILE_DISABLE", "1")
        return EngineSpec(
            name=replica,
            served_model=model_name,
            engine_args=arguments | {"model": _expanded(str(arguments["model"]))},
            environment=environment,
            work_dir=work_dir,
            parent_pid=os.getpid(),
            tool_call_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
            chat_template=model.chat_template,
        )

    return make_spec


def _expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _check_model_path(name: str, model: VLLMConfig) -> None:
    """Refuse a path that holds no model before vLLM takes it for the name of a hub's model."""
    path = str(model.engine_args.get("model", name))
    if not path.startswith(("/", "./", "../", "~")):
        return
    key = f"models.{name}.engine_args.model"
    folder = Path(_expanded(path))
    if folder.is_file() and folder.suffix == ".gguf":
        return
    if not folder.is_dir():
        raise ConfigError(f"{key}: no folder {path}; give a model's folder or a hub id", key=key)
    if not any((folder / file).is_file() for file in _MODEL_FILES):
        raise ConfigError(
            f"{key}: {path} holds no model: neither {' nor '.join(_MODEL_FILES)}", key=key
        )
