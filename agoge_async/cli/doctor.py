"""`agoge-async doctor`: what local engines need, what is there, and what to do about the rest.

The checks are pure functions of what `inspect_machine` and `probe_packages` find.
"""

from __future__ import annotations

import enum
import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agoge_async.cli.output import INSTALL_HINT
from agoge_async.engine.devices import visible_gpus

MIN_PYTHON = (3, 11)
MIN_VLLM = (0, 32)
MIN_FILES = 10240
"""Open files for 10000 requests to providers at once."""
MIN_MEMORY = int(2.5 * 2**30)
"""What a CPU engine's processes hold while they start: 2.4 GiB, vLLM 0.32 (2026-11). [bytes]"""
MIN_SHM = 64 * 2**20
GOOD_SHM = 2**30
PROBE_S = 180.0
NVIDIA_SMI_S = 20.0

TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")
"""What vLLM imports when it is there: a build for another torch then breaks vLLM."""
KEYS = {"OPENAI_API_KEY": "OpenAI", "ANTHROPIC_API_KEY": "Anthropic"}
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

# Runs in another process: these imports take long, and a broken build may crash. One line a step,
# so that what came before a crash is known.
_PROBE = """
import importlib, json

def tell(name, **found):
    print("\\nagoge " + json.dumps({"name": name, **found}), flush=True)

for name in %r:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            continue
        tell(name, error=f"{type(error).__name__}: {error}")
    except BaseException as error:
        tell(name, error=f"{type(error).__name__}: {error}")
    else:
        tell(name, version=str(getattr(module, "__version__", "")))
    if name == "torch":
        try:
            cuda = module.version.cuda
            found = cuda is not None and module.cuda.is_available()
            nccl = ".".join(map(str, module.cuda.nccl.version())) if found else None
            tell("cuda", version=cuda, available=found, nccl=nccl)
        except Exception as error:
            tell("cuda", error=f"{type(error).__name__}: {error}")
"""


class Level(enum.Enum):
    """How a finding counts."""

    OK = "ok"
    NOTE = "note"
    """Something could be better, or is needed for some uses only."""
    MISSING = "missing"
    """Local engines can't run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    level: Level
    found: str
    advice: str = ""
    """What to do; empty: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is, packages aside. Sizes in bytes; None where the system doesn't tell."""

    python: tuple[int, int, int]
    gpus: Sequence[str]
    """One line a GPU, of all GPUs."""
    num_visible_gpus: int
    shm_total: int | None
    shm_free: int | None
    memory_free: int | None
    files_soft: int
    files_hard: int
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packages:
    """What there is of Python packages."""

    distributions: Sequence[tuple[str, str]]
    """Name and version of what provides the module vllm."""
    probed: Mapping[str, Mapping[str, Any]]
    """By module name (and "cuda"): its version, or the error of its import."""
    failure: str = ""
    """How the probe ended, where it didn't come to its end."""

    def version(self, name: str) -> str | None:
        """Give a module's version; None where it can't be imported."""
        found = self.probed.get(name, {}).get("version")
        return None if found is None else str(found)

    def error(self, name: str) -> str | None:
        """Give the error of a module's import."""
        found = self.probed.get(name, {}).get("error")
        return None if found is None else str(found)


def run_doctor(console: Console) -> bool:
    """Check this machine and show the findings; False: local engines can't run."""
    with console.status("importing torch and vLLM (takes up to a minute)"):
        findings = list(check_all(inspect_machine(), probe_packages()))
    for finding in findings:
        console.print(_as_text(finding))
    missing = [finding.name for finding in findings if finding.level is Level.MISSING]
    console.print()
    if missing:
        console.print(f"[red]Local engines can't run[/red]: {', '.join(missing)}.")
    else:
        console.print("[green]Local engines can run[/green].")
    return not missing


def _as_text(finding: Finding) -> Text:
    style = {Level.OK: "green", Level.NOTE: "yellow", Level.MISSING: "bold red"}[finding.level]
    text = Text.assemble((f"{finding.level.value:8}", style), (f"{finding.name:15}", "bold"))
    text.append(finding.found)
    if finding.advice:
        text.append(f"\n{'':8}{'':15}-> {finding.advice}")
    return text


def check_all(machine: Machine, packages: Packages) -> Iterator[Finding]:
    """Judge what was found."""
    yield check_python(machine)
    yield check_gpus(machine)
    yield check_torch(machine, packages)
    yield check_vllm(packages)
    yield from check_torch_extras(packages)
    yield check_nccl(machine, packages)
    yield check_shared_memory(machine)
    yield check_memory(machine)
    yield check_files(machine)
    yield from check_keys(machine)
    yield check_offline(machine)


