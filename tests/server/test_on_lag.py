"""`on_lag`: what happens to a stream whose reader does not keep up, at the engine's door (F18). No sockets: time and readers
do what a test says.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.bench import entries
from tests.server.fake_core import FakeCore, tokens

from pagewire.config import Config, ServerConfig
from pagewire.engine.server import WireServer
from pagewire.errors import Cancelled, ConnectionLost, UnknownStream
from pagewire_transport.codec import decode_server, encode
from pagewire_transport.columns import pack
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    Done,
    Error,
    Finished,
    Generate,
    Pause,
    Resume,
    Tokens,
)
from pagewire_transport.params import SamplingParams

MOST = 16


class Peer:
    """A connection as the server sees it, and what came over it."""

    is_open = True
    client = "test"
    peer = b"test"

    def __init__(self, server):
        self.server = server
        self.is_deaf = False
        self.kept = []
        self.got = []

    @property
    def is_blocked(self):
        return bool(self.kept) or not self.is_open

    @property
    def num_unsent(self):
        return len(self.kept)

    def send(self, message):
        self.send_frame(encode(message))

    def send_frame(self, frame):
        (self.kept if self.is_deaf or self.kept else self.got).append(decode_server(frame))

    def listen(self):
        self.is_deaf = False
        self.got += self.kept
        self.kept.clear()
        self.server.on_writable(self)

    def lose(self, reason=ConnectionLost("test")):  # noqa: B008
        self.is_open = False
        self.server.on_lost(self, reason)

    def say(self, message):
        self.server.on_message(self, message)
        self.server.check_invariants()

    def generate(self, stream=1, on_lag="coalesce", resumable=True, **params):
        params = SamplingParams(**({"max_tokens": 200, "seed": stream} | params))
        self.say(
            Generate(stream=stream, prompt_ids=pack("I", [1, 2]), on_lag=on_lag, resumable=resumable, params=params)
        )
        return self

    def resume(self, accepted, received, stream=1):
        fields = {"request_id": accepted.request_id, "resume_key": accepted.resume_key}
        self.say(Resume(stream=stream, received=pack("I", received), **fields))
        return self

    def of(self, kind, stream=1):
        return [m for m in self.got if isinstance(m, kind) and m.stream == stream]

    def ids(self, stream=1, choice=0):
        """The tokens that came, which must follow one another; the index of the first."""
        first, got = None, []
        for message in self.got:
            if isinstance(message, Tokens):
                for number, which, start, ids in entries(message):
                    if (number, which) == (stream, choice):
                        first = start if first is None else first
                        assert start == first + len(got)
                        got += ids
        return first, got


class Bench:
    """A server whose steps, time and readers are moved by hand."""

    def __init__(self, **config):
        config = {"max_lag_tokens": MOST, "max_lag_ms": 0} | config
        self.server = WireServer(FakeCore(), Config(server=ServerConfig(**config)))
        self.core = self.server._core
        self.core.sinks.append(self.server)
        self.server._log = type("Log", (), {"info": lambda *_, **__: None})()
        self.now_ms = 1000
        self.server._delivery._lag._now_ns = lambda: self.now_ms * 1_000_000

    def peer(self):
        return Peer(self.server)

    async def step(self, num=1, ms=0):
        for _ in range(num):
            self.now_ms += ms
            self.core.step()
            self.server.check_invariants()
            await asyncio.sleep(0)
            self.server.check_invariants()

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)
            self.server.check_invariants()

    def output(self, seed):
        """How many tokens a live sequence has."""
        return next(s for s in self.core.live.values() if s.seed == seed).num_output


async def test_pause_holds_who_is_not_read_and_nobody_else():
    bench = Bench()
    slow, quick = bench.peer(), bench.peer()
    slow.generate(1, "pause").generate(2, "coalesce")
    quick.generate(3, "pause")
    await bench.step(5)
    slow.is_deaf = True
    await bench.step(100)
    held = bench.output(1)
    assert 5 + MOST < held <= 5 + 1 + MOST + 2  # one frame was on its way, and the step that tells is one too late
    assert bench.output(2) == bench.output(3) == 105
    assert quick.ids(3) == (0, tokens(3, 105))
    slow.listen()
    await bench.step(300)
    assert slow.ids(1) == (0, tokens(1, 200))
    assert slow.ids(2) == (0, tokens(2, 200))
    assert [m.reason for m in slow.of(Finished, 1)] == ["length"]
    assert len(slow.of(Done, 1)) == 1


async def test_a_held_stream_goes_on_when_half_the_lag_is_gone_not_before():
    bench = Bench()
    slow = bench.peer().generate(1, "pause", n=2)
    await bench.step(2)
    slow.is_deaf = True
    await bench.step(50)
    held = bench.output(1)
    lag = bench.server._delivery._lag
    (reader,) = bench.server._readers.values()
    (first, second) = next(iter(reader.streams.values())).choices
    for choice in (first, second):
        bench.server._delivery._table.set_sent(choice, held - MOST // 2 - 1)
    lag.moved(reader)
    assert first.sequence.is_paused
    bench.server._delivery._table.set_sent(first, held - MOST // 2)
    lag.moved(reader)
    assert not first.sequence.is_paused
    assert second.sequence.is_paused
    bench.server.check_invariants()


@pytest.mark.parametrize("first", ["lag", "client"])
async def test_a_clients_pause_and_that_of_its_lag_do_not_undo_each_other(first):
    bench = Bench()
    slow = bench.peer().generate(1, "pause")
    await bench.step(2)
    (sequence,) = bench.core.live.values()
    slow.is_deaf = True
    await bench.step(50)
    slow.say(Pause(stream=1))
    if first == "lag":  # ends first
        slow.listen()
        await bench.step(10)
        assert sequence.is_paused
        slow.say(Pause(stream=1, paused=False))
    else:
        slow.say(Pause(stream=1, paused=False))
        await bench.step(10)
        assert sequence.is_paused
        slow.listen()
        await bench.settle()
    assert not sequence.is_paused
    await bench.step(200)
    assert slow.ids() == (0, tokens(1, 200))


@pytest.mark.parametrize("how", ["cancelled", "goodbye", "grace", "resumed", "drained"])
async def test_a_held_stream_has_every_end_that_others_have(how):
    bench = Bench(resume_grace_ms=20, replay_timeout_ms=200)
    slow = bench.peer().generate(1, "pause")
    await bench.step(2)
    (sequence,) = bench.core.live.values()
    slow.is_deaf = True
    await bench.step(50)
    had = sequence.num_output
    if how == "cancelled":
        slow.say(Cancel(stream=1))
        bench.core.report()
        slow.listen()
        await bench.settle()
        assert slow.ids() == (0, tokens(1, had))
        assert [m.reason for m in slow.of(Finished)] == ["cancelled"]
        return
    if how == "drained":
        bench.server.drain()
        slow.listen()
        await bench.step(300)
        assert slow.ids() == (0, tokens(1, 200))
        return
    slow.lose(Cancelled("goodbye") if how == "goodbye" else ConnectionLost("test"))
    if how == "goodbye":
        assert not sequence.is_live
        return
    await bench.step(5)
    assert sequence.num_output == had, "nobody reads it: it stays paused for its grace"
    if how == "grace":
        while sequence.is_live:
            await asyncio.sleep(0.005)
        return
    other = bench.peer().resume(slow.of(Accepted)[0], [len(slow.ids()[1])])
    await bench.step(300)
    assert slow.ids()[1] + other.ids()[1] == tokens(1, 200)
    assert len(other.of(Done)) == 1


async def test_a_resumed_stream_that_owes_more_than_the_bound_is_held_until_it_was_read():
    bench = Bench()
    first = bench.peer().generate(1, "pause")
    await bench.step(50)
    other = bench.peer()
    other.is_deaf = True
    other.resume(first.of(Accepted)[0], [0])
    (sequence,) = bench.core.live.values()
    assert sequence.is_paused
    other.listen()
    await bench.step(200)
    assert other.ids() == (0, tokens(1, 200))


@pytest.mark.parametrize("resumable", [True, False])
async def test_cancel_ends_a_stream_by_tokens_and_keeps_what_was_made(resumable):
    bench = Bench()
    slow, quick = bench.peer(), bench.peer()
    slow.generate(1, "cancel", resumable=resumable, n=2).generate(3, "coalesce")
    quick.generate(4, "cancel")
    await bench.step(4)
    slow.is_deaf = True
    await bench.step(60)
    assert sorted(s.seed for s in bench.core.live.values()) == [3, 4]
    assert bench.output(4) == 64
    slow.listen()
    await bench.settle()
    (error,) = slow.of(Error)
    assert (error.code, error.field) == ("slow_reader", "on_lag")
    got = [slow.ids(1, choice)[1] for choice in range(2)]
    assert [len(ids) for ids in got] == [5, 5], "the error comes at once, not behind what was not read"
    assert slow.of(Finished) == slow.of(Done) == []
    assert slow.ids(3) == (0, tokens(3, 64))
    with pytest.raises(UnknownStream):
        slow.say(Cancel(stream=1))
    if not resumable:
        with pytest.raises(UnknownStream):
            bench.peer().resume(slow.of(Accepted)[0], [5, 5])
        return
    for _ in range(2):  # and again, as for all that was told and may have been lost
        other = bench.peer().resume(slow.of(Accepted)[0], [5, 3])
        await bench.settle()
        num = other.of(Finished)[0].num_tokens
        assert 5 + MOST < num <= 5 + MOST + 2
        assert other.ids(1, 0) == (5, tokens(1, num - 5, 5))
        assert other.ids(1, 1) == (3, tokens(2, num - 3, 3))
        assert [m.reason for m in other.of(Finished)] == ["cancelled", "cancelled"]
        assert other.of(Done)[0].usage.completion == 2 * num


async def test_what_a_slow_reader_may_fetch_is_forgotten_with_its_grace():
    bench = Bench(resume_grace_ms=20, replay_timeout_ms=200)
    slow = bench.peer().generate(1, "cancel")
    await bench.step(1)
    slow.is_deaf = True
    await bench.step(40)
    while bench.server._survivors._streams.is_keeping:
        await asyncio.sleep(0.005)
    with pytest.raises(UnknownStream):
        bench.peer().resume(slow.of(Accepted)[0], [0])


async def test_cancel_ends_a_stream_whose_reader_takes_nothing_for_too_long():
    bench = Bench(max_lag_ms=500, max_lag_tokens=50)
    slow = bench.peer().generate(1, "cancel").generate(2, "pause").generate(3, "coalesce")
    await bench.step(1)
    slow.is_deaf = True
    await bench.step(5, ms=100)
    slow.listen()  # in time: the time begins anew
    await bench.settle()
    slow.is_deaf = True
    await bench.step(5, ms=100)
    assert len(bench.core.live) == 3
    await bench.step(3, ms=100)
    assert sorted(s.seed for s in bench.core.live.values()) == [2, 3], "few tokens wait, but the time is over"
    slow.listen()
    await bench.settle()
    assert [m.code for m in slow.of(Error)] == ["slow_reader"]


async def test_whoever_comes_back_is_not_cancelled_for_what_was_made_meanwhile():
    bench = Bench()
    first = bench.peer().generate(1, "cancel")
    await bench.step(5)
    first.lose()
    await bench.step(60)
    assert bench.core.live, "a lost reader is no slow one"
    other = bench.peer().resume(first.of(Accepted)[0], [0])
    other.is_deaf = True
    await bench.step(MOST)
    assert bench.core.live
    await bench.step(4)
    assert not bench.core.live
    third = bench.peer().resume(first.of(Accepted)[0], [5])
    await bench.settle()
    assert third.ids()[0] == 5
    assert len(third.of(Done)) == 1


async def test_what_a_slow_reader_of_log_probabilities_is_sent_comes_in_small_messages():
    """So many of them may wait in libzmq: 20 alternatives a token would make 2.7 MB of what is 64 KiB without."""
    bench = Bench()
    slow = bench.peer().generate(1, max_tokens=2000, logprobs=20)
    await bench.step(1)
    slow.is_deaf = True
    await bench.step(1500)
    slow.listen()
    await bench.settle()
    assert slow.ids() == (0, tokens(1, 1501))
    assert max(len(encode(m)) for m in slow.got) < 80_000


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 25)),
        st.tuples(st.sampled_from(["deafen", "listen", "lose", "stop"]), st.integers(0, 1)),
        st.tuples(st.sampled_from(["pause", "go on", "cancel"]), st.integers(1, 4)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(MOVES)
def test_whatever_happens_lag_is_bounded_and_every_token_comes_once(moves):
    """Two readers with streams of all kinds; at the end everybody reads, and what ended with an error is fetched."""
    asyncio.run(_play(moves))


async def _play(moves):
    bench = Bench(max_lag_ms=200, resume_grace_ms=60_000)
    peers = [bench.peer(), bench.peer()]
    kinds = {1: "pause", 2: "cancel", 3: "coalesce", 4: "pause"}
    have, accepted = {s: [] for s in kinds}, {}
    for stream, kind in kinds.items():
        peers[stream % 2].generate(stream, kind, max_tokens=60 + 40 * stream)

    def collect():
        for peer in peers:
            for message in peer.got:
                if isinstance(message, Accepted):
                    accepted.setdefault(message.stream, message)
                elif isinstance(message, Tokens):
                    for stream, _, start, ids in entries(message):
                        assert start == len(have[stream])
                        have[stream] += ids
                elif isinstance(message, Finished):
                    cancelled.update({message.stream} if message.reason == "cancelled" else ())
                elif isinstance(message, Error | Done):
                    open_.pop(message.stream, None)
                    if isinstance(message, Error):  # told, or lost with its connection
                        assert (message.code, kinds[message.stream]) == ("slow_reader", "cancel")
                        slow.append(message.stream)
            peer.got.clear()

    open_, slow, cancelled = dict.fromkeys(kinds), [], set()
    for what, which in moves:
        if what == "step":
            await bench.step(which, ms=30)
        elif what in ("deafen", "listen"):
            peers[which].is_deaf = what == "deafen"
            if what == "listen":
                peers[which].listen()
        elif what in ("lose", "stop"):
            collect()
            lost, peers[which] = peers[which], bench.peer()
            lost.lose()
            for stream in [s for s in open_ if s % 2 == which and s in accepted]:
                peers[which].resume(accepted[stream], [len(have[stream])], stream)
            peers[which].is_deaf = what == "stop"
        else:
            messages = {"pause": Pause(stream=which), "go on": Pause(stream=which, paused=False)}
            try:
                peers[which % 2].say(messages.get(what) or Cancel(stream=which))
            except UnknownStream:
                assert not bench.server.has_stream(peers[which % 2], which)
            bench.core.report()
        await bench.settle()
        collect()
        for reader in bench.server._readers.values():
            for stream in reader.streams.values():
                for choice in stream.choices:
                    lag = choice.sequence.num_output - bench.server._delivery._table.sent_of(choice)
                    if stream.on_lag == "pause" and choice not in reader.watched:
                        assert lag <= MOST + 1
        bench.server.check_invariants()
    for peer in peers:
        peer.listen()
    await bench.settle()
    for stream in list(open_):
        peer = peers[stream % 2]
        if bench.server.has_stream(peer, stream):
            peer.say(Pause(stream=stream, paused=False))
    await bench.step(300)
    await bench.settle()
    collect()
    last = bench.peer()
    peers.append(last)
    for stream in set(slow) | set(open_):
        last.resume(accepted[stream], [len(have[stream])], stream)
    await bench.settle()
    collect()
    for stream, ids in have.items():
        assert ids == tokens(stream, len(ids))
        assert stream in slow or stream in cancelled or len(ids) == 60 + 40 * stream
    assert cancelled <= {2} | {which for what, which in moves if what == "cancel"}
    assert not bench.core.live
    assert bench.server.num_streams == 0
