"""Measures pushes of weights beside what the machine can do, and beside the peers' protocol.

Three parts, each with its bars:

1. *transfer*: the shapes of Qwen3-0.6B in bf16 (1.19 GB, 310 tensors), from a module in this
   process into receiver processes that copy into a model of that shape (`weight_receivers.py`).
   Beside it: one flat gloo broadcast of the same bytes in pieces of a bucket's size, into memory
   that is touched already (the floor of gloo); memcpy of the same bytes into such memory (the
   floor of shared memory); and the protocol of SkyRL's `/update_weight` and TRL up to 1.10, one
   control call and one broadcast a parameter, over the same channel and group.
2. *ranks*: two ranks under ZeRO-3 with torchrun, 0.1B parameters in fp32, every strategy and
   transport: seconds, and the memory that rank 1 takes beside its partition: what it counts, and
   what the kernel saw (peak of the resident set).
3. *engine*: a real vLLM engine on the CPU with a random Qwen3 of 0.1B parameters in bf16, which
   generates meanwhile: how long generation stands still, staged and not; and beside it the peers'
   protocol into vLLM's `AsyncLLM`: `collective_rpc` and a broadcast a parameter, and
   `load_weights` of the one.

The cells of a part follow each other in turn, and all of that is repeated; a number is the median,
a ratio is taken within each repeat. Each cell connects anew, and its second push is measured: the
first makes the groups, and touches memory for the first time.

A *transfer* ends when all receivers have everything, whole and with its digest checked, where the
floors end too. A *push* ends when it is loaded and committed as well, which the floors don't do.

What it simplifies: a receiver's `load` is a copy; every process has one thread, and there are two
cores for trainer, receivers and gloo's own threads, so that with more receivers than one the cores
are what is measured. The digest of each receiver's model is compared with the trainer's after each
cell, outside of what is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import functools
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
import torch
from weight_receivers import (
    CPU,
    HOST,
    LIMIT_S,
    SIZES,
    RemoteTarget,
    Size,
    Weights,
    broadcast_flat,
    joined,
)

from agoge_async import ParamSyncer, Router, TokenRequest
from agoge_async.weights.groups import Group, join_store, serve_store
from agoge_async.weights.manifest import GroupRoute

BUCKET_BYTES = 16 << 20
TINY = files("agoge_async") / "tiny_model"
CONTROL_CALLS = {True: 5, False: 4}
"""Of a push to one engine, by whether it is staged; whatever the number of parameters."""
Numbers = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Something that is measured."""

    name: str
    kind: str
    receivers: int = 1
    options: dict[str, Any] = field(default_factory=dict)


# Part 1: transfer.


def transfer_cells() -> list[Cell]:
    pushes = [
        Cell(
            name=transport
            + ("" if staged else ", not staged")
            + ("" if digests else ", no digests"),
            kind="push",
            options={"transport": transport, "staged": staged, "check_digests": digests},
        )
        for transport in ("gloo", "shm")
        for staged, digests in [(True, True), (True, False), (False, True)]
    ]
    more = [
        Cell(
            name=f"{name}, {count} receivers",
            kind=kind,
            receivers=count,
            options={"transport": name} if kind == "push" else {},
        )
        for count in (2, 4)
        for name, kind in [("flat broadcast", "flat"), ("gloo", "push"), ("shm", "push")]
    ]
    floors = [
        Cell(name="memcpy", kind="memcpy"),
        Cell(name="flat broadcast", kind="flat"),
        Cell(name="a call and a broadcast a parameter", kind="peers"),
    ]
    return [*floors, *pushes, *more]


