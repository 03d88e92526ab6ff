"""Pushes of one rank into receivers that run in threads of this process: the whole protocol, real
groups and segments, without an engine.
"""

import asyncio
import contextlib
import dataclasses
import resource
import signal
import tempfile
import threading

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from agoge_async.backends.base import BackendStatus, WeightShape
from agoge_async.engine.receiver import PushReceiver
from agoge_async.errors import WeightSyncError
from agoge_async.weights import frames
from agoge_async.weights.manifest import decode_manifest
from agoge_async.weights.syncer import ParamSyncer

BUCKET_BYTES = 3000
CPU = torch.device("cpu")
TRANSPORTS = ("gloo", "shm", "disk")


class Tied(nn.Module):
    """Tied parameters, a scalar, a tensor above the budget, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 20)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(5))
        self.scale = nn.Parameter(torch.randn(()))
        self.head = nn.Linear(20, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.randn(3))
        self.register_buffer("cache", torch.randn(3), persistent=False)


class Target:
    """Receives as a worker does; what it loaded is in `weights`, once it is committed."""

    def __init__(self, name: str, *, dtype: str = "float32") -> None:
        self.name = name
        self.version = 0
        self.status = BackendStatus(state="serving")
        self.shape = WeightShape(incarnation=1, devices=("cpu",), dtype=dtype)
        self.weights: dict[str, torch.Tensor] = {}
        self.on_stale = lambda: None
        self.calls: list[str] = []
        self.committed = asyncio.Event()
        self.condemned: str | None = None
        self.load_error: Exception | None = None
        self.load_gate: threading.Event | None = None
        self._receiver = PushReceiver(0, CPU)
        self._loaded: dict[str, torch.Tensor] = {}

    def weight_shape(self) -> WeightShape:
        return self.shape

    async def begin_push(self, manifest: str, timeout_s: float) -> None:
        self.calls.append("begin")
        self._receiver.begin(decode_manifest(manifest))

    def _put(self, tensors) -> None:
        if self.load_gate is not None:
            self.load_gate.wait(10)
        if self.load_error is not None:
            raise self.load_error
        self._loaded = {name: tensor.clone() for name, tensor in tensors}

    async def wait_push(self, timeout_s: float) -> None:
        self.calls.append("ready")
        while not self._receiver.is_ready:
            await anyio.sleep(0.001)

    async def hold_push(self, mode: str, timeout_s: float) -> None:
        self.calls.append(f"hold {mode}")

    async def load_push(self, version: int, timeout_s: float) -> dict[str, float]:
        self.calls.append("load")
        return await anyio.to_thread.run_sync(self._receiver.load, self._put)

    async def compare_push(self, timeout_s: float) -> tuple[list[str], list[str]]:
        self.calls.append("compare")
        held, self._loaded = self.weights, {}
        await anyio.to_thread.run_sync(self._receiver.load, self._put)
        return [n for n, t in self._loaded.items() if not torch.equal(t, held[n])], []

    async def commit_push(self, version: int, timeout_s: float) -> None:
        self.calls.append("commit")
        self.version, self.weights = version, self._loaded
        self.status = BackendStatus(state="serving")
        self.committed.set()

    async def abort_push(self, timeout_s: float) -> str | None:
        self.calls.append("abort")
        return await anyio.to_thread.run_sync(self._receiver.abort)

    def condemn(self, cause: str) -> None:
        self.condemned = cause

    def restart(self) -> None:
        """Lose everything, as an engine that died does."""
        self._receiver.abort()
        self._receiver = PushReceiver(0, CPU)
        self.shape = dataclasses.replace(self.shape, incarnation=object())
        self.weights = {}
        self.status = BackendStatus(state="stale")

    def close(self) -> None:
        self._receiver.abort()


@contextlib.asynccontextmanager
async def connected(model, num_targets=1, **options):
    targets = [Target(f"engine/{number}") for number in range(num_targets)]
    options = {"bucket_bytes": BUCKET_BYTES, "timeout_s": 20.0} | options
    with tempfile.TemporaryDirectory() as folder:
        if options.get("transport") == "disk":
            options["folder"] = folder
        try:
            async with await ParamSyncer.connect(model, targets, **options) as syncer:
                yield syncer, targets
        finally:
            for target in targets:
                target.close()


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def assert_equal(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()  # tied ones under both names, no buffer that isn't kept
    assert sorted(state) == sorted(weights)
    for name, tensor in state.items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("gather", ["gather_one", "gather_all", "bucketed", "zero3_low_mem"])
@pytest.mark.parametrize("staged", [True, False], ids=["staged", "at once"])
@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_every_target_gets_every_tensor(kind, staged, gather):
    """Bit for bit, push after push, over the same groups."""
    model = Tied()
    options = {"transport": kind, "staged": staged, "gather": gather}
    async with connected(model, 3, **options) as (syncer, targets):
        for version in (1, 5):
            change(model)
            record = await syncer.push(version=version)
            for target in targets:
                assert_equal(model, target.weights)
                assert version == target.version
    assert (version, kind, 3) == (record.version, record.transport, record.num_engines)
    assert 13 == record.num_tensors
    assert 4 * (50 * 20 + 5 * (400 + 20) + 1 + 3) == record.num_bytes
    assert record.num_buckets > 3


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_target_is_called_five_times_a_push(kind):
    """open-instruct#1535: two hundred calls a push; here their number knows no parameters."""
    async with connected(Tied(), 2, transport=kind, bucket_bytes=64) as (syncer, targets):
        record = await syncer.push(version=1)
        for target in targets:
            assert ["begin", "ready", "hold keep", "load", "commit"] == target.calls
    assert 10 == record.control_calls


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_the_trainer_casts_to_the_engines_type(kind):
    """Before the send, and the record says so."""
    model = Tied()
    async with connected(model, transport=kind) as (syncer, [target]):
        target.shape = WeightShape(incarnation=1, devices=("cpu",), dtype="bfloat16")
        record = await syncer.push(version=1)
    assert ("float32",) == record.cast
    assert torch.equal(model.embed.weight.to(torch.bfloat16), target.weights["embed.weight"])


