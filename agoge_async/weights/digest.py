"""A 64-bit digest of bytes in a tensor, at the speed of memory. Finds accidents, not attacks.

On the CPU it is XXH3 (https://github.com/Cyan4973/xxHash). On a GPU it is multilinear hashing: the
sum, modulo 2^64, of each 8-byte word times an odd weight of its place (Lemire & Kaser 2014,
"Strongly universal string hashing is fast"). An odd weight can be undone, so that a single word
that changed always changes the sum. Both ends of a transport have their frames on the same kind of
device.
"""

from __future__ import annotations

import functools
from concurrent.futures import Executor, Future

import torch
import xxhash

CHUNK_WORDS = 1 << 15
"""Words that have weights of their own; chunks are combined by a polynomial."""
CHUNKS_AT_ONCE = 64
"""Bounds the memory that the products take: 16 MiB."""
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def digest(data: torch.Tensor) -> int:
    """Give the digest of a flat uint8 tensor, whose size is a multiple of 8 bytes."""
    if data.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(data.numpy())
    return multilinear(data)


class RunningDigest:
    """The digest of a tensor that is being written, taken in another thread right behind.

    Args:
        data: As `digest` takes it.
        thread: An executor with one thread.
    """

    def __init__(self, data: torch.Tensor, thread: Executor) -> None:
        self._data = data
        self._thread = thread
        self._hash = xxhash.xxh3_64() if data.device.type == "cpu" else None
        self._begin = 0
        self._last: Future[None] | None = None

    def advance(self, end: int) -> None:
        """Take note that everything before a byte is written."""
        if self._hash is not None and end > self._begin:
            written = self._data[self._begin : end].numpy()
            self._last = self._thread.submit(self._hash.update, written)
            self._begin = end

    def value(self) -> int:
        """Give the digest, once everything is written."""
        if self._hash is None:
            return multilinear(self._data)
        self.advance(self._data.numel())
        if self._last is not None:
            self._last.result()
        return self._hash.intdigest()


def multilinear(data: torch.Tensor) -> int:
    """Give the digest that GPUs compute; on any device."""
    words = data.view(torch.int64)
    weights = _weights(words.device)
    total: int = words.numel()
    whole = words.numel() // CHUNK_WORDS * CHUNK_WORDS
    sums = [
        (chunks * weights).sum(dim=1)
        for chunks in words[:whole].view(-1, CHUNK_WORDS).split(CHUNKS_AT_ONCE)
    ]
    rest = words[whole:]
    sums.append((rest * weights[: rest.numel()]).sum(dim=0, keepdim=True))
    for chunk_sum in torch.cat(sums).tolist():
        total = (total * _MULTIPLIER + chunk_sum) & _MASK
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    places = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device)
    mixed = places * (_MULTIPLIER - (1 << 64))  # wraps, as all of it does
    mixed = mixed ^ (mixed >> 29)
    return mixed | 1
