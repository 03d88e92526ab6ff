"""The child's side: vLLM's `AsyncLLM` behind two sockets.

`main` runs in a process of its own session, which EngineCore and the workers join. It builds the
engine in the main thread (the constructor blocks until the model is loaded), then answers calls:
one task each, results batched by the channel. The chat template, tool and reasoning parsers and
structured outputs are vLLM's own serving classes (see `serving`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import socket
import sys
import threading
import traceback
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from agoge_async.engine.channel import Channel, as_frame
from agoge_async.engine.group import GROUP_POLL_S, GROUP_VARIABLE, end_own_group, own_group
from agoge_async.engine.messages import (
    Call,
    Cancel,
    Command,
    CommandDone,
    CommandKind,
    EngineLoad,
    EngineSpec,
    Failed,
    Progress,
    Query,
    Ready,
    Reply,
    ReplyKind,
    Shutdown,
    ToChildControl,
    ToParentControl,
    encode_fault,
)

if TYPE_CHECKING:
    from agoge_async.engine.serving import Serving

HEALTH_POLL_S = 0.2
"""How often an idle host looks whether EngineCore still lives; running calls learn it at once."""
ABORTABLE = {CommandKind.BEGIN, CommandKind.READY, CommandKind.HOLD}
"""Steps of a push that an ABORT ends: they may wait for what doesn't come."""
MAX_CAUSE = 300
"""Characters of a failed command's cause; the log has all of it."""
DIED_EXIT_CODE = 70
START_FAILED_EXIT_CODE = 71


def main(spec: EngineSpec, data: socket.socket, control: socket.socket, log: Connection) -> None:
    """Become the engine of `spec`; the target of the child process."""
    os.setsid()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    log.close()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a TextIOWrapper
    os.environ.clear()
    os.environ.update(spec.environment)
    os.environ[GROUP_VARIABLE] = str(own_group())
    _leave_resource_tracker()
    threading.Thread(target=_end_with_parent, args=(spec,), daemon=True).start()
    gc.disable()  # until it is ready: going through what imports make takes a second
    code = START_FAILED_EXIT_CODE
    try:
        code = _run(spec, data, control)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # atexit hooks of torch and vLLM could hang; the parent sweeps the group


def _leave_resource_tracker() -> None:
    """Have this process and its children start a resource tracker of their own.

    A spawned process reports its semaphores to its parent's, which would complain on the user's
    terminal, at the program's end, of what killed engines left. The parent sweeps up after them.
    """
    tracker: Any = resource_tracker._resource_tracker  # undoes what `multiprocessing.spawn` did
    inherited, tracker._fd = tracker._fd, None
    if inherited is not None:
        os.close(inherited)


def _end_with_parent(spec: EngineSpec) -> None:
    """End the whole group when the parent is gone: a SIGKILL of it tells nobody."""
    never = threading.Event()
    while os.getppid() == spec.parent_pid:
        never.wait(GROUP_POLL_S)
    shutil.rmtree(spec.work_dir, ignore_errors=True)
    end_own_group()


def _run(spec: EngineSpec, data: socket.socket, control: socket.socket) -> int:
    early = _EarlyControl(control)
    try:
        early.send(Progress("loading vLLM"))
        from agoge_async.engine.serving import Serving, build_engine

        early.send(Progress("loading the model"))
        engine = build_engine(spec)
        serving = Serving(engine, spec)
        with _event_loop_runner() as runner:
            return runner.run(Host(serving).run(data, control))
    except BaseException as error:  # noqa: BLE001  # the process boundary: the parent must know
        traceback.print_exc()
        early.send(Failed(f"{type(error).__name__}: {error}".splitlines()[0]))
        return START_FAILED_EXIT_CODE


def _event_loop_runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


