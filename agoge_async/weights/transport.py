"""How a message gets from a rank to the workers: by broadcast over gloo, or by shared memory.

A message in memory is its payload, filled up to `ALIGNMENT`, and a trailer of `DIGEST_BYTES`: its
digest, and the version of the push. So a worker knows a message that was damaged, and one that
belongs to another push, before it loads anything of it. Used by both sides; knows no model.
"""

from __future__ import annotations

import datetime
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from agoge_async.errors import WeightSyncError
from agoge_async.weights.digest import digest
from agoge_async.weights.manifest import DIGEST_BYTES, GlooRoute, Manifest, SharedMemoryRoute
from agoge_async.weights.plan import Message, aligned

CONNECT_S = 5.0
"""How long a store that is there may take to answer; one that is gone is tried as long."""
_WORD = 1 << 64


def frame_bytes(message: Message) -> int:
    """Size of a message in memory."""
    return aligned(message.num_bytes) + DIGEST_BYTES


def seal(frame: torch.Tensor, version: int, *, with_digest: bool) -> None:
    """Write the trailer of a filled frame."""
    payload, trailer = frame[:-DIGEST_BYTES], frame[-DIGEST_BYTES:].view(torch.int64)
    trailer[0] = _signed(digest(payload)) if with_digest else 0
    trailer[1] = version


def check(frame: torch.Tensor, message: Message, version: int, *, with_digest: bool) -> None:
    """Compare a frame that came with its trailer.

    Raises:
        WeightSyncError: It was damaged, or is of another push.
    """
    payload, trailer = frame[:-DIGEST_BYTES], frame[-DIGEST_BYTES:].view(torch.int64)
    where = f"bucket {message.bucket} from rank {message.source}"
    if int(trailer[1]) != version:
        raise WeightSyncError(f"{where} is of version {int(trailer[1])}, not {version}")
    if with_digest and int(trailer[0]) != _signed(digest(payload)):
        raise WeightSyncError(f"{where} was damaged on its way: its digest is wrong")


def _signed(value: int) -> int:
    return value - _WORD if value >= _WORD // 2 else value


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Start the store that the groups of a syncer meet at, on a free port."""
    return TCPStore(host, 0, is_master=True, timeout=_seconds(timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store; explicitly, so that torchrun's variables can't redirect it."""
    connect = _seconds(min(timeout_s, CONNECT_S))
    store = TCPStore(host, port, is_master=False, timeout=connect, wait_for_workers=False)
    store.set_timeout(_seconds(timeout_s))
    return store


class GlooGroup:
    """A source and the workers, outside torch's registry of groups; rank 0 is the source.

    Blocks until all have come.
    """

    def __init__(
        self, store: TCPStore, route: GlooRoute, source: int, rank: int, timeout_s: float
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=route.host)]
        options._timeout = _seconds(timeout_s)
        prefixed = PrefixStore(f"{route.epoch}/{source}", store)
        self._timeout = _seconds(timeout_s)
        self._group: ProcessGroupGloo | None = ProcessGroupGloo(
            prefixed, rank, route.num_workers + 1, options
        )

    def broadcast(self, frame: torch.Tensor) -> Work:
        """Begin to send or receive a frame."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        group = self._group
        if group is None:
            raise WeightSyncError("the group was left")
        return group.broadcast([frame], options)

    def close(self) -> None:
        """Leave: whoever waits for this end fails now."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


class Lane(Protocol):
    """One rank's way to all workers."""

    @property
    def num_bytes(self) -> int:
        """Memory that it holds of its own."""
        ...

    def frame(self, message: Message) -> torch.Tensor:
        """Give the memory that a message is to be written to; waits until it is free."""
        ...

    def send(self, message: Message, frame: torch.Tensor) -> None:
        """Begin to send it."""
        ...

    def flush(self) -> None:
        """Wait until all is sent."""
        ...

    def close(self) -> None:
        """Give everything back; ends what waits, too."""
        ...