class Trainer:
    """This process's model, and what is done with it."""

    def __init__(self, size: Size, targets: Sequence[RemoteTarget]) -> None:
        self._weights = Weights(size)
        self._weights.flat.view(torch.int16).random_()
        self._module = self._weights.module()
        self._targets = targets
        self._copy = torch.ones_like(self._weights.flat)
        self._versions = itertools.count(1)

    async def run(self, cell: Cell) -> Numbers:
        targets = self._targets[: cell.receivers]
        measured: Numbers = await getattr(self, f"_{cell.kind}")(cell, targets)
        if cell.kind != "memcpy":
            for target in targets:
                assert await target.call("digest") == self._weights.digest(), cell
        return measured | {"num_bytes": self._weights.bytes.nbytes}

    async def _push(self, cell: Cell, targets: Sequence[RemoteTarget]) -> Numbers:
        options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": LIMIT_S} | cell.options
        async with await ParamSyncer.connect(self._module, targets, **options) as syncer:
            for _ in range(2):
                self._weights.change()
                record = await syncer.push(version=next(self._versions))
        calls = CONTROL_CALLS[cell.options.get("staged", True)]
        assert record.control_calls == calls * len(targets), record
        return {
            "total_s": record.total_s,
            "transfer_s": record.transfer_s,
            "load_s": record.load_s,
        }

    async def _flat(self, _: Cell, targets: Sequence[RemoteTarget]) -> Numbers:
        async with joined(targets) as group:
            for _ in range(2):
                self._weights.change()
                started = time.perf_counter()
                async with asyncio.TaskGroup() as tasks:
                    for target in targets:
                        tasks.create_task(target.call("flat", str(BUCKET_BYTES)))
                    await asyncio.to_thread(broadcast_flat, group, self._weights, BUCKET_BYTES)
                seconds = time.perf_counter() - started
        return {"total_s": seconds, "transfer_s": seconds}

    async def _peers(self, _: Cell, targets: Sequence[RemoteTarget]) -> Numbers:
        async with joined(targets) as group:
            for _ in range(2):
                self._weights.change()
                started = time.perf_counter()
                for name, tensor in self._weights.tensors.items():
                    body = json.dumps([name, list(tensor.shape)])
                    async with asyncio.TaskGroup() as tasks:
                        for target in targets:
                            tasks.create_task(target.call("parameter", body))
                        await asyncio.to_thread(broadcast, group, tensor)
                seconds = time.perf_counter() - started
        return {"total_s": seconds, "transfer_s": seconds}

    async def _memcpy(self, _: Cell, __: Sequence[RemoteTarget]) -> Numbers:
        started = time.perf_counter()
        self._copy.copy_(self._weights.flat)
        seconds = time.perf_counter() - started
        return {"total_s": seconds, "transfer_s": seconds}


def broadcast(group: Group, tensor: torch.Tensor) -> None:
    group.wait(group.broadcast(tensor.detach().view(-1).view(torch.uint8)))


async def measure_transfer(size: str, repeats: int) -> Measured:
    cells = transfer_cells()
    targets = [
        await RemoteTarget.start(f"receiver/{index}", size)
        for index in range(max(cell.receivers for cell in cells))
    ]
    trainer = Trainer(SIZES[size], targets)
    measured = Measured()
    for repeat, cell in itertools.product(range(repeats), cells):
        measured.add(cell.name, await trainer.run(cell))
        note(f"transfer {repeat + 1}: {cell.name}: {measured.last(cell.name)}")
    for target in targets:
        await target.aclose()
    return measured


# Part 2: ranks. This file is what torchrun runs, with --rank.


def measure_ranks(size: str, repeats: int) -> Measured:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, "--rank", "--size", size]
    output = subprocess.run(
        [*command, "--repeats", str(repeats)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    ).stdout
    measured = Measured()
    for line in output.splitlines():
        if line.startswith("{"):
            cell = json.loads(line)
            measured.add(cell.pop("name"), cell)
    return measured


async def be_rank(size: str, repeats: int) -> None:
    """Push as one rank of two; rank 1, which has no engines, says what memory it took."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for a minute
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    module = Weights(SIZES[size]).module().float()
    for parameter in module.parameters():
        parameter.requires_grad_()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    targets = [await RemoteTarget.start("receiver/0", size)] if rank == 0 else None
    versions = itertools.count(1)
    gathers = ("gather_one", "gather_all", "bucketed", "shards")
    for _, gather, transport in itertools.product(range(repeats), gathers, ("gloo", "shm")):
        options = {"gather": gather, "transport": transport, "timeout_s": LIMIT_S}
        async with await ParamSyncer.connect(
            engine, targets, sources="round_robin", bucket_bytes=BUCKET_BYTES, **options
        ) as syncer:
            for _ in range(2):
                before = begin_peak()
                record = await syncer.push(version=next(versions))
                peak = resident_bytes("VmHWM") - before
        if rank == 1:
            numbers = {
                "name": f"{gather}, {transport}",
                "total_s": record.total_s,
                "num_bytes": record.num_bytes,
                "counted_bytes": record.peak_extra_bytes,
                "resident_bytes": peak,
            }
            print(json.dumps(numbers), flush=True)
    for target in targets or ():
        await target.aclose()
    torch.distributed.barrier()


def begin_peak() -> int:
    """Have the peak of this process's memory begin anew; gives what it has now."""
    ctypes.CDLL(None).malloc_trim(0)  # what earlier pushes left would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_bytes("VmRSS")


def resident_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


# Part 3: a real engine.


def write_model(folder: Path, size: Size) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=258,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(str(TINY / name), folder)


def engine_args(folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder),
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 256 << 20,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
    }