async def test_memory_on_its_way_is_two_buckets():
    """trl#7131: gather, then send, loses the bound. Here it is counted."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    largest = 64 * 64 * 4
    async with connected(model, transport="gloo", bucket_bytes=largest) as (syncer, _):
        record = await syncer.push(version=1)
    assert record.num_bytes > 15 * largest
    assert record.peak_extra_bytes <= 2 * (largest + 80)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_damaged_message_is_found_before_anything_is_loaded(kind, monkeypatch):
    """One bit; the engine keeps its weights, and the next push succeeds."""
    model = Tied()
    seal = frames.seal

    def damage(frame, checksum, stamp):
        frame[1] ^= 4
        seal(frame, checksum, stamp)

    async with connected(model, 2, transport=kind) as (syncer, targets):
        monkeypatch.setattr("agoge_async.weights.sending.seal", damage)
        with pytest.raises(WeightSyncError, match="bucket 0 from rank 0 was damaged") as caught:
            await syncer.push(version=1)
        assert caught.value.culprit in {"engine/0", "engine/1"}
        assert 1 == caught.value.version
        assert not any(target.weights for target in targets)
        monkeypatch.setattr("agoge_async.weights.sending.seal", seal)
        await syncer.push(version=2)
        for target in targets:
            assert_equal(model, target.weights)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_load_that_fails_condemns_every_target(kind):
    """One is torn, the other holds what was never committed: neither may serve."""
    model = Tied()
    async with connected(model, 2, transport=kind) as (syncer, targets):
        targets[1].load_error = ValueError("no such layer")
        with pytest.raises(WeightSyncError, match=r"while loading: .*no such layer") as caught:
            await syncer.push(version=1)
        assert "engine/1" == caught.value.culprit
        assert all(target.condemned for target in targets)
        targets[1].load_error = None
        await syncer.push(version=1)
        assert_equal(model, targets[1].weights)


async def test_requests_that_do_not_end_fail_the_push_and_leave_the_targets_alone():
    """Nothing was touched: no target is ended, and all generate again."""
    model = Tied()
    async with connected(model, 2, timeout_s=1.0, mode="drain") as (syncer, targets):
        hold = targets[1].hold_push
        targets[1].hold_push = lambda *_: anyio.sleep_forever()
        with pytest.raises(
            WeightSyncError, match=r"while waiting for requests to end: .*engine/1 did not answer"
        ) as caught:
            await syncer.push(version=1)
        assert "engine/1" == caught.value.culprit
        for target in targets:
            assert target.condemned is None
            assert "abort" == target.calls[-1]
        targets[1].hold_push = hold
        await syncer.push(version=1)
        assert_equal(model, targets[1].weights)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_what_is_sent_is_a_copy(kind, monkeypatch):
    """trl#6765: views of parameters outlived the gather, and the trainer wrote into them."""
    model = Tied()
    pushed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seal = frames.seal

    def seal_and_change(frame, checksum, stamp):
        seal(frame, checksum, stamp)
        if not left.pop():
            change(model)

    async with connected(model, transport=kind) as (syncer, [target]):
        left = [False]
        with monkeypatch.context() as patched:
            patched.setattr("agoge_async.weights.sending.seal", lambda *a: left.append(seal(*a)))
            await syncer.push(version=1)
        num_messages = len(left) - 1
        left = [*range(num_messages)]  # the last one finds a zero
        monkeypatch.setattr("agoge_async.weights.sending.seal", seal_and_change)
        await syncer.push(version=2)
        assert not torch.equal(model.scale, pushed["scale"])
        for name, tensor in pushed.items():
            assert torch.equal(tensor, target.weights[name]), name


