"""Weights pushed into two live engines: what they then answer, and what callers see meanwhile."""

import copy

import anyio
import pytest
import torch
from torch import nn

from agoge_async import ParamSyncer, Router, TokenRequest, UnsupportedError, WeightSyncError
from agoge_async.engine.messages import CommandKind
from agoge_async.weights.transport import serve_store
from tests.engine.test_parity import greedy

PROMPT = [257, *b"user\nWhat is 2 plus 2?", 258, 10, 257, *b"assistant\n"]
LONG = 300


@pytest.fixture(scope="module")
async def trained():
    """Two replicas that weights are pushed to."""
    serve_store("127.0.0.1", 10.0)  # the first one opens what torch keeps
    settings = {"num_workers": 2, "restart": {"backoff_s": 0.1}}
    async with Router.from_config(["tiny", {"models": {"tiny": settings}}]) as router:
        yield router


@pytest.fixture
def policy(transformers_model):
    """Give a policy that was trained a little: its answers differ from the engine's first ones."""
    model = copy.deepcopy(transformers_model[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    return model


def next_version(router) -> int:
    return 1 + max(replica.version for replica in router.pool("tiny").backends)


async def sample(router_or_replica, **fields):
    defaults = {"model": "tiny", "prompt_token_ids": PROMPT, "max_tokens": 20, "ignore_eos": True}
    response = await router_or_replica.generate(TokenRequest(**defaults | fields))
    return response.choices[0]


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "at once"])
@pytest.mark.parametrize("transport", ["gloo", "shm"])
async def test_engines_answer_with_the_weights_that_were_pushed(
    trained, policy, transformers_model, transport, staged
):
    """Greedy tokens and log probabilities are transformers', on both; spans name the version."""
    version = next_version(trained)
    options = {"model": "tiny", "transport": transport, "staged": staged, "timeout_s": 60}
    async with await ParamSyncer.connect(policy, trained, bucket_bytes=500_000, **options) as sync:
        record = await sync.push(version=version)
    ids, logprobs = greedy((policy, transformers_model[1]), PROMPT, 20)
    for replica in trained.pool("tiny").backends:
        assert version == replica.version
        choice = await sample(replica, temperature=0, logprobs=0)
        assert ids == choice.token_ids[: len(ids)]
        assert logprobs == pytest.approx(choice.logprobs[: len(ids)], abs=1e-4)
        assert [(version, 0, 20)] == [(s.version, s.start, s.end) for s in choice.policy_versions]
    assert 2 == record.num_engines
    waits_first = staged or transport == "shm"
    assert record.control_calls == 2 * (4 if waits_first else 3)


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
async def test_a_push_while_requests_run(trained, policy, mode):
    """No request is lost, and the spans say truly which weights sampled which token."""
    old = next_version(trained)
    choices = []

    async def ask() -> None:
        choices.append(await sample(trained, max_tokens=LONG, temperature=1, timeout_s=120))

    async with await ParamSyncer.connect(
        policy, trained, model="tiny", mode=mode, timeout_s=90
    ) as syncer:
        await syncer.push(version=old)
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(ask)
            await _until_generating(trained)
            await syncer.push(version=old + 1)
        after = await sample(trained)
    assert [(old + 1, 0, 20)] == [(s.version, s.start, s.end) for s in after.policy_versions]
    assert 8 == len(choices)
    for choice in choices:
        spans = [(span.version, span.start, span.end) for span in choice.policy_versions]
        count = len(choice.token_ids)
        if mode == "keep":
            assert LONG == count
            assert [old, old + 1] == [version for version, _, _ in spans]
            assert [0, spans[0][2], count] == [spans[0][1], spans[1][1], spans[1][2]]
        else:
            assert [(old, 0, count)] == spans
            assert ("abort" if mode == "abort" else "length") == choice.finish_reason
            assert (count < LONG) == (mode == "abort")


