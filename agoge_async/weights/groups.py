"""Messages by broadcast, in a process group of a source and all workers: gloo, or NCCL.

The groups are made here, outside torch's registry, so that they can be left and made anew while
others live, and every wait in them has a deadline.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from agoge_async.errors import WeightSyncError
from agoge_async.weights.frames import FramePool, frame_bytes
from agoge_async.weights.manifest import GroupRoute, Manifest
from agoge_async.weights.plan import Message

CONNECT_S = 5.0
"""How long a store that is there may take to answer; one that is gone is tried as long."""
NCCL_POLL_S = 0.0005
"""How often a broadcast over NCCL is looked at: waiting for it in CUDA knows no deadline."""


def serve_store(host: str, timeout_s: float) -> TCPStore:
    """Start the store that the groups of a syncer meet at, on a free port."""
    return TCPStore(host, 0, is_master=True, timeout=_seconds(timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store; explicitly, so that torchrun's variables can't redirect it."""
    connect = _seconds(min(timeout_s, CONNECT_S))
    store = TCPStore(host, port, is_master=False, timeout=connect, wait_for_workers=False)
    store.set_timeout(_seconds(timeout_s))
    return store


class Group:
    """A source and the workers; rank 0 is the source. Blocks until all have come.

    Args:
        store: Where they meet.
        route: Names the group, and what it is made of.
        source: Rank of the trainer that sends.
        rank: Of this process in the group.
        device: Where frames are: the CPU for gloo, a GPU for NCCL.
        timeout_s: For the meeting, and for each message.

    Raises:
        WeightSyncError: This torch has no NCCL, or it doesn't work between these GPUs.
    """

    def __init__(
        self,
        store: TCPStore,
        route: GroupRoute,
        source: int,
        rank: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._timeout = _seconds(timeout_s)
        self._is_nccl = route.backend == "nccl"
        prefixed = PrefixStore(f"{route.epoch}/{source}", store)
        make = _make_nccl if self._is_nccl else _make_gloo
        self._group: Any = make(prefixed, rank, route, self._timeout)
        if self._is_nccl:
            # NCCL connects with the first message. One whose content is known shows that it works.
            hello = torch.full((1,), 7 if rank == 0 else 0, dtype=torch.uint8, device=device)
            self.wait(self.broadcast(hello))
            if int(hello) != 7:
                raise WeightSyncError("a broadcast over NCCL said that it was done, and wasn't")

    def broadcast(self, frame: torch.Tensor) -> Work:
        """Begin to send or receive a frame."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        group = self._group
        if group is None:
            raise WeightSyncError("the group was left")
        work: Work = group.broadcast([frame], options)
        return work

    def wait(self, work: Work) -> None:
        """Wait until a frame is sent, or here.

        Raises:
            WeightSyncError: It wasn't in time.
            RuntimeError: The other side left.
        """
        if self._is_nccl:
            deadline = time.monotonic() + self._timeout.total_seconds()
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"NCCL sent nothing for {self._timeout.seconds} s")
                time.sleep(NCCL_POLL_S)
        work.wait()

    def close(self) -> None:
        """Leave: whoever waits for this end fails now."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _make_gloo(
    store: PrefixStore, rank: int, route: GroupRoute, timeout: datetime.timedelta
) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=route.host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, route.num_workers + 1, options)


def _make_nccl(
    store: PrefixStore, rank: int, route: GroupRoute, timeout: datetime.timedelta
) -> Any:
    if not torch.distributed.is_nccl_available():
        raise WeightSyncError("this torch has no NCCL; take transport='gloo' or 'shm'")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, route.num_workers + 1, options)


class GroupLane:
    """Sends from `num_frames` frames in turn: one is filled while another is on its way."""

    def __init__(self, group: Group, largest: int, num_frames: int, device: torch.device) -> None:
        self._group = group
        self._frames = [
            torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(num_frames)
        ]
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
            self._group.wait(work)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


class GroupInlet:
    """Receives what the sources broadcast.

    Args:
        route: Where to meet.
        worker: Rank of this worker among all of them.
        device: Where frames are to be.
        pool: Memory for those on the CPU.
        timeout_s: For the meeting, and for each message.
    """

    def __init__(
        self,
        route: GroupRoute,
        worker: int,
        device: torch.device,
        pool: FramePool,
        timeout_s: float,
    ) -> None:
        self.route = route
        self._device = device
        self._pool = pool
        store = join_store(route.host, route.port, timeout_s)
        self._groups = {
            source: Group(store, route, source, worker, device, timeout_s)
            for source in route.sources
        }
        self._left: Iterator[Message] = iter(())
        self._next: tuple[Group, torch.Tensor, Work] | None = None

    def begin(self, manifest: Manifest) -> None:
        """Begin to receive the first message."""
        self._left = iter(manifest.messages)
        self._next = self._post()

    def receive(self, message: Message) -> torch.Tensor:
        """Wait for the next message, and begin to receive the one after it."""
        del message
        assert self._next is not None
        group, frame, work = self._next
        group.wait(work)
        self._next = self._post()
        return frame

    def _post(self) -> tuple[Group, torch.Tensor, Work] | None:
        message = next(self._left, None)
        if message is None:
            return None
        size = frame_bytes(message)
        if self._device.type == "cpu":
            frame = self._pool.take(size)
        else:
            frame = torch.empty(size, dtype=torch.uint8, device=self._device)
        group = self._groups[message.source]
        return group, frame, group.broadcast(frame)

    def close(self) -> None:
        """Leave the groups."""
        for group in list(self._groups.values()):
            group.close()
        self._next = None


def _seconds(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=timeout_s)
