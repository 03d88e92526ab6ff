"""Pushes of a DeepSpeed trainer with two ranks under torchrun: all ZeRO stages, failing ranks.

The targets are threads of rank 0's process; tests/engine/test_weights.py has real engines.
"""

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs the train extra")
ROOT = Path(__file__).parents[2]
LIMIT_S = 150


def torchrun(num_ranks: int, *tasks: str) -> tuple[int, str]:
    """Run the trainer; gives its exit code and what its ranks printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc-per-node", str(num_ranks), "-m", "tests.weights.ranks", *tasks],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output


@pytest.fixture(scope="module")
def pushes() -> str:
    """Give what two ranks print that push by each strategy of each stage."""
    code, output = torchrun(2, *STAGES, "3:memory", *(["3:lora"] if find_spec("peft") else []))
    assert 0 == code, output
    return output


STAGES = (
    "0:bucketed",
    "1:nonzero3_low_mem",
    "2:bucketed,gather_all",
    "3:bucketed,gather_one,gather_all,shards",
)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_push_the_same_weights(pushes, stage):
    """Bit for bit, over gloo and shared memory, from one rank and from both, step after step.

    trl#6386, #6713: sizes come from `ds_numel`, never from `numel()`, which is 0 under ZeRO-3.
    trl#2923, #3608: ranks that don't send hung; they gather in the same order.
    """
    count = 8 * len(stage.split(","))
    for rank in (0, 1):
        assert f"{stage} rank {rank}: {count} pushes" in pushes


@pytest.mark.slow
def test_three_ranks_gather_in_one_order():
    """trl#6797, #6798: with more than two ranks, gathers that were begun as needed hung."""
    code, output = torchrun(3, "3:bucketed,shards")
    assert 0 == code, output
    for rank in (0, 1, 2):
        assert f"rank {rank}: 16 pushes" in output


def test_a_rank_takes_two_buckets_and_no_more(pushes):
    """What a rank without receivers counts itself, and how its resident memory grows.

    trl#7131, ms-swift#7986: buckets bounded nothing, for everything was gathered first. The model
    has 80 MB, a bucket 2, the largest parameter 4. The kernel also sees what DeepSpeed's gathers
    and the allocator take beside that, which is up to 30 MB and other each time.
    """
    found = re.findall(r"rank 1: (\w+) ([-\d.]+) MB, ([\d.]+) MB counted", pushes)
    peaks = {gather: (float(peak), float(counted)) for gather, peak, counted in found}
    assert peaks["gather_all"][0] > 60, peaks
    assert peaks["bucketed"][0] < 50, peaks
    assert peaks["bucketed"][1] <= 2 * 2.1 + 4, peaks
    assert peaks["shards"][0] < 8, peaks
    assert peaks["shards"][1] <= 2 * 2.1, peaks


def test_two_ranks_push_a_model_with_its_adapter_merged_and_the_adapter_alone(pushes):
    """Under ZeRO-3 base and adapter are gathered together, a bucket at a time.

    trl#5766: merging gathered the whole model.
    """
    pytest.importorskip("peft", reason="needs the dev extra")
    for rank in (0, 1):
        refused = "gather='shards' can't merge an adapter; take 'bucketed'"
        assert f"3:lora rank {rank}: {refused}" in pushes
        assert f"3:lora rank {rank}: 8 pushes" in pushes


FAULTS = {
    "raises": r"rank 1: push of version 1 failed while sending: rank 1: ZeroDivisionError",
    "other version": r"rank 1: push of version 1 failed .*: rank 1 came for a push of version 2",
    "comes late": r"while waiting for the other ranks to come: .*; rank 1 did not",
}


@pytest.fixture(scope="module")
def faults() -> str:
    """Give what two ranks print, one of which does what it shouldn't, once each."""
    code, output = torchrun(2, *(f"3:{fault}" for fault in FAULTS))
    assert 0 == code, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_is_named_on_every_rank(faults, fault):
    """Within the deadline, and the next push succeeds; trl#5766, NeMo-RL#3472: the others hung."""
    said = {}
    for rank in (0, 1):
        start = f"3:{fault} rank {rank}: "
        lines = [line for line in faults.splitlines() if line.startswith(start)]
        said[rank], last = (line.removeprefix(start) for line in lines)
        assert "then 3" == last
    assert said[0] == said[1]
    assert re.search(FAULTS[fault], said[0])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies in send", "dies in gather"])
def test_a_rank_that_is_killed_is_named(fault):
    """The others learn at once who is gone."""
    _, output = torchrun(2, f"3:{fault}")
    assert re.search(r"rank 0: rank 1: .*failed while sending: rank 1 is gone", output), output
