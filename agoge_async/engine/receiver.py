"""A push as a worker sees it: received in a thread, loaded when it is told to.

Runs inside vLLM's worker processes. `begin` touches nothing of the model; `load` changes it, and
when it fails the model is torn and the engine must end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch
from safetensors.torch import save_file

from agoge_async.errors import WeightSyncError
from agoge_async.weights.files import DiskInlet
from agoge_async.weights.frames import FramePool, check
from agoge_async.weights.groups import GroupInlet
from agoge_async.weights.manifest import DiskRoute, GroupRoute, Manifest
from agoge_async.weights.plan import Bucket, Message
from agoge_async.weights.segments import SegmentInlet
from agoge_async.weights.transport import Inlet

MAX_WAITING = 2
"""Buckets that wait to be loaded, when the push isn't staged."""

Tensors = Iterator[tuple[str, torch.Tensor]]
_Loaded = tuple[Bucket, torch.Tensor]


class PushReceiver:
    """Receives pushes, one at a time.

    Args:
        worker: Number of this worker within its engine.
        device: Where its model is.
    """

    def __init__(self, worker: int, device: torch.device) -> None:
        self._worker = worker
        self._device = device
        self._lock = threading.Lock()
        self._inlet: Inlet | None = None
        self._pool = FramePool()
        self._push: _Push | None = None

    def begin(self, manifest: Manifest) -> None:
        """Start to receive; returns at once."""
        if self._push is not None:
            self.abort()
        self._push = _Push(manifest, self._device, self._pool, self._open_inlet)
        self._push.start()

    def load(self, put: Callable[[Tensors], None]) -> dict[str, float]:
        """Wait for the push, then put it into the model; gives the seconds it took.

        Args:
            put: Takes all tensors, by name.

        Raises:
            WeightSyncError: It didn't come whole, or the model can't take it.
        """
        push = self._push
        if push is None:
            raise WeightSyncError("no push has begun")
        if push.manifest.is_staged:
            push.wait_received()
        started = time.monotonic()
        put(push.tensors())
        seconds = time.monotonic() - started
        push.wait_received()
        if self._push is push:  # another one may have begun meanwhile
            self._push = None
        return {"load_s": seconds, "receive_s": push.receive_s}

    @property
    def is_ready(self) -> bool:
        """Whether the push that was begun is here, whole.

        Raises:
            WeightSyncError: It won't be.
        """
        if self._push is None:
            raise WeightSyncError("no push has begun")
        return self._push.is_received

    def abort(self) -> str | None:
        """Give up a push that was begun, and leave the trainer.

        Gives what went wrong with the push here, if anything did.
        """
        push, self._push = self._push, None
        fault = None
        if push is not None:
            fault = push.fault
            push.give_up()
        self._leave()
        self._pool.clear()
        return fault

    def _leave(self) -> None:
        with self._lock:
            inlet, self._inlet = self._inlet, None
        if inlet is not None:
            inlet.close()

    def _open_inlet(self, push: _Push) -> Inlet:
        """Meet the trainer, or find what it writes; blocks, in the push's thread."""
        manifest = push.manifest
        if self._inlet is not None and self._inlet.route == manifest.route:
            return self._inlet
        self._leave()
        inlet = self._make_inlet(manifest)
        with self._lock:
            if not push.is_given_up:
                self._inlet = inlet
        return inlet

    def _make_inlet(self, manifest: Manifest) -> Inlet:
        route = manifest.route
        worker = manifest.first_worker + self._worker
        if isinstance(route, GroupRoute):
            device = torch.device("cpu") if route.backend == "gloo" else self._device
            return GroupInlet(route, worker, device, self._pool, manifest.timeout_s)
        if isinstance(route, DiskRoute):
            return DiskInlet(route, self._pool)
        return SegmentInlet(route, worker)


