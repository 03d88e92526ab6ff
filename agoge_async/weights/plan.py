"""What a push sends, and in which pieces: pure functions of names, types and shapes.

Every rank and every worker computes or receives the same plan, so the order of what is sent is the
same everywhere. A *bucket* is a run of whole tensors that are gathered, checked and loaded
together; a *message* is what one rank sends of one bucket, or a part of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

ALIGNMENT = 64
"""Bytes that each tensor of a bucket starts at a multiple of: views of any type, whole cache lines.
"""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Types that weights may have, by torch's names, and their sizes."""


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a push sends, as the checkpoint names it."""

    name: str
    dtype: str
    """torch's name, such as bfloat16."""
    shape: tuple[int, ...]
    is_buffer: bool = False
    """Not a parameter: an engine may have no place for it."""

    @property
    def num_items(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Size of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.num_items * self.item_bytes


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in a bucket."""

    tensor: TensorMeta
    offset: int
    """In bytes; a multiple of `ALIGNMENT`."""


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that are gathered, checked and loaded together."""

    index: int
    slices: tuple[Slice, ...]
    num_bytes: int
    """Its size with the gaps of the alignment."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece of one tensor in a message."""

    slice: int
    """Index of the tensor in its bucket's `slices`."""
    first: int
    """First element of the tensor that the piece holds."""
    num_items: int
    offset: int
    """Of the piece in the message. [bytes]"""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """What one rank of the trainer sends of one bucket at once."""

    bucket: int
    source: int
    """The rank."""
    num_bytes: int
    parts: tuple[Part, ...] | None
    """Pieces of the bucket's tensors; None: the whole bucket, laid out as it is."""


def plan_buckets(tensors: Iterable[TensorMeta], budget: int) -> list[Bucket]:
    """Cut the tensors, in their order, into buckets of at most `budget` bytes.

    A tensor that is larger than the budget is a bucket of its own: tensors are never cut, so the
    largest bucket is the larger of the budget and the largest tensor.

    Args:
        tensors: What is sent; names must differ.
        budget: Largest size of a bucket, gaps included. [bytes]

    Raises:
        ValueError: The budget isn't positive, a name comes twice, or a type is unknown.
    """
    if budget < 1:
        raise ValueError(f"the budget of a bucket must be positive, got {budget}")
    buckets: list[Bucket] = []
    slices: list[Slice] = []
    filled = 0
    seen: set[str] = set()

    def close() -> None:
        nonlocal slices, filled
        if slices:
            buckets.append(Bucket(len(buckets), tuple(slices), filled))
        slices, filled = [], 0

    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(f"the name {tensor.name} comes twice")
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{tensor.name}: can't send the type {tensor.dtype}")
        seen.add(tensor.name)
        offset = aligned(filled)
        if offset + tensor.num_bytes > budget:
            close()
            offset = 0
        slices.append(Slice(tensor, offset))
        filled = offset + tensor.num_bytes
    close()
    return buckets


def whole_messages(buckets: Iterable[Bucket], sources: Sequence[int]) -> list[Message]:
    """Have each bucket sent whole, by one rank after the other.

    Args:
        buckets: What is sent.
        sources: Ranks that send, in turn: bucket i comes from `sources[i % len(sources)]`.
    """
    return [
        Message(bucket.index, sources[bucket.index % len(sources)], bucket.num_bytes, None)
        for bucket in buckets
    ]


def shard_messages(buckets: Iterable[Bucket], num_ranks: int) -> list[Message]:
    """Have each rank send its ZeRO-3 partition of each bucket's tensors.

    DeepSpeed cuts a flattened parameter in pieces of `ceil(numel / ranks)` elements, the last of
    which is padded (`deepspeed/runtime/zero/partition_parameters.py`, `_partition_param`). A rank
    without a piece of a bucket sends nothing of it.
    """
    messages = []
    for bucket in buckets:
        for rank in range(num_ranks):
            parts: list[Part] = []
            filled = 0
            for index, slice_ in enumerate(bucket.slices):
                tensor = slice_.tensor
                length = -(-tensor.num_items // num_ranks)
                first = rank * length
                count = min(length, tensor.num_items - first)
                if count > 0:
                    offset = aligned(filled)
                    parts.append(Part(index, first, count, offset))
                    filled = offset + count * tensor.item_bytes
            if parts:
                messages.append(Message(bucket.index, rank, filled, tuple(parts)))
    return messages


def cut_messages(
    messages: Iterable[Message], buckets: Sequence[Bucket], limit: int
) -> list[Message]:
    """Cut messages so that none holds more than `limit` bytes, but for at least one element.

    Args:
        messages: Whole or in parts.
        buckets: That they belong to.
        limit: Largest size of a message, gaps included. [bytes]
    """
    cut: list[Message] = []
    for message in messages:
        if message.num_bytes <= limit:
            cut.append(message)
            continue
        bucket = buckets[message.bucket]
        parts: list[Part] = []
        filled = 0
        for whole in parts_of(message, bucket):
            item = bucket.slices[whole.slice].tensor.item_bytes
            first, end = whole.first, whole.first + whole.num_items
            while first < end:
                offset = aligned(filled)
                count = min(end - first, (limit - offset) // item)
                if count < 1 and parts:
                    cut.append(Message(message.bucket, message.source, filled, tuple(parts)))
                    parts, filled = [], 0
                    continue
                count = max(count, 1)
                parts.append(Part(whole.slice, first, count, offset))
                filled = offset + count * item
                first += count
        cut.append(Message(message.bucket, message.source, filled, tuple(parts)))
    return cut


def parts_of(message: Message, bucket: Bucket) -> Sequence[Part]:
    """Give the pieces that a message holds of its bucket's tensors."""
    if message.parts is not None:
        return message.parts
    return [
        Part(index, 0, slice_.tensor.num_items, slice_.offset)
        for index, slice_ in enumerate(bucket.slices)
    ]


def aligned(position: int) -> int:
    """Give the next position, in bytes, that a tensor may start at."""
    return -(-position // ALIGNMENT) * ALIGNMENT
