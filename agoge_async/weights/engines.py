"""The engines of a push, as rank 0 sees them: which have come how far, and whose failure it was."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import msgspec

from agoge_async.backends.base import WeightShape, WeightTarget
from agoge_async.errors import (
    BackendError,
    EngineDiedError,
    NoReplicaError,
    WeightSyncError,
)
from agoge_async.tasks import await_all
from agoge_async.weights.manifest import Manifest, encode_manifest

CLEANUP_S = 10.0
"""How long engines and threads may take to give up a push that failed."""
ENGINE_POLL_S = 0.1
"""How often an engine that doesn't run is looked at; it takes seconds to start."""
_Result = TypeVar("_Result")
_LOST_TOUCH = ("RuntimeError", "DistNetworkError", "DistStoreError")
"""How torch's errors begin when the other side has left."""


class EnginePush:
    """One push: which engines have come how far.

    Args:
        targets: The engines.
        what: The push, in words.
        version: Of the push.
        mode: What becomes of requests that run: wait, abort or keep.
        timeout_s: For each call.
    """

    def __init__(
        self,
        targets: Sequence[WeightTarget],
        what: str,
        version: int,
        mode: str,
        timeout_s: float,
    ) -> None:
        self.targets = targets
        self.what = what
        self.version = version
        self.doing = "starting"
        self.control_calls = 0
        self.awaited: set[str] = set()
        """Ranks and engines that have something to do; what is late, when time is up."""
        self._mode = mode
        self._timeout_s = timeout_s
        self._begun: list[WeightTarget] = []
        self._torn: list[WeightTarget] = []
        self._held_from = math.inf

    async def begin(self, manifest: Manifest) -> None:
        """Have all engines receive."""
        first_workers: dict[str, int] = {}
        next_worker = 1
        for target in self.targets:
            first_workers[target.name] = next_worker
            next_worker += target.weight_shape().num_workers

        def begin(target: WeightTarget) -> Awaitable[None]:
            own = msgspec.structs.replace(manifest, first_worker=first_workers[target.name])
            self._begun.append(target)
            return target.begin_push(encode_manifest(own), self._timeout_s)

        await self._on_each(begin)

    async def wait_ready(self) -> None:
        """Wait until all engines have everything, whole; still nothing is touched."""
        await self._on_each(lambda target: target.wait_push(self._timeout_s))

    async def hold(self) -> None:
        """Have all engines hold generation; still nothing is touched."""

        async def hold(target: WeightTarget) -> None:
            await target.hold_push(self._mode, self._timeout_s)
            self._held_from = min(self._held_from, time.monotonic())

        await self._on_each(hold)

    async def load(self) -> list[dict[str, float]]:
        """Have all engines load; from here on what fails is torn."""
        self._torn, self._begun = self._begun, []
        return await self._on_each(lambda target: target.load_push(self.version, self._timeout_s))

    async def compare(self) -> dict[str, tuple[list[str], list[str]]]:
        """Have all engines compare; gives, by engine, what differs and what can't be compared."""
        found: dict[str, tuple[list[str], list[str]]] = {}

        async def compare(target: WeightTarget) -> None:
            found[target.name] = await target.compare_push(self._timeout_s)

        await self._on_each(compare)
        self._begun = []
        return found

    async def commit(self) -> float:
        """Have all engines generate again; gives the seconds that they stood still."""
        await self._on_each(lambda target: target.commit_push(self.version, self._timeout_s))
        self._torn = []
        return time.monotonic() - self._held_from

    async def undo(self, cause: str) -> dict[str, str]:
        """End torn engines, have the others forget the push; gives what went wrong in which."""
        faults: dict[str, str] = {}
        for target in self._torn:
            target.condemn(f"a push of weights failed while it was loaded ({cause})")

        async def abort(target: WeightTarget) -> None:
            try:
                fault = await target.abort_push(CLEANUP_S)
            except (EngineDiedError, NoReplicaError) as error:
                faults[target.name] = str(error).splitlines()[0]
            else:
                if fault is not None and not fault.startswith(_LOST_TOUCH):
                    faults[target.name] = f"engine {target.name}: {fault}"

        with contextlib.suppress(Exception):
            await await_all(*(functools.partial(abort, target) for target in self._begun))
        return faults

    def failure(self, error: BaseException, faults: dict[str, str]) -> WeightSyncError:
        """Say whose failure it was: an engine's own first; the others only lost touch with it."""
        culprit = error.culprit if isinstance(error, WeightSyncError) else None
        text = str(error) or type(error).__name__
        if faults and (culprit is None or isinstance(error.__cause__, RuntimeError)):
            culprit, text = next(iter(faults.items()))
        culprit = culprit or "rank 0"
        return WeightSyncError(
            f"{self.what} failed while {self.doing}: {text}",
            culprit=culprit,
            version=self.version,
        )

    async def _on_each(self, call: Callable[[WeightTarget], Awaitable[_Result]]) -> list[_Result]:
        """Call all engines; a failure carries the engine's name, and its silence is seen."""
        results: list[_Result] = []

        async def one(target: WeightTarget) -> None:
            self.awaited.add(target.name)
            try:
                results.append(await call(target))
            except Exception as error:
                if isinstance(error, WeightSyncError) and error.culprit is not None:
                    raise
                raise WeightSyncError(str(error).splitlines()[0], culprit=target.name) from error
            self.awaited.discard(target.name)

        self.control_calls += len(self.targets)
        await await_all(*(functools.partial(one, target) for target in self.targets))
        return results


