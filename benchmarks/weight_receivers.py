"""Receivers for weight_sync.py: processes that hold a model of a given shape and take pushes.

A receiver runs what a worker of an engine runs, `PushReceiver`, and copies what comes into tensors
that it holds. Over the same channel it takes the calls of other protocols, so that these are
measured with the same means. Run as a script, this file is a receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import anyio
import msgspec
import torch
from torch import nn

from agoge_async import WeightSyncError
from agoge_async.backends.base import BackendStatus, WeightShape
from agoge_async.engine.channel import Channel
from agoge_async.engine.receiver import PushReceiver
from agoge_async.weights.digest import digest
from agoge_async.weights.groups import Group, join_store, serve_store
from agoge_async.weights.manifest import GroupRoute, decode_manifest

CPU = torch.device("cpu")
HOST = "127.0.0.1"
LIMIT_S = 300.0
READY_POLL_S = 0.002


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name the parameters, as its checkpoint does."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        return (
            {"model.embed_tokens.weight": (self.vocab, self.hidden)}
            | {
                f"model.layers.{index}.{name}.weight": shape
                for index in range(self.layers)
                for name, shape in layer.items()
            }
            | {"model.norm.weight": (self.hidden,)}
        )


SIZES = {
    "0.6B": Size(  # https://huggingface.co/Qwen/Qwen3-0.6B, config.json
        hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936
    ),
    "0.1B": Size(
        hidden=512, layers=28, heads=8, kv_heads=2, head_dim=64, intermediate=1536, vocab=16000
    ),
    "quick": Size(
        hidden=256, layers=8, heads=4, kv_heads=2, head_dim=64, intermediate=1024, vocab=32000
    ),
}


class Weights:
    """A model's tensors in bf16, one behind the other in memory that is taken at once."""

    def __init__(self, size: Size) -> None:
        shapes = size.shapes()
        counts = [torch.Size(shape).numel() for shape in shapes.values()]
        self.flat = torch.zeros(-(-sum(counts) // 4) * 4, dtype=torch.bfloat16)
        pieces = self.flat[: sum(counts)].split(counts)
        self.tensors = {
            name: piece.view(shape)
            for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    @property
    def bytes(self) -> torch.Tensor:
        """Show all of it as bytes."""
        return self.flat.view(torch.uint8)

    def digest(self) -> str:
        """Give what tells these weights from others."""
        return str(digest(self.bytes))

    def change(self) -> None:
        """Make them others; cheap, and every bit counts."""
        self.flat.view(torch.int16).add_(1)

    def module(self) -> nn.Module:
        """Give a module that has them as its parameters."""
        root = nn.Module()
        for name, tensor in self.tensors.items():
            *path, leaf = name.split(".")
            owner = root
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
        return root


class Ask(msgspec.Struct, array_like=True):
    """A trainer to a receiver."""

    id: int
    kind: str
    body: str = ""


class Answer(msgspec.Struct, array_like=True):
    """A receiver to its trainer."""

    id: int
    body: str = ""
    error: str | None = None


class Receiver:
    """Does what it is asked."""

    def __init__(self, size: Size) -> None:
        self._weights = Weights(size)
        self._receiver = PushReceiver(0, CPU)
        self._group: Group | None = None

    async def answer(self, ask: Ask) -> str:
        return await getattr(self, ask.kind)(ask.body) or ""

    async def begin(self, manifest: str) -> None:
        self._receiver.begin(decode_manifest(manifest))

    async def ready(self, _: str) -> None:
        while True:
            if self._receiver.is_ready:
                return
            await asyncio.sleep(READY_POLL_S)

    async def load(self, _: str) -> str:
        return json.dumps(await asyncio.to_thread(self._receiver.load, self._put))

    def _put(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._weights.tensors[name].copy_(tensor)

    async def abort(self, _: str) -> str | None:
        return self._receiver.abort()

    async def join(self, body: str) -> None:
        """Come to a group of the trainer's."""
        route, rank = msgspec.json.decode(body, type=tuple[GroupRoute, int])
        store = join_store(route.host, route.port, LIMIT_S)
        make = functools.partial(Group, store, route, 0, rank, CPU, LIMIT_S)
        self._group = await asyncio.to_thread(make)

    async def leave(self, _: str) -> None:
        assert self._group is not None
        self._group.close()
        self._group = None

    async def flat(self, piece: str) -> None:
        """Receive everything in pieces, into the model's own memory."""
        assert self._group is not None
        await asyncio.to_thread(broadcast_flat, self._group, self._weights, int(piece))

    async def parameter(self, body: str) -> None:
        """Receive one parameter and load it, as the peers' workers do."""
        assert self._group is not None
        name, shape = json.loads(body)
        await asyncio.to_thread(self._one_parameter, self._group, name, shape)

    def _one_parameter(self, group: Group, name: str, shape: list[int]) -> None:
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        group.wait(group.broadcast(tensor.view(-1).view(torch.uint8)))
        self._weights.tensors[name].copy_(tensor)

    async def digest(self, _: str) -> str:
        return self._weights.digest()


def broadcast_flat(group: Group, weights: Weights, piece: int) -> None:
    """Broadcast all of it, one piece after the other; runs on both sides."""
    for data in weights.bytes.split(piece):
        group.wait(group.broadcast(data))


class RemoteTarget:
    """A receiver's process, as a trainer sees it."""

    on_stale = staticmethod(lambda: None)
    status = BackendStatus(state="serving")

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = 0
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._process: subprocess.Popen[bytes]
        self._channel: Channel[Ask, Answer]

    @classmethod
    async def start(cls, name: str, size: str) -> RemoteTarget:
        target = cls(name)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), size]
            start = functools.partial(subprocess.Popen, command, pass_fds=[theirs.fileno()])
            target._process = await asyncio.to_thread(start)
        target._channel = await Channel.open(ours, Answer, target._on_answer, target._on_closed)
        return target

    def _on_answer(self, answer: Answer) -> None:
        future = self._asked.pop(answer.id)
        if answer.error is None:
            future.set_result(answer.body)
        else:
            future.set_exception(WeightSyncError(answer.error, culprit=self.name))

    def _on_closed(self, _: Exception | None) -> None:
        for future in self._asked.values():
            future.set_exception(WeightSyncError("it is gone", culprit=self.name))

    async def call(self, kind: str, body: str = "") -> str:
        ask = Ask(next(self._ids), kind, body)
        future = self._asked[ask.id] = asyncio.get_running_loop().create_future()
        self._channel.send(ask)
        with anyio.fail_after(LIMIT_S):
            return await future

    def weight_shape(self) -> WeightShape:
        return WeightShape(incarnation=id(self), devices=("cpu",), dtype="bfloat16")

    async def begin_push(self, manifest: str, _timeout_s: float) -> None:
        await self.call("begin", manifest)

    async def wait_push(self, _timeout_s: float) -> None:
        await self.call("ready")

    async def hold_push(self, _mode: str, _timeout_s: float) -> None:
        pass  # nothing is generated

    async def load_push(self, _version: int, _timeout_s: float) -> dict[str, float]:
        return json.loads(await self.call("load"))

    async def compare_push(self, _timeout_s: float) -> tuple[list[str], list[str]]:
        raise NotImplementedError

    async def commit_push(self, version: int, _timeout_s: float) -> None:
        self.version = version

    async def abort_push(self, _timeout_s: float) -> str | None:
        return await self.call("abort") or None

    def condemn(self, cause: str) -> None:
        raise SystemExit(cause)

    async def aclose(self) -> None:
        self._channel.close()
        await asyncio.to_thread(self._process.wait, 30)


@contextlib.asynccontextmanager
async def joined(targets: Sequence[RemoteTarget]) -> AsyncIterator[Group]:
    """Make a group of this process and receivers, for protocols that aren't ours."""
    store = serve_store(HOST, LIMIT_S)
    route = GroupRoute("gloo", HOST, store.port, "bench", (0,), len(targets))
    make = functools.partial(Group, store, route, 0, 0, CPU, LIMIT_S)
    async with asyncio.TaskGroup() as tasks:
        for rank, target in enumerate(targets, 1):
            tasks.create_task(target.call("join", msgspec.json.encode((route, rank)).decode()))
        made = tasks.create_task(asyncio.to_thread(make))
    try:
        yield made.result()
    finally:
        for target in targets:
            await target.call("leave")
        made.result().close()


async def receive(descriptor: int, size: str) -> None:
    """Be a receiver until the trainer hangs up."""
    receiver = Receiver(SIZES[size])
    closed = asyncio.Event()

    async def answer(ask: Ask) -> None:
        try:
            channel.send(Answer(ask.id, await receiver.answer(ask)))
        except Exception as error:  # noqa: BLE001  # the trainer prints it
            channel.send(Answer(ask.id, error=f"{type(error).__name__}: {error}"))

    async with asyncio.TaskGroup() as tasks:
        channel = await Channel.open(
            socket.socket(fileno=descriptor),
            Ask,
            lambda ask: tasks.create_task(answer(ask)),
            lambda _: closed.set(),
        )
        await closed.wait()
    os._exit(0)  # a group that was left in the middle can't be left in peace


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(receive(int(sys.argv[1]), sys.argv[2]))
