"""Framed messages over a socket pair."""

import asyncio
import contextlib
import random
import socket

import anyio
import msgspec
import pytest

from agoge_async.engine.channel import MAX_BATCH, MAX_FRAME_BYTES, Channel
from agoge_async.engine.messages import (
    Call,
    CallKind,
    Cancel,
    EngineInfo,
    EngineLoad,
    Failed,
    Fault,
    FaultKind,
    Progress,
    Query,
    Ready,
    Reply,
    ReplyKind,
    Shutdown,
    ToChildControl,
    ToParentControl,
    decode_fault,
    encode_fault,
    encode_json,
)


class End:
    """A channel and what has come through it."""

    def __init__(self) -> None:
        self.channel: Channel
        self.messages: list[object] = []
        self.closed: list[Exception | None] = []
        self.changed = asyncio.Event()

    def take(self, message: object) -> None:
        self.messages.append(message)
        self.changed.set()

    def on_closed(self, error: Exception | None) -> None:
        self.closed.append(error)
        self.changed.set()

    async def until(self, condition) -> None:
        with anyio.fail_after(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def end_of(sock: socket.socket, incoming=Reply):
    end = End()
    end.channel = await Channel.open(sock, incoming, end.take, end.on_closed)
    try:
        yield end
    finally:
        end.channel.close()


@contextlib.asynccontextmanager
async def pair(incoming=Reply):
    """Two channels, connected."""
    ours, theirs = socket.socketpair()
    async with end_of(ours, incoming) as left, end_of(theirs, incoming) as right:
        yield left, right


@contextlib.asynccontextmanager
async def half(incoming=Reply):
    """A channel, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs:
        async with end_of(ours, incoming) as end:
            yield end, theirs


def reply(number: int, body: bytes = b"") -> Reply:
    return Reply(number, ReplyKind.CHUNK, body)


def frame(*messages: object) -> bytes:
    payload = msgspec.msgpack.encode(list(messages))
    return len(payload).to_bytes(4, "big") + payload


async def test_messages_arrive_whole_and_in_order():
    """Empty ones, big ones, many in one turn of the loop."""
    chance = random.Random(1)
    sent = [reply(i, chance.randbytes(chance.choice([0, 1, 100, 70_000]))) for i in range(300)]
    async with pair() as (left, right):
        for message in sent:
            left.channel.send(message)
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        await right.until(lambda: len(right.messages) == len(sent))
    assert sent == right.messages


async def test_both_ends_send_at_once():
    """Neither disturbs the other."""
    async with pair() as (left, right):
        for number in range(100):
            left.channel.send(reply(number))
            right.channel.send(reply(-number))
        await left.until(lambda: len(left.messages) == 100)
        await right.until(lambda: len(right.messages) == 100)
    assert [message.id for message in right.messages] == list(range(100))
    assert [message.id for message in left.messages] == [-number for number in range(100)]


@pytest.mark.parametrize("seed", range(5))
async def test_frames_may_come_in_any_pieces(seed):
    """A socket knows no frames: lengths are cut apart, frames come together."""
    chance = random.Random(seed)
    sent = [reply(i, chance.randbytes(chance.randrange(50))) for i in range(60)]
    stream = b"".join(frame(*sent[i : i + 3]) for i in range(0, 60, 3)) + frame()
    async with half() as (end, sock):
        while stream:
            size = chance.choice([1, 1, 2, 3, 5, 50, 500])
            await asyncio.get_running_loop().sock_sendall(sock, stream[:size])
            stream = stream[size:]
            await asyncio.sleep(0)
        await end.until(lambda: len(end.messages) == len(sent))
    assert sent == end.messages


async def test_messages_of_one_turn_leave_together():
    """Fewer system calls, and one decoding."""
    async with half() as (end, sock):
        for number in range(3):
            end.channel.send(reply(number))
        received = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
    assert frame(*[reply(number) for number in range(3)]) == received


async def test_a_long_turn_sends_before_its_end():
    """The other end needn't wait for the last message to begin with the first."""
    async with half() as (end, sock):
        for number in range(MAX_BATCH + 1):
            end.channel.send(reply(number))
        received = sock.recv(1 << 16)
        assert frame(*[reply(number) for number in range(MAX_BATCH)]) == received
        received = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
    assert frame(reply(MAX_BATCH)) == received


async def test_what_announces_more_waits_for_the_end_of_the_turn():
    """Chunks of many streams wake the other end once, not once every few."""
    async with half() as (end, sock):
        sent = [reply(number) for number in range(3 * MAX_BATCH)]
        for message in sent:
            end.channel.send(message, more_follows=True)
        received = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
    assert frame(*sent) == received


CONTROL = [
    (
        ToParentControl,
        [
            Progress("loading the model"),
            Ready(EngineInfo(2048, "0.32.0", False, True, ("cpu",), "float32", None)),
            Failed("ValueError: no memory"),
            EngineLoad(1, 2, 3),
        ],
    ),
    (ToChildControl, [Cancel(1), Query(2), Shutdown()]),
    (Call, [Call(1, CallKind.CHAT, b"{}"), Call(2, CallKind.GENERATE, b"\x00\xff")]),
]


@pytest.mark.parametrize(("kind", "messages"), CONTROL, ids=["to parent", "to child", "data"])
async def test_each_kind_of_message_arrives_as_itself(kind, messages):
    """The type of each is told by its tag."""
    async with pair(kind) as (left, right):
        for message in messages:
            left.channel.send(message)
        await right.until(lambda: len(right.messages) == len(messages))
    assert messages == right.messages


async def fill(channel: Channel, sent: list[Reply]) -> None:
    for number in range(2_000):
        channel.send(reply(number, b"x" * 10_000))
        sent.append(reply(number))
        await channel.drain()


async def test_drain_waits_while_the_other_end_does_not_read():
    """So memory stays bounded; reading lets it go on, and nothing is lost."""
    ours, theirs = socket.socketpair()
    sent: list[Reply] = []
    async with end_of(ours) as end, anyio.create_task_group() as group:
        group.start_soon(fill, end.channel, sent)
        await anyio.wait_all_tasks_blocked()
        count = len(sent)
        assert count < 100, "1 MB, with the kernel's buffer"
        assert not end.channel.is_writable
        async with end_of(theirs) as reader:
            await reader.until(lambda: len(reader.messages) == 2_000)
    assert [message.id for message in reader.messages] == list(range(2_000))


async def test_drain_ends_when_the_other_end_is_gone():
    """Nobody will read: waiting on would be a hang."""
    async with half() as (end, sock), anyio.create_task_group() as group:
        group.start_soon(fill, end.channel, [])
        await anyio.wait_all_tasks_blocked()
        sock.close()
    assert 1 == len(end.closed)


BROKEN = {
    "length": (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    "text": b"Traceback (most recent call last):\n",
    "msgpack": (3).to_bytes(4, "big") + b"\xc1\xc1\xc1",
    "type": frame({"id": "no reply"}),
    "message": frame(Cancel(1)),
    "after a good one": frame(reply(1)) + frame("bad") + frame(reply(2)),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_cannot_be_read_closes_the_channel_with_an_error(name):
    """Told once; what came before is delivered, nothing that comes after."""
    async with half() as (end, sock):
        await asyncio.get_running_loop().sock_sendall(sock, BROKEN[name])
        await end.until(lambda: end.closed)
        await anyio.wait_all_tasks_blocked()
        with contextlib.suppress(ConnectionError):
            assert b"" == sock.recv(1)
    [error] = end.closed
    assert isinstance(error, ValueError | msgspec.MsgspecError)
    assert end.messages == ([reply(1)] if name == "after a good one" else [])


async def test_the_end_of_the_other_side_is_told_once():
    """Without an error: it may have meant to."""
    async with half() as (end, sock):
        sock.close()
        await end.until(lambda: end.closed)
        await anyio.wait_all_tasks_blocked()
        end.channel.close()
    assert [None] == end.closed


async def test_half_a_frame_at_the_end_is_dropped():
    """A process that is killed while it writes."""
    async with half() as (end, sock):
        await asyncio.get_running_loop().sock_sendall(sock, frame(reply(1)) + frame(reply(2))[:-1])
        sock.close()
        await end.until(lambda: end.closed)
    assert (end.messages, end.closed) == ([reply(1)], [None])


async def test_close_sends_what_is_queued():
    """Also what doesn't fit into the kernel's buffer."""
    sent = [reply(number, b"x" * 100_000) for number in range(30)]
    async with pair() as (left, right):
        for message in sent:
            left.channel.send(message)
        left.channel.close()
        await right.until(lambda: right.closed)
    assert (sent, [None]) == (right.messages, right.closed)


async def test_sending_on_a_closed_channel_does_nothing():
    """The owner has been told; each caller need not look."""
    async with pair() as (left, right):
        right.channel.close()
        await left.until(lambda: left.closed)
        left.channel.send(reply(1))
        with anyio.fail_after(1):
            await left.channel.drain()
    assert ([], 1) == (right.messages, len(left.closed))


def test_a_fault_survives_its_encoding():
    """All of its fields."""
    fault = Fault(FaultKind.CONTEXT, "too long", "messages", 5000, 2048)
    assert decode_fault(encode_fault(fault)) == fault


def test_json_bodies_are_utf8():
    """Not escaped: fewer bytes, and readable in a log."""
    assert encode_json({"a": "caf\u00e9"}) == '{"a":"caf\u00e9"}'.encode()