async def wait_for_engines(push: EnginePush) -> list[WeightShape]:
    """Wait until every engine runs.

    Raises:
        WeightSyncError: One is down for good.
    """
    engines = []
    for target in push.targets:
        push.awaited.add(target.name)
        while True:
            if target.status.state == "failed":
                raise WeightSyncError(
                    f"engine {target.name} is down: {target.status.error}", culprit=target.name
                )
            with contextlib.suppress(NoReplicaError):
                engines.append(target.weight_shape())
                break
            await anyio.sleep(ENGINE_POLL_S)
        push.awaited.discard(target.name)
    return engines


def check_adapters(
    targets: Sequence[WeightTarget], engines: Sequence[WeightShape], rank: int | None
) -> None:
    """Refuse to send what an engine doesn't take.

    An engine that takes adapters gets nothing else: whole weights would change under requests that
    have begun with an adapter, and a restarted engine would have it on other weights than before.

    Args:
        targets: The engines.
        engines: What they say of themselves.
        rank: Of the LoRA adapter that is sent; None: it is whole weights.

    Raises:
        WeightSyncError: Says which engine, and what to do.
    """
    for target, engine in zip(targets, engines, strict=True):
        largest = engine.max_lora_rank
        if rank is None and largest:
            why = "takes LoRA adapters only: connect with lora='adapter', or start it without "
            why += "enable_lora"
        elif rank is not None and not largest:
            why = "takes no LoRA adapters: give it the engine_args enable_lora: true, max_loras: "
            why += f"2 and max_lora_rank: {rank} (or the next that vLLM takes)"
        elif rank is not None and rank > largest:
            why = f"takes LoRA adapters of rank {largest} at most (max_lora_rank in engine_args); "
            why += f"this one's is {rank}"
        else:
            continue
        raise WeightSyncError(f"engine {target.name} {why}", culprit=target.name)


async def leave(targets: Sequence[WeightTarget]) -> None:
    """Have engines let go of what pushes used; those that don't run have nothing."""

    async def one(target: WeightTarget) -> None:
        with contextlib.suppress(BackendError, WeightSyncError):
            await target.abort_push(CLEANUP_S)

    await await_all(*(functools.partial(one, target) for target in targets))


@contextlib.asynccontextmanager
async def deadline(timeout_s: float, push: EnginePush) -> AsyncIterator[None]:
    """Bound a push; says what it was at, and names who is late.

    Raises:
        WeightSyncError: Time is up.
    """
    try:
        async with asyncio.timeout(timeout_s) as bound:
            yield
    except TimeoutError as error:
        if not bound.expired():
            raise
        late = sorted(push.awaited)
        raise WeightSyncError(
            f"not done within {timeout_s:g} s (timeout_s)"
            + (f"; {', '.join(late)} did not answer" if late else ""),
            culprit=late[0] if late else None,
        ) from error