async def measure_engine(size: str, repeats: int) -> Measured:
    """Push into our engine while it generates, and into vLLM's as the peers do."""
    measured = Measured()
    weights = Weights(SIZES[size])
    weights.flat.normal_(std=0.02)
    module = weights.module()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, SIZES[size])
        settings = {"backend": "vllm", "engine_args": engine_args(folder)}
        versions = itertools.count(1)
        async with Router.from_config({"models": {"policy": settings}}) as router:

            async def push(transport: str, staged: bool) -> Numbers:
                async with await ParamSyncer.connect(
                    module, router, transport=transport, staged=staged, bucket_bytes=BUCKET_BYTES
                ) as syncer:
                    for _ in range(2):
                        record = await syncer.push(version=next(versions))
                assert record.control_calls == CONTROL_CALLS[staged], record
                return {
                    "total_s": record.total_s,
                    "stall_s": record.stall_s,
                    "num_bytes": record.num_bytes,
                }

            cells: dict[str, Callable[[], Awaitable[Numbers]]] = {
                f"{transport}{'' if staged else ', not staged'}": functools.partial(
                    push, transport, staged
                )
                for transport in ("gloo", "shm")
                for staged in (True, False)
            }
            for repeat, (cell, run) in itertools.product(range(repeats), cells.items()):
                async with generating(router):
                    measured.add(cell, await run())
                note(f"engine {repeat + 1}: {cell}: {measured.last(cell)}")
        for numbers in await push_as_peers(folder, weights, repeats):
            measured.add("a call and a broadcast a parameter", numbers)
    return measured


@contextlib.asynccontextmanager
async def generating(router: Router) -> Any:
    """Have four requests run at any time."""

    async def ask() -> None:
        while True:
            await router.generate(
                TokenRequest(model="policy", prompt_token_ids=[65], max_tokens=64, ignore_eos=True)
            )

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(ask)
        await anyio.sleep(1)  # they have begun
        yield
        group.cancel_scope.cancel()


class PeerExtension:
    """What a peer's worker has: a group, and a call for each parameter."""

    def peer_join(self, route: list[Any]) -> None:
        host, port, epoch = route
        store = join_store(host, port, LIMIT_S)
        group_route = GroupRoute("gloo", host, port, epoch, (0,), 1)
        self.peer_group = Group(store, group_route, 0, 1, CPU, LIMIT_S)

    def peer_update(self, name: str, shape: list[int]) -> None:
        worker: Any = self
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        broadcast(self.peer_group, tensor)
        worker.get_model().load_weights([(name, tensor)])

    def peer_leave(self) -> None:
        self.peer_group.close()


