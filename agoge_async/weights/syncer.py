"""Pushes a trainer's weights to engines, as a transaction over its ranks and all engines.

A push goes: every rank joins → engines begin (nothing is touched) → the ranks send → engines load,
with generation held → engines commit. What fails before the load leaves the engines as they were.
What fails in it leaves torn engines, which are ended and restarted, and serve nothing before a
whole push. Either way all ranks raise the same error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec
import torch.distributed
from torch import nn

from agoge_async.backends.base import Backend, WeightShape, WeightTarget
from agoge_async.errors import EngineDiedError, NoReplicaError, UnsupportedError, WeightSyncError
from agoge_async.metrics import PushRecord
from agoge_async.router import Router
from agoge_async.weights.manifest import (
    GlooRoute,
    Manifest,
    Route,
    SharedMemoryRoute,
    encode_manifest,
)
from agoge_async.weights.plan import (
    Message,
    plan_buckets,
    shard_messages,
    whole_messages,
)
from agoge_async.weights.ranks import Failed, Hub, Joined, Sent, Spoke, Start, ToRank, Verdict
from agoge_async.weights.sending import Gather, Part
from agoge_async.weights.sources import ModelSource
from agoge_async.weights.transport import (
    GlooGroup,
    GlooLane,
    Lane,
    Segment,
    SharedMemoryLane,
    frame_bytes,
    join_store,
    segment_bytes,
    serve_store,
)

GATHER_NAMES = {
    "zero3_low_mem": Gather.ONE,
    "nonzero3_low_mem": Gather.ONE,
    "zero3_high_mem": Gather.ALL,
} | {str(gather): gather for gather in Gather}
"""Names of strategies, those of other trainers' `param_sync_mode` included."""
PAUSE_MODES = {"keep": "keep", "abort": "abort", "drain": "wait"}
TRANSPORTS = ("auto", "gloo", "shm")
CLEANUP_S = 10.0
"""How long engines and threads may take to give up a push that failed."""
EXPLAIN_S = 1.0
"""A rank that only lost touch waits as long for whoever can say why."""
_connects = itertools.count()
_Result = TypeVar("_Result")
_Other = TypeVar("_Other")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """How pushes are made; the same on every rank."""

    gather: Gather
    transport: str
    round_robin: bool
    bucket_bytes: int
    mode: str
    staged: bool
    check_digests: bool
    timeout_s: float


