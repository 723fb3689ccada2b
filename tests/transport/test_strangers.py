"""Connections that want nothing: each is cut in time, and there are never too many; whoever said hello is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chaos.flood_peers import SECONDS, ZMTP
from tests.server.bench import RawPeer, until
from tests.transport.test_door import Recorder

from pagewire_transport.door import Door
from pagewire_transport.errors import Overloaded
from pagewire_transport.handler import DoorLimits
from pagewire_transport.messages import Error, Generate, Hello, Ping, Pong
from pagewire_transport.strangers import Strangers, Wire

SOON_MS = 300


@contextlib.asynccontextmanager
async def opened(url="tcp://127.0.0.1:*", **limits):
    handler = Recorder()
    limits = {"heartbeat_timeout_ms": 60_000, "hello_timeout_ms": SOON_MS, **limits}
    door = Door(url, handler=handler, limits=DoorLimits(**limits), on_fault=lambda *what: handler.faults.append(what))
    try:
        yield door, handler
        door._socket._strangers.check_invariants()
        assert handler.faults == []
    finally:
        await door.close()


class Raw:
    """A plain socket that says what it is told, byte for byte."""

    def __init__(self, url):
        if url.startswith("ipc://"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(url.removeprefix("ipc://"))
        else:
            host, _, port = url.removeprefix("tcp://").rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.setblocking(False)
        self.heard = b""

    def say(self, data):
        self.socket.send(data)

    @property
    def is_cut(self):
        try:
            while data := self.socket.recv(65_536):
                self.heard += data
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


def strangers_of(door):
    return door._socket._strangers


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:*", "ipc://*"])
@pytest.mark.parametrize("kind", [kind for kind in ZMTP if kind != "hello and no more"])
async def test_who_does_not_say_hello_is_cut(url, kind):
    async with opened(url) as (door, _):
        began = asyncio.get_running_loop().time()
        with Raw(door.url) as peer, RawPeer(door.url) as other:
            await other.hello()
            with contextlib.suppress(OSError):
                peer.say(ZMTP[kind])
            if kind in SECONDS:
                await until(lambda: peer.is_cut or len(peer.heard) > 64)
                with contextlib.suppress(OSError):
                    peer.say(SECONDS[kind])
            await until(lambda: peer.is_cut)
            if "curve" not in kind:  # this door has no keys, and says so at once
                assert asyncio.get_running_loop().time() - began >= 0.9 * SOON_MS / 1000
            await until(lambda: strangers_of(door).num_wires == 1)
            other.send(Ping(nonce=3))
            assert await other.read() == Pong(nonce=3)


async def test_who_said_hello_stays_and_is_cut_once_it_is_lost():
    async with opened(heartbeat_timeout_ms=5 * SOON_MS) as (door, handler):
        with Raw(door.url) as peer, RawPeer(door.url) as quick:
            await quick.hello()
            peer.say(ZMTP["hello and no more"])
            await until(lambda: peer.is_cut or len(peer.heard) > 64)
            peer.say(SECONDS["hello and no more"])
            await until(lambda: len(door.connections) == 2)
            await asyncio.sleep(0.002 * SOON_MS)
            assert not peer.is_cut
            assert len(strangers_of(door)) == 0
            while not handler.lost:
                quick.send(Ping())
                await quick.read()
                await asyncio.sleep(0.02)
            assert len(strangers_of(door)) == 1
            while not peer.is_cut:
                quick.send(Ping())
                await quick.read()
                await asyncio.sleep(0.02)
            assert len(handler.lost) == 1
            assert len(door.connections) == 1


async def test_beyond_the_limit_the_one_that_waits_longest_goes():
    async with opened(max_strangers=3, hello_timeout_ms=60_000) as (door, _), contextlib.AsyncExitStack() as stack:
        known = stack.enter_context(RawPeer(door.url))
        await known.hello()
        peers = []
        for number in range(6):
            peers.append(stack.enter_context(Raw(door.url)))
            await until(lambda number=number: strangers_of(door).num_wires + door.num_closed == number + 2)
        await until(lambda: [peer.is_cut for peer in peers] == [True] * 3 + [False] * 3)
        assert len(strangers_of(door)) == 3
        known.send(Ping(nonce=1))
        assert await known.read() == Pong(nonce=1)
        with RawPeer(door.url) as late:  # and whoever means it gets in
            await late.hello()


async def test_who_is_told_to_try_again_may_wait():
    async with opened() as (door, handler):
        handler.shut = Overloaded("full", retry_after_ms=10)
        with RawPeer(door.url) as patient, Raw(door.url) as silent:
            for _ in range(12):
                patient.send(Hello())
                assert isinstance(await patient.read(), Error)
                await asyncio.sleep(0.2 * SOON_MS / 1000)
            assert silent.is_cut
            handler.shut = None
            await patient.hello()
            assert len(door.connections) == 1


async def test_another_process_under_the_same_identity_is_known_by_its_next_word():
    """Its hello comes from a known identity and another connection; libzmq says nothing of the end of the old one."""
    async with opened() as (door, handler):
        with RawPeer(door.url, identity=b"me", reconnects=False) as first:  # it would take the name back
            await first.hello()
            with RawPeer(door.url, identity=b"me") as second:
                await second.hello()
                for _ in range(8):
                    second.send(Ping())
                    assert isinstance(await second.read(), Pong)
                    await asyncio.sleep(0.3 * SOON_MS / 1000)
                assert len(handler.lost) == 1
                assert len(door.connections) == 1
                assert strangers_of(door).knows(b"me")


async def test_thousands_come_and_go_and_nothing_stays():
    async with opened(max_strangers=64) as (door, _):
        process = psutil.Process()
        with RawPeer(door.url) as warm:
            await warm.hello()
        await until(lambda: strangers_of(door).num_wires == 0)
        before = process.num_fds()
        for turn in range(1, 11):
            with contextlib.ExitStack() as stack:
                peers = [stack.enter_context(Raw(door.url)) for _ in range(200)]
                for number, peer in enumerate(peers):
                    with contextlib.suppress(OSError):
                        peer.say(list(ZMTP.values())[number % len(ZMTP)])
                num_seen = 1 + 200 * turn
                await until(lambda n=num_seen: door.num_closed + strangers_of(door).num_wires == n)
                await until(lambda: strangers_of(door).num_wires <= 64)
                strangers_of(door).check_invariants()
        await until(lambda: strangers_of(door).num_wires == 0)
        assert len(strangers_of(door)) == 0
        assert door.num_closed == 2001
        await until(lambda: process.num_fds() <= before)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much came")
async def test_a_stranger_that_says_much_is_cut_at_once():
    """A frame of a handshake may be announced as large as two messages, and libzmq keeps what comes of it."""
    async with opened(hello_timeout_ms=60_000, max_message_bytes=2**24) as (door, _):
        with Raw(door.url) as talker, Raw(door.url) as brief, RawPeer(door.url) as known:
            await known.hello()
            known.send(Generate(stream=1, prompt_ids=b"1234" * 500_000))  # who said hello may
            for peer, size in ((brief, 0), (talker, 2_000_000)):
                peer.say(ZMTP["half of a large handshake"])
                sent = 0
                with contextlib.suppress(OSError):
                    while sent < size and not peer.is_cut:
                        with contextlib.suppress(BlockingIOError):
                            sent += peer.socket.send(b"x" * min(20_000, size - sent))
                        await asyncio.sleep(0)
            await until(lambda: talker.is_cut)
            await asyncio.sleep(0.25)
            assert not brief.is_cut
            known.send(Ping(nonce=1))
            assert await known.read() == Pong(nonce=1)
        await until(lambda: door._socket._wires._looking is None)


async def test_only_the_socket_that_is_meant_is_shut():
    """A number may have become another's; whatever that is, it stays open."""
    async with opened(hello_timeout_ms=60_000) as (door, _):
        wires = door._socket._wires
        with Raw(door.url) as peer:
            await until(lambda: strangers_of(door).num_wires == 1)
            (wire,) = strangers_of(door)._wires.values()
            wires._cut(Wire(wire.number, wire.inode + 1, 0))  # another socket of ours under the same number
            ours, theirs = socket.socketpair()
            with ours, theirs:
                wires._cut(Wire(ours.fileno(), os.fstat(ours.fileno()).st_ino, 0))  # not accepted here
                theirs.send(b"x")
                assert ours.recv(1) == b"x"
            wires._cut(Wire(ours.fileno(), 1, 0))  # closed
            await asyncio.sleep(0.05)
            assert not peer.is_cut
            wires._cut(wire)
            await until(lambda: peer.is_cut)


