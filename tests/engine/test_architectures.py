"""Weights pushed into engines of other shapes: two workers, biases, an untied head, bfloat16."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agoge_async import ParamSyncer, Router, TokenRequest
from agoge_async.weights.groups import serve_store
from tests.engine.conftest import TINY
from tests.engine.test_parity import greedy

pytestmark = pytest.mark.slow
PROMPT = [*b"What is 2 plus 2?"]
ENGINE_ARGS = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}


def randomized(model):
    """Give a model whose parameters all matter: transformers makes biases zero, norms one."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def qwen2_folder(tmp_path_factory):
    """Write a Qwen2: biases in its fused layers, and a head of its own."""
    folder = tmp_path_factory.mktemp("qwen2")
    config = Qwen2Config(
        vocab_size=272,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
async def engines(qwen2_folder):
    """One engine of two workers in fp32, one in bfloat16."""
    serve_store("127.0.0.1", 10.0)  # the first one opens what torch keeps
    two = {"model": str(qwen2_folder), "dtype": "float32", "tensor_parallel_size": 2}
    half = {"model": str(TINY), "dtype": "bfloat16"}
    models = {
        name: {"backend": "vllm", "engine_args": ENGINE_ARGS | arguments}
        for name, arguments in {"two": two, "half": half}.items()
    }
    async with Router.from_config({"models": models}) as router:
        yield router


@pytest.mark.parametrize("transport", ["gloo", "shm"])
async def test_two_workers_take_their_parts(engines, qwen2_folder, transport):
    """Of fused layers with biases, and of a head that isn't tied; SkyRL#1398: ranks were wrong."""
    policy = randomized(AutoModelForCausalLM.from_pretrained(qwen2_folder, dtype=torch.float32))
    version = 1 + engines.pool("two").backends[0].version
    options = {"model": "two", "transport": transport, "bucket_bytes": 50_000, "timeout_s": 60}
    async with await ParamSyncer.connect(policy, engines, **options) as syncer:
        assert not (await syncer.verify()).is_equal or version > 1
        await syncer.push(version=version)
        assert (await syncer.verify()).is_equal
        request = TokenRequest(
            model="two",
            prompt_token_ids=PROMPT,
            max_tokens=16,
            temperature=0,
            ignore_eos=True,
            logprobs=0,
        )
        choice = (await engines.generate(request)).choices[0]
        ids, logprobs = greedy((policy, SimpleNamespace(eos_token_id=None)), PROMPT, 16)
        assert ids == choice.token_ids[: len(ids)]
        assert logprobs == pytest.approx(choice.logprobs[: len(ids)], abs=1e-4)
        name = "model.layers.1.self_attn.v_proj.bias"
        with torch.no_grad():
            policy.get_parameter(name)[-1] += 0.5
        assert {"two/0": (name,)} == (await syncer.verify()).differing


async def test_bfloat16_is_cast_by_the_trainer_and_equal_in_the_engine(engines):
    """Bit for bit; the trainer's parameters stay in fp32."""
    policy = randomized(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32))
    async with await ParamSyncer.connect(policy, engines, model="half", timeout_s=60) as syncer:
        record = await syncer.push(version=1)
        assert (await syncer.verify()).is_equal
    assert ("float32",) == record.cast
    assert torch.float32 is policy.dtype
    assert record.num_bytes == 2 * sum(p.numel() for p in policy.parameters())
