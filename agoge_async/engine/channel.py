"""Framed messages over a socket, in both processes.

Messages sent in one turn of the event loop leave together, some to a frame, so that the other side
begins with the first while this one still makes the last. `drain()` waits while the other side
doesn't read: whoever makes many messages awaits it, so memory stays bounded by the kernel's buffer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 1 << 30
"""A length above this means that the stream is corrupt."""
MAX_BODY_BYTES = MAX_FRAME_BYTES - 1024
"""A message with a longer body doesn't fit a frame."""

MAX_BATCH = 8
"""A frame leaves with this many messages, or at the end of the turn."""

_Out = TypeVar("_Out")
_In = TypeVar("_In")


def as_frame(payload: bytes) -> bytes:
    """Put its length before a msgpack list of messages."""
    return len(payload).to_bytes(4, "big") + payload


class Channel(asyncio.Protocol, Generic[_Out, _In]):
    """One end of a connected socket that carries typed messages.

    Args:
        incoming: Type of the messages that the other end sends.
        on_message: Called for each of them, on the event loop.
        on_closed: Called once, when the other end is gone or sends what can't be read.
    """

    def __init__(
        self,
        incoming: Any,
        on_message: Callable[[_In], None],
        on_closed: Callable[[Exception | None], None],
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[_In]] = msgspec.msgpack.Decoder(list[incoming])
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message = on_message
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._fault: Exception | None = None
        self._outgoing: list[_Out] = []
        self._writable = asyncio.Event()
        self._writable.set()

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        incoming: Any,
        on_message: Callable[[_In], None],
        on_closed: Callable[[Exception | None], None],
    ) -> Channel[_Out, _In]:
        """Take over a connected stream socket."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        is_unix = sock.family == socket.AF_UNIX
        connect = loop.create_unix_connection if is_unix else loop.create_connection
        _, channel = await connect(lambda: cls(incoming, on_message, on_closed), sock=sock)
        return channel

    def send(self, message: _Out, *, more_follows: bool = False) -> None:
        """Queue a message; a closed channel drops it, `on_closed` has told of that.

        Args:
            message: What to send.
            more_follows: The other end can do little with it alone: it waits for the turn's end.
        """
        if self._transport is None:
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)
        if len(self._outgoing) >= MAX_BATCH and not more_follows:
            self._flush()

    async def drain(self) -> None:
        """Send what is queued; wait until the other end reads again."""
        self._flush()
        await self._writable.wait()

    @property
    def is_writable(self) -> bool:
        """Whether `drain` would return at once."""
        return self._writable.is_set()

    def close(self) -> None:
        """Send what is queued, then close."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        if self._outgoing:
            batch, self._outgoing = self._outgoing, []
            self._write(batch)

    def _write(self, batch: list[_Out]) -> None:
        payload = self._encoder.encode(batch)
        if len(payload) > MAX_FRAME_BYTES and len(batch) > 1:
            half = len(batch) // 2
            self._write(batch[:half])
            self._write(batch[half:])
        elif self._transport is not None:
            self._transport.write(as_frame(payload))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; called by asyncio."""
        self._transport = transport  # type: ignore[assignment]  # a connection of a stream socket gives a Transport

    def pause_writing(self) -> None:
        """Make `drain` wait; called by asyncio."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let `drain` go on; called by asyncio."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Deliver each whole message; called by asyncio."""
        received = self._received
        received += data
        start = 0
        while len(received) - start >= 4:
            size = int.from_bytes(received[start : start + 4], "big")
            if size > MAX_FRAME_BYTES:
                self._fail(ValueError(f"a frame of {size} bytes, limit {MAX_FRAME_BYTES}"))
                return
            end = start + 4 + size
            if len(received) < end:
                break
            try:
                messages = self._decoder.decode(memoryview(received)[start + 4 : end])
            except msgspec.MsgspecError as error:
                self._fail(error)
                return
            start = end
            for message in messages:
                self._on_message(message)
        if start:
            del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner; called by asyncio."""
        self._transport = None
        self._writable.set()
        self._outgoing.clear()
        self._on_closed(self._fault or exc)

    def _fail(self, error: Exception) -> None:
        self._fault = error  # `connection_lost` tells the owner
        self._received.clear()
        if self._transport is not None:
            self._transport.abort()
