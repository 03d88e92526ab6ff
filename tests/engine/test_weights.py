"""Weights pushed into two live engines: what they then answer, and what callers see meanwhile."""

import copy
import itertools
import os
import signal

import anyio
import pytest
import torch
from torch import nn

from agoge_async import ParamSyncer, Router, TokenRequest, UnsupportedError, WeightSyncError
from agoge_async.engine.messages import CommandKind
from agoge_async.weights import frames
from agoge_async.weights.groups import serve_store
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
    assert record.control_calls == 2 * (5 if staged else 4)


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
async def test_a_push_while_requests_run(trained, policy, mode):
    """No request is lost, and the spans say truly which weights sampled which token.

    torchforge#251: requests that come during the push were admitted to whatever was there.
    """
    old = next_version(trained)
    choices, late = [], []

    async def ask(answers) -> None:
        answers.append(await sample(trained, max_tokens=LONG, temperature=1, timeout_s=120))

    async with await ParamSyncer.connect(
        policy, trained, model="tiny", mode=mode, timeout_s=90
    ) as syncer:
        await syncer.push(version=old)
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(ask, choices)
            await _until_generating(trained)
            for _ in range(4):
                group.start_soon(ask, late)
            await syncer.push(version=old + 1)
        after = await sample(trained)
    assert [(old + 1, 0, 20)] == [(s.version, s.start, s.end) for s in after.policy_versions]
    assert [8, 4] == [len(choices), len(late)]
    for choice in late:
        spans = [(span.version, span.start, span.end) for span in choice.policy_versions]
        assert [version for version, _, _ in spans] in ([old], [old, old + 1], [old + 1])
        assert [0, *(end for _, _, end in spans)] == [
            *(start for _, start, _ in spans),
            len(choice.token_ids),
        ]
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


async def test_requests_that_do_not_end_in_time_fail_the_push_alone(trained, policy):
    """prime-rl#1119, #3016: an engine that was paused for a push that never came stood still.

    They go on to their end; nothing is restarted, and the next push finds everything as it was.
    """
    pids = [replica.engine.pid for replica in trained.pool("tiny").backends]
    version = next_version(trained)
    lengths = []

    async def ask() -> None:
        choice = await sample(trained, max_tokens=1000, temperature=1, timeout_s=120)
        lengths.append(len(choice.token_ids))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
        await _until_generating(trained)
        async with await ParamSyncer.connect(
            policy, trained, model="tiny", mode="drain", timeout_s=1
        ) as syncer:
            with pytest.raises(
                WeightSyncError, match="while waiting for requests to end"
            ) as caught:
                await syncer.push(version=version)
        assert caught.value.culprit in {"tiny/0", "tiny/1"}
    assert [1000] * 8 == lengths
    assert pids == [replica.engine.pid for replica in trained.pool("tiny").backends]
    async with await ParamSyncer.connect(policy, trained, model="tiny", timeout_s=60) as syncer:
        await syncer.push(version=version)
    assert [version] == [span.version for span in (await sample(trained)).policy_versions]


async def test_prefixes_that_old_weights_cached_are_not_found(trained, policy, transformers_model):
    """NeMo-RL#4018, prime-rl#2270, trl#6765: stale for up to 17 pushes; a version is in the key."""
    replica = trained.pool("tiny").backends[0]
    prompt = [*range(97, 107)] * 60
    version = next_version(trained)

    async def ask():
        request = TokenRequest(model="tiny", prompt_token_ids=prompt, max_tokens=1, logprobs=0)
        response = await replica.generate(request)
        cached = response.usage.prompt_tokens_details.cached_tokens
        return cached, response.choices[0].logprobs[0], response.choices[0].token_ids[0]

    await ask()
    assert (await ask())[0] > 400
    async with await ParamSyncer.connect(policy, trained, model="tiny", timeout_s=60) as syncer:
        await syncer.push(version=version)
    cached, logprob, token = await ask()
    assert 0 == cached
    with torch.no_grad():
        scores = policy(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert scores[token].item() == pytest.approx(logprob, abs=1e-4)
    assert (await ask())[0] > 400


def flip(frame) -> None:
    """Damage a message."""
    frame[5] ^= 1


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.may_leave("processes", "tasks", "descriptors", "shared memory")
async def test_engines_that_were_torn_serve_again_after_a_whole_push(
    trained, policy, transformers_model, monkeypatch
):
    """They are restarted, and nobody gets an answer from weights that nobody pushed."""
    version = next_version(trained)
    monkeypatch.setattr("agoge_async.weights.sending.seal", at_bucket(3, flip))
    options = {"transport": "gloo", "staged": False, "bucket_bytes": 500_000}
    async with await ParamSyncer.connect(
        policy, trained, model="tiny", timeout_s=60, **options
    ) as syncer:
        with pytest.raises(WeightSyncError, match=r"while sending and loading: .*bucket 3 .*damag"):
            await syncer.push(version=version)
    monkeypatch.undo()
    async with await ParamSyncer.connect(policy, trained, model="tiny", timeout_s=120) as syncer:
        await syncer.push(version=version + 1)
    await assert_greedy(trained, policy, transformers_model, version + 1)
    statistics = trained.statistics().models["tiny"].backends
    assert ["serving", "serving"] == [backend.state for backend in statistics.values()]


def at_bucket(index, act):
    """Give a `seal` that does something once, at the message of an index."""
    count = itertools.count()

    def seal(frame, checksum, stamp):
        if next(count) == index:
            act(frame)
        frames.seal(frame, checksum, stamp)

    return seal


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(3))), "can't take extra"),
        (lambda m: delattr(m.model.layers[1].self_attn, "k_proj"), "a part .*qkv_proj.*q_proj"),
        (
            lambda m: delattr(m.model.layers[1].mlp, "down_proj"),
            "has nothing for .*1.mlp.down_proj",
        ),
        (
            lambda m: setattr(m.model, "norm", nn.LayerNorm(64, bias=False)),
            r"can't take model.norm.weight of shape \[64\]",
        ),
        (
            lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight + 1)),
            "has lm_head.weight, model.embed_tokens.weight apart",
        ),
    ],
    ids=["name", "fused member", "missing", "shape", "untied head"],
)
async def test_a_model_that_does_not_fit_is_refused_before_anything_is_touched(
    trained, policy, spoil, message
):
    """vllm#51665: a head that is tied there and not here; a fused layer without all its members."""
    before = await sample(trained, temperature=0)
    with torch.no_grad():
        spoil(policy)
    pids = [replica.engine.pid for replica in trained.pool("tiny").backends]
    async with await ParamSyncer.connect(policy, trained, model="tiny", timeout_s=60) as syncer:
        with pytest.raises(WeightSyncError, match=f"telling the engines.*{message}"):
            await syncer.push(version=next_version(trained))
    assert pids == [replica.engine.pid for replica in trained.pool("tiny").backends]
    after = await sample(trained, temperature=0)
    assert before.token_ids == after.token_ids


