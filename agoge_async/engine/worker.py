"""What vLLM's worker processes run of ours: loaded by them as `worker_extension_cls`.

vLLM's EngineCore doesn't notice when its front end is killed (vLLM 0.32; vllm#55510), so an engine
could outlive its router and keep its GPU. Every process of an engine is in the process group of the
child that `host` runs in; a thread in each worker ends the whole group when that child is gone.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING, Any

from agoge_async.engine.group import (
    GROUP_POLL_S,
    GROUP_VARIABLE,
    end_own_group,
    is_alive,
    own_group,
)
from agoge_async.weights.manifest import decode_manifest

if TYPE_CHECKING:
    from agoge_async.engine.layout import Comparison
    from agoge_async.engine.loading import ModelWeights
    from agoge_async.engine.receiver import PushReceiver


def _end_with_leader(leader_pid: int) -> None:
    never = threading.Event()
    while is_alive(leader_pid):
        never.wait(GROUP_POLL_S)
    end_own_group()


class WorkerExtension:
    """Mixed into vLLM's worker class; importing this module in an engine starts the watch.

    The methods are called by name from the child (`AsyncLLM.collective_rpc`), on every worker.
    """

    _agoge_receiver: PushReceiver | None = None
    _agoge_weights: ModelWeights | None = None

    def agoge_begin_push(self, text: str) -> list[str]:
        """Start to receive a push; gives the parameters that this worker has no place for."""
        from agoge_async.engine.loading import ModelWeights
        from agoge_async.engine.receiver import PushReceiver

        worker: Any = self
        manifest = decode_manifest(text)
        self._agoge_weights = self._agoge_weights or ModelWeights(worker)
        unplaced = [] if manifest.adapter else self._agoge_weights.expect(manifest)
        self._agoge_receiver = self._agoge_receiver or PushReceiver(worker.rank, worker.device)
        self._agoge_receiver.begin(manifest)
        return unplaced

    def agoge_device(self) -> str:
        """Say where this worker holds its weights: "cpu", or its GPU's UUID."""
        import torch

        worker: Any = self
        device: torch.device = worker.device
        if device.type != "cuda":
            return str(device.type)
        return str(torch.cuda.get_device_properties(device).uuid)

    def agoge_push_is_ready(self) -> bool:
        """Whether the push is here, whole."""
        return self._agoge_begun()[0].is_ready

    def agoge_load_push(self) -> dict[str, float]:
        """Put the push into the model; gives the seconds it took."""
        receiver, weights = self._agoge_begun()
        return receiver.load(weights.load)

    def agoge_save_push(self, path: str) -> dict[str, float]:
        """Write the push to a file, once for all workers; gives the seconds it took."""
        from agoge_async.engine.receiver import save_tensors

        worker: Any = self
        put = functools.partial(save_tensors, path if worker.rank == 0 else None)
        return self._agoge_begun()[0].load(put)

    def agoge_compare_push(self) -> dict[str, list[str]]:
        """Compare the push with the model; ends the push."""
        receiver, weights = self._agoge_begun()
        found: list[Comparison] = []
        receiver.load(lambda tensors: found.append(weights.compare(tensors)))
        return found[0]._asdict()

    def _agoge_begun(self) -> tuple[PushReceiver, ModelWeights]:
        if self._agoge_receiver is None or self._agoge_weights is None:
            raise RuntimeError("no push has begun")
        return self._agoge_receiver, self._agoge_weights

    def agoge_abort_push(self) -> str | None:
        """Give up a push that was begun; gives what went wrong with it here."""
        return self._agoge_receiver.abort() if self._agoge_receiver is not None else None


if os.environ.get(GROUP_VARIABLE) == str(own_group()):
    threading.Thread(
        target=_end_with_leader, args=(own_group(),), name="agoge-watch-leader", daemon=True
    ).start()
