"""Engines that share a GPU with the trainer: what they give back, and what they answer afterwards.

Bytes are those that the driver says are free, whichever process had them.
"""

import asyncio
import shutil
from pathlib import Path

import anyio
import pytest

import agoge_async
from agoge_async import ParamSyncer, Router, TokenRequest, UnsupportedError, WeightSyncError

# What CUDA opens in this process on its first use of something stays open.
pytestmark = pytest.mark.may_leave("descriptors")

TINY = Path(agoge_async.__file__).parent / "tiny_model"
GIB = 1 << 30
CACHE_BYTES = 2 * GIB
SLACK = 0.05
"""Of the bytes that are expected: allocations are rounded up, CUDA's context grows."""
PROMPTS = [list(range(first, first + 40)) for first in (1, 50, 100)]


@pytest.fixture(scope="module")
def checkpoint(cuda, tmp_path_factory):
    """Write a random model, large enough that its memory is told from noise; 0.4 GB in bf16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=272,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=4096,
        eos_token_id=258,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    return folder


@pytest.fixture(scope="module")
def trainer(checkpoint):
    """Give the trainer's copy of the model, on the GPU that the engine has."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to("cuda:0")


def engine_on(checkpoint, **engine_args) -> Router:
    arguments = {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "enforce_eager": True,
        "enable_prefix_caching": False,  # a prompt found in part may round otherwise
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": CACHE_BYTES,
    }
    settings = {"gpus": [[0]], "engine_args": arguments | engine_args}
    return Router.from_config({"models": {"policy": {"backend": "vllm"} | settings}})


@pytest.fixture(scope="module")
async def router(trainer, checkpoint):
    """An engine that can sleep, beside the trainer."""
    from agoge_async.weights.groups import serve_store

    serve_store("127.0.0.1", 10.0)  # the first one opens what torch keeps
    async with engine_on(checkpoint, enable_sleep_mode=True) as router:
        yield router


@pytest.fixture
async def syncer(router, trainer):
    async with await ParamSyncer.connect(trainer, router, timeout_s=120) as syncer:
        yield syncer


def weight_bytes(trainer) -> int:
    return sum(p.numel() * p.element_size() for p in trainer.parameters())


def version_of(router) -> int:
    return router.pool("policy").backends[0].version


def state_of(router) -> str:
    return router.statistics().models["policy"].backends["policy/0"].state


async def answer(router, prompt):
    response = await router.generate(
        TokenRequest(
            model="policy",
            prompt_token_ids=prompt,
            max_tokens=64,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
            timeout_s=120,
        )
    )
    return response.choices[0].token_ids, response.choices[0].logprobs


async def answers(router):
    """Answer one by one: batches of other sizes may round otherwise."""
    return [await answer(router, prompt) for prompt in PROMPTS]


def change(trainer, factor: float) -> None:
    import torch

    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(factor)  # by a power of two: it can be undone exactly


class Memory:
    """How many bytes have become free on the GPU since it was made."""

    def __init__(self, cuda) -> None:
        self._cuda = cuda
        cuda.synchronize()
        cuda.empty_cache()
        self._before = cuda.mem_get_info(0)[0]

    @property
    def freed(self) -> int:
        self._cuda.empty_cache()
        return self._cuda.mem_get_info(0)[0] - self._before


def roughly(num_bytes: int):
    return pytest.approx(num_bytes, abs=SLACK * (CACHE_BYTES + GIB))


async def test_level_1_keeps_the_weights(router, trainer, cuda):
    """On the host; the GPU has theirs and the cache's bytes free, and then answers as before."""
    before = await answers(router)
    memory = Memory(cuda)
    await router.sleep("policy")
    assert roughly(weight_bytes(trainer) + CACHE_BYTES) == memory.freed
    waiting = asyncio.get_running_loop().create_task(answer(router, PROMPTS[0]))
    await anyio.wait_all_tasks_blocked()
    assert "asleep" == state_of(router)
    assert not waiting.done()
    await router.wake_up("policy")
    assert before[0] == await waiting
    assert roughly(0) == memory.freed
    assert before == await answers(router)


async def test_level_2_a_push_and_the_cache_last(router, trainer, syncer, cuda):
    """vllm#29341, #16564: in vLLM's order each part takes its bytes again, and nothing is lost."""
    before = await answers(router)
    memory = Memory(cuda)
    for factor in (2.0, 0.5):
        await router.sleep("policy", level=2)
        assert roughly(weight_bytes(trainer) + CACHE_BYTES) == memory.freed
        with pytest.raises(WeightSyncError, match="policy/0 is asleep, its weights too"):
            await syncer.push(version=version_of(router) + 1)
        change(trainer, factor)
        await router.wake_up("policy", tags=["weights"])
        assert roughly(CACHE_BYTES) == memory.freed
        await syncer.push(version=version_of(router) + 1)
        assert "asleep" == state_of(router)
        await router.wake_up("policy", tags=["kv_cache"])
        assert "serving" == state_of(router)
        assert roughly(0) == memory.freed
        assert (factor == 0.5) == (before == await answers(router))


async def test_level_2_serves_nothing_before_a_push(router, syncer):
    """All of it awake, its weights are garbage (vllm#29341)."""
    before = await answers(router)
    await router.sleep("policy", level=2)
    await router.wake_up("policy")
    assert "stale" == state_of(router)
    waiting = asyncio.get_running_loop().create_task(answer(router, PROMPTS[0]))
    await anyio.wait_all_tasks_blocked()
    assert not waiting.done()
    await syncer.push(version=version_of(router) + 1)
    assert before[0] == await waiting
    assert before == await answers(router)


async def test_what_runs_ends_before_an_engine_sleeps(router):
    """Whole by default, with what it has on demand."""
    request = TokenRequest(
        model="policy", prompt_token_ids=PROMPTS[0], max_tokens=800, ignore_eos=True, timeout_s=120
    )
    for mode, reason in (("drain", "length"), ("abort", "abort")):
        running = asyncio.get_running_loop().create_task(router.generate(request))
        engine = router.pool("policy").backends[0].engine
        with anyio.fail_after(30):
            while not (await engine.load()).unfinished:
                await anyio.sleep(0.01)
        await router.sleep("policy", mode=mode)
        assert reason == (await running).choices[0].finish_reason
        await router.wake_up("policy")


@pytest.mark.may_leave("descriptors", "shared memory")
async def test_an_engine_without_sleep_mode_refuses(checkpoint):
    """It says what to set; vLLM would assert in its worker."""
    async with engine_on(checkpoint, kv_cache_memory_bytes=GIB // 4) as router:
        with pytest.raises(UnsupportedError, match=r"policy/0 can't sleep: .*enable_sleep_mode"):
            await router.sleep("policy")
        assert "serving" == state_of(router)
