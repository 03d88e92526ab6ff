"""Real engines: one for the session, and a pair of replicas where faults are made."""

import importlib.util
from pathlib import Path

import psutil
import pytest

import agoge_async
from agoge_async import InferenceRequest, Router
from agoge_async.backends.local import LocalBackend

if importlib.util.find_spec("vllm") is None:  # importing it takes ten seconds
    pytest.skip("needs the cpu or gpu extra", allow_module_level=True)

TINY = Path(agoge_async.__file__).parent / "tiny_model"
QUESTION = "Tom has 7 apples and buys 5 more. How many apples does Tom have now?"


def pytest_collection_modifyitems(items):
    """Mark every test of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
async def router():
    """One tiny engine, shared by all tests that leave it as they found it."""
    async with Router.from_config("tiny") as router:
        yield router


@pytest.fixture(scope="module")
async def pair():
    """Two replicas of the tiny model for tests that kill them, workers in their own processes."""
    settings = {
        "num_workers": 2,
        "restart": {"backoff_s": 0.1},
        "engine_args": {"distributed_executor_backend": "mp"},
    }
    replicas = {"models": {"tiny": settings}}
    async with Router.from_config(["tiny", replicas]) as router:
        yield router


@pytest.fixture(scope="session")
def transformers_model():
    """Give the tiny model and its tokenizer as transformers loads them, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(TINY)


def ask(**fields):
    """Make a greedy request to the tiny model."""
    defaults = {"model": "tiny", "messages": QUESTION, "max_tokens": 64, "temperature": 0}
    return InferenceRequest(**defaults | fields)


def backends(router) -> list[LocalBackend]:
    """List the replicas of the tiny model."""
    return router.pool("tiny").backends


def vllm_processes(engine) -> list[psutil.Process]:
    """List the processes that vLLM runs under an engine's child: EngineCore, then the worker."""
    core = next(
        process
        for process in psutil.Process(engine.pid).children()
        if "resource_tracker" not in " ".join(process.cmdline())
    )
    return [core, *(p for p in core.children() if "resource_tracker" not in " ".join(p.cmdline()))]