async def push_as_peers(folder: Path, weights: Weights, repeats: int) -> list[Numbers]:
    """Call vLLM's `AsyncLLM` in this process once a parameter, while it generates."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_args(folder) | {
        "worker_extension_cls": "weight_sync.PeerExtension",
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "disable_log_stats": True,
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def ask(worker: int) -> None:
        for number in itertools.count():
            parameters = SamplingParams(max_tokens=64, ignore_eos=True)
            async for _ in engine.generate(tokens_input([65]), parameters, f"{worker}-{number}"):
                pass

    async def push() -> Numbers:
        store = serve_store(HOST, LIMIT_S)
        route = GroupRoute("gloo", HOST, store.port, "peers", (0,), 1)
        async with asyncio.TaskGroup() as group:
            joining = [HOST, store.port, "peers"]
            group.create_task(engine.collective_rpc("peer_join", args=(joining,)))
            make = functools.partial(Group, store, route, 0, 0, CPU, LIMIT_S)
            made = group.create_task(asyncio.to_thread(make))
        started = time.perf_counter()
        await engine.pause_generation(mode="keep", clear_cache=False)
        for name, tensor in weights.tensors.items():
            async with asyncio.TaskGroup() as group:
                update = engine.collective_rpc("peer_update", args=(name, list(tensor.shape)))
                group.create_task(update)
                await asyncio.to_thread(broadcast, made.result(), tensor)
        await engine.resume_generation()
        seconds = time.perf_counter() - started
        await engine.collective_rpc("peer_leave")
        made.result().close()
        return {"total_s": seconds, "stall_s": seconds, "num_bytes": weights.bytes.nbytes}

    try:
        async with anyio.create_task_group() as asking:
            for worker in range(4):
                asking.start_soon(ask, worker)
            await anyio.sleep(1)  # they have begun
            found = [await push() for _ in range(repeats + 1)][1:]
            asking.cancel_scope.cancel()
    finally:
        engine.shutdown(timeout=5)
    return found


# Tables and bars.


class Measured:
    """What each repeat of each cell gave."""

    def __init__(self) -> None:
        self.runs: dict[str, list[Numbers]] = {}

    def add(self, cell: str, numbers: Numbers) -> None:
        self.runs.setdefault(cell, []).append(numbers)

    def last(self, cell: str) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in self.runs[cell][-1].items())

    def median(self, cell: str, name: str) -> float | None:
        values = [run[name] for run in self.runs[cell] if name in run]
        return statistics.median(values) if values else None

    def ratio(self, one: str, other: str, name: str, other_name: str | None = None) -> list[float]:
        pairs = zip(self.runs[one], self.runs[other], strict=True)
        return [mine[name] / theirs[other_name or name] for mine, theirs in pairs]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A ratio, and what it must be."""

    what: str
    ratios: Sequence[float]
    bar: float
    at_most: bool

    @property
    def is_met(self) -> bool:
        median = statistics.median(self.ratios)
        return median <= self.bar if self.at_most else median >= self.bar

    def cells(self) -> list[str]:
        low, high = min(self.ratios), max(self.ratios)
        return [
            self.what,
            f"{statistics.median(self.ratios):.2f} ({low:.2f} to {high:.2f})",
            f"{'<=' if self.at_most else '>='} {self.bar:g}",
            "met" if self.is_met else "MISSED",
        ]


def transfer_bars(found: Measured) -> list[Bar]:
    def faster(one: str, other: str, name: str, bar: float, what: str) -> Bar:
        return Bar(what=what, ratios=found.ratio(other, one, name), bar=bar, at_most=False)

    def cost(kind: str) -> Bar:
        with_digests = found.runs[kind]
        without = found.runs[f"{kind}, no digests"]
        pairs = zip(with_digests, without, strict=True)
        ratios = [1 - less["total_s"] / more["total_s"] for more, less in pairs]
        return Bar(what=f"{kind}: digests' share of a push", ratios=ratios, bar=0.1, at_most=True)

    return [
        faster("gloo", "flat broadcast", "transfer_s", 0.85, "gloo: transfer, of the flat rate"),
        faster(
            "gloo, not staged", "flat broadcast", "total_s", 0.85,
            "gloo, not staged: whole push, of the flat rate",
        ),
        faster("shm", "gloo", "total_s", 2, "shm: whole push, of gloo's rate"),
        faster("shm", "memcpy", "transfer_s", 0.6, "shm: transfer, of memcpy's rate"),
        Bar(
            what="shm: transfer to 4, over one",
            ratios=found.ratio("shm, 4 receivers", "shm", "transfer_s"),
            bar=1.5,
            at_most=True,
        ),
        cost("gloo"),
        cost("shm"),
        faster(
            "gloo", "a call and a broadcast a parameter", "total_s", 1,
            "gloo: whole push, over a call a parameter to a receiver",
        ),
    ]  # fmt: skip


