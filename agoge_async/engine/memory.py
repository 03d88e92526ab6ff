"""What one engine has in its GPU's memory, and how it gives that back for a while.

An engine that shares a GPU with the trainer sleeps while the trainer trains. `EngineMemory` lives
as long as its engine: one that is restarted is awake, with a memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import anyio
import msgspec

from agoge_async.engine.messages import MEMORY_TAGS, WEIGHTS, CommandKind
from agoge_async.engine.process import EngineProcess
from agoge_async.errors import EngineBusyError, EngineError, WeightSyncError

CALLS_POLL_S = 0.02
"""How often an engine that is to sleep is asked whether it has answered its calls."""


class EngineMemory:
    """Puts an engine to sleep and wakes it up; knows what may be asked of it meanwhile.

    Args:
        engine: A started engine.
        on_change: Called when `state` may have changed.
        is_stale: Whether its weights must not serve.
    """

    def __init__(
        self, engine: EngineProcess, on_change: Callable[[], None], *, is_stale: bool
    ) -> None:
        self.engine = engine
        self._on_change = on_change
        self._is_stale = is_stale
        self._is_in_push = False
        self._asleep: frozenset[str] = frozenset()
        self._one_at_a_time = anyio.Lock()

    @property
    def state(self) -> str:
        """How the engine is doing: asleep (a part of it at least), stale or serving."""
        if self._asleep:
            return "asleep"
        return "stale" if self._is_stale else "serving"

    async def sleep(self, level: int, mode: str, timeout_s: float) -> None:
        """Give weights and KV cache back, once nothing runs; does nothing when the weights sleep.

        The state is asleep from now on, so that the router sends nothing; it is as before when what
        runs doesn't end. At level 1 the weights move to the host, at level 2 they are dropped.

        Raises:
            EngineBusyError: A push is under way, or requests still ran after `timeout_s`.
            EngineError: It couldn't, and is restarted.
        """
        async with self._one_at_a_time:
            self._refuse_in_push("sleep")
            if WEIGHTS in self._asleep:
                return
            before = self._asleep
            self._become(frozenset(MEMORY_TAGS))
            try:
                await self._end_calls(mode, timeout_s)
            except BaseException:
                self._become(before)
                raise
            self._is_stale |= level == 2
            await self._command(CommandKind.SLEEP, str(level), timeout_s)

    async def wake_up(self, tags: Collection[str], timeout_s: float) -> None:
        """Take memory again; does nothing for what is awake.

        Raises:
            EngineBusyError: A push is under way, or the engine didn't answer within `timeout_s`.
            EngineError: It couldn't, and is restarted.
        """
        async with self._one_at_a_time:
            self._refuse_in_push("wake it up")
            waking = [tag for tag in MEMORY_TAGS if tag in tags and tag in self._asleep]
            if waking:
                body = msgspec.json.encode(waking).decode()
                await self._command(CommandKind.WAKE_UP, body, timeout_s)
                self._become(self._asleep.difference(waking))

    def check_push(self) -> None:
        """Refuse a push to weights that sleep: it would end the engine (vllm#57853).

        Raises:
            WeightSyncError: Says what to do first.
        """
        if WEIGHTS in self._asleep:
            raise WeightSyncError(
                f"engine {self.engine.spec.name} is asleep, its weights too; before the push call "
                'router.wake_up(model, tags=["weights"])',
                culprit=self.engine.spec.name,
            )

    def begin_push(self) -> None:
        """Stay as it is until the push has ended.

        Raises:
            WeightSyncError: The weights sleep.
        """
        self.check_push()
        self._is_in_push = True

    def end_push(self, *, is_committed: bool) -> None:
        """Take note of the end of a push."""
        self._is_in_push = False
        self._is_stale &= not is_committed

    def _become(self, asleep: frozenset[str]) -> None:
        self._asleep = asleep
        self._on_change()

    def _refuse_in_push(self, what: str) -> None:
        if self._is_in_push:
            name = self.engine.spec.name
            raise EngineBusyError(
                f"engine {name} takes a push of weights now; {what} when it is over", backend=name
            )

    async def _end_calls(self, mode: str, timeout_s: float) -> None:
        try:
            with anyio.fail_after(timeout_s):
                while self.engine.num_calls:
                    if mode == "abort":
                        await self.engine.command(CommandKind.END_REQUESTS, "", timeout_s)
                    await anyio.sleep(CALLS_POLL_S)
        except TimeoutError as error:
            name = self.engine.spec.name
            raise EngineBusyError(
                f"engine {name} doesn't sleep: after {timeout_s:g} s (timeout_s) "
                f"{self.engine.num_calls} requests still run; mode='abort' would end them",
                backend=name,
            ) from error

    async def _command(self, kind: CommandKind, body: str, timeout_s: float) -> None:
        """Have the engine do it; one that fails has some of its memory and is of no use."""
        try:
            await self.engine.command(kind, body, timeout_s)
        except WeightSyncError as error:
            what = f"it failed to {kind.replace('_', ' ')}"
            self.engine.condemn(f"{what}: {error}")
            raise EngineError(
                f"{error}; {what} and is restarted", backend=self.engine.spec.name
            ) from error
