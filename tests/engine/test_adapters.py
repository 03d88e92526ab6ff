"""LoRA adapters pushed into two live engines: one a version, kept for the requests that use it."""

import copy

import anyio
import pytest
import torch

from agoge_async import ParamSyncer, Router, WeightSyncError
from agoge_async.weights.groups import serve_store
from tests.engine.conftest import ask, backends
from tests.engine.test_kills import replaces_engine, wait_serving
from tests.engine.test_parity import greedy
from tests.engine.test_weights import PROMPT, next_version, sample

peft = pytest.importorskip("peft", reason="needs the dev extra")
LONG = 200


@pytest.fixture(scope="module")
async def adapted():
    """Two replicas that adapters are pushed to."""
    serve_store("127.0.0.1", 10.0)  # the first one opens what torch keeps
    engine_args = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    settings = {"num_workers": 2, "restart": {"backoff_s": 0.1}, "engine_args": engine_args}
    async with Router.from_config(["tiny", {"models": {"tiny": settings}}]) as router:
        yield router


@pytest.fixture
def policy(transformers_model):
    """Give a policy with an adapter that changes its answers."""
    return with_adapter(transformers_model[0])


def with_adapter(model, **options):
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options
    trained = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
    train(trained)
    return trained


def train(model) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def connect(model, router, **options):
    defaults = {"model": "tiny", "lora": "adapter", "timeout_s": 60.0}
    return ParamSyncer.connect(model, router, **defaults | options)


def spans(choice) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in choice.policy_versions]


async def wait_adapters(replica, versions: list[int]) -> None:
    """Wait until vLLM has these adapters, and the disk."""
    folder = anyio.Path(replica.engine.spec.work_dir, "adapters")
    with anyio.fail_after(10):
        while versions != list((await replica.engine.load()).adapters):
            await anyio.sleep(0.01)
        while versions != sorted([int(path.name) async for path in folder.iterdir()]):
            await anyio.sleep(0.01)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
async def test_engines_answer_with_the_adapter_that_was_pushed(
    adapted, policy, transformers_model, transport
):
    """Greedy tokens and log probabilities are those of transformers with PEFT; push after push."""
    base, _ = greedy(transformers_model, PROMPT, 20)
    async with await connect(policy, adapted, transport=transport) as syncer:
        for _ in range(2):
            version = next_version(adapted)
            train(policy)
            record = await syncer.push(version=version)
            ids, logprobs = greedy((policy, transformers_model[1]), PROMPT, 20)
            assert base != ids
            for replica in backends(adapted):
                assert version == replica.version
                choice = await sample(replica, temperature=0, logprobs=0)
                assert ids == choice.token_ids[: len(ids)]
                assert logprobs == pytest.approx(choice.logprobs[: len(ids)], abs=1e-4)
                assert [(version, 0, 20)] == spans(choice)
                await wait_adapters(replica, [version])
    assert 10 == record.control_calls
    assert record.num_bytes < 200_000


async def test_requests_finish_with_the_adapter_that_they_began_with(
    adapted, policy, transformers_model
):
    """Those that come meanwhile use the new one; the old one goes with the last that uses it."""
    old = next_version(adapted)
    replica = backends(adapted)[0]
    before, after = copy.deepcopy(policy), policy
    train(after)
    choices = []

    async def ask_long() -> None:
        fields = {"max_tokens": LONG, "temperature": 0, "timeout_s": 120}
        choices.append(await sample(replica, **fields))

    async with await connect(before, adapted) as syncer:
        await syncer.push(version=old)
    async with await connect(after, adapted) as syncer, anyio.create_task_group() as group:
        group.start_soon(ask_long)
        while (await replica.engine.load()).unfinished == 0:
            await anyio.sleep(0.01)
        await syncer.push(version=old + 1)
        new = await sample(replica, temperature=0)
        assert not choices
        await wait_adapters(replica, [old, old + 1])
    assert [(old + 1, 0, 20)] == spans(new)
    assert [(old, 0, LONG)] == spans(choices[0])
    for model, choice in ((before, choices[0]), (after, new)):
        ids, _ = greedy((model, transformers_model[1]), PROMPT, 20)
        assert ids == choice.token_ids[: len(ids)]
    await wait_adapters(replica, [old + 1])


