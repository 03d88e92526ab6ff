"""One rank's part of a push: gathers, fills messages and sends its own. Blocks; runs in a thread.

Gathers are collective: every rank goes through the same messages in the same order, whoever sends
them, and a message is complete in memory of ours before it leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum

import torch

from agoge_async.weights.frames import seal
from agoge_async.weights.manifest import Manifest
from agoge_async.weights.plan import Message
from agoge_async.weights.ranks import Sent
from agoge_async.weights.sources import ModelSource
from agoge_async.weights.transport import Lane


class Gather(StrEnum):
    """How whole parameters come together under ZeRO-3; the others have them whole anyway."""

    ONE = "gather_one"
    """One parameter at a time."""
    ALL = "gather_all"
    """All at once, then they are sent: the model must fit beside itself."""
    BUCKETED = "bucketed"
    """As many as fit a bucket."""
    SHARDS = "shards"
    """Not at all: each rank sends its partition, the workers join them."""


class Part:
    """What one rank does of a push.

    A rank that can't go on sending goes on gathering: else the collectives that follow, of a
    training step or the next push, would meet those that the other ranks still wait in.

    Args:
        source: The model.
        rank: Of this process.
        gather: How whole parameters come together.
    """

    def __init__(self, source: ModelSource, rank: int, gather: Gather) -> None:
        self._source = source
        self._rank = rank
        self._gather = gather
        self._one_push = threading.Lock()

    def send(
        self,
        manifest: Manifest,
        open_lane: Callable[[], Lane | None],
        on_failure: Callable[[Exception], None],
    ) -> Sent:
        """Do it.

        Args:
            manifest: The push.
            open_lane: Gives this rank's way to the workers; None when it sends nothing.
            on_failure: Told at once when this rank can't go on sending.
        """
        # One that failed may still be gathering.
        with self._one_push, self._source.on_device():
            started = time.monotonic()
            sender = _Sender(manifest, self._source, self._rank, open_lane, on_failure)
            names = [slice_.tensor.name for bucket in manifest.buckets for slice_ in bucket.slices]
            peak = self._source.held_bytes(names) if self._gather is Gather.ALL else 0
            with self._gathered(names, when=Gather.ALL):
                for message in manifest.messages:
                    peak = max(peak, self._one_message(manifest, message, sender))
            sender.flush()
            return Sent(
                gather_s=time.monotonic() - started - sender.waiting_s,
                send_s=sender.waiting_s,
                peak_extra_bytes=peak + sender.num_bytes,
            )

    def _one_message(self, manifest: Manifest, message: Message, sender: _Sender) -> int:
        """Gather, and send what is ours; gives the bytes that were gathered for it."""
        if message.parts is not None:
            sender.send_shard(message)
            return 0
        names = [slice_.tensor.name for slice_ in manifest.buckets[message.bucket].slices]
        with self._gathered(names, when=Gather.BUCKETED):
            sender.begin(message)
            for index, name in enumerate(names):
                with self._gathered([name], when=Gather.ONE):
                    sender.fill(message, index)
        sender.end(message)
        if self._gather is Gather.BUCKETED:
            return self._source.held_bytes(names)
        if self._gather is Gather.ONE:
            return max(self._source.held_bytes([name]) for name in names)
        return 0

    def _gathered(self, names: list[str], *, when: Gather) -> AbstractContextManager[None]:
        return self._source.gathered(names) if self._gather is when else nullcontext()


class _Sender:
    """Writes and sends one rank's messages; does nothing more once that failed."""

    def __init__(
        self,
        manifest: Manifest,
        source: ModelSource,
        rank: int,
        open_lane: Callable[[], Lane | None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.waiting_s = 0.0
        self.num_bytes = 0
        self._manifest = manifest
        self._source = source
        self._rank = rank
        self._on_failure = on_failure
        self._lane: Lane | None = None
        self._frame: torch.Tensor | None = None
        with self._guarded():
            self._lane = open_lane()
            self.num_bytes = self._lane.num_bytes if self._lane is not None else 0

    def begin(self, message: Message) -> None:
        """Take a frame for a message of ours."""
        self._frame = None
        if self._lane is not None and message.source == self._rank:
            with self._guarded(), self._waiting():
                self._frame = self._lane.frame(message)

    def fill(self, message: Message, index: int) -> None:
        if self._frame is not None:
            with self._guarded():
                bucket = self._manifest.buckets[message.bucket]
                self._source.fill(bucket, index, self._frame)

    def end(self, message: Message) -> None:
        if self._frame is not None and self._lane is not None:
            with self._guarded():
                checks = self._manifest.checks_digests
                seal(self._frame, self._manifest.stamp, with_digest=checks)
                self._lane.send(message, self._frame)

    def send_shard(self, message: Message) -> None:
        """Send this rank's partitions, if the message is ours."""
        self.begin(message)
        if self._frame is not None:
            with self._guarded():
                bucket = self._manifest.buckets[message.bucket]
                self._source.fill_shard(bucket, message, self._frame)
            self.end(message)

    def flush(self) -> None:
        if self._lane is not None:
            with self._guarded(), self._waiting():
                self._lane.flush()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # rank 0 tells it to all
            self._lane = self._frame = None
            self._on_failure(error)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.waiting_s += time.monotonic() - started