async def test_a_target_that_hangs_fails_the_push_by_its_deadline():
    """NeMo-RL#3472: the next sync blocked for ever."""
    async with connected(Tied(), timeout_s=1.0, transport="shm") as (syncer, [target]):
        target.load_gate = threading.Event()
        with pytest.raises(
            WeightSyncError, match=r"while loading: .*not done within 1 s .*engine/0 did not"
        ) as caught:
            await syncer.push(version=1)
        assert "engine/0" == caught.value.culprit
        assert target.condemned
        target.load_gate.set()


async def test_a_cancelled_push_is_given_up():
    """The next one is whole."""
    model = Tied()
    async with connected(model, 2, transport="gloo") as (syncer, targets):
        begun = asyncio.Event()
        begin = targets[0].begin_push

        async def slow(*arguments):
            await begin(*arguments)
            begun.set()
            await anyio.sleep_forever()

        targets[0].begin_push = slow
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: syncer.push(version=1))
            await begun.wait()
            group.cancel_scope.cancel()
        assert 0 == targets[0].version
        targets[0].begin_push = begin
        await syncer.push(version=1)
        for target in targets:
            assert_equal(model, target.weights)
    for thread in threading.enumerate():  # one may look for the store for CONNECT_S
        if thread.name == "agoge-receive":
            await anyio.to_thread.run_sync(thread.join, 10.0)


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_verify_names_what_differs(kind):
    """On each engine, and changes nothing."""
    model = Tied()
    async with connected(model, 2, transport=kind) as (syncer, targets):
        await syncer.push(version=3)
        found = await syncer.verify()
        assert found.is_equal
        assert (3, 13) == (found.version, found.num_tensors)
        with torch.no_grad():
            model.layers[2].bias[7] += 1
        targets[1].weights["scale"] += 1
        found = await syncer.verify()
        assert not found.is_equal
        assert {
            "engine/0": ("layers.2.bias",),
            "engine/1": ("layers.2.bias", "scale"),
        } == {name: tuple(sorted(names)) for name, names in found.differing.items()}
        assert ["begin", "ready", "compare"] == targets[0].calls[-3:]
        await syncer.push(version=4)
        assert (await syncer.verify()).is_equal


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shm", r"no \d+ MB of shared memory.*transport='gloo'"),
        ("disk", r"can't write .*safetensors"),
    ],
)
async def test_memory_or_disk_that_fills_fails_the_push_by_name(kind, message):
    """The system refuses to make anything larger; afterwards, the next push succeeds."""
    model = Tied()
    model.wide = nn.Linear(1000, 1000)
    async with connected(model, transport=kind) as (syncer, [target]):
        with largest_file(1 << 20), pytest.raises(WeightSyncError, match=message) as caught:
            await syncer.push(version=1)
        assert "rank 0" == caught.value.culprit
        assert not target.weights
        await syncer.push(version=2)
        assert_equal(model, target.weights)


