"""Messages in memory that the ranks write and the workers read: of the host, or of one GPU."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch

from agoge_async.errors import WeightSyncError
from agoge_async.weights.frames import frame_bytes, stamp_of
from agoge_async.weights.manifest import CudaIpcRoute, IpcHandle, Manifest, SharedMemoryRoute
from agoge_async.weights.plan import Message, aligned

STAMP_POLL_S = 0.0002
"""How often a worker looks whether the next message is written."""


class Memory(Protocol):
    """What holds all messages of a push, one after the other."""

    data: torch.Tensor


class Segment:
    """Memory that processes of one user and host share, without a name that could be left behind.

    A memfd (`man memfd_create`): others open it through `/proc/PID/fd`; it is gone with the last
    process that has it, however that ends. It doesn't count against the size of /dev/shm.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._closing = threading.Lock()
        self.num_bytes = num_bytes
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        """Where others find it, while this process has it."""
        self._map = mmap.mmap(descriptor, num_bytes)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def make(cls, num_bytes: int) -> Segment:
        """Make one; its memory is taken at once.

        Raises:
            WeightSyncError: There isn't enough.
        """
        descriptor = os.memfd_create("agoge-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise WeightSyncError(
                f"no {num_bytes / 1e6:.0f} MB of shared memory for the weights: {error.strerror}; "
                "transport='gloo' takes two buckets"
            ) from error

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Segment:
        """Open another process's.

        Raises:
            WeightSyncError: It is gone, or isn't on this host.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WeightSyncError(
                f"the trainer's shared memory {path} can't be opened: {error.strerror}"
            ) from error
        return cls(descriptor, num_bytes)

    def close(self) -> None:
        """Let go of it; the memory stays until the last tensor that shows it is gone.

        Any thread may call it, at once with another one: a number that is closed twice would be
        another file's by then.
        """
        with self._closing:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            del self.data


class CudaSegment:
    """Memory of this process's GPU, which other processes open by CUDA's IPC handles."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def handles(self, count: int) -> tuple[IpcHandle, ...]:
        """Give one for each process that opens it: torch counts who has a handle."""
        storage: Any = self.data.untyped_storage()
        return tuple(IpcHandle(*storage._share_cuda_()[1:]) for _ in range(count))

    def close(self) -> None:
        """Let go of it."""
        del self.data


class SegmentLane:
    """Writes each message to its place: what is written is sent."""

    num_bytes = 0
    takes_any_order = True

    def __init__(self, memory: Memory, messages: Sequence[Message]) -> None:
        self._frames = frames_in(memory.data, messages)
        self._is_on_gpu = memory.data.is_cuda

    def frame(self, message: Message) -> torch.Tensor:
        """Give the message's place."""
        return self._frames[message.bucket, message.source]

    def send(self, message: Message, frame: torch.Tensor) -> None:
        """Nothing is left to be done."""

    def flush(self) -> None:
        """Wait until what a GPU was told to write is written."""
        if self._is_on_gpu:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Let go of the places; the segment is its owner's."""
        self._frames.clear()


def frames_in(
    data: torch.Tensor, messages: Sequence[Message]
) -> dict[tuple[int, int], torch.Tensor]:
    """Give the place of each message in a segment, by bucket and source."""
    frames = {}
    offset = 0
    for message in messages:
        size = frame_bytes(message)
        frames[message.bucket, message.source] = data[offset : offset + size]
        offset = aligned(offset + size)
    return frames


def segment_bytes(messages: Sequence[Message]) -> int:
    """Size of the segment that holds all messages."""
    return sum(aligned(frame_bytes(message)) for message in messages)


class SegmentInlet:
    """Reads messages where they are, as soon as they carry the stamp of the push."""

    def __init__(self, route: SharedMemoryRoute | CudaIpcRoute, worker: int) -> None:
        self.route = route
        self._segment: Segment | None = None
        if isinstance(route, SharedMemoryRoute):
            self._segment = Segment.open(route.segment, route.num_bytes)
            self._data = self._segment.data
        else:
            self._data = _open_cuda(route, worker)
        self._frames: dict[tuple[int, int], torch.Tensor] = {}
        self._stamp = 0
        self._deadline = 0.0
        self._closed = threading.Event()

    def begin(self, manifest: Manifest) -> None:
        """Find the places."""
        self._frames = frames_in(self._data, manifest.messages)
        self._stamp = manifest.stamp
        self._deadline = time.monotonic() + manifest.timeout_s

    def receive(self, message: Message) -> torch.Tensor:
        """Give the message where it is, once it is there."""
        frame = self._frames[message.bucket, message.source]
        while stamp_of(frame) != self._stamp:
            if self._closed.wait(STAMP_POLL_S):
                raise WeightSyncError("the push was given up")
            if time.monotonic() > self._deadline:
                raise WeightSyncError(
                    f"bucket {message.bucket} from rank {message.source} was not written in time"
                )
        return frame

    def close(self) -> None:
        """Let go of the segment."""
        self._closed.set()
        self._frames = {}
        if self._segment is not None:
            self._segment.close()


def _open_cuda(route: CudaIpcRoute, worker: int) -> torch.Tensor:
    """Show another process's memory of this worker's GPU."""
    device = torch.cuda.current_device()
    opened: Any = torch.UntypedStorage
    handle = msgspec.structs.astuple(route.handles[worker - 1])
    storage = opened._new_shared_cuda(device, *handle)
    data = torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}")
    return data.set_(storage)[: route.num_bytes]
