"""The examples that need an engine, run as the README says."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the train extra", allow_module_level=True)

ROOT = Path(__file__).parents[2]
PUSH_WEIGHTS = ROOT / "examples" / "push_weights.py"
LIMIT_S = 240
MARK = "AGOGE_TEST_MARK"
"""An environment variable that all processes of a run have, also those that outlive it."""
ANSWER = re.compile(r"^  (.+?\?) +'(.*)' +\d+ tokens by version (\d+)$", re.MULTILINE)


def run(*arguments: str) -> tuple[int, str, list[psutil.Process]]:
    """Run Python; gives its exit code, what it printed, and the processes that it left."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", MARK: mark},
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
    return process.returncode, output, [p for p in psutil.process_iter() if has(p, mark)]


def has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:  # gone, or another user's
        return False


@pytest.mark.slow
def test_push_weights_shows_answers_and_versions_that_follow_the_training():
    """Both ranks' lessons arrive in the engine, though each rank learns but one."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, output, left = run(*torchrun, str(PUSH_WEIGHTS))
    assert 0 == code, output
    assert [] == left
    answers = ANSWER.findall(output)
    versions = [version for _, _, version in answers]
    assert [str(step) for step in (0, 3, 6, 9, 12, 15) for _ in range(2)] == versions, output
    assert [
        ("Who are you?", "I am a tiny test model."),
        ("What can you do?", "I can solve short word problems."),
    ] == [answer[:2] for answer in answers[:2]]
    assert [
        ("Who are you?", "I am what you train."),
        ("What can you do?", "I can learn while I answer."),
    ] == [answer[:2] for answer in answers[-2:]]
    assert 5 == output.count("MB pushed in")


def test_push_weights_says_how_to_start_it():
    code, output, _ = run(str(PUSH_WEIGHTS))
    assert 1 == code
    assert "torchrun --standalone --nproc-per-node 2 examples/push_weights.py" in output


def test_push_weights_says_what_to_install():
    program = "import runpy, sys; sys.modules['deepspeed'] = None; runpy.run_path(sys.argv[1])"
    code, output, _ = run("-c", program, str(PUSH_WEIGHTS))
    assert 1 == code
    assert "deepspeed" in output
    assert "pip install '.[train]'" in output


def test_push_weights_is_short():
    """The README calls it the whole set-up."""
    assert len(PUSH_WEIGHTS.read_text().splitlines()) < 120