@contextlib.contextmanager
def largest_file(num_bytes):
    """Have the kernel refuse to let files, a segment's included, grow beyond a size."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, ignored)


async def test_a_disk_holds_the_last_push_alone(tmp_path):
    """As a checkpoint that others can read; what failed pushes left is removed."""
    model = Tied()
    target = Target("engine/0")
    options = {"transport": "disk", "folder": tmp_path, "bucket_bytes": BUCKET_BYTES}
    async with await ParamSyncer.connect(model, [target], **options) as syncer:
        await syncer.push(version=1)
        target.load_error = ValueError("no such layer")
        with pytest.raises(WeightSyncError):
            await syncer.push(version=2)
        target.load_error = None
        await syncer.push(version=3)
        assert ["v3"] == [path.name for path in tmp_path.iterdir()]
        read = {}
        for file in (tmp_path / "v3").glob("*.safetensors"):
            read |= load_file(file)
        for name, tensor in read.items():
            assert torch.equal(tensor, model.get_parameter(name) if name != "kept" else model.kept)
        assert len(read) == 13
    target.close()


async def test_versions_grow():
    """An old one is refused before anything is touched."""
    async with connected(Tied()) as (syncer, [target]):
        await syncer.push(version=3)
        with pytest.raises(WeightSyncError, match="version 3 already; versions must grow"):
            await syncer.push(version=3)
        assert ["begin", "ready", "hold keep", "load", "commit"] == target.calls
        await syncer.push(version=4)


async def test_a_target_that_was_restarted_is_met_anew():
    """Its groups are gone with it; NeMo-RL#3591: the trainer's have to be made anew."""
    model = Tied()
    async with connected(model, 2, transport="gloo") as (syncer, targets):
        await syncer.push(version=1)
        targets[0].restart()
        change(model)
        await syncer.push(version=2)
        for target in targets:
            assert_equal(model, target.weights)


@pytest.mark.parametrize("kind", ["shm", "disk"])
async def test_a_target_that_was_restarted_gets_the_last_push_at_once(kind):
    """From what is still there of it; the trainer has changed since, and isn't asked.

    AReaL#1101: an engine that comes while others run needs their weights.
    """
    model = Tied()
    async with connected(model, 2, transport=kind) as (syncer, targets):
        await syncer.push(version=7)
        pushed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        change(model)
        targets[0].restart()
        targets[0].committed.clear()
        targets[0].on_stale()
        with anyio.fail_after(10):
            await targets[0].committed.wait()
        assert 7 == targets[0].version
        for name, tensor in pushed.items():
            assert torch.equal(tensor, targets[0].weights[name])
        await syncer.push(version=8)
        assert_equal(model, targets[0].weights)


@pytest.mark.parametrize("spoil", ["a push that failed", "gloo"])
async def test_a_target_is_not_restored_from_what_is_not_whole(spoil):
    """It waits for the next push."""
    model = Tied()
    kind = "gloo" if spoil == "gloo" else "shm"
    async with connected(model, 2, transport=kind) as (syncer, targets):
        await syncer.push(version=1)
        if spoil != "gloo":
            targets[1].load_error = ValueError("no such layer")
            with pytest.raises(WeightSyncError):
                await syncer.push(version=2)
        targets[1].load_error = None
        targets[0].restart()
        calls = list(targets[0].calls)
        targets[0].on_stale()
        while syncer._restores:
            await anyio.lowlevel.checkpoint()
        assert calls == targets[0].calls
        await syncer.push(version=3)
        assert_equal(model, targets[0].weights)


async def test_a_new_trainer_replaces_an_old_one():
    """trl#3408, vllm#40646: one that is gone leaves nothing that the next one stumbles over."""
    model = Tied()
    target = Target("engine/0")
    for version in (1, 2, 3):
        change(model)
        async with await ParamSyncer.connect(model, [target], transport="gloo") as syncer:
            await syncer.push(version=version)
        assert_equal(model, target.weights)
    target.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather": "gather_two"}, "gather must be one of .*'gather_two'"),
        ({"transport": "pigeon"}, "transport must be one of auto, gloo, nccl, .*, got 'pigeon'"),
        ({"sources": "all"}, "sources must be one of rank0, round_robin"),
        ({"mode": "wait"}, "mode must be one of keep, abort, drain"),
        ({"gather": "shards"}, "needs a model under ZeRO-3"),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive"),
        ({"transport": "disk"}, "transport='disk' needs a folder"),
        ({"folder": "here"}, "transport='disk' needs a folder, and only that"),
        ({"transport": "cuda_ipc", "sources": "round_robin"}, "only rank 0 can send"),
        ({"transport": "nccl"}, "transport='nccl' needs a GPU"),
    ],
    ids=[
        "gather",
        "transport",
        "sources",
        "mode",
        "shards",
        "bucket",
        "no folder",
        "folder",
        "ipc",
        "no gpu",
    ],
)
async def test_options_that_cannot_be_are_refused(options, message):
    """With what could be."""
    with pytest.raises(ValueError, match=message):
        await ParamSyncer.connect(Tied(), [Target("engine/0")], **options)