@pytest.mark.parametrize("lack", ["a descriptor", "none"])
async def test_it_also_cuts_when_no_descriptor_is_left(monkeypatch, lack):
    async with opened(hello_timeout_ms=60_000) as (door, _):
        with Raw(door.url) as peer:
            await until(lambda: strangers_of(door).num_wires == 1)
            (wire,) = strangers_of(door)._wires.values()
            if lack == "a descriptor":

                def full(number):
                    raise OSError(24, "too many open files")

                monkeypatch.setattr("pagewire_transport.wires.os.dup", full)
            door._socket._wires._cut(wire)
            await until(lambda: peer.is_cut)
            monkeypatch.undo()
            await until(lambda: strangers_of(door).num_wires == 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["accepted", "closed", "welcomed", "refused", "left", "overdue"]),
            st.integers(0, 5),
            st.integers(0, 40),
        ),
        max_size=80,
    )
)
def test_the_books_are_right_in_any_order(events):
    """Against a model: a list of who waits since when."""
    strangers = Strangers(max_num=3, timeout_ms=50)
    now, waiting, known, alive = 0, [], {}, set()

    def too_many():
        return waiting.pop(0)[0] if len(waiting) > 3 else None

    for what, number, later in events:
        now += later * 1_000_000
        peer = bytes([number % 3])
        if what == "accepted":
            waiting = [one for one in waiting if one[0] != number]
            known = {name: one for name, one in known.items() if one != number}
            alive.add(number)
            waiting.append((number, now))
            cut = strangers.accepted(number, number, now)
            assert (cut.number if cut else None) == too_many()
        elif what == "closed":
            strangers.closed(number)
            alive.discard(number)
            waiting = [one for one in waiting if one[0] != number]
            known = {name: one for name, one in known.items() if one != number}
        elif what == "welcomed":
            strangers.welcomed(number, peer)
            if number in alive:
                waiting = [one for one in waiting if one[0] != number]
                known = {name: one for name, one in known.items() if one != number}
                known[peer] = number
        elif what == "refused":
            strangers.refused(number, now)
            if number in [one[0] for one in waiting]:
                waiting = [one for one in waiting if one[0] != number] + [(number, now)]
        elif what == "left":
            cut = strangers.left(peer, now)
            if peer in known:
                waiting.append((known.pop(peer), now))
            assert (cut.number if cut else None) == too_many()
        else:
            due = [one[0] for one in waiting if now - one[1] > 50_000_000]
            assert [wire.number for wire in strangers.overdue(now)] == due
            waiting = waiting[len(due) :]
        strangers.check_invariants()
        assert [wire.number for wire in strangers._strangers] == [one[0] for one in waiting]
        assert {name: wire.number for name, wire in strangers._known.items()} == known
        assert strangers.num_wires == len(alive)
