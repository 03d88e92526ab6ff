"""Local engines whose child is a task of the test: real backend, sockets and host, without vLLM."""

import asyncio
import contextlib
import gc
import os
import socket

from agoge_async.backends.local import LocalBackend, RestartPolicy
from agoge_async.engine.channel import Channel
from agoge_async.engine.host import Host
from agoge_async.engine.messages import (
    Call,
    CallKind,
    Command,
    CommandKind,
    EngineInfo,
    EngineSpec,
    Fault,
    FaultKind,
    Reply,
    ReplyKind,
    ToParentControl,
    encode_json,
)
from agoge_async.engine.process import EngineProcess


class ServingDouble:
    """Answers calls with one token, while `gate` is open; notes what it is commanded."""

    death_errors = ()

    def __init__(self, *, no_sleep: str | None = None, max_lora_rank: int = 0) -> None:
        self.calls = 0
        self.commands: list[str] = []
        self.faults: dict[CommandKind, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_dead = False
        self.num_unfinished = 0
        self.adapter_versions = ()
        self._no_sleep = no_sleep
        self._max_lora_rank = max_lora_rank

    async def info(self) -> EngineInfo:
        options = (self._no_sleep, self._max_lora_rank)
        return EngineInfo(512, "0", False, False, ("cpu",), "float32", *options)

    async def warm_up(self) -> None:
        pass

    def death_cause(self) -> str:
        return "the test ended it"

    def shutdown(self) -> None:
        pass

    async def obey(self, command: Command) -> str:
        self.commands.append(f"{command.kind} {command.body}".strip())
        if command.kind in self.faults:
            raise self.faults[command.kind]
        if command.kind is CommandKind.END_REQUESTS:
            self.gate.set()
        return "{}" if command.kind is CommandKind.LOAD else "null"

    async def answer(self, call: Call):
        self.calls += 1
        if call.kind is CallKind.CHAT_STREAM:
            choice = {"index": 0, "delta": {"content": "hi"}}
            chunk = {"id": "1", "created": 0, "model": "m", "choices": [choice]}
            yield ReplyKind.CHUNK, encode_json(chunk)
        await self.gate.wait()
        if call.kind is CallKind.CHAT_STREAM:
            yield ReplyKind.RESULT, b"{}"
            return
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choice = {"index": 0, "token_ids": [7], "finish_reason": "stop"}
        body = {"id": "1", "model": "m", "prompt_token_ids": [1], "choices": [choice]}
        yield ReplyKind.RESULT, encode_json(body | {"usage": usage})

    def describe_fault(self, error: Exception) -> Fault:
        return Fault(FaultKind.INTERNAL, str(error))


class EngineDouble(EngineProcess):
    """Has a task where an engine has a process."""

    def __init__(self, spec: EngineSpec, serving: ServingDouble) -> None:
        super().__init__(spec, lambda _stage: None)
        self._serving = serving

    async def _launch(self) -> None:
        data, their_data = socket.socketpair()
        control, their_control = socket.socketpair()
        self._data = await Channel.open(data, Reply, self._on_reply, self._on_closed)
        self._control = await Channel.open(
            control, ToParentControl, self._on_control, self._on_closed
        )
        host = Host(self._serving)
        self._child = asyncio.get_running_loop().create_task(host.run(their_data, their_control))


class LocalDouble(LocalBackend):
    """A replica of such engines; `serving` is the child's side of the one that runs."""

    def __init__(self, name: str = "m/0", **serving) -> None:
        super().__init__(name, self._spec, restart=RestartPolicy(backoff_s=0.01))
        self._serving_options = serving
        self.serving: ServingDouble

    def _spec(self, work_dir: str) -> EngineSpec:
        return EngineSpec(
            name=self.name,
            served_model="m",
            engine_args={},
            environment={},
            work_dir=work_dir,
            parent_pid=os.getpid(),
        )

    def make_serving(self, **options) -> ServingDouble:
        return ServingDouble(**options)

    def _make_engine(self) -> EngineProcess:
        self.serving = self.make_serving(**self._serving_options)
        return EngineDouble(super()._make_engine().spec, self.serving)


@contextlib.contextmanager
def unfrozen():
    """Undo what a host does for a process of its own."""
    try:
        yield
    finally:
        gc.unfreeze()
