"""What vLLM's worker processes run of ours: loaded by them as `worker_extension_cls`.

vLLM's EngineCore doesn't notice when its front end is killed (vLLM 0.32; vllm#55510), so an engine
could outlive its router and keep its GPU. Every process of an engine is in the process group of the
child that `host` runs in; a thread in each worker ends the whole group when that child is gone.
"""

from __future__ import annotations

import os
import threading

from agoge_async.engine.group import (
    GROUP_POLL_S,
    GROUP_VARIABLE,
    end_own_group,
    is_alive,
    own_group,
)


def _end_with_leader(leader_pid: int) -> None:
    never = threading.Event()
    while is_alive(leader_pid):
        never.wait(GROUP_POLL_S)
    end_own_group()


class WorkerExtension:
    """Mixed into vLLM's worker class; importing this module in an engine starts the watch."""


if os.environ.get(GROUP_VARIABLE) == str(own_group()):
    threading.Thread(
        target=_end_with_leader, args=(own_group(),), name="agoge-watch-leader", daemon=True
    ).start()