async def test_chats_and_streams_use_the_adapter_and_give_it_back(adapted, policy):
    """A stream that its reader leaves, too."""
    version = next_version(adapted)
    async with await connect(policy, adapted) as syncer:
        await syncer.push(version=version)
        response = await adapted.chat(ask(max_tokens=8, ignore_eos=True))
        assert "tiny" == response.model
        assert [(version, 0, 8)] == spans(response.choices[0])
        async with adapted.stream(ask(max_tokens=LONG, ignore_eos=True)) as stream:
            async for _ in stream:
                await syncer.push(version=version + 1)
                break
        async with adapted.stream(ask(max_tokens=8, ignore_eos=True)) as stream:
            async for _ in stream:
                pass
    assert [(version + 1, 0, 8)] == spans(stream.response.choices[0])
    for replica in backends(adapted):
        await wait_adapters(replica, [version + 1])


async def test_an_adapter_that_vllm_refuses_leaves_engines_as_they_were(
    adapted, policy, transformers_model
):
    """The one that serves serves on, and the next push succeeds."""
    version = next_version(adapted)
    pids = [replica.engine.pid for replica in backends(adapted)]
    wrong = with_adapter(transformers_model[0], init_lora_weights="olora")
    async with await connect(policy, adapted) as syncer:
        await syncer.push(version=version)
        async with await connect(wrong, adapted) as other:
            with pytest.raises(WeightSyncError, match=r"checking what came: .*'olora'") as caught:
                await other.push(version=version + 1)
        assert caught.value.culprit in {"tiny/0", "tiny/1"}
        for replica in backends(adapted):
            assert [(version, 0, 20)] == spans(await sample(replica))
            await wait_adapters(replica, [version])
        await syncer.push(version=version + 1)
    for replica in backends(adapted):
        assert [(version + 1, 0, 20)] == spans(await sample(replica))
    assert pids == [replica.engine.pid for replica in backends(adapted)]


@pytest.mark.parametrize(
    ("rank", "lora", "message"),
    [
        (16, "adapter", r"adapters of rank 8 at most \(max_lora_rank in .*; this one's is 16"),
        (4, "merged", "takes LoRA adapters only: connect with lora='adapter', or start it without"),
    ],
)
async def test_what_an_engine_with_adapters_does_not_take_is_refused(
    adapted, transformers_model, rank, lora, message
):
    """Before anything is sent."""
    model = with_adapter(transformers_model[0], r=rank)
    async with await connect(model, adapted, lora=lora) as syncer:
        with pytest.raises(WeightSyncError, match=message) as caught:
            await syncer.push(version=next_version(adapted))
    assert "tiny/0" == caught.value.culprit


async def test_an_engine_without_adapters_says_how_to_start_it(router, policy):
    """Before anything is sent."""
    async with await connect(policy, router) as syncer:
        with pytest.raises(
            WeightSyncError, match=r"tiny/0 takes no LoRA adapters: .*enable_lora: true, .*rank: 4 "
        ):
            await syncer.push(version=1)


@replaces_engine
async def test_an_engine_that_was_restarted_serves_with_the_last_adapter(
    adapted, policy, transformers_model
):
    """Not before: its base model alone would answer."""
    version = next_version(adapted)
    replica = backends(adapted)[0]
    async with await connect(policy, adapted, timeout_s=120) as syncer:
        await syncer.push(version=version)
        pid = replica.engine.pid
        replica.condemn("by a test")
        with anyio.fail_after(10):
            while replica.is_serving:
                await anyio.sleep(0.01)
        assert [(version, 0, 20)] == spans(await sample(adapted))  # the other one's
        await wait_serving(adapted)
    assert pid != replica.engine.pid
    ids, _ = greedy((policy, transformers_model[1]), PROMPT, 20)
    choice = await sample(replica, temperature=0)
    assert ids == choice.token_ids[: len(ids)]
    assert [(version, 0, 20)] == spans(choice)
    await wait_adapters(replica, [version])