@pytest.mark.timeout(240)
@pytest.mark.may_leave("processes", "tasks", "descriptors", "shared memory")
async def test_engines_that_were_torn_serve_again_after_a_whole_push(
    trained, policy, transformers_model
):
    """They are restarted, and nobody gets an answer from weights that nobody pushed."""
    wrong = nn.Module()
    wrong.register_parameter("no_such_layer", nn.Parameter(torch.zeros(3)))
    version = next_version(trained)
    async with await ParamSyncer.connect(wrong, trained, model="tiny", timeout_s=60) as syncer:
        with pytest.raises(WeightSyncError, match=r"while loading: .*no_such_layer") as caught:
            await syncer.push(version=version)
    assert caught.value.culprit in {"tiny/0", "tiny/1"}
    async with await ParamSyncer.connect(policy, trained, model="tiny", timeout_s=120) as syncer:
        await syncer.push(version=version + 1)
    ids, _ = greedy((policy, transformers_model[1]), PROMPT, 20)
    choice = await sample(trained, temperature=0)
    assert ids == choice.token_ids[: len(ids)]
    assert [version + 1] == [span.version for span in choice.policy_versions]
    statistics = trained.statistics().models["tiny"].backends
    assert ["serving", "serving"] == [backend.state for backend in statistics.values()]


async def test_an_engine_on_the_cpu_does_not_sleep(router):
    """vLLM would do as if, and free nothing (0.32); it is refused, and goes on serving."""
    with pytest.raises(UnsupportedError, match=r"tiny/0 can't sleep: .*not supported on the CPU"):
        await router.sleep("tiny", level=2)
    with pytest.raises(UnsupportedError, match="not supported on the CPU"):
        await router.wake_up("tiny")
    assert "serving" == router.statistics().models["tiny"].backends["tiny/0"].state
    await sample(router)


async def test_vllm_generates_when_all_is_awake_and_not_before(trained, policy, transformers_model):
    """What the child does, as on a GPU: the CPU's worker frees nothing, the rest of vLLM is real.

    A push between the two halves of a wake-up must not start generation: there is no cache yet.
    """
    replica = trained.pool("tiny").backends[0]
    version = next_version(trained)
    async with (
        await ParamSyncer.connect(policy, [replica], timeout_s=60) as syncer,
        anyio.create_task_group() as group,
    ):
        await replica.engine.command(CommandKind.SLEEP, "2", 30)
        answers = []

        async def ask() -> None:
            answers.append(await sample(replica, temperature=0))

        group.start_soon(ask)
        await replica.engine.command(CommandKind.WAKE_UP, '["weights"]', 30)
        await syncer.push(version=version)
        with anyio.move_on_after(1):
            await _until(lambda: answers)
        assert [] == answers
        await replica.engine.command(CommandKind.WAKE_UP, '["weights", "kv_cache"]', 30)
    ids, _ = greedy((policy, transformers_model[1]), PROMPT, 20)
    assert ids == answers[0].token_ids[: len(ids)]
    assert [version] == [span.version for span in answers[0].policy_versions]


async def test_requests_that_run_can_be_ended(trained):
    """They answer with what they have, and the next one is served."""
    choices = []

    async def ask() -> None:
        choices.append(await sample(trained, max_tokens=LONG, temperature=1))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
        await _until_generating(trained)
        for replica in trained.pool("tiny").backends:
            await replica.engine.command(CommandKind.END_REQUESTS, "", 30)
    assert ["abort"] * 8 == [choice.finish_reason for choice in choices]
    assert all(0 < len(choice.token_ids) < LONG for choice in choices)
    assert 20 == len((await sample(trained)).token_ids)


@pytest.mark.timeout(240)
@pytest.mark.may_leave("processes", "tasks", "descriptors", "shared memory")
async def test_weights_that_were_dropped_all_come_back(trained, policy):
    """vllm#29341, #54235: what a push leaves out would be garbage, without a warning."""
    replica = trained.pool("tiny").backends[0]
    version = next_version(trained)
    part = copy.deepcopy(policy)
    del part.model.norm
    async with await ParamSyncer.connect(part, [replica], timeout_s=60) as syncer:
        await syncer.push(version=version)  # the engine keeps its norm
        await replica.engine.command(CommandKind.SLEEP, "2", 30)
        await replica.engine.command(CommandKind.WAKE_UP, '["weights", "kv_cache"]', 30)
        with pytest.raises(WeightSyncError, match=r"lost its weights .* no model\.norm\.weight"):
            await syncer.push(version=version + 1)
    assert version == replica.version
    async with await ParamSyncer.connect(policy, trained, model="tiny", timeout_s=120) as syncer:
        await syncer.push(version=version + 1)
    await sample(replica)


async def _until(condition) -> None:
    while not condition():
        await anyio.sleep(0.01)


async def _until_generating(router) -> None:
    with anyio.fail_after(30):
        for replica in router.pool("tiny").backends:
            while (await replica.engine.load()).unfinished < 4:
                await anyio.sleep(0.01)
    await anyio.sleep(0.3)  # some tokens, which nothing tells of
