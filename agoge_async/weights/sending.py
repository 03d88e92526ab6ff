"""One rank's part of a push: gathers, fills messages and sends its own. Blocks; runs in a thread.

Gathers are collective: every rank goes through the same messages in the same order, whoever sends
them, and a message is complete in memory of ours before it leaves.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import NamedTuple

import torch

from agoge_async.weights.digest import RunningDigest
from agoge_async.weights.frames import payload_of, seal
from agoge_async.weights.manifest import Manifest
from agoge_async.weights.plan import Bucket, Message, Part, parts_of
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


class RankPart:
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
        hasher = ThreadPoolExecutor(1, "agoge-digest")
        with self._one_push, self._source.on_device(), hasher:
            started = time.monotonic()
            shard = self._rank if self._gather is Gather.SHARDS else None
            fill = functools.partial(self._source.fill, rank=shard)
            sender = _Sender(manifest, self._rank, fill, hasher, open_lane, on_failure)
            names = [slice_.tensor.name for bucket in manifest.buckets for slice_ in bucket.slices]
            peak = self._source.held_bytes(names) if self._gather is Gather.ALL else 0
            with self._gathered(names, when=self._gather is Gather.ALL):
                for index, run in itertools.groupby(manifest.messages, lambda m: m.bucket):
                    bucket = manifest.buckets[index]
                    peak = max(peak, self._one_bucket(bucket, list(run), sender))
            sender.flush()
            return Sent(
                gather_s=time.monotonic() - started - sender.waiting_s,
                send_s=sender.waiting_s,
                peak_extra_bytes=peak + sender.num_bytes,
            )

    def _one_bucket(self, bucket: Bucket, messages: list[Message], sender: _Sender) -> int:
        """Gather, and send what is ours; gives the bytes that were gathered for it."""
        names = [slice_.tensor.name for slice_ in bucket.slices]
        is_large = len(messages) > 1 and self._gather is Gather.ONE  # one tensor, cut up
        at_once = self._gather is Gather.BUCKETED or is_large
        one_by_one = self._gather is Gather.ONE and not is_large
        with self._gathered(names, when=at_once):
            for message in messages:
                sender.begin(message)
                for part in parts_of(message, bucket):
                    with self._gathered([names[part.slice]], when=one_by_one):
                        sender.fill(part)
                sender.end()
        if at_once:
            return self._source.held_bytes(names)
        if one_by_one:
            return max(self._source.held_bytes([name]) for name in names)
        return 0

    def _gathered(self, names: list[str], *, when: bool) -> AbstractContextManager[None]:
        return self._source.gathered(names) if when else nullcontext()


class _Writing(NamedTuple):
    """A message that is being written."""

    message: Message
    frame: torch.Tensor
    checksum: RunningDigest | None


class _Sender:
    """Writes and sends one rank's messages; does nothing more once that failed."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        fill: Callable[[Bucket, Part, torch.Tensor], Iterator[int]],
        hasher: Executor,
        open_lane: Callable[[], Lane | None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.waiting_s = 0.0
        self.num_bytes = 0
        self._manifest = manifest
        self._rank = rank
        self._fill = fill
        self._hasher = hasher
        self._on_failure = on_failure
        self._lane: Lane | None = None
        self._writing: _Writing | None = None
        with self._guarded():
            self._lane = open_lane()
            self.num_bytes = self._lane.num_bytes if self._lane is not None else 0

    def begin(self, message: Message) -> None:
        """Take a frame, if the message is ours."""
        self._writing = None
        if self._lane is not None and message.source == self._rank:
            with self._guarded(), self._waiting():
                frame = self._lane.frame(message)
                checks = self._manifest.checks_digests
                checksum = RunningDigest(payload_of(frame), self._hasher) if checks else None
                self._writing = _Writing(message, frame, checksum)

    def fill(self, part: Part) -> None:
        """Write a piece of a tensor."""
        if self._writing is not None:
            with self._guarded():
                message, frame, checksum = self._writing
                for end in self._fill(self._manifest.buckets[message.bucket], part, frame):
                    if checksum is not None:
                        checksum.advance(end)

    def end(self) -> None:
        """Send the message."""
        if self._writing is not None and self._lane is not None:
            with self._guarded():
                message, frame, checksum = self._writing
                seal(frame, 0 if checksum is None else checksum.value(), self._manifest.stamp)
                self._lane.send(message, frame)

    def flush(self) -> None:
        if self._lane is not None:
            with self._guarded(), self._waiting():
                self._lane.flush()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # rank 0 tells it to all
            self._lane = self._writing = None
            self._on_failure(error)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.waiting_s += time.monotonic() - started
