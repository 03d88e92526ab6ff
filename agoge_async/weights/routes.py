"""What one rank keeps from push to push to reach the engines: groups, frames, memory, a folder."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import torch.distributed

from agoge_async.backends.base import WeightShape
from agoge_async.weights.files import DiskLane, new_folder, publish, remove_others
from agoge_async.weights.groups import Group, GroupLane, join_store, serve_store
from agoge_async.weights.manifest import (
    CudaIpcRoute,
    DiskRoute,
    GroupRoute,
    Manifest,
    Route,
    SharedMemoryRoute,
)
from agoge_async.weights.plan import Message
from agoge_async.weights.ranks import host_address, is_one_host
from agoge_async.weights.segments import CudaSegment, Segment, SegmentLane, segment_bytes
from agoge_async.weights.transport import Lane

CPU = "cpu"


def pick_transport(
    engines: Sequence[WeightShape], own: str, sources: Sequence[int], *, is_one_host: bool
) -> str:
    """Choose the transport for engines on rank 0's host.

    Args:
        engines: Where they hold their weights.
        own: Where rank 0 holds its own: "cpu", or its GPU's UUID.
        sources: Ranks that send.
        is_one_host: Whether all ranks are on it too.
    """
    workers = [device for engine in engines for device in engine.devices]
    is_here = is_one_host or tuple(sources) == (0,)
    through_memory = "shm" if is_here else "gloo"
    if CPU in workers or own == CPU:
        return through_memory
    if set(workers) == {own} and tuple(sources) == (0,):
        return "cuda_ipc"
    # NCCL has no two ranks of a group on one GPU.
    is_apart = own not in workers and len(set(workers)) == len(workers)
    return "nccl" if is_apart else through_memory


class Routes:
    """The ways of one rank. Used by threads.

    Args:
        rank: Of this process.
        device: Where this rank's GPU frames are; None: it has no GPU.
        timeout_s: For connecting, and for each message.
        folder: For pushes over a disk.
    """

    def __init__(
        self, rank: int, device: torch.device | None, timeout_s: float, folder: Path | None
    ) -> None:
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._folder = None if folder is None else folder.absolute()
        self._store: torch.distributed.TCPStore | None = None
        self._memory: Segment | CudaSegment | None = None
        self._memory_route: tuple[object, SharedMemoryRoute | CudaIpcRoute] | None = None
        self._group: tuple[GroupRoute, int, int, GroupLane] | None = None
        self._group_route: tuple[object, GroupRoute] | None = None

    def route(
        self,
        transport: str,
        messages: Sequence[Message],
        engines: Sequence[WeightShape],
        version: int,
    ) -> Route:
        """Say how this push goes; rank 0's."""
        sources = tuple(sorted({message.source for message in messages}))
        if transport == "auto":
            own = self._own_device()
            transport = pick_transport(engines, own, sources, is_one_host=is_one_host())
        if transport == "disk":
            assert self._folder is not None
            return DiskRoute(str(new_folder(self._folder, version).with_suffix("")))
        if transport in {"gloo", "nccl"}:
            return self._meeting(transport, sources, engines)
        return self._place(transport, segment_bytes(messages), engines)

    def _own_device(self) -> str:
        if self._device is None:
            return CPU
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def _meeting(
        self, backend: str, sources: tuple[int, ...], engines: Sequence[WeightShape]
    ) -> GroupRoute:
        """Name a group of these engines: the last one, if it is theirs."""
        key = (backend, list(engines), sources)
        if self._group_route is not None and self._group_route[0] == key:
            return self._group_route[1]
        if self._store is None:
            self._store = serve_store(host_address(), self._timeout_s)
        route = GroupRoute(
            backend=backend,
            host=host_address(),
            port=self._store.port,
            epoch=secrets.token_hex(8),
            sources=sources,
            num_workers=sum(engine.num_workers for engine in engines),
        )
        self._group_route = key, route
        return route

    def _place(
        self, transport: str, size: int, engines: Sequence[WeightShape]
    ) -> SharedMemoryRoute | CudaIpcRoute:
        """Have memory of this size: the last one, if it is the same that is asked for."""
        key = (transport, size, list(engines) if transport == "cuda_ipc" else None)
        if self._memory_route is not None and self._memory_route[0] == key:
            return self._memory_route[1]
        self._leave_memory()
        route: SharedMemoryRoute | CudaIpcRoute
        if transport == "shm":
            segment = Segment.make(size)
            route = SharedMemoryRoute(segment.path, size)
            self._memory = segment
        else:
            assert self._device is not None
            memory = CudaSegment(size, self._device)
            route = CudaIpcRoute(memory.handles(sum(e.num_workers for e in engines)), size)
            self._memory = memory
        self._memory_route = key, route
        return route

    def lane(self, manifest: Manifest, largest: int, num_frames: int) -> Lane:
        """Give this rank's way to the workers.

        Args:
            manifest: The push.
            largest: Largest of this rank's frames. [bytes]
            num_frames: Frames that may wait to be sent.
        """
        route = manifest.route
        if isinstance(route, DiskRoute):
            return DiskLane(Path(f"{route.folder}.partial"), manifest, largest)
        if isinstance(route, GroupRoute):
            return self._group_lane(route, largest, num_frames)
        if self._memory_route is None or self._memory_route[1] != route:
            assert isinstance(route, SharedMemoryRoute)
            self._leave_memory()
            self._memory = Segment.open(route.segment, route.num_bytes)
            self._memory_route = None, route
        assert self._memory is not None
        return SegmentLane(self._memory, manifest.messages)

    def _group_lane(self, route: GroupRoute, largest: int, num_frames: int) -> GroupLane:
        if self._group is not None and self._group[:3] == (route, largest, num_frames):
            return self._group[3]
        if self._group is not None:
            self._group[3].close()
            self._group = None
        if self._store is None:
            self._store = join_store(route.host, route.port, self._timeout_s)
        device = torch.device(CPU) if route.backend == "gloo" else self._device
        assert device is not None
        group = Group(self._store, route, self._rank, 0, device, self._timeout_s)
        lane = GroupLane(group, largest, num_frames, device)
        self._group = route, largest, num_frames, lane
        return lane

    def written(self, manifest: Manifest) -> None:
        """Take note that all ranks have sent everything; rank 0's."""
        if isinstance(manifest.route, DiskRoute):
            publish(Path(f"{manifest.route.folder}.partial"))

    def committed(self, manifest: Manifest) -> None:
        """Take note that nobody needs earlier pushes any more; rank 0's."""
        if isinstance(manifest.route, DiskRoute):
            remove_others(Path(manifest.route.folder))

    def give_up(self) -> None:
        """Leave the groups, so that nobody waits for this rank; the next push makes new ones."""
        self._group_route = None
        self._store = None  # rank 0's is the server: who waits at it for a group is told
        if self._group is not None:
            self._group[3].close()
            self._group = None

    def close(self) -> None:
        """Leave everything."""
        self.give_up()
        self._leave_memory()

    def _leave_memory(self) -> None:
        self._memory_route = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
