"""A message in memory: its payload, filled up to `ALIGNMENT`, and a trailer of `DIGEST_BYTES`.

The trailer is the payload's digest and the stamp of the push. So a worker knows a message that was
damaged, and one that belongs to another push, before it loads anything of it.
"""

from __future__ import annotations

import mmap
import sys

import torch

from agoge_async.errors import WeightSyncError
from agoge_async.weights.digest import digest
from agoge_async.weights.manifest import DIGEST_BYTES, Manifest
from agoge_async.weights.plan import Message, aligned

_WORD = 1 << 64
_IDLE_REFERENCES = 3
"""Of a buffer that no tensor shows: the list's, the loop's and that of the call that counts."""
_MAX_WASTE = 2


def frame_bytes(message: Message) -> int:
    """Size of a message in memory."""
    return aligned(message.num_bytes) + DIGEST_BYTES


def payload_of(frame: torch.Tensor) -> torch.Tensor:
    """Show what comes before the trailer."""
    return frame[:-DIGEST_BYTES]


def seal(frame: torch.Tensor, checksum: int, stamp: int) -> None:
    """Write the trailer of a filled frame; the stamp comes last.

    Args:
        frame: The frame.
        checksum: The payload's digest; 0, where digests aren't checked.
        stamp: Of the push.
    """
    trailer = frame[-DIGEST_BYTES:].view(torch.int64)
    trailer[0] = _signed(checksum)
    trailer[1] = stamp


def stamp_of(frame: torch.Tensor) -> int:
    """Give the stamp of the push that a frame belongs to."""
    return int(frame[-8:].view(torch.int64))


def check(frame: torch.Tensor, message: Message, manifest: Manifest) -> None:
    """Compare a frame that came with its trailer.

    Raises:
        WeightSyncError: It was damaged, or is of another push.
    """
    trailer = frame[-DIGEST_BYTES:].view(torch.int64)
    where = f"bucket {message.bucket} from rank {message.source}"
    if int(trailer[1]) != manifest.stamp:
        raise WeightSyncError(f"{where} is of another push")
    if manifest.checks_digests and int(trailer[0]) != _signed(digest(payload_of(frame))):
        raise WeightSyncError(f"{where} was damaged on its way: its digest is wrong")


def _signed(value: int) -> int:
    return value - _WORD if value >= _WORD // 2 else value


class FramePool:
    """Memory of frames that come, used again once no tensor shows it.

    Touching a page for the first time can cost more than copying it does; and a loader may keep a
    tensor for longer than the next message takes to come.
    """

    def __init__(self) -> None:
        self._buffers: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Give a frame that nobody else has."""
        best: mmap.mmap | None = None
        for buffer in self._buffers:
            fits = num_bytes <= len(buffer) <= _MAX_WASTE * num_bytes
            is_idle = fits and sys.getrefcount(buffer) <= _IDLE_REFERENCES
            if is_idle and (best is None or len(buffer) < len(best)):
                best = buffer
        if best is None:
            best = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._buffers.append(best)
        return torch.frombuffer(best, dtype=torch.uint8)[:num_bytes]

    def clear(self) -> None:
        """Give back all that no tensor shows."""
        self._buffers.clear()
