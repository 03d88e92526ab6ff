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
from agoge_async.weights.plan import Bucket, Part, TensorMeta

STEP_BYTES = 1 << 20
"""What is copied at once: small enough to be found in the cache by who reads it next."""


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
        return whole + self.merging_bytes(names)

    def merging_bytes(self, names: Iterable[str]) -> int:
        """Memory that merging an adapter into one of these tensors takes."""
        return max(merge_bytes(self._tensors[n], self._deltas[n]) for n in names)

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

    def fill(
        self, bucket: Bucket, part: Part, out: torch.Tensor, rank: int | None
    ) -> Iterator[int]:
        """Write a piece of a tensor to its place in a frame.

        Gives the end of each of the steps that it takes. [bytes]

        Args:
            bucket: That holds the tensor.
            part: The piece.
            out: The frame.
            rank: Whose ZeRO-3 partition it is taken from, this process's own; None: the tensor is
                gathered.
        """
        meta = bucket.slices[part.slice].tensor
        if rank is None:
            values = self._whole(meta.name)[part.first :]
        else:
            values = self._shard(meta.name, part.first, rank)
        step = max(1, STEP_BYTES // meta.item_bytes) if out.device.type == "cpu" else part.num_items
        dtype = _torch_dtype(meta.dtype)
        for first in range(0, part.num_items, step):
            end = min(first + step, part.num_items)
            begin_byte, end_byte = (part.offset + n * meta.item_bytes for n in (first, end))
            out[begin_byte:end_byte].view(dtype).copy_(values[first:end])
            yield end_byte

    def _whole(self, name: str) -> torch.Tensor:
        return merged(self._tensors[name], self._deltas[name]).reshape(-1)

    def _shard(self, name: str, first: int, rank: int) -> torch.Tensor:
        """Give this rank's elements from one on, counted in the whole tensor."""
        tensor: Any = self._tensors[name]
        if not _is_partitioned(tensor):
            return self._whole(name)[first:]  # a buffer is on every rank
        shard: torch.Tensor = tensor.ds_tensor.data.view(-1)
        return shard[first - rank * shard.numel() :]


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
