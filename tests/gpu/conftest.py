"""Tests that need an NVIDIA GPU: skipped, with the reason, where there is none.

torch is imported when the first of them runs, not when they are collected.
"""

import importlib.util
import os
from pathlib import Path

import pytest

from agoge_async.engine.devices import visible_gpus


def pytest_collection_modifyitems(items):
    """Mark every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session", autouse=True)
def cuda():
    """Give `torch.cuda`, started."""
    if not visible_gpus(os.environ):
        pytest.skip("needs an NVIDIA GPU; this process sees none")
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs the gpu extra")
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"needs a build of torch for CUDA, this is {torch.__version__}")
    torch.cuda.init()
    return torch.cuda
