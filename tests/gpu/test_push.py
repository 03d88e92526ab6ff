"""Weights pushed from a GPU into engines on GPUs, over each transport."""

from pathlib import Path

import pytest

import agoge_async
from agoge_async import ParamSyncer, Router, TokenRequest

# What CUDA opens in this process on its first use of something stays open.
pytestmark = pytest.mark.may_leave("descriptors")

TINY = Path(agoge_async.__file__).parent / "tiny_model"
PROMPT = [*b"What is 2 plus 2?"]


@pytest.fixture(scope="module")
def policy(cuda):
    """Give the tiny model on the first GPU."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).to("cuda:0")


def engine_on(gpu: int) -> Router:
    arguments = {
        "model": str(TINY),
        "dtype": "bfloat16",
        "max_model_len": 512,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 256 << 20,
    }
    settings = {"backend": "vllm", "gpus": [[gpu]], "engine_args": arguments}
    return Router.from_config({"models": {"policy": settings}})


@pytest.fixture(scope="module")
async def beside(policy):
    """An engine on the trainer's GPU."""
    from agoge_async.weights.groups import serve_store

    serve_store("127.0.0.1", 10.0)  # the first one opens what torch keeps
    async with engine_on(0) as router:
        yield router


@pytest.fixture(scope="module")
async def apart(policy, cuda):
    """An engine on a GPU of its own."""
    if cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL has no two ranks of a group on one")
    async with engine_on(1) as router:
        yield router


def change(policy) -> None:
    import torch

    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))


async def push_and_compare(policy, router, expected: str, **options) -> None:
    """Push twice, over what the first push made; every tensor is the trainer's, cast."""
    version = router.pool("policy").backends[0].version
    async with await ParamSyncer.connect(
        policy, router, bucket_bytes=300_000, timeout_s=120, **options
    ) as syncer:
        for _ in range(2):
            version += 1
            change(policy)
            record = await syncer.push(version=version)
            assert (expected, ("float32",)) == (record.transport, record.cast)
            found = await syncer.verify()
            assert found.is_equal, found
    response = await router.generate(
        TokenRequest(model="policy", prompt_token_ids=PROMPT, max_tokens=8, ignore_eos=True)
    )
    spans = response.choices[0].policy_versions
    assert [version] == [span.version for span in spans]


@pytest.mark.parametrize("transport", ["auto", "cuda_ipc", "shm", "gloo"])
async def test_an_engine_on_the_trainers_gpu(policy, beside, transport):
    """`auto` takes the GPU's own memory."""
    expected = "cuda_ipc" if transport == "auto" else transport
    await push_and_compare(policy, beside, expected, transport=transport)


async def test_an_engine_on_the_trainers_gpu_over_a_disk(policy, beside, tmp_path):
    """The trainer's tensors come from its GPU, the engine's go to its own."""
    await push_and_compare(policy, beside, "disk", transport="disk", folder=tmp_path)


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "at once"])
@pytest.mark.parametrize("transport", ["auto", "nccl", "shm"])
async def test_an_engine_on_another_gpu(policy, apart, transport, staged):
    """`auto` takes NCCL."""
    expected = "nccl" if transport == "auto" else transport
    await push_and_compare(policy, apart, expected, transport=transport, staged=staged)


def test_a_gpu_computes_the_digest_that_the_cpu_does(cuda):
    """Both ends of NCCL are on GPUs, not always of one kind."""
    import torch

    from agoge_async.weights.digest import digest, multilinear

    data = torch.randint(0, 256, (8 * 1_000_003,), dtype=torch.uint8)
    assert multilinear(data) == digest(data.cuda())
