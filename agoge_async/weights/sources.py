"""A trainer's model, as a push reads it: names, sizes, and bytes into buckets.

Runs in the trainer's ranks. Nothing here sends; gathers are collective over the ranks, in the order
of the buckets, on the calling thread and its current stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from agoge_async.errors import WeightSyncError
from agoge_async.weights.adapters import (
    Adapter,
    Deltas,
    base_model,
    checkpoint_tensors,
    merge_bytes,
    merged,
)
from agoge_async.weights.plan import Bucket, Message, TensorMeta


class ModelSource:
    """The parameters and persistent buffers of a model, under the names of its checkpoint.

    LoRA adapters of PEFT that are active now are merged as the weights are read.

    Args:
        model: A `torch.nn.Module` or a DeepSpeed engine of any ZeRO stage.
        adapter_alone: Only the LoRA adapter, under the names that PEFT saves it by.

    Raises:
        ValueError: An adapter can't be merged, or isn't all that is trained.
    """

    def __init__(self, model: nn.Module, *, adapter_alone: bool = False) -> None:
        module = _unwrapped(model)
        self.adapter = Adapter.of(module) if adapter_alone else None
        """Which the tensors are; None: they are a model."""
        tensors: Iterable[tuple[str, torch.Tensor, Deltas]]
        if self.adapter is not None:
            tensors = ((name, tensor, ()) for name, tensor in self.adapter.tensors.items())
        else:
            tensors = checkpoint_tensors(base_model(module))
        self._tensors: dict[str, torch.Tensor] = {}
        self._deltas: dict[str, Deltas] = {}
        self.aliases: dict[str, str] = {}
        """Other names of tied parameters, and the name that is sent."""
        first_names: dict[tuple[int, Deltas], str] = {}
        for name, tensor, deltas in tensors:
            first = first_names.setdefault((id(tensor), deltas), name)
            if first == name:
                self._tensors[name] = tensor
                self._deltas[name] = deltas
            else:
                self.aliases[name] = first
        if not self._tensors:
            raise WeightSyncError("the model has no parameters")
        self.is_partitioned = any(map(_is_partitioned, self._tensors.values()))
        """Whether ZeRO-3 has cut the parameters up."""
        self.is_merged = any(self._deltas.values())
        """Whether an adapter is added to any of them."""
        self.device: torch.device | None = None
        """The GPU that this rank trains on."""
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Have this thread use the rank's GPU: CUDA chooses one anew in each thread."""
        return contextlib.nullcontext() if self.device is None else torch.cuda.device(self.device)

    def metadata(self, dtype: str | None = None) -> list[TensorMeta]:
        """Describe what is sent, in order; nothing is gathered.

        Args:
            dtype: What floating-point tensors are cast to; None: they are sent as they are.
        """
        return [
            TensorMeta(
                name,
                dtype if dtype is not None and tensor.is_floating_point() else _name(tensor.dtype),
                tuple(getattr(tensor, "ds_shape", tensor.shape)),
                is_buffer=not isinstance(tensor, nn.Parameter),
            )
            for name, tensor in self._tensors.items()
        ]

    def cast(self, metadata: Iterable[TensorMeta]) -> tuple[str, ...]:
        """Give the types of the model that are sent as others."""
        held = {meta.name: _name(self._tensors[meta.name].dtype) for meta in metadata}
        return tuple(sorted({held[m.name] for m in metadata if held[m.name] != m.dtype}))

    def held_bytes(self, names: Iterable[str]) -> int:
        """Memory that reading tensors takes: ZeRO-3 has to gather them, an adapter is merged."""
        names = list(names)
        whole: int = sum(t.ds_numel * t.element_size() for t in self._partitioned(names))
        return whole + max(merge_bytes(self._tensors[n], self._deltas[n]) for n in names)

    def _partitioned(self, names: Iterable[str]) -> list[Any]:
        """List what ZeRO-3 has to gather for whole tensors, adapters included."""
        parts: dict[int, torch.Tensor] = {}
        for name in names:
            for part in (self._tensors[name], *(p for d in self._deltas[name] for p in d.parts)):
                parts[id(part)] = part
        return [part for part in parts.values() if _is_partitioned(part)]

    @contextlib.contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[None]:
        """Have whole tensors on every rank; collective under ZeRO-3, else free."""
        partitioned = self._partitioned(names)
        if not partitioned:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(partitioned):
            yield

    def fill(self, bucket: Bucket, index: int, out: torch.Tensor) -> None:
        """Write one tensor of a bucket, which must be gathered, to its place in a frame."""
        slice_ = bucket.slices[index]
        meta = slice_.tensor
        place = out[slice_.offset : slice_.offset + meta.num_bytes]
        place.view(_torch_dtype(meta.dtype)).view(meta.shape).copy_(
            merged(self._tensors[meta.name], self._deltas[meta.name])
        )

    def fill_shard(self, bucket: Bucket, message: Message, out: torch.Tensor) -> None:
        """Write this rank's partitions of a bucket's tensors to their places in a frame."""
        for part in message.parts or ():
            meta = bucket.slices[part.slice].tensor
            tensor: Any = self._tensors[meta.name]
            shard = tensor.ds_tensor if _is_partitioned(tensor) else _flat(tensor, part.first)
            place = out[part.offset : part.offset + part.num_items * meta.item_bytes]
            place.view(_torch_dtype(meta.dtype)).copy_(shard.data.view(-1)[: part.num_items])


def _unwrapped(model: Any) -> nn.Module:
    """Take off DeepSpeed's engine, DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and (hasattr(model, "zero_optimization") or _is_parallel(model)):
            inner = model.module
        if inner is None:
            break
        model = inner
    if not isinstance(model, nn.Module):
        raise TypeError(f"can't push a {type(model).__name__}; give a torch.nn.Module")
    return model


def _is_parallel(model: Any) -> bool:
    return isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)


def _is_partitioned(tensor: Any) -> bool:
    return hasattr(tensor, "ds_id")


def _flat(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Give a whole tensor from an element on: a buffer is on every rank."""
    return tensor.data.reshape(-1)[first:]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
