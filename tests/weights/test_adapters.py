"""Pushes of models with PEFT's adapters, into the receivers of test_push.py."""

import copy
import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import agoge_async
from agoge_async.backends.base import WeightShape
from agoge_async.errors import WeightSyncError
from agoge_async.weights.manifest import decode_manifest
from agoge_async.weights.syncer import ParamSyncer
from tests.weights.test_push import TRANSPORTS, Target, assert_equal, connected

peft = pytest.importorskip("peft", reason="needs the dev extra")
transformers = pytest.importorskip("transformers", reason="needs the train extra")
TINY = Path(agoge_async.__file__).parent / "tiny_model"


class Policy(nn.Module):
    """What adapters go on: linear layers of both orientations, an embedding; tied, with a buffer.

    `head` is tied to a tensor that no adapter is on; `score` is for `modules_to_save`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 20)
        self.output = nn.Embedding(40, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.turned = transformers.pytorch_utils.Conv1D(12, 20)
        self.score = nn.Linear(12, 5)
        self.head = nn.Linear(20, 40, bias=False)
        self.head.weight = self.output.weight
        self.register_buffer("kept", torch.randn(3))


def with_adapter(model: nn.Module, targets=("layers.0", "layers.2", "turned"), **options):
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": targets}
    with warnings.catch_warnings(action="ignore"):  # of two orientations in one model
        trained = peft.get_peft_model(model, peft.LoraConfig(**defaults | options))
    train(trained)
    return trained


def train(model) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.add_(torch.randn_like(parameter))


def merge(model) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # of what is merged already
        return copy.deepcopy(model).merge_and_unload()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"targets": ("layers.1", "turned", "embed"), "use_rslora": True},
        {"modules_to_save": ["score"], "alpha_pattern": {"turned": 3}},
        {"targets": ("layers.0", "layers.1", "turned"), "lora_bias": True},
    ],
    ids=["linear", "embedding", "modules_to_save", "bias"],
)
@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_targets_get_the_base_model_with_its_adapter_merged(kind, options):
    """Bit for bit what PEFT's own merge gives, under the checkpoint's names, push after push."""
    model = with_adapter(Policy(), **options)
    async with connected(model, 2, transport=kind) as (syncer, targets):
        for version in (1, 2):
            train(model)
            held = copy.deepcopy(model.state_dict())
            await syncer.push(version=version)
            for target in targets:
                assert_equal(merge(model), target.weights)
            assert all(torch.equal(held[name], t) for name, t in model.state_dict().items())


@pytest.fixture(scope="module")
def tiny():
    """Give the tiny model, whose head is tied to its embeddings."""
    return transformers.AutoModelForCausalLM.from_pretrained(TINY)


async def test_a_language_model_with_an_adapter_comes_under_its_checkpoints_names(tiny):
    """Tied head and all."""
    model = with_adapter(copy.deepcopy(tiny), "all-linear")
    async with connected(model) as (syncer, [target]):
        await syncer.push(version=1)
    assert_equal(merge(model), target.weights)
    assert sorted(tiny.state_dict()) == sorted(target.weights)


async def test_adapters_that_are_merged_already_are_not_merged_again():
    """And all that are active are."""
    model = with_adapter(Policy())
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["layers.0", "layers.1"]))
    model.base_model.set_adapter(["default", "second"])
    train(model)
    async with connected(model) as (syncer, [target]):
        await syncer.push(version=1)
        assert_equal(merge(model), target.weights)
        model.merge_adapter(["second"])
        await syncer.push(version=2)
        assert_equal(merge(model), target.weights)


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engine", ["float32", "bfloat16"])
async def test_the_cast_to_the_engines_type_follows_the_merge(held, engine):
    """PEFT keeps the adapter of a bf16 model in fp32."""
    model = with_adapter(Policy().to(held), targets=("layers.0", "turned", "embed"))
    async with connected(model) as (syncer, [target]):
        target.shape = WeightShape(incarnation=1, devices=("cpu",), dtype=engine)
        await syncer.push(version=1)
    assert_equal(merge(model).to(getattr(torch, engine)), target.weights)


async def test_experts_that_are_one_parameter_are_merged():
    """PEFT's `target_parameters`, two of one module."""
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.up = nn.Parameter(torch.randn(3, 4, 6))
    model.experts.down = nn.Parameter(torch.randn(3, 6, 4))
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["experts.up", "experts.down"]
    )
    model = peft.get_peft_model(model, config)
    train(model)
    async with connected(model) as (syncer, [target]):
        await syncer.push(version=1)
    assert_equal(merge(model), target.weights)


async def test_an_adapter_on_one_of_two_tied_weights_unties_them():
    """As in the trainer's forward pass; PEFT's merge would change both."""
    model = with_adapter(Policy(), targets=("output", "turned"))
    base = model.get_base_model().head.weight.detach().clone()
    async with connected(model) as (syncer, [target]):
        await syncer.push(version=1)
    assert torch.equal(base, target.weights["head.weight"])
    assert torch.equal(merge(model).output.weight, target.weights["output.weight"])


async def test_layers_that_peft_put_into_a_model_are_merged():
    """Without a model of PEFT's around it, as transformers' `add_adapter` does."""
    config = peft.LoraConfig(r=2, target_modules=["layers.1"])
    model = peft.inject_adapter_in_model(config, Policy())
    train(model)
    async with connected(model) as (syncer, [target]):
        await syncer.push(version=1)
    layer = model.layers[1]
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.equal(expected, target.weights["layers.1.weight"])
    assert sorted(Policy().state_dict()) == sorted(target.weights)


