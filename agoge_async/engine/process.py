"""The parent's handle of one engine: start it, call it, notice its death, end all of it.

An `EngineProcess` lives once: after `aclose` or the engine's death a new one is made (by
`backends.local`). It must be used on the event loop that started it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import anyio
import anyio.to_thread

from agoge_async.engine.channel import MAX_BODY_BYTES, Channel
from agoge_async.engine.group import (
    group_members,
    kill_group,
    shared_memory_of,
    wait_group_gone,
)
from agoge_async.engine.log import LogPump, best_cause
from agoge_async.engine.messages import (
    Call,
    CallKind,
    Cancel,
    Command,
    CommandDone,
    CommandKind,
    EngineInfo,
    EngineLoad,
    EngineSpec,
    Progress,
    Query,
    Ready,
    Reply,
    ReplyKind,
    Shutdown,
    ToChildControl,
    ToParentControl,
)
from agoge_async.errors import (
    EngineBusyError,
    EngineDiedError,
    EngineStartError,
    InvalidRequestError,
    WeightSyncError,
)

logger = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""How long a polite end may take; then the group is killed."""
EXIT_S = 0.5
"""A process that a signal ended closes its sockets at most this long before it is gone."""
KILL_S = 5.0
"""How long killed processes may take to be gone."""
QUERY_S = 5.0
"""A child answers a query between two turns of its loop; longer means that it hangs."""

SEGMENTS_POLL_S = 0.5
"""Pause between two looks at what a starting engine has put in shared memory."""
HEARTBEAT_S = 10.0
"""Pause between two looks whether an engine's loop still turns."""
HANG_S = 60.0
"""A loop that is silent for this long hangs: the engine is restarted."""

_spawn_lock = threading.Lock()


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script in the child.

    A spawned child imports `__main__` again, which runs a script that has no `__main__` guard and
    fails for one read from stdin. The child needs nothing of it, so spawn finds no path of it.
    """
    with _spawn_lock:
        main: dict[str, object] = vars(sys.modules["__main__"])
        names: tuple[str, ...] = ("__file__", "__spec__")
        hidden = {name: main.pop(name) for name in names if name in main}
        main["__spec__"] = None
        try:
            yield
        finally:
            main.update(hidden)


def _spawn(spec: EngineSpec, *ends: socket.socket | Connection) -> BaseProcess:
    """Launch the child.

    `torch.multiprocessing` hands out this same context, and teaches it to pass tensors. None are
    passed here, so torch (2.5 s, 300 MB) stays out of a caller that has no use of its own for it.
    """
    from agoge_async.engine.host import main

    process = multiprocessing.get_context("spawn").Process(
        target=main, args=(spec, *ends), name=f"agoge-engine-{spec.name}", daemon=False
    )
    with _no_main_module():
        process.start()
    return process


def start_error(name: str, error: Exception) -> EngineStartError:
    """Say why an engine couldn't even be launched."""
    cause = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, ModuleNotFoundError):
        cause = f"{error}; install agoge_async[cpu] or agoge_async[gpu]"
    return EngineStartError(f"engine {name} can't start: {cause}", backend=name, cause=cause)


def describe_exit(code: int | None) -> str:
    """Say how a child ended that said nothing itself."""
    if code is None:
        return "it was closed"
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{hint}"
    return f"its process ended with exit code {code}"


class EngineStream:
    """The pieces of one answer, as the engine makes them.

    The queue needs no limit of its own: a call makes no more pieces than its answer has tokens.
    """

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._call_id = -1
        self._replies: deque[Reply | EngineDiedError] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def begin(self, call_id: int) -> None:
        """Take note that the call was sent."""
        self._call_id = call_id

    def put(self, reply: Reply | EngineDiedError) -> None:
        """Take a reply from the engine."""
        self._replies.append(reply)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def next(self) -> Reply:
        """Wait for the next reply: chunks, then a result or an error.

        Raises:
            EngineDiedError: The engine died first.
        """
        if not self._replies:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        reply = self._replies.popleft()
        if isinstance(reply, EngineDiedError):
            raise reply
        return reply

    def cancel(self) -> None:
        """Abort the call in the engine; does nothing after its end."""
        self._engine.cancel(self._call_id)


