"""`on_lag` at the gateway's door: clients that do not keep up, where text is pending and not only tokens (F18)."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.bench import BYTES, Bench, ids_of, tokens
from tests.gateway.test_survival import LENGTH, Engine, token

from pagewire.gateway.blame import FAR
from pagewire_client.text.text_stream import TextStream
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

MOST = 8
SERVER = {"max_lag_tokens": MOST, "max_lag_ms": 0}


def ask(bench, peer="a", stream=1, on_lag="coalesce", **params):
    params = SamplingParams(**({"seed": stream} | params))
    bench.client(peer, Generate(stream=stream, prompt_ids=array("I", [97] * 3).tobytes(), on_lag=on_lag, params=params))


def resume(bench, accepted, received, peer="b", stream=1):
    fields = {"request_id": accepted.request_id, "resume_key": accepted.resume_key}
    bench.client(peer, Resume(stream=stream, received=array("I", received).tobytes(), **fields))


def ids(bench, peer="a", stream=1):
    """The tokens that came, which must follow one another; the index of the first."""
    first, got = None, []
    for message in bench.of(Tokens, peer):
        numbers, starts = (array("I", column) for column in (message.streams, message.starts))
        counts = array("H", message.counts) if message.counts else [1] * len(numbers)
        at = 0
        for number, start, count in zip(numbers, starts, counts, strict=True):
            if number == stream:
                first = start if first is None else first
                assert start == first + len(got)
                got += array("I", message.ids)[at : at + count].tolist()
            at += count
    return first, got


def made(seed, stop=LENGTH, start=0):
    return [token(seed, i) for i in range(start, stop)]


def text_of(tokens):
    stream = TextStream(BYTES, ())
    return stream.push(tokens).text + stream.flush().text


def asked_of(engine, seed):
    return next(a for a in engine.asked.values() if a.message.params.seed == seed)


@pytest.fixture
def lagging(make_bench):
    bench = make_bench(server=SERVER)
    bench.now_ms = 1000
    bench.gateway._lag._now_ns = lambda: bench.now_ms * 1_000_000
    return bench


async def test_pause_reaches_the_engine_for_who_is_not_read_alone(lagging):
    engine = Engine(lagging)
    ask(lagging, "a", 1, "pause")
    ask(lagging, "a", 2, "coalesce")
    ask(lagging, "b", 3, "pause")
    engine.obey()
    lagging.deafen("a")
    for _ in range(30):
        engine.step(1)
    num = [len(asked_of(engine, seed).outputs[0]) for seed in (1, 2, 3)]
    assert num == [1 + MOST + 1, 30, 30]
    lagging.listen("a")
    assert [m.paused for m in lagging.to_engine(Pause)] == [True, False]
    for _ in range(LENGTH):
        engine.step(1)
    for stream in (1, 2):
        assert ids(lagging, "a", stream) == (0, made(stream))
        assert lagging.text("a", stream) == text_of(made(stream))
    assert sorted(m.stream for m in lagging.of(Done)) == [1, 2]


@pytest.mark.parametrize("first", ["lag", "client"])
async def test_a_clients_pause_and_that_of_its_lag_do_not_undo_each_other(lagging, first):
    engine = Engine(lagging)
    ask(lagging, on_lag="pause")
    engine.obey()
    asked = asked_of(engine, 1)
    lagging.deafen("a")
    for _ in range(20):
        engine.step(1)
    lagging.client("a", Pause(stream=1))
    if first == "lag":
        lagging.listen("a")
        engine.obey()
        assert asked.is_paused
        lagging.client("a", Pause(stream=1, paused=False))
    else:
        lagging.client("a", Pause(stream=1, paused=False))
        engine.obey()
        assert asked.is_paused
        lagging.listen("a")
    engine.obey()
    assert not asked.is_paused
    engine.step(LENGTH)
    assert ids(lagging) == (0, made(1))


async def test_a_held_stream_is_kept_and_goes_on_where_it_is_resumed(lagging):
    engine = Engine(lagging)
    ask(lagging, on_lag="pause")
    engine.obey()
    lagging.deafen("a")
    for _ in range(20):
        engine.step(1)
    had = len(asked_of(engine, 1).outputs[0])
    lagging.lose("a")
    engine.step(5)
    assert len(asked_of(engine, 1).outputs[0]) == had
    (accepted,) = [m for m in lagging.connections["a"].sent if isinstance(m, Accepted)]
    resume(lagging, accepted, [0])
    engine.obey()
    engine.step(LENGTH)
    assert ids(lagging, "b") == (0, made(1))
    assert len(lagging.of(Done, "b")) == 1


async def test_a_held_stream_may_be_cancelled(lagging):
    engine = Engine(lagging)
    ask(lagging, on_lag="pause")
    engine.obey()
    lagging.deafen("a")
    for _ in range(20):
        engine.step(1)
    lagging.client("a", Cancel(stream=1))
    engine.obey()
    lagging.listen("a")
    assert [m.reason for m in lagging.of(Finished)] == ["cancelled"]
    assert ids(lagging) == (0, made(1, 1 + MOST + 1))


async def test_the_next_engine_learns_of_the_pause(lagging):
    engine = Engine(lagging)
    ask(lagging, on_lag="pause")
    ask(lagging, "b", 2)
    engine.obey()
    engine.step(1)
    lagging.client("b", Pause(stream=2))
    lagging.deafen("a")
    for _ in range(20):
        engine.step(1)
    for dies in (False, True):
        engine.lose(dies=dies)
        engine.come_back()
        assert [asked_of(engine, seed).is_paused for seed in (1, 2)] == [True, True]
    lagging.listen("a")
    lagging.client("b", Pause(stream=2, paused=False))
    engine.obey()
    engine.step(LENGTH)
    assert ids(lagging, "a") == (0, made(1))
    assert ids(lagging, "b", 2) == (0, made(2))


async def test_a_pause_that_comes_before_the_prompt_is_prepared_is_not_forgotten(lagging):
    lagging.client("a", Generate(stream=1, prompt="aaa"))
    lagging.client("a", Pause(stream=1))
    assert lagging.engine == []
    await lagging.settle()
    assert [type(m) for m in lagging.engine] == [Generate, Pause]
    assert lagging.engine[1] == Pause(stream=lagging.engine[0].stream)


async def test_cancel_ends_a_stream_by_tokens_and_keeps_tokens_and_text(lagging):
    """Also the text that was held back: the last token kept is the first byte of a longer character."""
    number = lagging.start("a", 1, on_lag="cancel", params={"n": 2})
    lagging.from_engine(tokens((number, 0, 0, ids_of("ab")), (number, 1, 0, ids_of("x"))))
    lagging.deafen("a")
    lagging.from_engine(tokens((number, 0, 2, ids_of("c"))))
    lagging.from_engine(tokens((number, 0, 3, ids_of("defghijk"))))
    assert lagging.to_engine(Cancel) == []
    lagging.from_engine(tokens((number, 0, 11, [0xE7])))
    assert lagging.to_engine(Cancel) == [Cancel(stream=number)]
    assert not lagging.gateway.has_stream(lagging.connections["a"], 1)
    lagging.listen("a")
    assert lagging.text("a", 1) == "abc"
    assert [(m.code, m.field, m.stream) for m in lagging.of(Error)] == [("slow_reader", "on_lag", 1)]
    assert lagging.of(Finished) == lagging.of(Done) == []
    lagging.from_engine(tokens((number, 0, 12, ids_of("zz"))))  # was on its way
    assert isinstance(lagging.sent["a"][-1], Error)


async def test_what_was_kept_of_a_cancelled_stream_is_fetched_with_its_text(lagging):
    engine = Engine(lagging)
    ask(lagging, on_lag="cancel")
    engine.obey()
    engine.step(3)
    lagging.deafen("a")
    for _ in range(20):
        engine.step(1)
    assert asked_of(engine, 1).ends == [("cancelled", 3 + 1 + MOST + 1)]
    lagging.listen("a")
    assert [m.code for m in lagging.of(Error)] == ["slow_reader"]
    (accepted,) = lagging.of(Accepted)
    have = len(ids(lagging)[1])
    assert have == 4
    resume(lagging, accepted, [have])
    assert ids(lagging, "b") == (have, made(1, 13, have))
    assert lagging.text("a", 1) + lagging.text("b", 1) == text_of(made(1, 13))
    assert [(m.reason, m.num_tokens) for m in lagging.of(Finished, "b")] == [("cancelled", 13)]
    assert [m.usage.completion for m in lagging.of(Done, "b")] == [13]


async def test_cancel_ends_a_stream_whose_client_takes_nothing_for_too_long(lagging):
    lagging.gateway._lag._patience_ns = 500 * 1_000_000
    engine = Engine(lagging)
    ask(lagging, "a", 1, "cancel")
    ask(lagging, "a", 2, "pause")
    ask(lagging, "a", 3, "cancel", max_tokens=2)
    engine.obey()
    for _ in range(2):  # in time
        lagging.deafen("a")
        for _ in range(5):
            lagging.now_ms += 100
            engine.step(1)
        lagging.listen("a")
    lagging.now_ms += 10_000  # nothing was owed meanwhile
    lagging.deafen("a")
    engine.step(1)
    assert lagging.to_engine(Cancel) == []
    lagging.now_ms += 400
    engine.step(1)
    assert lagging.to_engine(Cancel) == []
    lagging.now_ms += 200
    engine.step(1)
    lagging.listen("a")
    assert sorted(m.stream for m in lagging.of(Error)) == [1, 3]
    assert lagging.gateway.num_streams == 1


async def test_whoever_comes_back_is_not_cancelled_for_what_was_made_meanwhile(lagging):
    engine = Engine(lagging)
    ask(lagging, on_lag="cancel")
    engine.obey()
    engine.step(2)
    (accepted,) = lagging.of(Accepted)
    lagging.lose("a")
    engine.step(30)
    lagging.deafen("b")
    resume(lagging, accepted, [0])
    for _ in range(MOST):
        engine.step(1)
    assert asked_of(engine, 1).ends == [None]
    engine.step(2)
    assert asked_of(engine, 1).ends == [("cancelled", 32 + MOST + 2)]
    resume(lagging, accepted, [5], "c")
    assert ids(lagging, "c") == (5, made(1, 32 + MOST + 2, 5))


async def test_another_gateway_knows_what_the_stream_asked_for(lagging, make_bench):
    engine = Engine(lagging)
    ask(lagging, on_lag="pause")
    engine.obey()
    engine.step(2)
    (accepted,) = lagging.of(Accepted)
    other = make_bench(server=SERVER)
    engine.bench, engine.taken = other, 0
    engine.open.clear()  # the link to the gateway of before
    resume(other, accepted, [2])
    engine.obey()
    other.deafen("b")
    for _ in range(20):
        engine.step(1)
    assert asked_of(engine, 1).is_paused
    other.listen("b")
    engine.obey()
    engine.step(LENGTH)
    assert ids(other, "b") == (2, made(1, start=2))


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 15)),
        st.tuples(st.sampled_from(["deafen", "listen", "lose", "engine", "link"]), st.just(0)),
        st.tuples(st.sampled_from(["pause", "go on", "cancel"]), st.integers(1, 3)),
    ),
    max_size=20,
)


@settings(max_examples=80, deadline=None)
@given(MOVES)
def test_whatever_happens_every_token_comes_once_and_every_stream_ends(moves):
    asyncio.run(_play(moves))


async def _play(moves):
    kinds = {1: "pause", 2: "cancel", 3: "coalesce"}
    bench = Bench(server=SERVER)
    engine, peer = Engine(bench), 0
    have, open_, slow, cancelled = {s: [] for s in kinds}, dict(kinds), set(), set()
    asked_to_cancel = {which for what, which in moves if what == "cancel"}
    for stream, kind in kinds.items():
        ask(bench, 0, stream, kind)
    engine.obey()
    accepted = {m.stream: m for m in bench.of(Accepted, 0)}

    def collect():
        for stream in kinds:
            first, got = ids(bench, peer, stream)
            assert first is None or first == len(have[stream])
            have[stream] += got
        for message in bench.sent[peer]:
            if isinstance(message, Error | Done):
                open_.pop(message.stream, None)
            if isinstance(message, Error) and message.stream is not None:
                assert (message.code, kinds[message.stream]) == ("slow_reader", "cancel")
                slow.add(message.stream)
            elif isinstance(message, Finished) and message.reason == "cancelled":
                cancelled.add(message.stream)  # also where the error was lost with its connection
        bench.sent[peer].clear()

    async def served():
        if bench.connections[peer] in bench.gateway._clients and not bench.connections[peer].is_deaf:
            await bench.caught_up(peer)

    for what, which in moves:
        if what == "step":
            for _ in range(which):
                engine.step(1)
        elif what == "deafen":
            bench.deafen(peer)
        elif what == "listen":
            bench.listen(peer)
        elif what in ("engine", "link"):
            engine.obey()  # those that go on do
            engine.step(FAR + 1)  # under which engines die before it gets far ends
            if all(asked.outputs[0] for asked in engine.asked.values()):  # those that are paused get none, and go on
                engine.lose(dies=what == "engine")
                engine.come_back()
        elif what == "lose":
            collect()
            bench.lose(peer)
            peer += 1
            for stream in open_:
                resume(bench, accepted[stream], [len(have[stream])], peer, stream)
            engine.obey()
        elif which in open_:
            messages = {"pause": Pause(stream=which), "go on": Pause(stream=which, paused=False)}
            bench.client(peer, messages.get(what) or Cancel(stream=which))
            engine.obey()
        await served()
        collect()
    bench.listen(peer)
    collect()
    for stream in open_:
        bench.client(peer, Pause(stream=stream, paused=False))
    engine.obey()
    for _ in range(3):
        engine.step(LENGTH)
        await served()
    collect()
    assert not open_
    peer += 1
    for stream in slow:
        resume(bench, accepted[stream], [len(have[stream])], peer, stream)
        await served()
    collect()
    for stream, got in have.items():
        assert got == made(stream, len(got))
        assert stream in slow | cancelled or len(got) == LENGTH
    assert cancelled <= asked_to_cancel | {2}
    assert bench.gateway.num_streams == 0
    bench.preparation.close()
