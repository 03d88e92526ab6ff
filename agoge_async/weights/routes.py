"""What one rank keeps from push to push to reach the engines: groups, frames, the segment."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch.distributed

from agoge_async.backends.base import WeightShape
from agoge_async.weights.manifest import GlooRoute, Manifest, Route, SharedMemoryRoute
from agoge_async.weights.plan import Message
from agoge_async.weights.ranks import host_address
from agoge_async.weights.transport import (
    GlooGroup,
    GlooLane,
    Lane,
    Segment,
    SharedMemoryLane,
    join_store,
    segment_bytes,
    serve_store,
)


class Routes:
    """The ways of one rank. Used by threads."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._store: torch.distributed.TCPStore | None = None
        self._segment: Segment | None = None
        self._segment_route: SharedMemoryRoute | None = None
        self._gloo: tuple[GlooRoute, int, int, GlooLane] | None = None
        self._last: tuple[object, GlooRoute] | None = None

    def route(
        self,
        transport: str,
        messages: Sequence[Message],
        engines: list[WeightShape],
    ) -> Route:
        """Say how this push goes; rank 0's."""
        if transport != "gloo":
            size = segment_bytes(messages)
            if self._segment is None or self._segment.num_bytes != size:
                self._leave_segment()
                self._segment = Segment.make(size)
            self._segment_route = SharedMemoryRoute(self._segment.path, size)
            return self._segment_route
        sources = tuple(sorted({message.source for message in messages}))
        key = (engines, sources)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        if self._store is None:
            self._store = serve_store(host_address(), self._timeout_s)
        route = GlooRoute(
            host=host_address(),
            port=self._store.port,
            epoch=secrets.token_hex(8),
            sources=sources,
            num_workers=sum(engine.num_workers for engine in engines),
            first_worker=0,
        )
        self._last = key, route
        return route

    def lane(self, manifest: Manifest, largest: int, num_frames: int) -> Lane:
        """Give this rank's way to the workers."""
        route = manifest.route
        if isinstance(route, SharedMemoryRoute):
            if self._segment is None or self._segment_route != route:
                self._leave_segment()
                self._segment = Segment.open(route.segment, route.num_bytes)
                self._segment_route = route
            return SharedMemoryLane(self._segment, manifest.messages)
        if self._gloo is not None and self._gloo[:3] == (route, largest, num_frames):
            return self._gloo[3]
        if self._gloo is not None:
            self._gloo[3].close()
            self._gloo = None
        if self._store is None:
            self._store = join_store(route.host, route.port, self._timeout_s)
        group = GlooGroup(self._store, route, self._rank, 0, self._timeout_s)
        lane = GlooLane(group, largest, num_frames)
        self._gloo = route, largest, num_frames, lane
        return lane

    def give_up(self) -> None:
        """Leave the groups, so that nobody waits for this rank; the next push makes new ones."""
        self._last = None
        self._store = None  # rank 0's is the server: who waits at it for a group is told
        if self._gloo is not None:
            self._gloo[3].close()
            self._gloo = None

    def close(self) -> None:
        """Leave everything."""
        self.give_up()
        self._leave_segment()

    def _leave_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None
