"""A model with LoRA adapters of PEFT: its base model's checkpoint with them merged, or one alone.

Adapters are merged as each weight is read; nothing of the trainer's changes. PEFT's layers are
known by their attributes: `peft` is imported by whoever made the model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What one adapter adds to one weight or bias of a layer."""

    layer: Any
    """PEFT's, around the layer of the base model."""
    adapter: str
    is_bias: bool = False

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The adapter's tensors that it is made of."""
        layer, adapter = self.layer, self.adapter
        if self.is_bias:
            return (layer.lora_B[adapter].bias,)
        if self._is_embedding:
            return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight

    def names(self, layer: str) -> tuple[str, str]:
        """Name the parts of a weight's as PEFT saves them, given the layer's name."""
        if self._is_embedding:
            return f"{layer}.lora_embedding_A", f"{layer}.lora_embedding_B"
        return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"

    @property
    def _is_embedding(self) -> bool:
        return self.adapter in self.layer.lora_embedding_A

    def add_to(self, tensor: torch.Tensor) -> None:
        """Add it as PEFT does, which rounds before the sum for an embedding, after it otherwise."""
        layer, adapter = self.layer, self.adapter
        if adapter in layer.merged_adapters:
            return
        if self.is_bias:
            tensor += layer.lora_B[adapter].bias * layer.scaling[adapter]
            return
        delta = layer.get_delta_weight(adapter)
        tensor += delta.to(tensor.dtype) if self._is_embedding else delta


Deltas = tuple[Delta, ...]


def merged(tensor: torch.Tensor, deltas: Deltas) -> torch.Tensor:
    """Give a weight with adapters merged in; all of their parts must be gathered."""
    if not deltas:
        return tensor.data
    with torch.no_grad():
        total = tensor.data.clone()
        for delta in deltas:
            delta.add_to(total)
    return total


def merge_bytes(tensor: Any, deltas: Sequence[Delta]) -> int:
    """Memory that `merged` takes: its result and one product."""
    if not deltas:
        return 0
    item_bytes = tensor.element_size() + max(d.parts[-1].element_size() for d in deltas)
    num_bytes: int = getattr(tensor, "ds_numel", tensor.numel()) * item_bytes
    return num_bytes


def base_model(model: Any) -> Any:
    """Take off PEFT's model; any other is given as it is.

    Raises:
        ValueError: Its adapter isn't one that can be merged.
    """
    if not _is_peft_model(model):
        return model
    for config in model.peft_config.values():
        if config.is_prompt_learning:
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(f"an adapter of type {kind} can't be pushed; only LoRA can")
    return model.get_base_model()


def _is_peft_model(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as PEFT saves it."""

    config: str
    """PEFT's configuration, as JSON."""
    rank: int
    """The largest of its layers'."""
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: Any) -> Adapter:
        """Take the one that is active.

        Raises:
            ValueError: There is none, or it isn't all that is trained.
        """
        active = list(model.active_adapters) if _is_peft_model(model) else []
        if len(active) != 1:
            raise _not_alone(f"needs PEFT's model with one active adapter, not {len(active)}")
        tensors: dict[str, torch.Tensor] = {}
        rank = 0
        for name, layer in model.named_modules():
            for _, delta in _layer_deltas(layer, name) if _is_layer(layer) else ():
                if not delta.is_bias:
                    tensors |= dict(zip(delta.names(name), delta.parts, strict=True))
                    rank = max(rank, layer.r[delta.adapter])
        if not tensors:
            raise _not_alone("needs an adapter with LoRA layers")
        sent = set(map(id, tensors.values()))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in sent:
                raise _not_alone(f"can't send {name}, which is trained too")
        config = model.peft_config[active[0]].to_dict()
        return cls(json.dumps(config, default=_plain), rank, tensors)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def _not_alone(why: str) -> ValueError:
    return ValueError(f"lora='adapter' {why}; take 'merged'")


def checkpoint_tensors(
    module: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor, Deltas]]:
    """Give what a checkpoint would hold, and what is to be added to each tensor.

    Tied tensors come under each of their names; of adapters, those that are active.

    Raises:
        ValueError: An adapter can't be merged.
    """
    module, deltas = _peeled(module, prefix)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter, tuple(deltas.get(name, ()))
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer, ()
    for name, child in module._modules.items():
        if child is not None:
            yield from checkpoint_tensors(child, f"{prefix}{name}.")


def _peeled(module: Any, prefix: str) -> tuple[nn.Module, dict[str, list[Delta]]]:
    """Take off what PEFT put around a layer; gives what it adds to which parameter."""
    deltas: dict[str, list[Delta]] = {}
    outer = module
    while True:
        if _is_layer(module):
            for name, delta in _layer_deltas(module, prefix):
                deltas.setdefault(name, []).append(delta)
            module = module.base_layer
        elif "original_module" in module._modules:
            module = _trained_module(module, prefix)
        else:
            break
    for name in deltas:
        parameter = module._parameters.get(name)
        if parameter is None or not parameter.is_floating_point():
            raise _unmergeable(outer, prefix, f"its base layer has no {name} to add to")
    return module, deltas


def _is_layer(module: nn.Module) -> bool:
    return "base_layer" in module._modules and hasattr(module, "merged_adapters")


def _layer_deltas(layer: Any, prefix: str) -> Iterator[tuple[str, Delta]]:
    if not hasattr(layer, "lora_A"):
        raise _unmergeable(layer, prefix, "it isn't LoRA")
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A and adapter not in layer.lora_embedding_A:
            continue
        if adapter in layer.lora_variant:
            raise _unmergeable(layer, prefix, "it is a variant of LoRA, such as DoRA")
        yield getattr(layer, "parameter_name", "weight"), Delta(layer, adapter)
        if layer.lora_bias.get(adapter):
            yield "bias", Delta(layer, adapter, is_bias=True)


def _trained_module(wrapper: Any, prefix: str) -> nn.Module:
    """Give the copy that is trained in a module's place (PEFT's `modules_to_save`)."""
    if "modules_to_save" not in wrapper._modules:
        raise _unmergeable(wrapper, prefix, "only LoRA and modules_to_save can be pushed")
    module: nn.Module = wrapper.original_module
    for adapter in wrapper.active_adapters[:1]:
        module = wrapper.modules_to_save[adapter]
    return module


def _unmergeable(layer: nn.Module, prefix: str, why: str) -> ValueError:
    where = prefix.removesuffix(".") or "the model"
    return ValueError(f"{where}: can't merge PEFT's {type(layer).__name__}: {why}")
