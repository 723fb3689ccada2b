"""The door: strangers, offenders, the silent, and peers that take nothing (F11, F12, F18)."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.server.bench import RawPeer, until

from pagewire_transport.codec import encode
from pagewire_transport.connection import Connection
from pagewire_transport.door import Door
from pagewire_transport.errors import Draining, InvalidRequest
from pagewire_transport.handler import DoorLimits
from pagewire_transport.messages import (
    Cancel,
    Error,
    Generate,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Tokens,
    Welcome,
)


class Recorder:
    """A handler that notes what it is told; stream 13 raises, 14 is refused."""

    def __init__(self):
        self.messages, self.lost, self.writable, self.faults = [], [], [], []
        self.streams = set()
        self.shut = None
        self.is_ready = True
        self.unready = "not now"

    def welcome(self):
        if self.shut is not None:
            raise self.shut
        return Welcome(
            version=1, role="engine", server="s", model="m", vocab_size=1, max_model_len=1, max_streams=1,
            max_message_bytes=10_000, heartbeat_ms=100, heartbeat_timeout_ms=1000,
        )  # fmt: skip

    def on_message(self, connection, message):
        if message.stream == 13:
            raise ZeroDivisionError
        if message.stream == 14:
            raise InvalidRequest("no", field="stream")
        self.messages.append((connection, message))
        self.streams.add(message.stream)

    def has_stream(self, connection, stream):
        return stream in self.streams

    def on_writable(self, connection):
        self.writable.append(connection)

    def on_lost(self, connection, reason):
        self.lost.append((connection, reason))

    def stats(self):
        return {}


@asynccontextmanager
async def opened(now_ns=None, files=None, admin=None, **limits):
    handler = Recorder()
    limits = {"max_message_bytes": 10_000, "heartbeat_timeout_ms": 60_000, **limits}
    options = {"files": files, "admin": admin} | ({} if now_ns is None else {"now_ns": now_ns})
    door = Door(
        "ipc://*",
        handler=handler,
        limits=DoorLimits(**limits),
        on_fault=lambda doing, error: handler.faults.append((doing, error)),
        **options,
    )
    try:
        yield door, handler
    finally:
        await door.close()


async def test_hello_comes_first_and_offenders_are_ignored():
    async with opened(max_offences=3) as (door, handler):
        with RawPeer(door.url) as peer:
            for _ in range(3):
                peer.send(Ping())
                error = await peer.read()
                assert (error.code, error.field) == ("protocol", "hello")
            peer.send(Hello())
            assert await peer.read_all() == []  # too late
            assert door.connections == []
        with RawPeer(door.url) as peer:  # nobody else pays for it
            await peer.hello()
            assert len(door.connections) == 1
        assert handler.faults == handler.messages == []


async def test_no_common_version():
    async with opened() as (door, _):
        with RawPeer(door.url) as peer:
            peer.send(Hello(versions=(2, 3)))
            error = await peer.read()
            assert (error.code, error.field) == ("version", "versions")
            peer.send(b"\2" + encode(Hello())[1:])
            assert (await peer.read()).code == "version"
            await peer.hello()


async def test_nobody_is_let_in_now():
    async with opened() as (door, handler):
        handler.shut = Draining("closing", retry_after_ms=7)
        with RawPeer(door.url) as peer:
            peer.send(Hello())
            error = await peer.read()
            assert (error.code, error.retry_after_ms) == ("draining", 7)
            handler.shut = None
            await peer.hello()


async def test_malformed_messages_are_answered_then_the_peer_is_dropped():
    async with opened(max_offences=4) as (door, handler):
        with RawPeer(door.url) as peer:
            await peer.hello()
            for bad in (b"", b"\1", b"\1" + b"\x91" * 9000):
                peer.send(bad)
                assert (await peer.read()).code in ("protocol", "invalid_request")
            for _ in range(20):  # a bad request is no offence
                peer.send(b"\1" + msgspec.msgpack.encode({"t": "generate", "stream": 5, "x": 1}))
                assert (await peer.read()).stream == 5
            assert handler.lost == []
            peer.send(b"\1\xc1")
            peer.send(encode(Generate(stream=1, prompt="x" * 15_000)))  # too big, and small enough to be answered
            await until(lambda: handler.lost)
            assert handler.lost[0][1].code == "protocol"
            assert door.connections == []


async def test_a_frame_far_too_big_costs_the_connection_and_nobody_elses():
    async with opened() as (door, handler):
        with RawPeer(door.url) as peer, RawPeer(door.url) as other:
            await peer.hello()
            await other.hello()
            peer.send(b"\1" * 1_000_000)
            other.send(Ping(nonce=1))
            assert await other.read() == Pong(nonce=1)
            peer.send(Ping())
            error = await peer.read()  # as a new peer
            assert error.field == "hello"
            assert handler.faults == []


async def test_junk_by_the_thousand():
    """F11: whatever comes, the door stands, and what it remembers is bounded."""
    source = random.Random(7)
    good = [encode(m) for m in (Hello(), Ping(), Cancel(stream=1), Generate(stream=2, prompt_ids=b"1234"), Goodbye())]
    async with opened() as (door, handler):
        for _ in range(40):
            with RawPeer(door.url) as peer:
                for _ in range(50):
                    frame = bytearray(source.choice(good))
                    for _ in range(source.randrange(3)):
                        frame[source.randrange(len(frame))] = source.randrange(256)
                    peer.send(bytes(frame[: source.randrange(1, 3 * len(frame))]))
                    if source.random() < 0.1:
                        peer.socket.send_multipart([b"a", bytes(frame), b""])
                await asyncio.sleep(0.002)
        with RawPeer(door.url) as peer:
            await peer.hello()
        assert handler.faults == []
        assert door._offenders.num <= 1024


async def test_refusals_and_faults_of_the_handler_are_answered():
    async with opened() as (door, handler):
        with RawPeer(door.url) as peer:
            await peer.hello()
            peer.send(Generate(stream=14))
            error = await peer.read()
            assert (error.code, error.stream, error.field) == ("invalid_request", 14, "stream")
            peer.send(Cancel(stream=14))
            assert (await peer.read()).stream is None  # a refused cancel ends nothing
            peer.send(Generate(stream=13))
            error = await peer.read()
            assert (error.code, error.stream) == ("internal", 13)
            assert len(handler.faults) == 1
            peer.send(Generate(stream=1))
            await until(lambda: handler.messages)
            # A second, bad one of that number must not seem to end the first.
            peer.send(b"\1" + msgspec.msgpack.encode({"t": "generate", "stream": 1, "x": 1}))
            assert (await peer.read()).stream is None


@pytest.mark.parametrize("how", ["goodbye", "hello again", "silence"])
async def test_a_connection_is_lost_once(how):
    now = [10**15]
    async with opened(now_ns=lambda: now[0], heartbeat_timeout_ms=40) as (door, handler):
        with RawPeer(door.url, identity=b"me") as peer:
            await peer.hello()
            (connection,) = door.connections
            if how == "goodbye":
                peer.send(Goodbye())
            elif how == "hello again":
                peer.send(Hello(client="second"))
            else:
                for _ in range(6):  # the clock goes on a little each tick
                    now[0] += 9_000_000
                    await asyncio.sleep(0.012)
                now[0] += 11_000_000
            await until(lambda: handler.lost)
            await asyncio.sleep(0.02)
            assert [lost for lost, _ in handler.lost] == [connection]
            assert not connection.is_open
            assert not connection.try_send(Pong())
            connection.send(Pong())  # into the void, without a word
            assert [c.client for c in door.connections] == (["second"] if how == "hello again" else [])


async def test_pings_keep_a_connection_and_a_late_clock_judges_nobody():
    now = [10**15]
    async with opened(now_ns=lambda: now[0], heartbeat_timeout_ms=40) as (door, handler):
        with RawPeer(door.url) as peer:
            await peer.hello()
            for _ in range(8):
                now[0] += 9_000_000
                peer.send(Ping())
                assert isinstance(await peer.read(), Pong)
                await asyncio.sleep(0.012)
            now[0] += 10**12  # this process was stopped, and the pings are in the socket
            peer.send(Ping())
            assert isinstance(await peer.read(), Pong)
            await asyncio.sleep(0.03)
            assert handler.lost == []


async def test_a_peer_that_takes_nothing_blocks_itself_alone_and_not_for_ever():
    async with opened(max_unsent=3) as (door, handler):
        with RawPeer(door.url, receive_hwm=1) as slow, RawPeer(door.url) as quick:
            await slow.hello()
            (connection,) = door.connections
            await quick.hello()
            frame = Tokens(streams=b"", starts=b"", ids=b"x" * 200_000)
            sent = 0
            while connection.try_send(frame):
                sent += 1
                await asyncio.sleep(0)
            connection.send(frame)
            assert connection.is_blocked
            assert not connection.try_send(Pong())
            quick.send(Ping())
            assert isinstance(await quick.read(), Pong)
            while [await slow.read() for _ in range(1)] and not handler.writable:
                pass
            assert handler.writable == [connection]
            assert not connection.is_blocked
            while not connection.is_blocked:
                connection.send(frame)
                await asyncio.sleep(0)
            for _ in range(5):
                connection.send(Error(code="x", message="y"))
            await until(lambda: handler.lost)
            assert handler.lost[0][1].code == "overloaded"
            assert connection.num_unsent <= 3


async def test_a_peer_that_pings_and_reads_nothing_is_lost_and_one_that_reads_slowly_is_not():
    """F18: heartbeats alone keep no connection for which something waits."""
    now = [10**15]
    limits = {"heartbeat_timeout_ms": 40, "unread_timeout_ms": 100}
    async with opened(now_ns=lambda: now[0], **limits) as (door, handler):
        with RawPeer(door.url, receive_hwm=1) as peer:
            await peer.hello()
            (connection,) = door.connections
            frame = Tokens(streams=b"", starts=b"", ids=b"x" * 200_000)

            async def fill():
                while not connection.is_blocked:
                    connection.send(frame)
                    await asyncio.sleep(0)
                for _ in range(200):
                    connection.send(frame)

            async def pass_ms(ms):
                for _ in range(ms // 8):
                    now[0] += 8_000_000
                    peer.send(Ping())
                    await asyncio.sleep(0.012)

            await fill()
            for _ in range(3):
                await pass_ms(72)
                assert handler.lost == []
                before = connection.num_unsent
                while connection.num_unsent == before:  # libzmq takes more when half of what it holds was read
                    await peer.read()
            await pass_ms(160)
            assert [reason.code for _, reason in handler.lost] == ["slow_reader"]


async def test_a_thousand_blocked_peers_cost_little_each_round(monkeypatch):
    async with opened() as (door, _):
        tried = []
        monkeypatch.setattr(door._socket, "try_send", lambda peer, frame: tried.append(peer) or False)
        for i in range(1000):
            one = Connection(door, b"%d" % i, "", 0)
            door._connections[one.peer] = one
            one.send(Pong())
        tried.clear()
        door._on_change()
        assert len(tried) == 32
        await until(lambda: len(set(tried)) == 1000)  # and all have their turn
