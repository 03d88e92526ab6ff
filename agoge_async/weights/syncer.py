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
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec
from torch import nn

from agoge_async.backends.base import Backend, WeightShape, WeightTarget
from agoge_async.errors import BackendError, UnsupportedError, WeightSyncError
from agoge_async.metrics import PushRecord, VerifyRecord
from agoge_async.router import Router
from agoge_async.tasks import await_all, await_both
from agoge_async.weights.engines import (
    CLEANUP_S,
    EnginePush,
    check_adapters,
    deadline,
    leave,
    wait_for_engines,
)
from agoge_async.weights.frames import frame_bytes
from agoge_async.weights.manifest import GroupRoute, Manifest
from agoge_async.weights.plan import cut_messages, plan_buckets, shard_messages, whole_messages
from agoge_async.weights.ranks import (
    Failed,
    Hub,
    Joined,
    Sent,
    Spoke,
    Start,
    ToRank,
    Verdict,
    meet,
    rank_and_size,
)
from agoge_async.weights.routes import Routes
from agoge_async.weights.sending import Gather, RankPart
from agoge_async.weights.sources import ModelSource
from agoge_async.weights.transport import Lane

logger = logging.getLogger(__name__)

GATHER_NAMES = {
    "zero3_low_mem": Gather.ONE,
    "nonzero3_low_mem": Gather.ONE,
    "zero3_high_mem": Gather.ALL,
} | {str(gather): gather for gather in Gather}
"""Names of strategies, those of other trainers' `param_sync_mode` included."""
PAUSE_MODES = {"keep": "keep", "abort": "abort", "drain": "wait"}
TRANSPORTS = ("auto", "gloo", "nccl", "shm", "cuda_ipc", "disk")
EXPLAIN_S = 1.0
"""A rank that only lost touch waits as long for whoever can say why."""
_Choice = TypeVar("_Choice")
_Record = TypeVar("_Record", PushRecord, VerifyRecord)


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
    folder: str | None
    lora: str


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
        self._part = RankPart(source, rank, options.gather)
        folder = None if options.folder is None else Path(options.folder)
        self._routes = Routes(rank, source.device, options.timeout_s, folder)
        self._lock = asyncio.Lock()
        self._snapshot: Manifest | None = None
        """The last push, while all that was written for it is still there."""
        self._restores: set[asyncio.Task[None]] = set()
        for target in self._targets:
            target.on_stale = functools.partial(self._begin_restore, target)

    @classmethod
    async def connect(
        cls,
        trainer_model: nn.Module,
        router: Router | Sequence[Backend | WeightTarget] | None,
        /,
        *,
        model: str = "policy",
        gather: str = "bucketed",
        transport: Literal["auto", "gloo", "nccl", "shm", "cuda_ipc", "disk"] = "auto",
        sources: Literal["rank0", "round_robin"] = "rank0",
        bucket_bytes: int = 16 << 20,
        mode: Literal["keep", "abort", "drain"] = "keep",
        staged: bool = True,
        check_digests: bool = True,
        timeout_s: float = 300.0,
        folder: str | os.PathLike[str] | None = None,
        lora: Literal["merged", "adapter"] = "merged",
    ) -> Self:
        """Bring a trainer and engines together; every rank calls it, in the same order.

        Args:
            trainer_model: A module or DeepSpeed engine.
            router: On rank 0: the router, or the backends themselves; elsewhere None.
            model: The router's model that is pushed to.
            gather: `gather_one`, `gather_all`, `bucketed` or `shards` (ZeRO-3 only).
            transport: `shm` (same host: one copy, whatever the number of engines), `gloo`, `nccl`
                (engines on other GPUs than the trainer's), `cuda_ipc` (on the same GPU as rank 0),
                `disk` (safetensors in `folder`); `auto` takes the fastest of them that is possible
                between rank 0 and the engines.
            sources: Who sends whole buckets: rank 0, or one rank after the other.
            bucket_bytes: Largest size of a bucket; a larger tensor is a bucket of its own.
            mode: What becomes of requests that run during the load: `keep` (frozen, then they go
                on with the new weights), `abort` (end with what they have), `drain` (finish first).
            staged: Generation goes on while the engines receive.
            check_digests: Compare a digest of each message before anything is loaded.
            timeout_s: For connecting, and for each push as a whole.
            folder: For `disk`: each push becomes a folder `v<version>` in it, and the one before is
                removed once all engines have the new one.
            lora: What is sent of a model with LoRA adapters of PEFT: its base model with them
                `merged`, or the `adapter` alone, to engines that were started from the base model
                with `enable_lora`. Then requests that run finish with the adapter that they began
                with; engines drop it after the last of them.

        Raises:
            WeightSyncError: A rank didn't come.
            UnsupportedError: A backend can't take weights.
            ValueError: An argument is none of those above.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        rank, num_ranks = rank_and_size()
        is_adapter = _choice("lora", lora, {"merged": False, "adapter": True})
        source = ModelSource(trainer_model, adapter_alone=is_adapter)
        options = SyncOptions(
            gather=_choice("gather", gather, GATHER_NAMES),
            transport=_choice("transport", transport, {name: name for name in TRANSPORTS}),
            round_robin=_choice("sources", sources, {"rank0": False, "round_robin": True}),
            bucket_bytes=bucket_bytes,
            mode=_choice("mode", mode, PAUSE_MODES),
            staged=staged or is_adapter,
            check_digests=check_digests,
            timeout_s=timeout_s,
            folder=None if folder is None else os.fspath(folder),
            lora=lora,
        )
        _check_together(options, source)
        targets = _targets(router, model) if rank == 0 else []
        ends = await meet(rank, num_ranks, timeout_s)
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
        what = f"push of version {version}"
        async with self._lock:
            if isinstance(self._ends, Spoke):
                return await self._follow(self._ends, what, PushRecord)
            push = self._engine_push(what, version)
            return await self._lead(self._ends, push, self._push)

    async def verify(self) -> VerifyRecord:
        """Compare what the engines compute with, and what the trainer holds; every rank calls it.

        Everything is sent as in a push, and nothing is changed. An engine doesn't generate while
        it compares.

        Raises:
            WeightSyncError: It couldn't be done, on all ranks with the same words; an adapter
                can't be compared.
        """
        if self._source.adapter is not None:
            raise WeightSyncError("verify() can't compare an adapter with what the engines have")
        what = "verify()"
        async with self._lock:
            if isinstance(self._ends, Spoke):
                return await self._follow(self._ends, what, VerifyRecord)
            newest = max(target.version for target in self._targets)
            push = self._engine_push(what, newest)
            return await self._lead(self._ends, push, self._verify)

    async def aclose(self) -> None:
        """Let go of all that pushes used, here and in the engines, which keep their weights."""
        for target in self._targets:
            target.on_stale = lambda: None
        for task in self._restores:
            task.cancel()
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLEANUP_S):
            async with self._lock:
                await leave(self._targets)
        self._ends.close()
        await anyio.to_thread.run_sync(self._routes.close)

    async def __aenter__(self) -> Self:
        """Give the syncer itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    # Rank 0.

    def _engine_push(self, what: str, version: int) -> EnginePush:
        options = self._options
        return EnginePush(self._targets, what, version, options.mode, options.timeout_s)

    async def _lead(
        self, hub: Hub, push: EnginePush, work: Callable[[Hub, EnginePush], Awaitable[_Record]]
    ) -> _Record:
        """Do what all ranks do together, and tell them how it ended."""
        try:
            async with deadline(self._options.timeout_s, push):
                record = await work(hub, push)
        except BaseException as error:
            failure = push.failure(error, {})
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLEANUP_S):
                await anyio.to_thread.run_sync(self._routes.give_up)
                failure = push.failure(error, await push.undo(str(failure)))
            await hub.tell_all(Verdict(None, str(failure), failure.culprit or "", failure.version))
            if not isinstance(error, Exception):
                raise
            raise failure from error
        await hub.tell_all(Verdict(dataclasses.asdict(record)))
        return record

    async def _push(self, hub: Hub, push: EnginePush) -> PushRecord:
        started = time.monotonic()
        await self._collect(hub, push)
        newest = max(target.version for target in self._targets)
        if push.version <= newest:
            raise WeightSyncError(
                f"the engines have version {newest} already; versions must grow", culprit="rank 0"
            )
        manifest = await self._prepare(push, is_staged=self._options.staged)
        if manifest.is_staged:
            sent = await self._transfer(hub, push, manifest)
            transfer_s = time.monotonic() - started
            await self._hold(push)
            push.doing = "loading"
            loads = await push.load()
        else:
            push.doing = "telling the engines to receive"
            await push.begin(manifest)
            await self._hold(push)
            push.doing = "sending and loading"
            sent, loads = await await_both(self._send_with_all(hub, push, manifest), push.load())
            transfer_s = time.monotonic() - started
        push.doing = "committing"
        stall_s = await push.commit()
        load_s = max(load["load_s"] for load in loads)
        await anyio.to_thread.run_sync(self._routes.committed, manifest)
        self._snapshot = manifest if manifest.route.is_lasting else None
        return PushRecord(
            version=push.version,
            gather=self._options.gather,
            transport=manifest.route.name,
            num_bytes=sum(tensor.num_bytes for tensor in manifest.tensors),
            num_tensors=len(manifest.tensors),
            num_buckets=len(manifest.buckets),
            num_engines=len(self._targets),
            control_calls=push.control_calls,
            cast=self._source.cast(manifest.tensors),
            total_s=time.monotonic() - started,
            transfer_s=transfer_s,
            gather_s=max(part.gather_s for part in sent),
            send_s=max(part.send_s for part in sent),
            load_s=load_s,
            stall_s=stall_s if manifest.adapter is None else load_s,
            peak_extra_bytes=max(part.peak_extra_bytes for part in sent),
        )

    async def _verify(self, hub: Hub, push: EnginePush) -> VerifyRecord:
        started = time.monotonic()
        await self._collect(hub, push)
        manifest = await self._prepare(push, is_staged=True)
        await self._transfer(hub, push, manifest)
        push.doing = "comparing"
        found = await push.compare()
        differing = {name: tuple(names) for name, (names, _) in found.items() if names}
        return VerifyRecord(
            version=push.version,
            num_tensors=len(manifest.tensors),
            differing=differing,
            unchecked=tuple(sorted({name for _, names in found.values() for name in names})),
            total_s=time.monotonic() - started,
        )

    async def _prepare(self, push: EnginePush, *, is_staged: bool) -> Manifest:
        push.doing = "waiting for the engines to serve"
        engines = await wait_for_engines(push)
        adapter = self._source.adapter
        check_adapters(push.targets, engines, None if adapter is None else adapter.rank)
        self._snapshot = None
        plan = functools.partial(self._plan, engines, push.version, is_staged=is_staged)
        return await anyio.to_thread.run_sync(plan)

    async def _hold(self, push: EnginePush) -> None:
        push.doing = "waiting for requests to end" if self._options.mode == "wait" else "holding"
        await push.hold()

    async def _transfer(self, hub: Hub, push: EnginePush, manifest: Manifest) -> list[Sent]:
        """Bring everything to all engines; none of them is touched."""
        if manifest.route.is_live:
            push.doing = "telling the engines to receive"
            await push.begin(manifest)
        push.doing = "sending"
        sent = await self._send_with_all(hub, push, manifest)
        if not manifest.route.is_live:
            await anyio.to_thread.run_sync(self._routes.written, manifest)
            push.doing = "telling the engines to read"
            await push.begin(manifest)
        push.doing = "checking what came"
        await push.wait_ready()
        return sent

    def _begin_restore(self, target: WeightTarget) -> None:
        task = asyncio.get_running_loop().create_task(self._restore(target))
        self._restores.add(task)
        task.add_done_callback(self._restores.discard)

    async def _restore(self, target: WeightTarget) -> None:
        """Bring an engine that was restarted to the last push, if what was written is there."""
        async with self._lock:
            manifest = self._snapshot
            if manifest is None or target.status.state != "stale":
                return
            options = self._options
            what = f"restoring version {manifest.version}"
            push = EnginePush([target], what, manifest.version, options.mode, options.timeout_s)
            try:
                async with deadline(options.timeout_s, push):
                    await push.begin(manifest)
                    await push.wait_ready()
                    await push.hold()
                    await push.load()
                    await push.commit()
            except (WeightSyncError, BackendError) as error:
                failure = push.failure(error, {})
                logger.warning("%s; it waits for the next push", failure)
                await push.undo(str(failure))

    async def _collect(self, hub: Hub, push: EnginePush) -> None:
        """Have every rank join, with the same model."""
        push.doing = "waiting for the other ranks to come"
        joined: dict[int, Joined] = {}
        ranks = range(1, rank_and_size()[1])

        async def join(rank: int) -> None:
            joined[rank] = await hub.join(rank)
            push.awaited.discard(f"rank {rank}")

        push.awaited.update(f"rank {rank}" for rank in ranks)
        await await_all(*(functools.partial(join, rank) for rank in ranks))
        mine = self._fingerprint()
        for rank in ranks:
            if joined[rank].what != push.what:
                raise WeightSyncError(
                    f"rank {rank} came for a {joined[rank].what}", culprit=f"rank {rank}"
                )
            if joined[rank].fingerprint != mine:
                raise WeightSyncError(
                    f"rank {rank} has another model, or other options, than rank 0",
                    culprit=f"rank {rank}",
                )

    async def _send_with_all(self, hub: Hub, push: EnginePush, manifest: Manifest) -> list[Sent]:
        """Have every rank do its part, this one included."""
        await hub.tell_all(Start(manifest))
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

        num_ranks = rank_and_size()[1]
        push.awaited.update(f"rank {rank}" for rank in range(num_ranks))
        await await_all(own, *(functools.partial(other, rank) for rank in range(1, num_ranks)))
        return sent

    def _plan(self, engines: list[WeightShape], version: int, *, is_staged: bool) -> Manifest:
        options = self._options
        dtypes = {engine.dtype for engine in engines}
        if len(dtypes) > 1:
            raise WeightSyncError(f"the engines' dtypes differ: {', '.join(sorted(dtypes))}")
        buckets = plan_buckets(self._source.metadata(dtypes.pop()), options.bucket_bytes)
        num_ranks = rank_and_size()[1]
        messages = (
            shard_messages(buckets, num_ranks)
            if options.gather is Gather.SHARDS
            else whole_messages(buckets, range(num_ranks) if options.round_robin else (0,))
        )
        route = self._routes.route(options.transport, messages, engines, version)
        if isinstance(route, GroupRoute):  # elsewhere, what is written is not copied any more
            messages = cut_messages(messages, buckets, options.bucket_bytes)
        return Manifest(
            version=version,
            stamp=1 + secrets.randbits(62),
            buckets=tuple(buckets),
            messages=tuple(messages),
            aliases=self._source.aliases,
            route=route,
            timeout_s=options.timeout_s,
            is_staged=is_staged or not route.is_live,
            checks_digests=options.check_digests,
            adapter=None if self._source.adapter is None else self._source.adapter.config,
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
            return self._routes.lane(manifest, max(own), 1 if waits else 2) if own else None

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
                self._routes.give_up()
                thread.cancel()
                await asyncio.wait({thread})
            if not failed.cancel() and not failed.cancelled():
                failed.exception()  # seen

    # The other ranks.

    async def _follow(self, spoke: Spoke, what: str, record: type[_Record]) -> _Record:
        await spoke.tell(Joined(spoke.num_verdicts, what, self._fingerprint()))
        # Rank 0 has the deadline; this one is for a rank 0 that hangs.
        try:
            async with asyncio.timeout(self._options.timeout_s + 2 * CLEANUP_S):
                verdict = await spoke.receive()
                if isinstance(verdict, Start):
                    verdict = await self._take_part(spoke, verdict.manifest)
        except TimeoutError as error:
            raise WeightSyncError(f"{what}: no verdict from rank 0", culprit="rank 0") from error
        assert isinstance(verdict, Verdict), verdict
        if verdict.record is None:
            await anyio.to_thread.run_sync(self._routes.give_up)
            raise verdict.failure()
        return msgspec.convert(verdict.record, record)

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


def _check_together(options: SyncOptions, source: ModelSource) -> None:
    """Refuse options that don't go together."""
    is_shards = options.gather is Gather.SHARDS
    if is_shards and not source.is_partitioned:
        raise ValueError("gather='shards' needs a model under ZeRO-3; take 'bucketed'")
    if is_shards and source.is_merged:
        raise ValueError("gather='shards' can't merge an adapter; take 'bucketed'")
    if (options.transport == "disk") != (options.folder is not None):
        raise ValueError("transport='disk' needs a folder, and only that")
    if options.transport == "disk" and is_shards:
        raise ValueError("gather='shards' sends no whole tensors; transport='disk' writes them")
    if options.transport == "cuda_ipc" and (is_shards or options.round_robin):
        raise ValueError("transport='cuda_ipc' shares rank 0's GPU: only rank 0 can send")
    if options.transport in {"nccl", "cuda_ipc"} and source.device is None:
        raise ValueError(f"transport={options.transport!r} needs a GPU; take 'auto'")


def _choice(name: str, given: str, known: dict[str, _Choice]) -> _Choice:
    if given not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {given!r}")
    return known[given]