def check_python(machine: Machine) -> Finding:
    """Check Python's version."""
    found = ".".join(map(str, machine.python))
    if machine.python[:2] >= MIN_PYTHON:
        return Finding("Python", Level.OK, found)
    return Finding("Python", Level.MISSING, found, "use Python 3.11 or newer")


def check_gpus(machine: Machine) -> Finding:
    """List the GPUs."""
    if not machine.gpus and not machine.num_visible_gpus:
        return Finding("GPUs", Level.OK, "none: engines run on the CPU")
    found = "; ".join(machine.gpus) or f"{machine.num_visible_gpus}"
    if machine.num_visible_gpus < len(machine.gpus):
        found += f" (this process may use {machine.num_visible_gpus}: CUDA_VISIBLE_DEVICES)"
    return Finding("GPUs", Level.OK, found)


def check_torch(machine: Machine, packages: Packages) -> Finding:
    """Check that torch can be imported and suits the machine."""
    version = packages.version("torch")
    if version is None:
        found = packages.error("torch") or packages.failure or "not installed"
        return Finding("torch", Level.MISSING, _one_line(found), INSTALL_HINT)
    has_gpus = machine.num_visible_gpus > 0
    cuda = packages.version("cuda")
    if cuda is None:
        advice = "install 'agoge_async[gpu]' to use the GPUs" if has_gpus else ""
        return Finding("torch", Level.NOTE if has_gpus else Level.OK, f"{version}, CPU", advice)
    found = f"{version}, CUDA {cuda}"
    if not has_gpus:
        advice = "install 'agoge_async[cpu]', or run where there is a GPU"
        return Finding("torch", Level.MISSING, f"{found}, but no GPU", advice)
    if not packages.probed["cuda"].get("available"):
        advice = "update the NVIDIA driver, or install a torch for the CUDA that nvidia-smi names"
        return Finding("torch", Level.MISSING, f"{found}, which finds no usable GPU", advice)
    return Finding("torch", Level.OK, found)


def check_vllm(packages: Packages) -> Finding:
    """Check vLLM's distribution, its version, and that it can be imported."""
    listed = packages.distributions
    version = listed[0][1] if listed else packages.version("vllm")
    error = packages.error("vllm")
    if version is None and error is None:
        return Finding("vLLM", Level.MISSING, "not installed", INSTALL_HINT)
    found = ", ".join(f"{name} {number}" for name, number in listed) or f"{version}"
    if len(listed) > 1:
        names = " ".join(name for name, _ in listed)
        advice = f"they overwrite each other: pip uninstall {names}, then {INSTALL_HINT}"
        return Finding("vLLM", Level.MISSING, found, advice)
    if version is not None and _numbers(version) < MIN_VLLM:
        advice = f"vLLM {'.'.join(map(str, MIN_VLLM))} or newer is needed: {INSTALL_HINT}"
        return Finding("vLLM", Level.MISSING, found, advice)
    if packages.version("vllm") is None:
        reason = error or packages.failure or "it can't be imported"
        advice = f"see `{sys.executable} -c 'import vllm'`"
        return Finding("vLLM", Level.MISSING, f"{found}; {_one_line(reason)}", advice)
    return Finding("vLLM", Level.OK, found)


def check_torch_extras(packages: Packages) -> Iterator[Finding]:
    """Find packages beside torch that break vLLM."""
    for name in TORCH_EXTRAS:
        error = packages.error(name)
        if error is not None:
            found = f"doesn't import beside this torch, and breaks vLLM: {_one_line(error)}"
            advice = f"{sys.executable} -m pip uninstall {name}"
            yield Finding(name, Level.MISSING, found, advice)


def check_nccl(machine: Machine, packages: Packages) -> Finding:
    """Check NCCL, which engines over several GPUs need."""
    version = packages.probed.get("cuda", {}).get("nccl")
    if version is not None:
        return Finding("NCCL", Level.OK, str(version))
    if not machine.num_visible_gpus:
        return Finding("NCCL", Level.OK, "none; the CPU needs none")
    advice = "engines over several GPUs need a torch for CUDA: install 'agoge_async[gpu]'"
    level = Level.MISSING if machine.num_visible_gpus > 1 else Level.NOTE
    return Finding("NCCL", level, packages.error("cuda") or "none", advice)


def check_shared_memory(machine: Machine) -> Finding:
    """Check the size of /dev/shm, over which an engine's processes talk."""
    total, free = machine.shm_total, machine.shm_free
    if total is None or free is None:
        return Finding("shared memory", Level.MISSING, "no /dev/shm", "mount a tmpfs on /dev/shm")
    found = f"/dev/shm: {_size(free)} free of {_size(total)}"
    if free >= GOOD_SHM:
        return Finding("shared memory", Level.OK, found)
    advice = "remove old files of /dev/shm, or enlarge it (docker run --shm-size=8g, or --ipc=host)"
    level = Level.MISSING if free < MIN_SHM else Level.NOTE
    return Finding("shared memory", level, found, advice)