class GlooLane:
    """Sends from `num_frames` frames in turn: one is filled while another is on its way."""

    def __init__(self, group: GlooGroup, largest: int, num_frames: int) -> None:
        self._group = group
        self._frames = [torch.empty(largest, dtype=torch.uint8) for _ in range(num_frames)]
        self._works: list[Work | None] = [None] * num_frames
        self._next = 0
        self.num_bytes = largest * num_frames
        """Memory that it holds."""

    def frame(self, message: Message) -> torch.Tensor:
        """Give the next frame, once what it held is sent."""
        self._wait(self._next)
        return self._frames[self._next][: frame_bytes(message)]

    def send(self, message: Message, frame: torch.Tensor) -> None:
        """Begin to broadcast it."""
        del message
        self._works[self._next] = self._group.broadcast(frame)
        self._next = (self._next + 1) % len(self._frames)

    def flush(self) -> None:
        """Wait until all is sent."""
        for index in range(len(self._works)):
            self._wait(index)

    def _wait(self, index: int) -> None:
        work, self._works[index] = self._works[index], None
        if work is not None:
            work.wait()

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


class Segment:
    """Memory that processes of one user and host share, without a name that could be left behind.

    A memfd (`man memfd_create`): others open it through `/proc/PID/fd`; it is gone with the last
    process that has it, however that ends. It doesn't count against the size of /dev/shm.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
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
                f"no {num_bytes / 1e6:.0f} MB of shared memory for the weights: {error.strerror}"
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
        """Let go of it; the memory stays until the last tensor that shows it is gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            del self.data


class SharedMemoryLane:
    """Writes each message to its place in a segment: what is written is sent."""

    num_bytes = 0

    def __init__(self, segment: Segment, messages: Sequence[Message]) -> None:
        self._segment = segment
        self._frames = frames_in(segment, messages)

    def frame(self, message: Message) -> torch.Tensor:
        """Give the message's place."""
        return self._frames[message.bucket, message.source]

    def send(self, message: Message, frame: torch.Tensor) -> None:
        """Nothing is left to be done."""

    def flush(self) -> None:
        """Nothing is on its way."""

    def close(self) -> None:
        """Let go of the places; the segment is its owner's."""
        self._frames.clear()


def frames_in(segment: Segment, messages: Sequence[Message]) -> dict[tuple[int, int], torch.Tensor]:
    """Give the place of each message in a segment, by bucket and source."""
    frames = {}
    offset = 0
    for message in messages:
        size = frame_bytes(message)
        frames[message.bucket, message.source] = segment.data[offset : offset + size]
        offset = aligned(offset + size)
    return frames


def segment_bytes(messages: Sequence[Message]) -> int:
    """Size of the segment that holds all messages."""
    return sum(aligned(frame_bytes(message)) for message in messages)


class Inlet(Protocol):
    """A worker's end of the way."""

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for the next message; gives its frame."""
        ...

    def close(self) -> None:
        """Leave; ends what waits, too."""
        ...


class GlooInlet:
    """Receives what the sources broadcast; kept from push to push.

    Args:
        route: Where to meet.
        worker: Rank of this worker among all of them.
        timeout_s: For the meeting, and for each message.
    """

    def __init__(self, route: GlooRoute, worker: int, timeout_s: float) -> None:
        self.route = route
        store = join_store(route.host, route.port, timeout_s)
        self._groups = {
            source: GlooGroup(store, route, source, worker, timeout_s) for source in route.sources
        }

    def receive(self, message: Message) -> torch.Tensor:
        """Receive into memory of its own."""
        frame = torch.empty(frame_bytes(message), dtype=torch.uint8)
        self._groups[message.source].broadcast(frame).wait()
        return frame

    def close(self) -> None:
        """Leave the groups."""
        for group in list(self._groups.values()):
            group.close()


class SharedMemoryInlet:
    """Reads a segment that is written already."""

    def __init__(self, route: SharedMemoryRoute, manifest: Manifest) -> None:
        self.route = route
        self._segment = Segment.open(route.segment, route.num_bytes)
        self._frames = frames_in(self._segment, manifest.messages)

    def receive(self, message: Message) -> torch.Tensor:
        """Give the message where it is."""
        return self._frames[message.bucket, message.source]

    def close(self) -> None:
        """Let go of the segment."""
        self._frames.clear()
        self._segment.close()


def _seconds(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=timeout_s)