class ParamSyncer:
    """Keeps engines' weights equal to a trainer's; made by `connect`, on every rank."""

    def __init__(
        self,
        source: ModelSource,
        rank: int,
        options: SyncOptions,
        ends: Hub | Spoke,
        targets: Sequence[WeightTarget],
    ) -> None:
        self._source = source
        self._rank = rank
        self._options = options
        self._ends = ends
        self._targets = list(targets)
        self._part = Part(source, rank, options.gather)
        self._roads = _Roads(rank, options.timeout_s)
        self._lock = asyncio.Lock()

    @classmethod
    async def connect(
        cls,
        trainer_model: nn.Module,
        router: Router | Sequence[Backend | WeightTarget] | None,
        /,
        *,
        model: str = "policy",
        gather: str = "bucketed",
        transport: Literal["auto", "gloo", "shm"] = "auto",
        sources: Literal["rank0", "round_robin"] = "rank0",
        bucket_bytes: int = 64 << 20,
        mode: Literal["keep", "abort", "drain"] = "keep",
        staged: bool = True,
        check_digests: bool = True,
        timeout_s: float = 300.0,
    ) -> Self:
        """Bring a trainer and engines together; every rank calls it, in the same order.

        Args:
            trainer_model: A module or DeepSpeed engine.
            router: On rank 0: the router, or the backends themselves; elsewhere None.
            model: The router's model that is pushed to.
            gather: `gather_one`, `gather_all`, `bucketed` or `shards` (ZeRO-3 only).
            transport: `shm` (same host), `gloo`; `auto` takes `shm` for local engines.
            sources: Who sends whole buckets: rank 0, or one rank after the other.
            bucket_bytes: Largest size of a bucket; a larger tensor is a bucket of its own.
            mode: What becomes of requests that run during the load: `keep` (frozen, then they go
                on with the new weights), `abort` (end with what they have), `drain` (finish first).
            staged: Generation goes on while the engines receive.
            check_digests: Compare a digest of each message before anything is loaded.
            timeout_s: For connecting, and for each push as a whole.

        Raises:
            WeightSyncError: A rank didn't come.
            UnsupportedError: A backend can't take weights.
            ValueError: An argument is none of those above.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        rank, num_ranks = _ranks()
        source = ModelSource(trainer_model)
        options = SyncOptions(
            gather=_choice("gather", gather, GATHER_NAMES),
            transport=_choice("transport", transport, {name: name for name in TRANSPORTS}),
            round_robin=_choice("sources", sources, {"rank0": False, "round_robin": True}),
            bucket_bytes=bucket_bytes,
            mode=_choice("mode", mode, PAUSE_MODES),
            staged=staged,
            check_digests=check_digests,
            timeout_s=timeout_s,
        )
        if options.gather is Gather.SHARDS and not source.is_partitioned:
            raise ValueError("gather='shards' needs a model under ZeRO-3; take 'bucketed'")
        targets = _targets(router, model) if rank == 0 else []
        ends = await _meet(rank, num_ranks, timeout_s)
        return cls(source, rank, options, ends, targets)

    async def push(self, *, version: int) -> PushRecord:
        """Bring all engines to the trainer's weights; every rank calls it.

        Args:
            version: Of the weights, such as the optimizer step; higher than the last one.

        Raises:
            WeightSyncError: It failed, on all ranks with the same words; `culprit` says whose
                failure was the first. The engines generate with the weights that they had, or not
                at all.
        """
        async with self._lock:
            if isinstance(self._ends, Hub):
                return await self._lead(self._ends, version)
            return await self._follow(self._ends, version)

    async def aclose(self) -> None:
        """Let go of everything that pushes used; the engines keep their weights."""
        self._ends.close()
        await anyio.to_thread.run_sync(self._roads.close)

    async def __aenter__(self) -> Self:
        """Give the syncer itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    # Rank 0.

    async def _lead(self, hub: Hub, version: int) -> PushRecord:
        push = _LeadingPush(self._options, self._targets, version)
        try:
            async with _deadline(self._options.timeout_s, push):
                record = await self._transact(hub, push)
        except BaseException as error:
            failure = push.failure(error, {})
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLEANUP_S):
                await anyio.to_thread.run_sync(self._roads.give_up)
                failure = push.failure(error, await push.undo(str(failure)))
            await hub.tell_all(
                Verdict(None, str(failure), failure.culprit or "", failure.version or version)
            )
            if not isinstance(error, Exception):
                raise
            raise failure from error
        await hub.tell_all(Verdict(dataclasses.asdict(record)))
        return record

    async def _transact(self, hub: Hub, push: _LeadingPush) -> PushRecord:
        started = time.monotonic()
        push.doing = "waiting for the other ranks to call push()"
        await self._collect(hub, push)
        push.doing = "waiting for the engines to serve"
        engines = await _wait_for_engines(self._targets)
        manifest = await anyio.to_thread.run_sync(self._plan, engines, push.version)
        is_gloo = isinstance(manifest.route, GlooRoute)
        if is_gloo:
            push.doing = "telling the engines to receive"
            await push.begin(manifest)
        push.doing = "sending"
        await hub.tell_all(Start(manifest))
        if is_gloo and not self._options.staged:
            push.doing = "sending and loading"
            sent, loads = await _both(self._send_with_all(hub, push, manifest), push.load())
        else:
            sent = await self._send_with_all(hub, push, manifest)
            if not is_gloo:
                push.doing = "telling the engines to read"
                await push.begin(manifest)
            push.doing = "checking what came"
            await push.wait_ready()
            push.doing = "loading"
            loads = await push.load()
        push.doing = "committing"
        stall_s = await push.commit()
        return PushRecord(
            version=push.version,
            gather=self._options.gather,
            transport="gloo" if is_gloo else "shm",
            num_bytes=sum(s.tensor.num_bytes for b in manifest.buckets for s in b.slices),
            num_tensors=sum(len(bucket.slices) for bucket in manifest.buckets),
            num_buckets=len(manifest.buckets),
            num_engines=len(self._targets),
            control_calls=push.control_calls,
            cast=self._source.cast([s.tensor for b in manifest.buckets for s in b.slices]),
            total_s=time.monotonic() - started,
            gather_s=max(part.gather_s for part in sent),
            send_s=max(part.send_s for part in sent),
            load_s=max(load["load_s"] for load in loads),
            stall_s=stall_s,
            peak_extra_bytes=max(part.peak_extra_bytes for part in sent),
        )

    async def _collect(self, hub: Hub, push: _LeadingPush) -> None:
        """Have every rank join this push, with the same model."""
        joined: dict[int, Joined] = {}
        ranks = range(1, _ranks()[1])

        async def join(rank: int) -> None:
            joined[rank] = await hub.join(rank)
            push.awaited.discard(f"rank {rank}")

        push.awaited.update(f"rank {rank}" for rank in ranks)
        await _all(*(functools.partial(join, rank) for rank in ranks))
        mine = self._fingerprint()
        for rank in ranks:
            if joined[rank].version != push.version:
                raise WeightSyncError(
                    f"rank {rank} pushes version {joined[rank].version}, rank 0 version "
                    f"{push.version}",
                    culprit=f"rank {rank}",
                )
            if joined[rank].fingerprint != mine:
                raise WeightSyncError(
                    f"rank {rank} has another model, or other options, than rank 0",
                    culprit=f"rank {rank}",
                )
        newest = max(target.version for target in self._targets)
        if push.version <= newest:
            raise WeightSyncError(
                f"the engines have version {newest} already; versions must grow", culprit="rank 0"
            )

    async def _send_with_all(self, hub: Hub, push: _LeadingPush, manifest: Manifest) -> list[Sent]:
        """Have every rank do its part, this one included."""
        sent: list[Sent] = []

        async def own() -> None:
            try:
                sent.append(await self._send(manifest))
            except WeightSyncError as error:
                if isinstance(error.__cause__, RuntimeError):  # torch's, when others have left
                    await anyio.sleep(EXPLAIN_S)
                raise
            push.awaited.discard("rank 0")

        async def other(rank: int) -> None:
            message = await hub.receive(rank)
            assert isinstance(message, Sent), message
            sent.append(message)
            push.awaited.discard(f"rank {rank}")

        num_ranks = _ranks()[1]
        push.awaited.update(f"rank {rank}" for rank in range(num_ranks))
        await _all(own, *(functools.partial(other, rank) for rank in range(1, num_ranks)))
        return sent

    def _plan(self, engines: list[WeightShape], version: int) -> Manifest:
        options = self._options
        dtypes = {engine.dtype for engine in engines}
        if len(dtypes) > 1:
            raise WeightSyncError(f"the engines' dtypes differ: {', '.join(sorted(dtypes))}")
        buckets = plan_buckets(self._source.metadata(dtypes.pop()), options.bucket_bytes)
        num_ranks = _ranks()[1]
        messages = (
            shard_messages(buckets, num_ranks)
            if options.gather is Gather.SHARDS
            else whole_messages(buckets, range(num_ranks) if options.round_robin else (0,))
        )
        route = self._roads.route(options.transport, messages, engines)
        return Manifest(
            version=version,
            buckets=tuple(buckets),
            messages=tuple(messages),
            aliases=self._source.aliases,
            route=route,
            timeout_s=options.timeout_s,
            is_staged=options.staged or not isinstance(route, GlooRoute),
            checks_digests=options.check_digests,
        )

    # Every rank.

    async def _send(self, manifest: Manifest) -> Sent:
        """Do this rank's part, in a thread.

        When it fails or is cancelled, nothing more is sent, but the thread goes on gathering.
        """
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[Sent] = loop.create_future()

        def open_lane() -> Lane | None:
            own = [frame_bytes(m) for m in manifest.messages if m.source == self._rank]
            # Under ZeRO-3 a gathered bucket waits beside the one on its way: two in all.
            waits = self._source.is_partitioned and self._options.gather is Gather.BUCKETED
            return self._roads.lane(manifest, max(own), 1 if waits else 2) if own else None

        def fail(error: Exception) -> None:
            if not failed.done():
                failed.set_exception(error)

        def on_failure(error: Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(fail, error)

        work = functools.partial(self._part.send, manifest, open_lane, on_failure)
        thread = loop.create_task(anyio.to_thread.run_sync(work, abandon_on_cancel=True))
        try:
            await asyncio.wait({thread, failed}, return_when=asyncio.FIRST_COMPLETED)
            return await (failed if failed.done() else thread)
        except WeightSyncError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise WeightSyncError(
                f"rank {self._rank}: {cause}", culprit=f"rank {self._rank}"
            ) from error
        finally:
            if not thread.done():
                self._roads.give_up()
                thread.cancel()
                await asyncio.wait({thread})
            if not failed.cancel() and not failed.cancelled():
                failed.exception()  # seen

    # The other ranks.

    async def _follow(self, spoke: Spoke, version: int) -> PushRecord:
        await spoke.tell(Joined(spoke.num_verdicts, version, self._fingerprint()))
        # Rank 0 has the deadline; this one is for a rank 0 that hangs.
        try:
            async with asyncio.timeout(self._options.timeout_s + 2 * CLEANUP_S):
                verdict = await spoke.receive()
                if isinstance(verdict, Start):
                    verdict = await self._take_part(spoke, verdict.manifest)
        except TimeoutError as error:
            raise WeightSyncError(
                f"push of version {version}: no verdict from rank 0",
                culprit="rank 0",
                version=version,
            ) from error
        assert isinstance(verdict, Verdict), verdict
        if verdict.record is None:
            await anyio.to_thread.run_sync(self._roads.give_up)
            raise verdict.failure()
        return msgspec.convert(verdict.record, PushRecord)

    async def _take_part(self, spoke: Spoke, manifest: Manifest) -> ToRank:
        async def part() -> None:
            try:
                await spoke.tell(await self._send(manifest))
            except WeightSyncError as error:
                await spoke.tell(Failed(str(error).removeprefix(f"rank {self._rank}: ")))

        async with anyio.create_task_group() as group:
            group.start_soon(part)
            verdict = await spoke.receive()
            group.cancel_scope.cancel()
        return verdict

    def _fingerprint(self) -> str:
        described = [self._source.metadata(), dataclasses.asdict(self._options)]
        return hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:16]


