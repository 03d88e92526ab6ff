"""A 64-bit digest of bytes in a tensor, at the speed of memory, on the CPU or a GPU.

Finds accidents, not attacks. Multilinear hashing: the sum, modulo 2^64, of each 8-byte word times
an odd weight of its place (Lemire & Kaser 2014, "Strongly universal string hashing is fast"). An
odd weight can be undone, so that a single word that changed always changes the sum.
"""

from __future__ import annotations

import functools

import torch

CHUNK_WORDS = 1 << 15
"""Words that have weights of their own; chunks are combined by a polynomial. The weights and a
chunk fit a core's cache."""
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def digest(data: torch.Tensor) -> int:
    """Give the digest of a flat uint8 tensor, whose size is a multiple of 8 bytes."""
    words = data.view(torch.int64)
    weights = _weights(words.device)
    total: int = words.numel()
    sums = []
    for chunk in words.split(CHUNK_WORDS):
        part = weights[: chunk.numel()]
        on_cpu = chunk.device.type == "cpu"
        sums.append(torch.dot(chunk, part) if on_cpu else (chunk * part).sum())
    if sums:
        for chunk_sum in torch.stack(sums).tolist():
            total = (total * _MULTIPLIER + chunk_sum) & _MASK
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    places = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device)
    mixed = places * (_MULTIPLIER - (1 << 64))  # wraps, as all of it does
    mixed = mixed ^ (mixed >> 29)
    return mixed | 1