class _EarlyControl:
    """Sends on the control socket while no event loop has it: before, and after a failure."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control.dup()

    def send(self, message: ToParentControl) -> None:
        frame = as_frame(msgspec.msgpack.encode([message]))
        with contextlib.suppress(OSError):  # the parent is gone; the watch thread ends us
            self._control.setblocking(True)
            self._control.sendall(frame)


class Host:
    """Answers calls with an engine until it is told to stop, or the engine dies."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled_early: set[int] = set()
        self._data: Channel[Reply, Call]
        self._control: Channel[ToParentControl, ToChildControl]
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._obeying: tuple[CommandKind, asyncio.Task[str]] | None = None
        self._stop = asyncio.Event()
        self._exit_code = 0

    async def run(self, data: socket.socket, control: socket.socket) -> int:
        """Serve; gives the exit code of the process."""
        self._control = await Channel.open(
            control, ToChildControl, self._on_control, self._on_closed
        )
        self._data = await Channel.open(data, Call, self._on_call, self._on_closed)
        self._control.send(Progress("warming up"))
        await self._serving.warm_up()
        gc.collect()
        gc.freeze()
        gc.enable()
        self._control.send(Ready(await self._serving.info()))
        obeying = asyncio.get_running_loop().create_task(self._obey_all())
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_POLL_S):
                    await self._stop.wait()
            if self._serving.is_dead and not self._stop.is_set():
                self._die(self._serving.death_cause())
        obeying.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._control.close()
        self._data.close()
        if not self._serving.is_dead:
            self._serving.shutdown()
        return self._exit_code

    def _on_closed(self, error: Exception | None) -> None:
        del error  # whatever it was, the parent can't be served any more
        self._stop.set()

    def _on_control(self, message: ToChildControl) -> None:
        if isinstance(message, Cancel):
            task = self._tasks.get(message.id)
            if task is not None:
                task.cancel()
            else:  # it overtook its call, or crossed with the answer
                self._cancelled_early.add(message.id)
        elif isinstance(message, Query):
            serving = self._serving
            unfinished, adapters = serving.num_unfinished, serving.adapter_versions
            self._control.send(EngineLoad(message.id, len(self._tasks), unfinished, adapters))
        elif isinstance(message, Command):
            if message.kind is CommandKind.ABORT and self._obeying is not None:
                kind, obeying = self._obeying
                if kind in ABORTABLE:
                    obeying.cancel()
            self._commands.put_nowait(message)
        elif isinstance(message, Shutdown):
            self._stop.set()

    async def _obey_all(self) -> None:
        """Carry out commands, one after the other."""
        while True:
            command = await self._commands.get()
            task = asyncio.get_running_loop().create_task(self._serving.obey(command))
            self._obeying = command.kind, task
            await asyncio.wait({task})
            self._obeying = None
            try:
                done = CommandDone(command.id, task.result())
            except asyncio.CancelledError:
                done = CommandDone(command.id, "null", "it was given up")
            except self._serving.death_errors:
                self._die(self._serving.death_cause())
                return
            except Exception as error:  # noqa: BLE001  # becomes data: the trainer gets it
                traceback.print_exc()
                cause = str(error).partition("\n")[0]  # vLLM's can list every layer
                done = CommandDone(command.id, "null", cause[:MAX_CAUSE])
            self._control.send(done)

    def _on_call(self, call: Call) -> None:
        if self._cancelled_early:
            # Calls arrive in order of their ids: a smaller one that isn't here was answered.
            is_cancelled = call.id in self._cancelled_early
            self._cancelled_early = {id_ for id_ in self._cancelled_early if id_ > call.id}
            if is_cancelled:
                return
        task = asyncio.get_running_loop().create_task(self._answer(call))
        self._tasks[call.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(call.id, None))

    async def _answer(self, call: Call) -> None:
        try:
            async with contextlib.aclosing(self._serving.answer(call)) as pieces:
                async for kind, body in pieces:
                    if not self._data.is_writable:
                        await self._data.drain()
                    if _is_cancelling():  # a serving class may swallow it (vLLM 0.32)
                        return
                    self._data.send(
                        Reply(call.id, kind, body), more_follows=kind is ReplyKind.CHUNK
                    )
        except self._serving.death_errors:
            self._die(self._serving.death_cause())
        except Exception as error:  # noqa: BLE001  # becomes data: the caller gets it
            if _is_cancelling():
                return
            if self._serving.is_dead:  # some serving classes turn that into an error of their own
                self._die(self._serving.death_cause())
                return
            fault = self._serving.describe_fault(error)
            self._data.send(Reply(call.id, ReplyKind.ERROR, encode_fault(fault)))

    def _die(self, cause: str) -> None:
        if not self._stop.is_set():
            self._control.send(Failed(cause))
            self._exit_code = DIED_EXIT_CODE
            self._stop.set()


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