class _LeadingPush:
    """One push, as rank 0 sees it: which engines have come how far."""

    def __init__(self, options: SyncOptions, targets: Sequence[WeightTarget], version: int) -> None:
        self.version = version
        self.doing = "starting"
        self.control_calls = 0
        self.awaited: set[str] = set()
        """Ranks and engines that have something to do; what is late, when time is up."""
        self._mode = options.mode
        self._timeout_s = options.timeout_s
        self._targets = targets
        self._begun: list[WeightTarget] = []
        self._torn: list[WeightTarget] = []
        self._held_from = 0.0

    async def begin(self, manifest: Manifest) -> None:
        """Have all engines receive."""
        first_workers: dict[str, int] = {}
        next_worker = 1
        for target in self._targets:
            first_workers[target.name] = next_worker
            next_worker += target.weight_shape().num_workers

        def begin(target: WeightTarget) -> Awaitable[None]:
            route = manifest.route
            if isinstance(route, GlooRoute):
                first_worker = first_workers[target.name]
                route = msgspec.structs.replace(route, first_worker=first_worker)
            own = msgspec.structs.replace(manifest, route=route)
            self._begun.append(target)
            return target.begin_push(encode_manifest(own), self._timeout_s)

        await self._on_each(begin)

    async def wait_ready(self) -> None:
        """Wait until all engines have everything, whole; still nothing is touched."""
        await self._on_each(lambda target: target.wait_push(self._timeout_s))

    async def load(self) -> list[dict[str, float]]:
        """Have all engines load; from here on what fails is torn."""
        self._held_from = time.monotonic()
        self._torn, self._begun = self._begun, []
        return await self._on_each(
            lambda target: target.load_push(self.version, self._mode, self._timeout_s)
        )

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
            await _all(*(functools.partial(abort, target) for target in self._begun))
        return faults

    def failure(self, error: BaseException, faults: dict[str, str]) -> WeightSyncError:
        """Say whose failure it was: an engine's own first; the others only lost touch with it."""
        culprit = error.culprit if isinstance(error, WeightSyncError) else None
        text = str(error) or type(error).__name__
        if faults and (culprit is None or isinstance(error.__cause__, RuntimeError)):
            culprit, text = next(iter(faults.items()))
        culprit = culprit or "rank 0"
        return WeightSyncError(
            f"push of version {self.version} failed while {self.doing}: {text}",
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

        self.control_calls += len(self._targets)
        await _all(*(functools.partial(one, target) for target in self._targets))
        return results


_LOST_TOUCH = ("RuntimeError", "DistNetworkError", "DistStoreError")
"""How torch's errors begin when the other side has left."""


class _Roads:
    """What one rank keeps from push to push: groups, frames, the segment. Used by threads."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._store: torch.distributed.TCPStore | None = None
        self._segment: Segment | None = None
        self._segment_route: SharedMemoryRoute | None = None
        self._gloo: tuple[GlooRoute, int, int, GlooLane] | None = None
        self._last: tuple[object, GlooRoute] | None = None

    def route(
        self,
        transport: str,
        messages: Sequence[Message],
        engines: list[WeightShape],
    ) -> Route:
        """Say how this push goes; rank 0's."""
        if transport != "gloo":
            size = segment_bytes(messages)
            if self._segment is None or self._segment.num_bytes != size:
                self._leave_segment()
                self._segment = Segment.make(size)
            self._segment_route = SharedMemoryRoute(self._segment.path, size)
            return self._segment_route
        sources = tuple(sorted({message.source for message in messages}))
        key = (engines, sources)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        if self._store is None:
            self._store = serve_store(_host(), self._timeout_s)
        route = GlooRoute(
            host=_host(),
            port=self._store.port,
            epoch=secrets.token_hex(8),
            sources=sources,
            num_workers=sum(engine.num_workers for engine in engines),
            first_worker=0,
        )
        self._last = key, route
        return route

    def lane(self, manifest: Manifest, largest: int, num_frames: int) -> Lane:
        """Give this rank's way to the workers."""
        route = manifest.route
        if isinstance(route, SharedMemoryRoute):
            if self._segment is None or self._segment_route != route:
                self._leave_segment()
                self._segment = Segment.open(route.segment, route.num_bytes)
                self._segment_route = route
            return SharedMemoryLane(self._segment, manifest.messages)
        if self._gloo is not None and self._gloo[:3] == (route, largest, num_frames):
            return self._gloo[3]
        if self._gloo is not None:
            self._gloo[3].close()
            self._gloo = None
        if self._store is None:
            self._store = join_store(route.host, route.port, self._timeout_s)
        group = GlooGroup(self._store, route, self._rank, 0, self._timeout_s)
        lane = GlooLane(group, largest, num_frames)
        self._gloo = route, largest, num_frames, lane
        return lane

    def give_up(self) -> None:
        """Leave the groups, so that nobody waits for this rank; the next push makes new ones."""
        self._last = None
        self._store = None  # rank 0's is the server: who waits at it for a group is told
        if self._gloo is not None:
            self._gloo[3].close()
            self._gloo = None

    def close(self) -> None:
        self.give_up()
        self._leave_segment()

    def _leave_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def _ranks() -> tuple[int, int]:
    """Give this process's rank and the number of them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _host() -> str:
    """Give rank 0's address, as all ranks and engines can reach it."""
    everywhere, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    return "127.0.0.1" if everywhere == here else os.environ["MASTER_ADDR"]


async def _meet(rank: int, num_ranks: int, timeout_s: float) -> Hub | Spoke:
    """Connect the ranks; they find rank 0 through the trainer's own store."""
    key = f"agoge_async/param_syncer/{next(_connects)}"
    if rank == 0:
        hub = Hub(num_ranks)
        try:
            address = await hub.open(_host())
            if num_ranks > 1:
                await anyio.to_thread.run_sync(_default_store().set, key, address)
            await hub.wait_all(timeout_s)
        except BaseException:
            hub.close()
            raise
        return hub
    try:
        with anyio.fail_after(timeout_s):
            raw = await anyio.to_thread.run_sync(_default_store().get, key, abandon_on_cancel=True)
    except (TimeoutError, RuntimeError) as error:
        raise WeightSyncError(
            f"rank 0 did not call connect() within {timeout_s:g} s", culprit="rank 0"
        ) from error
    spoke = Spoke(rank)
    try:
        await spoke.open(raw.decode(), timeout_s)
    except BaseException:
        spoke.close()
        raise
    return spoke


def _default_store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


def _targets(
    router: Router | Sequence[Backend | WeightTarget] | None, model: str
) -> list[WeightTarget]:
    if router is None:
        raise ValueError("rank 0 needs the router, or a list of backends, to push to")
    backends = router.pool(model).backends if isinstance(router, Router) else router
    targets = []
    for backend in backends:
        if not isinstance(backend, WeightTarget):
            raise UnsupportedError(
                f"backend {backend.name} can't take weights: only local engines can",
                capability="trainable",
            )
        targets.append(backend)
    if not targets:
        raise ValueError("there is no backend to push to")
    return targets


async def _wait_for_engines(targets: Sequence[WeightTarget]) -> list[WeightShape]:
    """Wait until every engine runs; one that is down for good fails the push."""
    engines = []
    for target in targets:
        while True:
            if target.status.state == "failed":
                raise WeightSyncError(
                    f"engine {target.name} is down: {target.status.error}", culprit=target.name
                )
            with contextlib.suppress(NoReplicaError):
                engines.append(target.weight_shape())
                break
            await anyio.sleep(0.1)
    return engines


async def _all(*calls: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Await all; the first failure ends the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call())
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def _both(one: Awaitable[_Result], other: Awaitable[_Other]) -> tuple[_Result, _Other]:
    """Await two; the first failure ends the other and is raised itself."""
    results: dict[int, Any] = {}

    async def keep(index: int, call: Awaitable[Any]) -> None:
        results[index] = await call

    await _all(lambda: keep(0, one), lambda: keep(1, other))
    return results[0], results[1]


@contextlib.asynccontextmanager
async def _deadline(timeout_s: float, push: _LeadingPush) -> AsyncIterator[None]:
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


def _choice(name: str, given: str, known: dict[str, _Result]) -> _Result:
    if given not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
    return known[given]
