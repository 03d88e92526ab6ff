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

    def agoge_begin_push(self, manifest: str) -> None:
        """Start to receive a push."""
        if self._agoge_receiver is None:
            from agoge_async.engine.receiver import PushReceiver

            worker: Any = self
            self._agoge_receiver = PushReceiver(worker.rank)
        self._agoge_receiver.begin(decode_manifest(manifest))

    def agoge_push_is_ready(self) -> bool:
        """Whether the push is here, whole."""
        return self._agoge_receiver is not None and self._agoge_receiver.is_ready

    def agoge_load_push(self, weights_are_lost: bool) -> dict[str, float]:
        """Put the push into the model; gives the seconds it took.

        Args:
            weights_are_lost: The model holds none that the push could leave as they are.
        """
        if self._agoge_receiver is None:
            raise RuntimeError("no push has begun")
        from agoge_async.engine.receiver import load_tensors

        worker: Any = self
        put = functools.partial(
            load_tensors, worker.get_model(), worker.model_config, needs_all=weights_are_lost
        )
        return self._agoge_receiver.load(put)

    def agoge_abort_push(self) -> str | None:
        """Give up a push that was begun; gives what went wrong with it here."""
        return self._agoge_receiver.abort() if self._agoge_receiver is not None else None


if os.environ.get(GROUP_VARIABLE) == str(own_group()):
    threading.Thread(
        target=_end_with_leader, args=(own_group(),), name="agoge-watch-leader", daemon=True
    ).start()