class _Push:
    """One push, and the thread that receives it."""

    def __init__(
        self,
        manifest: Manifest,
        device: torch.device,
        pool: FramePool,
        open_inlet: Callable[[_Push], Inlet],
    ) -> None:
        self.manifest = manifest
        self.fault: str | None = None
        self.receive_s = 0.0
        self._device = device
        self._pool = pool
        self._open_inlet = open_inlet
        self._inlet: Inlet | None = None
        self._given_up = threading.Event()
        self._deadline = time.monotonic() + manifest.timeout_s
        self._ready: queue.Queue[_Loaded | None] = queue.Queue(
            0 if manifest.is_staged else MAX_WAITING
        )
        self._thread = threading.Thread(target=self._run, name="agoge-receive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            with _on_own_stream(self._device):
                self._inlet = self._open_inlet(self)
                self._inlet.begin(self.manifest)
                self._receive(self._inlet)
        except BaseException as error:  # noqa: BLE001  # `load` or `abort` tells of it
            named = isinstance(error, WeightSyncError)
            text = str(error) if named else f"{type(error).__name__}: {error}"
            self.fault = text.partition("\n")[0]
        if self.fault is not None and self._inlet is not None:
            self._inlet.close()  # so that no sender waits for this worker
        self.receive_s = time.monotonic() - started
        self._put(None)

    def _receive(self, inlet: Inlet) -> None:
        manifest = self.manifest
        missing = [0] * len(manifest.buckets)
        for message in manifest.messages:
            missing[message.bucket] += 1
        begun: dict[int, torch.Tensor] = {}
        for message in manifest.messages:
            if self.is_given_up:
                raise WeightSyncError("the push was given up")
            frame = inlet.receive(message)
            check(frame, message, manifest)
            bucket = manifest.buckets[message.bucket]
            if message.parts is None:
                whole = frame
            else:
                if bucket.index not in begun:
                    begun[bucket.index] = self._empty(bucket.num_bytes, frame.device)
                whole = begun[bucket.index]
                _place_parts(message, bucket, frame, whole)
            missing[message.bucket] -= 1
            if missing[message.bucket] == 0:
                begun.pop(bucket.index, None)
                self._put((bucket, whole))

    def _empty(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return self._pool.take(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _put(self, item: _Loaded | None) -> None:
        """Hand a bucket over; ends when nobody wants it any more."""
        while not self._given_up.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return
        if item is not None:
            raise WeightSyncError("the push was given up")

    def tensors(self) -> Tensors:
        """Give each tensor as it comes, tied ones under each of their names."""
        aliases: dict[str, list[str]] = {}
        for alias, name in self.manifest.aliases.items():
            aliases.setdefault(name, []).append(alias)
        for _ in self.manifest.buckets:
            bucket, data = self._take()
            if data.is_cuda:  # received on another stream than it is loaded on
                data.record_stream(torch.cuda.current_stream())
            for slice_ in bucket.slices:
                meta = slice_.tensor
                piece = data[slice_.offset : slice_.offset + meta.num_bytes]
                tensor = piece.view(getattr(torch, meta.dtype)).view(meta.shape)
                for name in (meta.name, *aliases.get(meta.name, ())):
                    yield name, tensor

    def _take(self) -> _Loaded:
        left_s = self._deadline - time.monotonic()
        try:
            item = self._ready.get(timeout=max(0.0, left_s))
        except queue.Empty:
            raise WeightSyncError(
                f"the push didn't come whole within {self.manifest.timeout_s:g} s"
            ) from None
        if item is None:
            raise WeightSyncError(self.fault or "the push ended before its last bucket")
        return item

    def wait_received(self) -> None:
        """Wait for the last byte."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            raise WeightSyncError(
                f"the push didn't come whole within {self.manifest.timeout_s:g} s"
            )
        if self.fault is not None:
            raise WeightSyncError(self.fault)

    @property
    def is_received(self) -> bool:
        """Whether all is here, whole.

        Raises:
            WeightSyncError: It won't be.
        """
        if self._thread.is_alive():
            return False
        self.wait_received()
        return True

    @property
    def is_given_up(self) -> bool:
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Have the thread end: at once, or when what it waits for ends."""
        self._given_up.set()
        if self._inlet is not None:
            self._inlet.close()


@contextlib.contextmanager
def _on_own_stream(device: torch.device) -> Iterator[None]:
    """Have a thread receive beside the kernels of the model, where there is a GPU."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
        yield


def save_tensors(path: str | None, tensors: Tensors) -> None:
    """Write tensors to a file of safetensors; None: only take them."""
    held = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
    if path is not None:
        save_file(held, path)


def _place_parts(
    message: Message, bucket: Bucket, frame: torch.Tensor, whole: torch.Tensor
) -> None:
    for part in message.parts or ():
        slice_ = bucket.slices[part.slice]
        item = slice_.tensor.item_bytes
        begin, size = slice_.offset + part.first * item, part.num_items * item
        whole[begin : begin + size] = frame[part.offset : part.offset + size]