async def test_verify_compares_what_engines_compute_with(trained, policy):
    """Each tensor by its name, those that vLLM fuses or packs included."""
    async with await ParamSyncer.connect(policy, trained, model="tiny", timeout_s=60) as syncer:
        before = await syncer.verify()
        assert {"tiny/0", "tiny/1"} == before.differing.keys()
        await syncer.push(version=next_version(trained))
        assert (await syncer.verify()).is_equal
        changed = {
            "model.layers.2.self_attn.k_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.norm.weight",
            "model.embed_tokens.weight",
            "lm_head.weight",
        }
        with torch.no_grad():
            for name in changed - {"lm_head.weight"}:
                policy.get_parameter(name).view(-1)[100] *= 1.001
        found = await syncer.verify()
        for names in found.differing.values():
            assert set(names) <= changed
            assert set(names) >= changed - {"lm_head.weight"}
    assert not found.unchecked


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.may_leave("processes", "tasks", "descriptors", "shared memory")
async def test_an_engine_that_is_killed_fails_the_push_and_comes_back(
    trained, policy, transformers_model, monkeypatch
):
    """NeMo-RL#3472: a dead engine blocked the next sync for ever. It is named here, and restarted.

    In receive, the other engine keeps its weights; in load, it has to be restarted as well. One
    that dies later gets the last push at once.
    """
    first, second = trained.pool("tiny").backends
    version = next_version(trained)
    options = {"model": "tiny", "bucket_bytes": 500_000, "timeout_s": 120}

    def kill(_) -> None:
        os.kill(first.engine.pid, signal.SIGKILL)

    async with await ParamSyncer.connect(policy, trained, **options) as syncer:
        await syncer.push(version=version)
        with monkeypatch.context() as patched:
            patched.setattr("agoge_async.weights.sending.seal", at_bucket(2, kill))
            with pytest.raises(WeightSyncError, match="tiny/0 died") as caught:
                await syncer.push(version=version + 1)
        assert "tiny/0" == caught.value.culprit
        choice = await sample(second)
        assert [version] == [span.version for span in choice.policy_versions]
        await syncer.push(version=version + 2)  # waits for the engine
        os.kill(second.engine.pid, signal.SIGKILL)
        await _until_state(second, "restarting", "stale")
        await _until_state(second, "serving")
        await assert_greedy(second, policy, transformers_model, version + 2)
    async with await ParamSyncer.connect(
        policy, trained, staged=False, transport="gloo", **options
    ) as syncer:
        with monkeypatch.context() as patched:
            patched.setattr("agoge_async.weights.sending.seal", at_bucket(3, kill))
            with pytest.raises(WeightSyncError, match="while sending and loading") as caught:
                await syncer.push(version=version + 3)
        assert "tiny/0" == caught.value.culprit
        await syncer.push(version=version + 4)
    for replica in (first, second):
        await assert_greedy(replica, policy, transformers_model, version + 4)


async def assert_greedy(replica, policy, transformers_model, version) -> None:
    """Compare an engine's answer with transformers', and its span with the version."""
    choice = await sample(replica, temperature=0)
    ids, _ = greedy((policy, transformers_model[1]), PROMPT, 20)
    assert ids == choice.token_ids[: len(ids)]
    assert [version] == [span.version for span in choice.policy_versions]


async def _until_state(replica, *states) -> None:
    with anyio.fail_after(90):
        while replica.status.state not in states:
            await anyio.sleep(0.05)


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


async def _until(condition) -> None:
    while not condition():
        await anyio.sleep(0.01)


async def _until_generating(router) -> None:
    with anyio.fail_after(30):
        for replica in router.pool("tiny").backends:
            while (await replica.engine.load()).unfinished < 4:
                await anyio.sleep(0.01)
    await anyio.sleep(0.3)  # some tokens, which nothing tells of
