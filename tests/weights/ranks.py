"""What `torchrun` runs for test_ranks.py: a trainer of several ranks, targets in rank 0's process.

Usage: ranks.py STAGE:WHAT ..., where WHAT is gather strategies with commas between them, a fault,
"lora" for a model with an adapter, or "memory". Each line of output begins with its task.
"""

import asyncio
import ctypes
import dataclasses
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
from torch import nn

from agoge_async import ParamSyncer, WeightSyncError
from agoge_async.weights import sending
from agoge_async.weights.sources import ModelSource
from tests.weights.test_push import Target

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for a minute
TIMEOUT_S = 8.0
task = ""
FAULTS = ("dies in send", "dies in gather", "raises", "other version", "comes late")


class Model(nn.Module):
    """Uneven sizes; tied, above the bucket's budget, and small enough to persist under ZeRO-3."""

    def __init__(self, width: int = 33, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 51, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.head(self.norm(hidden)).float().log_softmax(-1).mean()


def with_adapter(model: nn.Module) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["layers.0", "layers.2"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def say(text: str) -> None:
    print(f"{task} rank {torch.distributed.get_rank()}: {text}", flush=True)


def make_engine(stage: int, what: str):
    torch.manual_seed(0)
    if what == "memory":
        model = Model(width=1000, depth=20)
    else:
        model = with_adapter(Model()) if what == "lora" else Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    return engine


def train(engine) -> None:
    """Make one step; it blocks the event loop, and the other ranks with it."""
    loss = engine(torch.arange(20)[None])
    engine.backward(loss)
    engine.step()


def gathered(engine) -> dict[str, torch.Tensor]:
    """Gather the parameters as DeepSpeed documents it, on every rank."""
    found = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
    return found


def whole(engine) -> dict[str, torch.Tensor]:
    """Give what engines should have; an adapter is merged by PEFT."""
    found = gathered(engine)
    if not any("lora_A" in name for name in found):
        return found
    model = with_adapter(Model())
    model.load_state_dict(found)
    return model.merge_and_unload().state_dict()


def count_segments() -> int:
    """Count this process's descriptors of segments: two for each, of which one is its map's."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("agoge-weights" in link for link in links)


async def push_all(engine, gathers: str) -> None:
    """Push by each strategy, over each transport, from one rank and both; compare bit for bit."""
    rank = torch.distributed.get_rank()
    targets = [Target("engine/0"), Target("engine/1")]
    version = 0
    choices = itertools.product(gathers.split(","), ("shm", "gloo"), ("rank0", "round_robin"))
    for gather, transport, sources in choices:
        options = {"gather": gather, "transport": transport, "sources": sources}
        async with await ParamSyncer.connect(
            engine,
            targets if rank == 0 else None,
            bucket_bytes=5000,
            timeout_s=TIMEOUT_S,
            **options,
        ) as syncer:
            for _ in range(2):
                version += 1
                train(engine)
                record = await syncer.push(version=version)
                assert version == record.version
                expected = whole(engine)
                for target in targets if rank == 0 else ():
                    assert sorted(expected) == sorted(target.weights)
                    for name, tensor in expected.items():
                        assert torch.equal(tensor, target.weights[name]), (options, name)
                if rank == 1:  # rank 0's process has the targets' as well
                    assert count_segments() <= 2
                largest = max(tensor.nbytes for tensor in expected.values())
                if transport == "gloo" and gather == "bucketed":
                    merging = 3 * 33 * 33 * 4 if hasattr(engine.module, "peft_config") else 0
                    assert record.peak_extra_bytes <= 2 * 5000 + largest + merging
                if gather == "shards":
                    assert record.peak_extra_bytes <= 2 * (5000 + 80)
    for target in targets:
        target.close()
    say(f"{version} pushes")


async def push_lora(engine, _: str) -> None:
    """Push with an adapter merged, then the adapter alone; what can't be is refused."""
    try:
        await ParamSyncer.connect(engine, None, gather="shards")
    except ValueError as error:
        say(str(error))
    await push_all(engine, "bucketed")
    target = Target("engine/0")
    target.shape = dataclasses.replace(target.shape, max_lora_rank=8)
    targets = [target] if torch.distributed.get_rank() == 0 else None
    options = {"lora": "adapter", "gather": "shards", "transport": "shm", "timeout_s": TIMEOUT_S}
    async with await ParamSyncer.connect(engine, targets, **options) as syncer:
        await syncer.push(version=1)
    found = gathered(engine)
    adapter = {name.replace(".default", ""): t for name, t in found.items() if "lora_" in name}
    if targets:
        assert adapter.keys() == target.weights.keys()
        assert all(torch.equal(tensor, target.weights[name]) for name, tensor in adapter.items())
    target.close()


async def count_memory(engine, _: str) -> None:
    """Push a model of 80 MB in buckets of 2 MB; say how much memory it took at its peak."""
    rank = torch.distributed.get_rank()
    targets = [Target("engine/0")] if rank == 0 else None  # its receiver's memory is rank 0's
    version = 0
    for gather in ("shards", "bucketed", "gather_all"):
        peaks = []
        async with await ParamSyncer.connect(
            engine, targets, gather=gather, transport="gloo", sources="round_robin",
            bucket_bytes=2 << 20, timeout_s=TIMEOUT_S,
        ) as syncer:  # fmt: skip
            for _ in range(4):
                version += 1
                before = begin_peak()
                record = await syncer.push(version=version)
                peaks.append(resident_mb("VmHWM") - before)
        # The first one makes the groups; of the others, one may find the heap in pieces.
        say(f"{gather} {min(peaks[1:]):.1f} MB, {record.peak_extra_bytes / 1e6:.1f} MB counted")
    for target in targets or ():
        target.close()


def begin_peak() -> float:
    """Have the peak of memory begin anew; gives what there is now. [MB]"""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier pushes left would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mb("VmRSS")


def resident_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024 / 1e6


async def fail(engine, fault: str) -> None:
    """Have rank 1 do something wrong; print what this rank raises."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when rank 1 is gone
    rank = torch.distributed.get_rank()
    targets = [Target("engine/0")] if rank == 0 else None
    syncer = await ParamSyncer.connect(
        engine, targets, bucket_bytes=5000, timeout_s=TIMEOUT_S, sources="round_robin",
        transport="gloo",
    )  # fmt: skip
    if rank == 1:
        seal = sending.seal

        def die(*_, **__) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def stumble(*_, **__) -> None:
            sending.seal = seal
            raise ZeroDivisionError("by rank 1")

        if fault == "dies in gather":
            ModelSource.gathered = die
        elif fault in {"dies in send", "raises"}:
            sending.seal = die if fault == "dies in send" else stumble
    try:
        if rank == 1 and fault == "comes late":
            time.sleep(TIMEOUT_S + 2)  # noqa: ASYNC251  # blocks, as a step of a trainer does
        await syncer.push(version=2 if rank == 1 and fault == "other version" else 1)
    except WeightSyncError as error:
        say(f"{error.culprit}: {error}")
    if not fault.startswith("dies"):
        record = await syncer.push(version=3)
        say(f"then {record.version}")
    await syncer.aclose()
    for target in targets or ():
        target.close()


def main() -> None:
    global task
    deepspeed.init_distributed("gloo")
    for task in sys.argv[1:]:
        stage, _, what = task.partition(":")
        runs = {"lora": push_lora, "memory": count_memory} | dict.fromkeys(FAULTS, fail)
        asyncio.run(runs.get(what, push_all)(make_engine(int(stage), what), what))
    sys.stdout.flush()
    os._exit(0)  # the groups of ranks that died can't be left in peace


if __name__ == "__main__":
    main()
