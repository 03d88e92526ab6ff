"""The ranks of a trainer, held together by rank 0: who is there, who failed, what the verdict is.

Small messages over one TCP connection a rank: a rank that ends closes it, which the others learn at
once; NCCL or gloo would tell them after a time-out, or never. Rank 0 decides: the first failure is
the verdict that all ranks get.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import secrets
import socket
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import torch.distributed

from agoge_async.engine.channel import Channel
from agoge_async.errors import WeightSyncError
from agoge_async.weights.manifest import Manifest

_connects = itertools.count()


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """A rank to rank 0, first of all."""

    rank: int
    token: str


class Joined(msgspec.Struct, frozen=True, tag="joined", array_like=True):
    """A rank to rank 0: it takes part, with such a model."""

    number: int
    """How many verdicts the rank has had: one that comes too late joins what is over."""
    what: str
    """A push of such a version, or verify()."""
    fingerprint: str


class Sent(msgspec.Struct, frozen=True, tag="sent", array_like=True):
    """A rank to rank 0: its part is done."""

    gather_s: float = 0.0
    send_s: float = 0.0
    peak_extra_bytes: int = 0


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """A rank to rank 0: its part failed."""

    cause: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """Rank 0 to the ranks: all have come."""


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """Rank 0 to the ranks: send."""

    manifest: Manifest


class Verdict(msgspec.Struct, frozen=True, tag="verdict", array_like=True):
    """Rank 0 to the ranks: how the push ended."""

    record: dict[str, Any] | None
    error: str | None = None
    culprit: str | None = None
    version: int | None = None

    def failure(self) -> WeightSyncError:
        """Give the error that every rank raises."""
        return WeightSyncError(
            self.error or "the push failed", culprit=self.culprit, version=self.version
        )


FromRank = Hello | Joined | Sent | Failed
ToRank = Welcome | Start | Verdict


class Hub:
    """Rank 0's side.

    Args:
        num_ranks: Of the trainer, rank 0 included.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._token = secrets.token_hex(16)
        self._channels: dict[int, Channel[ToRank, FromRank]] = {}
        self._inbox: dict[int, asyncio.Queue[FromRank | WeightSyncError]] = {}
        self._num_verdicts = 0
        self._waiting: set[Channel[ToRank, FromRank]] = set()
        self._all_here = anyio.Event()
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> str:
        """Listen; gives the address that the other ranks need."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"{host} {port} {self._token}"

    def _accept(self) -> Channel[ToRank, FromRank]:
        channel: Channel[ToRank, FromRank]
        ranks: list[int] = []

        def on_message(message: FromRank) -> None:
            if ranks:
                self._inbox[ranks[0]].put_nowait(message)
            elif self._is_welcome(message):
                assert isinstance(message, Hello)
                ranks.append(message.rank)
                self._channels[message.rank] = channel
                self._inbox[message.rank] = asyncio.Queue()
                if len(self._channels) == self._num_ranks - 1:
                    self._all_here.set()
            else:
                channel.close()

        def on_closed(error: Exception | None) -> None:
            self._waiting.discard(channel)
            for rank in ranks:
                gone = WeightSyncError(
                    f"rank {rank} is gone{f' ({error})' if error else ''}", culprit=f"rank {rank}"
                )
                self._inbox[rank].put_nowait(gone)

        channel = Channel(FromRank, on_message, on_closed)
        self._waiting.add(channel)
        return channel

    def _is_welcome(self, message: FromRank) -> bool:
        return (
            isinstance(message, Hello)
            and secrets.compare_digest(message.token, self._token)
            and 0 < message.rank < self._num_ranks
            and message.rank not in self._channels
        )

    async def wait_all(self, timeout_s: float) -> None:
        """Wait until every rank has connected, and tell them so.

        Raises:
            WeightSyncError: Some didn't, within `timeout_s`.
        """
        if self._num_ranks == 1:
            return
        with anyio.move_on_after(timeout_s):
            await self._all_here.wait()
            await self.tell_all(Welcome())
            return
        missing = [f"rank {rank}" for rank in range(1, self._num_ranks) if rank not in self._inbox]
        raise WeightSyncError(
            f"{', '.join(missing)} did not call connect() within {timeout_s:g} s",
            culprit=missing[0],
        )

    async def join(self, rank: int) -> Joined:
        """Wait for a rank to join the next push; drops what it said of those that are over.

        Raises:
            WeightSyncError: It is gone.
        """
        while True:
            message = await self._inbox[rank].get()
            if isinstance(message, WeightSyncError):
                self._inbox[rank].put_nowait(message)  # it stays gone
                raise message
            if isinstance(message, Joined) and message.number == self._num_verdicts:
                return message

    async def receive(self, rank: int) -> FromRank:
        """Wait for what a rank that joined says next.

        Raises:
            WeightSyncError: It is gone, or says that it failed.
        """
        message = await self._inbox[rank].get()
        if isinstance(message, WeightSyncError):
            self._inbox[rank].put_nowait(message)
            raise message
        if isinstance(message, Failed):
            raise WeightSyncError(f"rank {rank}: {message.cause}", culprit=f"rank {rank}")
        return message

    async def tell_all(self, message: ToRank) -> None:
        """Send to every other rank; it is on its way when this returns.

        A trainer's step blocks the event loop: what were only queued would wait for its end, and
        the step perhaps for a rank that waits for the message.
        """
        self._num_verdicts += isinstance(message, Verdict)
        for channel in self._channels.values():
            channel.send(message)
            await channel.drain()

    def close(self) -> None:
        """Hang up."""
        if self._server is not None:
            self._server.close()
        for channel in self._waiting:
            channel.close()


class Spoke:
    """Another rank's side."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._inbox: asyncio.Queue[ToRank | WeightSyncError] = asyncio.Queue()
        self._channel: Channel[FromRank, ToRank] | None = None
        self.num_verdicts = 0
        """Of pushes, so far."""

    async def open(self, address: str, timeout_s: float) -> None:
        """Connect to rank 0, and wait until all ranks have.

        Raises:
            WeightSyncError: It can't be reached, or is gone.
        """
        host, port, token = address.split()
        connect = functools.partial(socket.create_connection, (host, int(port)), timeout_s)
        try:
            sock = await anyio.to_thread.run_sync(connect)
        except OSError as error:
            raise WeightSyncError(
                f"rank 0 can't be reached at {host}:{port}: {error}", culprit="rank 0"
            ) from error
        self._channel = await Channel.open(sock, ToRank, self._inbox.put_nowait, self._on_closed)
        await self.tell(Hello(self._rank, token))
        try:
            with anyio.fail_after(timeout_s):
                await self.receive()
        except TimeoutError as error:
            raise WeightSyncError(
                f"not all ranks called connect() within {timeout_s:g} s", culprit="rank 0"
            ) from error

    def _on_closed(self, error: Exception | None) -> None:
        because = f" ({error})" if error else ""
        self._inbox.put_nowait(WeightSyncError(f"rank 0 is gone{because}", culprit="rank 0"))

    async def tell(self, message: FromRank) -> None:
        """Send to rank 0; it is on its way when this returns."""
        if self._channel is not None:
            self._channel.send(message)
            await self._channel.drain()

    async def receive(self) -> ToRank:
        """Wait for what rank 0 says next.

        Raises:
            WeightSyncError: It is gone.
        """
        message = await self._inbox.get()
        if isinstance(message, WeightSyncError):
            self._inbox.put_nowait(message)
            raise message
        self.num_verdicts += isinstance(message, Verdict)
        return message

    def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            self._channel.close()


def rank_and_size() -> tuple[int, int]:
    """Give this process's rank in the trainer, and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def host_address() -> str:
    """Give rank 0's address, as all ranks and engines can reach it."""
    return "127.0.0.1" if is_one_host() else os.environ["MASTER_ADDR"]


def is_one_host() -> bool:
    """Whether all ranks are on this host, as torchrun's variables tell.

    vLLM sets LOCAL_WORLD_SIZE alone in a process that makes an engine for the CPU (0.32).
    """
    everywhere = os.environ.get("WORLD_SIZE")
    return everywhere is None or everywhere == os.environ.get("LOCAL_WORLD_SIZE")


async def meet(rank: int, num_ranks: int, timeout_s: float) -> Hub | Spoke:
    """Connect the ranks; they find rank 0 through the trainer's own store.

    Raises:
        WeightSyncError: Some didn't come within `timeout_s`.
    """
    key = f"agoge_async/param_syncer/{next(_connects)}"
    if rank == 0:
        hub = Hub(num_ranks)
        try:
            address = await hub.open(host_address())
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