async def test_memory_that_a_merge_takes_is_counted():
    """The result and one product, of the largest weight, beside the two frames of its bucket."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "3"]))
    largest = 64 * 64 * 4
    async with connected(model, transport="gloo", bucket_bytes=largest) as (syncer, _):
        record = await syncer.push(version=1)
    assert 4 * largest <= record.peak_extra_bytes <= 4 * largest + 200


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"peft_type": "LORA", "use_dora": True, "target_modules": ["layers.0"]},
            "layers.0: can't merge PEFT's Linear: it is a variant of LoRA, such as DoRA",
        ),
        (
            {"peft_type": "IA3", "target_modules": ["layers.0"], "feedforward_modules": []},
            "layers.0: can't merge PEFT's Linear: it isn't LoRA",
        ),
        (
            {
                "peft_type": "LORA",
                "target_modules": ["layers.0"],
                "trainable_token_indices": {"embed": [1, 2]},
            },
            "embed: can't merge PEFT's TrainableTokensWrapper: only LoRA and modules_to_save",
        ),
    ],
    ids=["dora", "ia3", "tokens"],
)
async def test_adapters_that_cannot_be_merged_are_refused(config, message):
    """Before anything is sent, with the layer's name."""
    model = peft.get_peft_model(Policy(), peft.get_peft_config(dict(config)))
    with pytest.raises(ValueError, match=message):
        await ParamSyncer.connect(model, [Target("engine/0")])


async def test_what_is_no_adapter_of_layers_is_refused(tiny):
    """A prompt that was trained can't be merged."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(copy.deepcopy(tiny), config)
    with pytest.raises(ValueError, match="an adapter of type PROMPT_TUNING can't be pushed"):
        await ParamSyncer.connect(model, [Target("engine/0")])


class AdapterTarget(Target):
    """Takes adapters."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.shape = dataclasses.replace(self.shape, max_lora_rank=8)
        self.config: dict[str, object] = {}

    async def begin_push(self, manifest: str, timeout_s: float) -> None:
        self.config = json.loads(decode_manifest(manifest).adapter)
        await super().begin_push(manifest, timeout_s)


@pytest.mark.parametrize("targets", [("layers.1", "turned"), ("layers.1", "turned", "embed")])
@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_an_adapter_comes_as_peft_saves_it(kind, targets, tmp_path):
    """Bit for bit, push after push; staged, whatever else is asked for."""
    model = with_adapter(Policy(), targets)
    target = AdapterTarget("engine/0")
    options = {"transport": kind, "folder": tmp_path if kind == "disk" else None}
    async with await ParamSyncer.connect(
        model, [target], lora="adapter", staged=False, **options
    ) as syncer:
        for version in (1, 2):
            train(model)
            record = await syncer.push(version=version)
            expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
            assert expected.keys() == target.weights.keys()
            for name, tensor in expected.items():
                assert torch.equal(tensor, target.weights[name]), name
        assert ["begin", "ready", "hold keep", "load", "commit"] * 2 == target.calls
    assert sum(tensor.nbytes for tensor in expected.values()) == record.num_bytes
    target.close()


async def test_an_adapters_configuration_comes_with_it(tmp_path):
    """As PEFT saves it, but for what only tells how to load it."""
    model = with_adapter(Policy(), rank_pattern={"turned": 7}, use_rslora=True)
    target = AdapterTarget("engine/0")
    async with await ParamSyncer.connect(model, [target], lora="adapter") as syncer:
        await syncer.push(version=1)
    target.close()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    for config in (saved, target.config):
        config["target_modules"] = sorted(config["target_modules"])
        del config["inference_mode"], config["auto_mapping"]
    assert saved == target.config


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Policy, "needs PEFT's model with one active adapter, not 0; take 'merged'"),
        (
            lambda: with_adapter(Policy(), modules_to_save=["score"]),
            "can't send base_model.model.score.modules_to_save.default.weight, which is trained",
        ),
        (
            lambda: with_adapter(Policy(), ("layers.0", "turned"), lora_bias=True),
            "can't send .*layers.0.lora_B.default.bias, which is trained too",
        ),
    ],
    ids=["none", "modules_to_save", "bias"],
)
async def test_what_an_adapter_alone_does_not_hold_is_refused(make, message):
    """Else the engine would answer with less than was trained."""
    with pytest.raises(ValueError, match=message):
        await ParamSyncer.connect(make(), [AdapterTarget("engine/0")], lora="adapter")


@pytest.mark.parametrize(
    ("largest", "lora", "message"),
    [
        (0, "adapter", "engine/1 takes no LoRA adapters: .* max_lora_rank: 4 "),
        (2, "adapter", "engine/1 takes LoRA adapters of rank 2 at most .*; this one's is 4"),
        (8, "merged", "engine/1 takes LoRA adapters only: connect with lora='adapter'"),
    ],
)
async def test_engines_that_do_not_take_what_is_sent_are_named(largest, lora, message):
    """Before anything is sent to any."""
    targets = [AdapterTarget("engine/0") if lora == "adapter" else Target("engine/0")]
    targets.append(Target("engine/1"))
    targets[1].shape = dataclasses.replace(targets[1].shape, max_lora_rank=largest)
    async with await ParamSyncer.connect(with_adapter(Policy()), targets, lora=lora) as syncer:
        with pytest.raises(WeightSyncError, match=message) as caught:
            await syncer.push(version=1)
    assert "engine/1" == caught.value.culprit
    assert not any("begin" in target.calls for target in targets)


async def test_verify_refuses_an_adapter():
    """What vLLM has of it can't be read back."""
    async with await ParamSyncer.connect(
        with_adapter(Policy()), [AdapterTarget("engine/0")], lora="adapter"
    ) as syncer:
        with pytest.raises(WeightSyncError, match="can't compare an adapter"):
            await syncer.verify()
