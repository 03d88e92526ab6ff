"""A push as a worker sees it: received in a thread, loaded when it is told to.

Runs inside vLLM's worker processes. `begin` touches nothing of the model; `load` changes it, and
when it fails the model is torn and the engine must end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from agoge_async.errors import WeightSyncError
from agoge_async.weights.manifest import GlooRoute, Manifest
from agoge_async.weights.plan import Bucket, Message
from agoge_async.weights.transport import (
    GlooInlet,
    Inlet,
    SharedMemoryInlet,
    check,
)

MAX_WAITING = 2
"""Buckets that wait to be loaded, when the push isn't staged."""

Tensors = Iterator[tuple[str, torch.Tensor]]
_Loaded = tuple[Bucket, torch.Tensor]


class PushReceiver:
    """Receives pushes, one at a time.

    Args:
        worker: Number of this worker within its engine.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._gloo: GlooInlet | None = None
        self._push: _Push | None = None

    def begin(self, manifest: Manifest) -> None:
        """Start to receive; returns at once."""
        self.abort()
        self._push = _Push(manifest, self._open_inlet)
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
        push.end()
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
        """Give up a push that was begun; gives what went wrong with it here, if anything did."""
        push, self._push = self._push, None
        if push is None:
            return None
        fault = push.fault
        push.give_up()
        self._leave_gloo()
        return fault

    def close(self) -> None:
        """Leave everything."""
        self.abort()
        self._leave_gloo()

    def _leave_gloo(self) -> None:
        """Leave the groups: left in the middle of a push they are of no use any more."""
        with self._lock:
            inlet, self._gloo = self._gloo, None
        if inlet is not None:
            inlet.close()

    def _open_inlet(self, push: _Push) -> Inlet:
        """Meet the trainer, or find what it wrote; blocks, in the push's thread."""
        manifest = push.manifest
        route = manifest.route
        if not isinstance(route, GlooRoute):
            return SharedMemoryInlet(route, manifest)
        if self._gloo is not None and self._gloo.route == route:
            return self._gloo
        self._leave_gloo()
        inlet = GlooInlet(route, route.first_worker + self._worker, manifest.timeout_s)
        with self._lock:
            if not push.is_given_up:
                self._gloo = inlet
        return inlet


class _Push:
    """One push, and the thread that receives it."""

    def __init__(self, manifest: Manifest, open_inlet: Callable[[_Push], Inlet]) -> None:
        self.manifest = manifest
        self.fault: str | None = None
        self.receive_s = 0.0
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
            self._inlet = self._open_inlet(self)
            self._receive(self._inlet)
        except BaseException as error:  # noqa: BLE001  # `load` or `abort` tells of it
            named = isinstance(error, WeightSyncError)
            text = str(error) if named else f"{type(error).__name__}: {error}"
            self.fault = text.partition("\n")[0]
        if self.fault is not None:
            self.end()
            if isinstance(self._inlet, GlooInlet):
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
            check(frame, message, manifest.version, with_digest=manifest.checks_digests)
            bucket = manifest.buckets[message.bucket]
            if message.parts is None:
                whole = frame
            else:
                if bucket.index not in begun:
                    begun[bucket.index] = torch.empty(bucket.num_bytes, dtype=torch.uint8)
                whole = begun[bucket.index]
                _place_parts(message, bucket, frame, whole)
            missing[message.bucket] -= 1
            if missing[message.bucket] == 0:
                begun.pop(bucket.index, None)
                self._put((bucket, whole))

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
        if isinstance(self._inlet, GlooInlet):
            self._inlet.close()
        if not self._thread.is_alive():
            self.end()

    def end(self) -> None:
        """Let go of what was only for this push."""
        if isinstance(self._inlet, SharedMemoryInlet):
            self._inlet.close()


def _place_parts(
    message: Message, bucket: Bucket, frame: torch.Tensor, whole: torch.Tensor
) -> None:
    for part in message.parts or ():
        slice_ = bucket.slices[part.slice]
        item = slice_.tensor.item_bytes
        begin, size = slice_.offset + part.first * item, part.num_items * item
        whole[begin : begin + size] = frame[part.offset : part.offset + size]


def load_tensors(
    model: Any, model_config: Any, tensors: Tensors, *, needs_all: bool = False
) -> None:
    """Put checkpoint tensors into a running vLLM model, in place, as vLLM loads a checkpoint.

    Args:
        model: vLLM's.
        model_config: vLLM's.
        tensors: By the checkpoint's names.
        needs_all: Refuse to leave a parameter as it is.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    with torch.inference_mode():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(tensors)
        for name, _ in tensors:  # a loader that stops early would leave the rest unread
            raise WeightSyncError(f"the model did not take {name} and what follows it")
        finalize_layerwise_reload(model, model_config)
    is_known = loaded is not None and model_config.quantization is None  # as vLLM checks a reload
    missing = sorted(names - loaded) if needs_all and is_known else []
    if missing:
        raise WeightSyncError(
            f"the engine lost its weights when it slept, and the push holds no {missing[0]} "
            f"({len(missing)} of {len(names)} parameters are missing)"
        )
