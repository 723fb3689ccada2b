"""Sockets on either loop: nothing is missed, nothing waits, ends are noticed."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
import zmq

from pagewire_transport.client_socket import ClientSocket
from pagewire_transport.errors import ConfigError
from pagewire_transport.sockets import BATCH, PeerGone, ServerSocket
from pagewire_transport.strangers import Strangers

MAX = 10_000
MADE = []


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    async def guarded(main):
        try:
            await main
        finally:
            while MADE:  # those of a test that failed
                MADE.pop().abandon()

    loop = asyncio if request.param == "asyncio" else uvloop
    return lambda main: loop.run(guarded(main))


@pytest.fixture(params=["ipc://*", "tcp://127.0.0.1:*", "tcp://[::1]:0"])
def url(request):
    return request.param


def server(url, on_frame, on_change=lambda: None, **options):
    options = {"strangers": Strangers(max_num=99, timeout_ms=10_000), "handshake_ms": 10_000, **options}
    MADE.append(ServerSocket(url, on_frame=on_frame, on_change=on_change, max_message_bytes=MAX, **options))
    return MADE[-1]


def client(url, on_frame=lambda frame: None, on_change=lambda: None, on_disconnect=lambda: None, **options):
    callbacks = {"on_frame": on_frame, "on_change": on_change, "on_disconnect": on_disconnect}
    MADE.append(ClientSocket(url, **callbacks, max_message_bytes=MAX, **options))
    return MADE[-1]


async def until(condition, timeout=5.0):
    deadline = asyncio.get_running_loop().time() + timeout
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "timed out"
        await asyncio.sleep(0.001)


def test_floods_in_both_directions_arrive_whole_and_in_order(run, url):
    """Edge-triggered descriptors lose wake-ups if they are not looked at again: many more frames than a batch."""

    async def main():
        there, back = [], []

        def echo(peer, frame):
            there.append(frame)
            assert one.try_send(peer, frame)

        one = server(url, echo, send_hwm=100_000, receive_hwm=100_000)
        two = client(one.url, back.append, send_hwm=100_000, receive_hwm=100_000)
        sent = [b"%d" % i for i in range(BATCH * 20)]
        for i, frame in enumerate(sent):
            assert two.try_send(frame)
            if i % 97 == 0:
                await asyncio.sleep(0)
        await until(lambda: len(back) == len(sent))
        assert there == back == sent
        for round_ in range(50):  # and one at a time
            two.try_send(b"x")
            await until(lambda: len(back) == len(sent) + round_ + 1)  # noqa: B023
        await two.close()
        await one.close()

    run(main())


def test_a_batch_leaves_the_loop_its_turns(run):
    async def main():
        turns, got = [0], []
        one = server("ipc://*", lambda peer, frame: got.append(turns[0]))
        two = client(one.url)
        for _ in range(BATCH * 10):
            while not two.try_send(b"x"):
                await asyncio.sleep(0)
        running = True

        async def count():
            while running:
                turns[0] += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(count())
        await until(lambda: len(got) == BATCH * 10)
        running = False
        await task
        # A loop may run the descriptor's callback and the one of the round before in one turn.
        assert max(got.count(turn) for turn in set(got)) <= 3 * BATCH
        await two.close()
        await one.close()

    run(main())


def test_a_peer_that_does_not_read_gets_false_and_later_everything(run, url):
    async def main():
        peers, sent, refusals = [], [0], [0]
        frames = 1500

        def send():
            while peers and sent[0] < frames:
                if not one.try_send(peers[0], b"%05d" % sent[0] + b"x" * 20_000):
                    refusals[0] += 1
                    return
                sent[0] += 1

        one = server(url, lambda peer, frame: peers.append(peer), send, send_hwm=10)
        context = zmq.Context()
        lazy = context.socket(zmq.DEALER)
        lazy.rcvhwm = 1
        lazy.ipv6 = True
        lazy.connect(one.url)
        lazy.send(b"hello")
        await until(lambda: refusals[0])
        await asyncio.sleep(0.05)
        assert sent[0] < frames, "the kernel took everything"
        # From here on only the note that something changed makes it go on.
        got = 0
        deadline = asyncio.get_running_loop().time() + 10
        while got < frames:
            try:
                assert int(lazy.recv(zmq.NOBLOCK)[:5]) == got
                got += 1
            except zmq.Again:
                assert asyncio.get_running_loop().time() < deadline, (got, sent, refusals)
                await asyncio.sleep(0.001)
        lazy.close(0)
        context.term()
        await one.close()

    run(main())


def test_a_gone_peer_is_an_error_not_a_silence(run, url):
    async def main():
        peers = []
        one = server(url, lambda peer, frame: peers.append(peer))
        with pytest.raises(PeerGone):
            one.try_send(b"nobody", b"x")
        two = client(one.url)
        two.try_send(b"x")
        await until(lambda: peers)
        assert one.try_send(peers[0], b"x")
        await two.close()

        def is_gone():
            try:
                one.try_send(peers[0], b"x")
            except PeerGone:
                return True
            return False

        await until(is_gone)
        await one.close()
        with pytest.raises(PeerGone):
            one.try_send(peers[0], b"x")
        with pytest.raises(PeerGone):
            two.try_send(b"x")

    run(main())


@pytest.mark.parametrize("how", ["close", "too big"])
def test_a_broken_connection_is_told_after_what_came_before(run, url, how):
    async def main():
        events = []
        one = server(url, lambda peer, frame: [one.try_send(peer, b"%d" % i) for i in range(BATCH)], send_hwm=1000)
        two = client(one.url, events.append, on_disconnect=lambda: events.append("broken"))
        two.try_send(b"x")
        await until(lambda: events)
        if how == "close":
            await one.close()
        else:
            two.try_send(b"x" * (2 * MAX + 1))
        await until(lambda: "broken" in events)
        assert events[: BATCH + 1] == [*(b"%d" % i for i in range(BATCH)), "broken"]
        two.abandon()
        await one.close()

    run(main())


def test_a_frame_of_many_parts_is_no_message(run):
    async def main():
        got = []
        one = server("ipc://*", lambda peer, frame: got.append(frame))
        context = zmq.Context()
        odd = context.socket(zmq.DEALER)
        odd.connect(one.url)
        odd.send_multipart([b"a", b"b", b"c"])
        odd.send_multipart([b""])
        odd.send_multipart([b"good"])
        await until(lambda: len(got) == 3)
        assert got == [b"", b"", b"good"]
        odd.close(0)
        context.term()
        await one.close()

    run(main())


def test_an_address_in_use_leaves_nothing_behind(run):
    async def main():
        one = server("ipc://*", lambda peer, frame: None)
        with pytest.raises(ConfigError, match="in use"):
            server(one.url, lambda peer, frame: None)
        await one.close()
        await one.close()
        again = server(one.url, lambda peer, frame: None)
        again.abandon()

    run(main())


def test_a_flood_takes_one_batch_of_a_turn_however_many_reasons_there_are_to_look(run):
    """Each reason used to bring a chain of rounds of its own, until timers had no turn any more."""

    async def main():
        frames = []
        one = server("ipc://*", lambda peer, frame: frames.append(frame), receive_hwm=100_000)
        two = client(one.url, send_hwm=100_000)
        one._is_more_due = True  # nothing is taken yet
        for _ in range(BATCH * 40):
            two.try_send(b"x")
        await asyncio.sleep(0.2)
        one._is_more_due = False
        assert frames == []
        for _ in range(10):
            one._round()
        for turn in range(1, 20):
            assert len(frames) <= BATCH * turn
            await asyncio.sleep(0)
        await until(lambda: len(frames) == BATCH * 40)

    run(main())