def rank_bars(found: Measured, size: Size) -> list[Bar]:
    largest = 4 * max(torch.Size(shape).numel() for shape in size.shapes().values())
    limits = {"bucketed": 2 * BUCKET_BYTES + largest, "shards": 2 * BUCKET_BYTES}
    return [
        Bar(
            what=f"{gather}, gloo: counted memory of a rank, of its limit",
            ratios=[r["counted_bytes"] / limit for r in found.runs[f"{gather}, gloo"]],
            bar=1.001,  # the digests
            at_most=True,
        )
        for gather, limit in limits.items()
    ]


def engine_bars(found: Measured) -> list[Bar]:
    peers = "a call and a broadcast a parameter"
    return [
        Bar(
            what="gloo: stall of staged, of the whole push not staged",
            ratios=found.ratio("gloo", "gloo, not staged", "stall_s", "total_s"),
            bar=0.25,
            at_most=True,
        ),
        *(
            Bar(
                what=f"{cell}: whole push, over a call a parameter",
                ratios=found.ratio(peers, cell, "total_s"),
                bar=4,
                at_most=False,
            )
            for cell in ("gloo", "gloo, not staged", "shm")
        ),
    ]


def result_rows(found: Measured) -> list[list[str]]:
    def seconds(cell: str, name: str) -> str:
        value = found.median(cell, name)
        return "-" if value is None else f"{value:.3f}"

    def megabytes(cell: str, name: str) -> str:
        value = found.median(cell, name)
        return "-" if value is None else f"{value / 1e6:.0f}"

    rows = []
    for cell, runs in found.runs.items():
        rate = statistics.median(run["num_bytes"] / run["total_s"] for run in runs) / 1e9
        timed = [seconds(cell, name) for name in ("total_s", "transfer_s", "load_s", "stall_s")]
        memory = [megabytes(cell, name) for name in ("counted_bytes", "resident_bytes")]
        rows.append([cell, f"{rate:.2f}", *timed, *memory])
    return rows


HEADINGS = [
    "what", "GB/s", "total, s", "transfer, s", "load, s", "stall, s", "counted, MB", "resident, MB"
]  # fmt: skip
BAR_HEADINGS = ["ratio", "median (range)", "bar", ""]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(headings), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def note(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def facts() -> str:
    versions = {name: metadata.version(name) for name in ("torch", "deepspeed", "vllm-cpu")}
    load = " ".join(f"{load:.2f}" for load in os.getloadavg())
    return f"cores {os.cpu_count()}, load {load}, python {platform.python_version()}, {versions}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="transfer,ranks,engine", help="with commas between them")
    parser.add_argument("--quick", action="store_true", help="does it run? small, once")
    parser.add_argument("--no-bars", action="store_true", help="exit with 0 whatever comes")
    parser.add_argument("--json", type=Path, help="keep all that was measured")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--size", default="0.1B", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank:
        asyncio.run(be_rank(given.size, given.repeats))
        return 0
    large, small, repeats = (
        ("quick", "quick", 1) if given.quick else ("0.6B", "0.1B", given.repeats)
    )
    parts = given.parts.split(",")
    print(facts(), flush=True)
    found: dict[str, Measured] = {}
    bars: list[Bar] = []
    if "transfer" in parts:
        found["transfer"] = asyncio.run(measure_transfer(large, repeats))
        bars += transfer_bars(found["transfer"])
    if "ranks" in parts:
        found["ranks"] = measure_ranks(small, repeats)
        bars += rank_bars(found["ranks"], SIZES[small])
    if "engine" in parts:
        found["engine"] = asyncio.run(measure_engine(small, repeats))
        bars += engine_bars(found["engine"])
    for part, measured in found.items():
        print(f"\n{part}\n{table(HEADINGS, result_rows(measured))}")
    print(f"\n{table(BAR_HEADINGS, [bar.cells() for bar in bars])}")
    if given.json is not None:
        kept = {part: measured.runs for part, measured in found.items()}
        given.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return 0 if given.no_bars or all(bar.is_met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