class _SingleReply:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Reply] = loop.create_future()

    def put(self, reply: Reply | EngineDiedError) -> None:
        if self.future.done():
            return
        if isinstance(reply, EngineDiedError):
            self.future.set_exception(reply)
        else:
            self.future.set_result(reply)


class EngineProcess:
    """One vLLM engine in a child process.

    Args:
        spec: What the child becomes.
        on_progress: Told of each stage of the start-up.
    """

    def __init__(self, spec: EngineSpec, on_progress: Callable[[str], None]) -> None:
        self.spec = spec
        self.info: EngineInfo | None = None
        """Set once the engine is ready."""
        self._on_progress = on_progress
        self._stage = "launching"
        self._cause: str | None = None
        self._process: BaseProcess | None = None
        self._log: LogPump | None = None
        self._data: Channel[Call, Reply] | None = None
        self._control: Channel[ToChildControl, ToParentControl] | None = None
        self._pending: dict[int, _SingleReply | EngineStream] = {}
        self._num_unsent = 0
        self._queries: dict[int, asyncio.Future[EngineLoad | CommandDone]] = {}
        self._segments: set[Path] = set()
        self._is_ended = False
        self._exit_code: int | None = None
        self._ids = itertools.count()
        self._ready_or_gone = anyio.Event()
        self._gone = anyio.Event()

    @property
    def pid(self) -> int | None:
        """The child's pid, which is its process group too; None before it is launched."""
        return self._process.pid if self._process is not None else None

    async def start(self, timeout_s: float) -> EngineInfo:
        """Launch the child and wait until the engine serves.

        Raises:
            EngineStartError: It can't, or took longer than `timeout_s`; nothing is left of it.
        """
        try:
            with anyio.move_on_after(timeout_s):
                await self._launch()
                async with anyio.create_task_group() as group:
                    group.start_soon(self._watch_segments)
                    await self._ready_or_gone.wait()
                    group.cancel_scope.cancel()
        except Exception as error:
            await self._end_group()
            raise start_error(self.spec.name, error) from error
        except BaseException:
            await self._end_group()
            raise
        if self.info is None:
            raise await self._failed_start(timeout_s)
        await anyio.to_thread.run_sync(self._note_segments)
        return self.info

    async def _watch_segments(self) -> None:
        """Keep note of shared memory while the engine starts: one that fails leaves it behind."""
        while True:
            await anyio.to_thread.run_sync(self._note_segments)
            await anyio.sleep(SEGMENTS_POLL_S)

    async def call(self, kind: CallKind, body: bytes) -> Reply:
        """Send a call and wait for its one reply; cancelling aborts it in the engine.

        Raises:
            EngineDiedError: The engine died first.
        """
        pending = _SingleReply(asyncio.get_running_loop())
        call_id = await self._send(kind, body, pending)
        try:
            return await pending.future
        finally:
            self.cancel(call_id)

    async def stream(self, kind: CallKind, body: bytes) -> EngineStream:
        """Send a call whose reply comes in pieces.

        Raises:
            EngineDiedError: The engine is dead.
        """
        stream = EngineStream(self)
        stream.begin(await self._send(kind, body, stream))
        return stream

    async def _send(self, kind: CallKind, body: bytes, pending: _SingleReply | EngineStream) -> int:
        """Send a call; the child relies on ids that grow in the order of sending."""
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequestError(
                f"the request is {len(body)} bytes long, the limit is {MAX_BODY_BYTES}"
            )
        self._num_unsent += 1
        try:
            while self._data is not None and not self._data.is_writable:
                await self._data.drain()
        finally:
            self._num_unsent -= 1
        if self._data is None or self._gone.is_set():
            raise self._died_error()
        call_id = next(self._ids)
        self._pending[call_id] = pending
        self._data.send(Call(call_id, kind, body))
        return call_id

    def cancel(self, call_id: int) -> None:
        """Abort a call in the engine, if it isn't complete."""
        if self._pending.pop(call_id, None) is not None and self._control is not None:
            self._control.send(Cancel(call_id))

    @property
    def num_calls(self) -> int:
        """Calls that the engine has not answered."""
        return len(self._pending) + self._num_unsent

    async def load(self, timeout_s: float = QUERY_S) -> EngineLoad:
        """Ask the engine how busy it is.

        Raises:
            EngineBusyError: No answer within `timeout_s`.
            EngineDiedError: The engine is dead.
        """
        answer = await self._ask(Query(next(self._ids)), "a query", timeout_s)
        assert isinstance(answer, EngineLoad)
        return answer

    async def command(self, kind: CommandKind, body: str, timeout_s: float) -> str:
        """Have the engine carry out a command; gives what it tells, as JSON.

        Raises:
            WeightSyncError: It couldn't.
            EngineBusyError: No answer within `timeout_s`.
            EngineDiedError: The engine is dead, or died of it.
        """
        command = Command(next(self._ids), kind, body)
        answer = await self._ask(command, f"the command {kind}", timeout_s)
        assert isinstance(answer, CommandDone)
        if answer.error is not None:
            raise WeightSyncError(
                f"engine {self.spec.name}: {answer.error}", culprit=self.spec.name
            )
        return answer.body

    async def _ask(
        self, message: Query | Command, what: str, timeout_s: float
    ) -> EngineLoad | CommandDone:
        if self._control is None or self._gone.is_set():
            raise self._died_error()
        self._queries[message.id] = asyncio.get_running_loop().create_future()
        self._control.send(message)
        try:
            with anyio.fail_after(timeout_s):
                return await self._queries[message.id]
        except TimeoutError as error:
            text = f"engine {self.spec.name}: no answer to {what} within {timeout_s:g} s"
            raise EngineBusyError(text, backend=self.spec.name, log_tail=self._tail()) from error
        finally:
            del self._queries[message.id]

    def condemn(self, cause: str) -> None:
        """Have the engine ended as one that died: it must not serve any more."""
        self._cause = self._cause or cause
        self._gone.set()

    async def wait_gone(self) -> None:
        """Wait until the engine is dead: it said so, its child is gone, or its loop hangs."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_loop)
            await self._gone.wait()
            group.cancel_scope.cancel()

    async def _watch_loop(self) -> None:
        while True:
            await anyio.sleep(HEARTBEAT_S)
            try:
                await self.load(HANG_S)
            except EngineBusyError:
                self._cause = f"its event loop did not answer for {HANG_S:g} s"
                self._gone.set()
            except EngineDiedError:
                return

    async def bury(self) -> EngineDiedError:
        """End what is left of a gone engine, and fail its calls."""
        await self._end_group()
        error = self._died_error()
        self._fail_all(error)
        return error

    async def aclose(self) -> None:
        """End the engine: politely, then by force. Calls that run fail; nothing is left."""
        if self._is_forked:
            return
        try:
            with anyio.CancelScope(shield=True), anyio.move_on_after(SHUTDOWN_S):
                if self._control is not None and not self._gone.is_set():
                    self._control.send(Shutdown())
                    await self._gone.wait()
        finally:  # a native cancellation isn't held off by the shield
            self._fail_all(self._died_error())
            await self._end_group()

    async def _launch(self) -> None:
        with contextlib.ExitStack() as their_ends:
            data, their_data = socket.socketpair()
            control, their_control = socket.socketpair()
            log_reader, their_log = multiprocessing.connection.Pipe(duplex=False)
            for end in (their_data, their_control, their_log):
                their_ends.callback(end.close)
            self._log = LogPump(self.spec.name, log_reader)
            self._data = await Channel.open(data, Reply, self._on_reply, self._on_closed)
            self._control = await Channel.open(
                control, ToParentControl, self._on_control, self._on_closed
            )
            await anyio.to_thread.run_sync(self._spawn, their_data, their_control, their_log)

    def _spawn(self, *their_ends: socket.socket | Connection) -> None:
        self._process = _spawn(self.spec, *their_ends)
        atexit.register(self._kill)

    def _on_reply(self, reply: Reply) -> None:
        pending = self._pending.get(reply.id)
        if pending is not None:
            pending.put(reply)
            if reply.kind is not ReplyKind.CHUNK:
                del self._pending[reply.id]

    def _on_control(self, message: ToParentControl) -> None:
        if isinstance(message, EngineLoad | CommandDone):
            waiting = self._queries.get(message.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, Progress):
            self._stage = message.stage
            self._on_progress(message.stage)
        elif isinstance(message, Ready):
            self.info = message.info
            self._ready_or_gone.set()
        else:  # the child would only end what `_end_group` ends
            self._cause = message.cause
            self._gone.set()
            self._ready_or_gone.set()

    def _on_closed(self, error: Exception | None) -> None:
        if error is not None:
            self._cause = self._cause or f"its socket broke: {error}"
        self._gone.set()
        self._ready_or_gone.set()

    def _fail_all(self, error: EngineDiedError) -> None:
        pending, self._pending = self._pending, {}
        for waiting in pending.values():
            waiting.put(copy.copy(error))  # each caller raises its own
        for query in self._queries.values():
            if not query.done():
                query.set_exception(copy.copy(error))

    def _kill(self) -> None:
        """Kill the group; also at exit of a program that forgot to close, never of its forks."""
        if self.pid is not None and not self._is_forked:
            kill_group(self.pid)

    @property
    def _is_forked(self) -> bool:
        """Whether this is a fork of the engine's parent: the engine isn't its own."""
        return os.getpid() != self.spec.parent_pid

    async def _end_group(self) -> None:
        """Kill whatever is left of the engine and remove what it leaves behind."""
        if self._is_forked:
            return
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._end_group_sync)
            for channel in (self._data, self._control):
                if channel is not None:
                    channel.close()
            self._gone.set()
            self._ready_or_gone.set()

    def _note_segments(self) -> None:
        """Remember the shared memory of the group: a killed process can't be asked any more."""
        if self.pid is not None:
            self._segments |= shared_memory_of(group_members(self.pid))

    def _end_group_sync(self) -> None:
        if self._is_ended:  # its number may be another group's by now
            return
        self._is_ended = True
        if self._process is not None and self.pid is not None:
            if self._cause is None:  # it may have closed its sockets an instant before its end
                self._process.join(EXIT_S)
            self._exit_code = self._process.exitcode
            self._note_segments()
            self._kill()
            self._process.kill()  # a child that hasn't come to its own group yet
            self._process.join(KILL_S)
            self._kill()
            if not wait_group_gone(self.pid, KILL_S):
                logger.error("%s: processes of group %s don't end", self.spec.name, self.pid)
            for segment in self._segments:
                segment.unlink(missing_ok=True)
            atexit.unregister(self._kill)
        if self._log is not None:
            self._log.join(KILL_S)
        shutil.rmtree(self.spec.work_dir, ignore_errors=True)

    def _tail(self) -> list[str]:
        return self._log.tail() if self._log is not None else []

    async def _failed_start(self, timeout_s: float) -> EngineStartError:
        timed_out = not self._ready_or_gone.is_set()
        await self._end_group()
        if timed_out:
            cause = f"not ready within {timeout_s:g} s (start_timeout_s); it was {self._stage}"
        else:
            cause = best_cause(self._cause, self._tail()) or describe_exit(self._exit_code)
        return EngineStartError(
            f"engine {self.spec.name} can't start: {cause}",
            backend=self.spec.name,
            cause=cause,
            log_tail=self._tail(),
        ).with_log_note()

    def _died_error(self) -> EngineDiedError:
        cause = self._cause or describe_exit(self._exit_code)
        return EngineDiedError(
            f"engine {self.spec.name} died: {cause}",
            backend=self.spec.name,
            exit_code=self._exit_code,
            log_tail=self._tail(),
        ).with_log_note()