def check_memory(machine: Machine) -> Finding:
    """Check the free memory."""
    free = machine.memory_free
    if free is None:
        return Finding("memory", Level.NOTE, "the system doesn't tell")
    found = f"{_size(free)} free"
    if free >= MIN_MEMORY:
        return Finding("memory", Level.OK, found)
    advice = f"an engine needs {_size(MIN_MEMORY)} to start, its weights aside: end other programs"
    return Finding("memory", Level.MISSING, found, advice)


def check_files(machine: Machine) -> Finding:
    """Check the limit of open files."""
    soft, hard = machine.files_soft, machine.files_hard
    unlimited = resource.RLIM_INFINITY
    found = "no limit" if soft == unlimited else f"{soft} at most"
    if soft == unlimited or soft >= MIN_FILES:
        return Finding("open files", Level.OK, found)
    advice = f"10000 requests at once to providers need {MIN_FILES}: "
    if hard == unlimited or hard >= MIN_FILES:
        advice += f"ulimit -n {MIN_FILES}"
    else:
        advice += f"raise the hard limit, now {hard} (limits.conf; docker run --ulimit)"
    return Finding("open files", Level.NOTE, found, advice)


def check_keys(machine: Machine) -> Iterator[Finding]:
    """Say which providers' keys are set, never what they are."""
    for variable, provider in KEYS.items():
        if machine.environment.get(variable):
            yield Finding(provider, Level.OK, f"{variable} is set")
        else:
            advice = f"only models of {provider} need it"
            yield Finding(provider, Level.NOTE, f"{variable} is not set", advice)


def check_offline(machine: Machine) -> Finding:
    """Say whether models may be downloaded."""
    values = {name: machine.environment.get(name, "") for name in OFFLINE}
    on = [name for name, value in values.items() if value.upper() in {"1", "ON", "YES", "TRUE"}]
    if not on:
        return Finding("offline mode", Level.OK, "off: models of a hub may be downloaded")
    found = f"on ({', '.join(on)}): models come from folders and the cache only"
    return Finding("offline mode", Level.OK, found)


def inspect_machine() -> Machine:
    """Find out what there is, packages aside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total, free = _shared_memory()
    return Machine(
        python=sys.version_info[:3],
        gpus=_list_gpus(),
        num_visible_gpus=len(visible_gpus(os.environ)),
        shm_total=total,
        shm_free=free,
        memory_free=_free_memory(),
        files_soft=soft,
        files_hard=hard,
        environment=dict(os.environ),
    )


def probe_packages(timeout_s: float = PROBE_S) -> Packages:
    """Find out which packages there are; imports happen in another process."""
    modules = ("torch", *TORCH_EXTRAS, "vllm")
    # -P: a folder named vllm where the user happens to be isn't vLLM.
    command = [sys.executable, "-P", "-c", _PROBE % (modules,)]
    failure, output = "", b""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
        output = done.stdout
        if done.returncode != 0:
            failure = f"its import ended Python with exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        failure = f"its import took longer than {timeout_s:g} s"
    except OSError as error:
        failure = f"{sys.executable} can't be run: {error.strerror}"
    return Packages(
        distributions=_vllm_distributions(), probed=parse_probe(output), failure=failure
    )


def parse_probe(output: bytes) -> dict[str, dict[str, Any]]:
    """Read the probe's lines among what the modules themselves print."""
    probed = {}
    for line in output.decode(errors="replace").splitlines():
        prefix, _, document = line.partition(" ")
        if prefix != "agoge":
            continue
        try:
            found = json.loads(document)
        except ValueError:
            continue  # cut short by a crash
        probed[str(found.pop("name"))] = found
    return probed


def _vllm_distributions() -> list[tuple[str, str]]:
    names = sorted(set(importlib.metadata.packages_distributions().get("vllm", ())))
    return [(name, importlib.metadata.version(name)) for name in names]


def _list_gpus() -> list[str]:
    """List the GPUs that nvidia-smi sees; none where it can't tell."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=index,name,memory.free,memory.total"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_nvidia_smi(done.stdout) if done.returncode == 0 else []


def parse_nvidia_smi(output: str) -> list[str]:
    """Turn nvidia-smi's table into one line a GPU."""
    gpus = []
    for line in output.splitlines():
        fields = [text.strip() for text in line.split(",")]
        if len(fields) == 4:
            index, name, free, total = fields
            gpus.append(f"{index} {name}, {free} free of {total}")
    return gpus


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _free_memory() -> int | None:
    """Give the memory that may still be used: the machine's, or less in a limited container."""
    text = _read("/proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        return None
    free = int(match[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdecimal() and used.isdecimal():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _one_line(text: str, longest: int = 200) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= longest else f"{joined[: longest - 3]}..."
