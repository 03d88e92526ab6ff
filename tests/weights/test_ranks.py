"""Pushes of a DeepSpeed trainer with two ranks under torchrun: all ZeRO stages, failing ranks.

The targets are threads of rank 0's process; tests/engine/test_weights.py has real engines.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs the train extra")
ROOT = Path(__file__).parents[2]
LIMIT_S = 90


def torchrun(stage: int, what: str) -> tuple[int, str]:
    """Run the trainer; gives its exit code and what its ranks printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc-per-node", "2", "-m", "tests.weights.ranks", str(stage), what],
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


@pytest.mark.parametrize(
    ("stage", "gathers"),
    [
        (0, "bucketed"),
        (1, "nonzero3_low_mem"),
        (2, "bucketed,gather_all"),
        (3, "bucketed,gather_one,gather_all,shards"),
    ],
)
def test_two_ranks_push_the_same_weights(stage, gathers):
    """Bit for bit, over gloo and shared memory, from one rank and from both, step after step.

    trl#6386: sizes come from `ds_numel`, never from `numel()`, which is 0 under ZeRO-3.
    """
    code, output = torchrun(stage, gathers)
    assert 0 == code, output
    count = 8 * len(gathers.split(","))
    assert f"rank 0: {count} pushes" in output
    assert f"rank 1: {count} pushes" in output


def test_two_ranks_push_a_model_with_its_adapter_merged_and_the_adapter_alone():
    """Under ZeRO-3 base and adapter are gathered together, a bucket at a time.

    trl#5766: merging gathered the whole model.
    """
    pytest.importorskip("peft", reason="needs the dev extra")
    code, output = torchrun(3, "lora")
    assert 0 == code, output
    for rank in (0, 1):
        assert f"rank {rank}: gather='shards' can't merge an adapter; take 'bucketed'" in output
        assert f"rank {rank}: 8 pushes" in output


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", "rank 1: push of version 1 failed while sending: rank 1: ZeroDivisionError"),
        (
            "other version",
            "rank 1: push of version 1 failed .*: rank 1 came for a push of version 2",
        ),
        ("comes late", r"while waiting for the other ranks to call push\(\): .*; rank 1 did not"),
        ("dies in send", "failed while sending: rank 1 is gone"),
        ("dies in gather", "failed while sending: rank 1 is gone"),
    ],
)
def test_a_rank_that_fails_is_named_on_every_rank(fault, message):
    """Within the deadline; trl#5766, NeMo-RL#3472: the others hung."""
    code, output = torchrun(3, fault)
    lines = [line for line in output.splitlines() if line.startswith("rank ")]
    zeros = [line for line in lines if line.startswith("rank 0: rank 1")]
    assert 1 == len(zeros), output
    assert re.search(message, zeros[0])
    if not fault.startswith("dies"):
        assert 0 == code, output
        (one,) = [line for line in lines if line.startswith("rank 1: rank 1")]
        assert zeros[0].removeprefix("rank 0") == one.removeprefix("rank 1")
        assert "rank 0: then 3" in lines
        assert "rank 1: then 3" in lines
