"""Streams through the gateway, whatever is lost: client, engine, link, gateway. Every token once, and the same text."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.bench import WELCOME, Bench, ids_of, tokens

from pagewire.errors import Cancelled, EngineLost
from pagewire.gateway.asked import asked_in
from pagewire.gateway.blame import FAR
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    Done,
    Error,
    Finish,
    Finished,
    Generate,
    Pause,
    Resume,
    Timings,
    Tokens,
    Usage,
)
from pagewire_transport.params import SamplingParams

TEXT = "Ein Bär – größer als du –, STOPpt. 猫も歩く。 STO no STOP. "
LENGTH = 60


def token(seed: int, index: int) -> int:
    data = TEXT.encode()
    return data[(seed * 7 + index) % len(data)]


@dataclass
class Asked:
    """A request as the simulated engine has it."""

    message: Generate
    request_id: str
    key: str
    outputs: list[list[int]]
    ends: list[tuple[str, int] | None]
    is_paused: bool = False


@dataclass
class Engine:
    """Generates `token` for whoever asks; forgets nothing until it dies."""

    bench: Bench
    asked: dict[str, Asked] = field(default_factory=dict)
    open: dict[int, tuple[Asked, list[int]]] = field(default_factory=dict)
    number: int = 0
    taken: int = 0

    def obey(self):
        while self.taken < len(self.bench.engine):
            message = self.bench.engine[self.taken]
            self.taken += 1
            if isinstance(message, Generate):
                self.begin(message)
            elif isinstance(message, Resume):
                self.resume(message)
            elif isinstance(message, Pause):
                if message.stream in self.open:
                    self.open[message.stream][0].is_paused = message.paused
            elif isinstance(message, Cancel | Finish) and message.stream in self.open:
                asked, _ = self.open[message.stream]
                if isinstance(message, Cancel):
                    asked.ends = [
                        end or ("cancelled", len(o)) for end, o in zip(asked.ends, asked.outputs, strict=True)
                    ]
                elif asked.ends[message.choice] is None:
                    asked.ends[message.choice] = ("stop", message.at)
                    del asked.outputs[message.choice][message.at :]
        self.tell()

    def begin(self, message):
        self.number += 1
        n, replay = message.params.n, message.replay
        outputs = [array("I", o).tolist() for o in replay.output_ids] if replay else [[] for _ in range(n)]
        for choice, output in enumerate(outputs):
            assert output == [token(message.params.seed + choice, i) for i in range(len(output))]
        asked = Asked(
            message,
            replay.request_id if replay else f"{id(self)}-{self.number}",
            replay.resume_key if replay else f"key{self.number}",
            outputs,
            [None] * n,
        )
        self.asked[asked.request_id] = asked
        self.open[message.stream] = (asked, [len(output) for output in outputs])
        self.accept(message.stream, asked)

    def resume(self, message):
        asked = self.asked.get(message.request_id)
        if asked is None or asked.key != message.resume_key:
            self.bench.from_engine(
                Error(code="unknown_stream", message="no", field="request_id", stream=message.stream)
            )
            return
        for number, (other, _) in list(self.open.items()):
            if other is asked:
                del self.open[number]
                self.bench.from_engine(Error(code="taken_over", message="taken", stream=number))
        received = array("I", message.received).tolist() or [0] * asked.message.params.n
        assert all(r <= len(o) for r, o in zip(received, asked.outputs, strict=True))
        self.open[message.stream] = (asked, received)
        asked.is_paused = False
        more = {}
        if message.recall:
            more = {
                "prompt_ids": asked.message.prompt_ids,
                "memo": asked.message.memo,
                "output_ids": tuple(array("I", o[:r]).tobytes() for o, r in zip(asked.outputs, received, strict=True)),
            }
        self.accept(message.stream, asked, **more)

    def accept(self, number, asked, **more):
        self.bench.from_engine(
            Accepted(
                stream=number,
                request_id=asked.request_id,
                seed=asked.message.params.seed,
                num_prompt_tokens=len(asked.message.prompt_ids) // 4,
                max_tokens=LENGTH,
                resume_key=asked.key if asked.message.resumable else "",
                **more,
            )
        )

    def step(self, count):
        for asked in self.asked.values():
            for choice, output in enumerate(asked.outputs):
                for _ in range(count):
                    if asked.ends[choice] is None and not asked.is_paused:
                        output.append(token(asked.message.params.seed + choice, len(output)))
                        if len(output) == LENGTH:
                            asked.ends[choice] = ("length", LENGTH)
        self.tell()
        self.obey()

    def tell(self):
        for number, (asked, sent) in list(self.open.items()):
            for choice, output in enumerate(asked.outputs):
                if sent[choice] < len(output):
                    start, sent[choice] = sent[choice], len(output)
                    self.bench.from_engine(tokens((number, choice, start, output[start:])))
            if all(asked.ends) and self.open.pop(number, None) is not None:
                for choice, (reason, num) in enumerate(asked.ends):
                    self.bench.from_engine(Finished(stream=number, choice=choice, reason=reason, num_tokens=num))
                usage = Usage(prompt=len(asked.message.prompt_ids) // 4, completion=sum(map(len, asked.outputs)))
                timings = Timings(queue_ns=0, first_token_ns=0, total_ns=0)
                self.bench.from_engine(Done(stream=number, seed=5, usage=usage, timings=timings))

    def lose(self, *, dies):
        """The gateway loses it, and is connected to it, or to another one, at once."""
        self.open.clear()
        if dies:
            self.asked.clear()
        self.bench.gateway.engine_lost(EngineLost("gone"))
        self.bench.gateway.check_invariants()

    def come_back(self):
        self.bench.gateway.engine_ready(WELCOME)
        self.bench.gateway.check_invariants()
        self.obey()


@dataclass
class Reader:
    """A client: what it has of its stream, over whatever connections."""

    n: int
    ids: list[list[int]]
    texts: list[str]
    peer: str = "p0"
    seen: int = 0
    number: int = 1
    accepted: Accepted | None = None
    ends: dict[int, Finished] = field(default_factory=dict)
    done: Done | None = None
    error: Error | None = None

    def read(self, bench, unread=0):
        """Take what came, but for the last `unread` messages, which are lost."""
        sent = bench.connections[self.peer].sent
        for message in sent[self.seen : max(self.seen, len(sent) - unread)]:
            self.seen += 1
            if isinstance(message, Accepted):
                assert self.accepted is None or message.request_id == self.accepted.request_id
                self.accepted = message
            elif isinstance(message, Tokens):
                self.take(message)
            elif isinstance(message, Finished):
                assert message.num_tokens == len(self.ids[message.choice])
                if message.choice not in self.ends:
                    self.ends[message.choice] = message
                    self.texts[message.choice] += message.text
                assert self.ends[message.choice].num_tokens == message.num_tokens
            elif isinstance(message, Done):
                self.done = message
            else:
                self.error = message

    def take(self, message):
        columns = [array("I", column) for column in (message.streams, message.starts, message.ids)]
        counts = array("H", message.counts) if message.counts else [1] * len(columns[0])
        choices = array("H", message.choices) if message.choices else [0] * len(columns[0])
        at = 0
        for entry, count in enumerate(counts):
            mine = self.ids[choices[entry]]
            assert columns[0][entry] == self.number
            assert columns[1][entry] == len(mine), "lost or doubled"
            mine += columns[2][at : at + count]
            at += count
            if message.texts:
                self.texts[choices[entry]] += message.texts[entry]

    def resume(self, bench):
        self.peer = f"p{int(self.peer[1:]) + 1}"
        self.seen, self.number, self.error = 0, self.number + 3, None
        bench.client(
            self.peer,
            Resume(
                stream=self.number,
                request_id=self.accepted.request_id,
                resume_key=self.accepted.resume_key,
                received=array("I", [len(ids) for ids in self.ids]).tobytes(),
            ),
        )


class World:
    """One stream, its client, gateway and engine."""

    def __init__(self, n=1, stop=(), seed=3):
        self.bench = Bench()
        self.engine = Engine(self.bench)
        self.reader = Reader(n, [[] for _ in range(n)], [""] * n)
        params = SamplingParams(n=n, stop=stop, seed=seed)
        self.bench.client("p0", Generate(stream=1, prompt_ids=array("I", ids_of("hi")).tobytes(), params=params))
        self.engine.obey()

    def replace_gateway(self):
        old, self.bench = self.bench, Bench()
        old.preparation.close()
        self.engine.bench, self.engine.taken = self.bench, 0
        self.engine.open.clear()

    async def finish(self):
        for _ in range(2 * LENGTH):
            self.engine.step(3)
            await asyncio.sleep(0)
            self.reader.read(self.bench)
            if self.reader.done is not None or self.reader.error is not None:
                break
        self.bench.preparation.close()
        assert self.reader.error is None, self.reader.error
        assert self.reader.done is not None
        return [
            (ids, text, self.reader.ends[i].reason)
            for i, (ids, text) in enumerate(zip(self.reader.ids, self.reader.texts, strict=True))
        ]


MOVES = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.integers(0, 3),
        st.sampled_from(
            ["client", "client seems alive", "engine", "link", "gateway", "engine, then client", "nothing"]
        ),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    moves=MOVES,
    n=st.integers(1, 3),
    stop=st.sampled_from([(), ("STOP",), ("größer als", "no S")]),
    seed=st.integers(0, 9),
)
def test_whatever_is_lost_the_client_gets_every_token_once_and_the_same_text(moves, n, stop, seed):
    async def run(moves):
        world = World(n, stop, seed)
        reader, engine = world.reader, world.engine
        reader.read(world.bench)
        has_died = False
        for count, unread, lost in moves:
            # A stream under which engines die one after the other before it got far ends.
            engine.step(max(FAR + 1 if lost.startswith("engine") else 1, count))
            if reader.done is not None:
                break  # it has all and asks for nothing
            if lost in ("engine", "link"):
                engine.lose(dies=lost == "engine")
                engine.come_back()
                has_died = has_died or lost == "engine"
                continue
            if lost == "engine, then client":
                engine.lose(dies=True)
                has_died = True
            if lost == "gateway" and has_died and world.bench.of(Done, reader.peer):
                # It ended at the gateway, and an engine died that knew of it: the next has never heard of it.
                reader.read(world.bench)
                break
            if lost == "gateway":
                reader.read(world.bench, unread)
                world.replace_gateway()
            elif lost != "nothing":
                reader.read(world.bench, unread)
                if lost != "client seems alive":
                    world.bench.lose(reader.peer)
            if lost != "nothing":
                reader.resume(world.bench)
            if lost == "engine, then client":
                engine.come_back()
            engine.obey()
        return await world.finish()

    assert asyncio.run(run(moves)) == asyncio.run(run([]))


async def test_prompts_that_are_prepared_while_the_engine_is_away_wait_for_it(make_bench):
    bench = make_bench()
    bench.client("a", Generate(stream=7, prompt="hi"))
    bench.gateway.engine_lost(EngineLost("gone"))
    await bench.settle()
    assert bench.engine == []
    bench.gateway.engine_ready(WELCOME)
    assert [type(m) for m in bench.engine] == [Generate]


async def test_no_engine_in_time_is_told(make_bench):
    bench = make_bench(server={"replay_timeout_ms": 30})
    bench.start()
    bench.gateway.engine_lost(EngineLost("gone"))
    bench.gateway.engine_lost(EngineLost("still gone"))  # looking for it in vain is no new beginning
    assert bench.of(Error) == []
    await asyncio.sleep(0.06)
    assert [m.code for m in bench.of(Error)] == ["engine_lost"]
    bench.gateway.check_invariants()
    assert bench.gateway.num_streams == 0


async def test_what_kills_every_engine_is_found_out_and_its_neighbours_live_on(bench, monkeypatch):
    monkeypatch.setattr("pagewire.gateway.continuity._QUARANTINE_S", 0.02)
    engine = Engine(bench)
    for peer in ("killer", "good"):
        bench.client(peer, Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    engine.obey()
    asked = list(engine.asked.values())
    engine.asked.pop(asked[0].request_id)  # it never gets a token
    engine.step(FAR + 1)
    for num_told in (0, 1):
        engine.lose(dies=True)
        begun = len(bench.engine)
        engine.come_back()
        (first,) = [m.request_id for m in bench.engine[begun:] if isinstance(m, Resume)]
        assert first == asked[1].request_id, "whatever had no token yet comes later"
        engine.step(FAR + 1)
        await asyncio.sleep(0.05)
        engine.obey()
        assert len(bench.of(Error, "killer")) == num_told
        engine.asked.pop(asked[0].request_id, None)
    assert [m.code for m in bench.of(Error, "killer")] == ["engine_lost"]
    for _ in range(LENGTH):
        engine.step(1)
    assert bench.of(Error, "good") == []
    assert bench.of(Done, "good")


@pytest.mark.parametrize("says_so", [False, True])
async def test_what_kills_engines_at_a_certain_token_takes_two_and_no_more(bench, says_so):
    """Not all tokens that an engine drew before it died have arrived: it seems to come further each time."""
    engine = Engine(bench)
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    engine.obey()
    engine.step(30)
    for num_more, num_told in ((0, 0), (3, 1)):
        engine.step(num_more)
        if says_so:
            for number in engine.open:
                bench.from_engine(Error(code="engine_lost", message="token 34", stream=number))
        engine.lose(dies=True)
        engine.come_back()
        assert [m.code for m in bench.of(Error)] == ["engine_lost"] * num_told
    assert len(bench.gateway._upstream) == 0
    assert not engine.asked


async def test_a_stream_that_gets_on_outlives_any_number_of_engines(bench):
    engine = Engine(bench)
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    engine.obey()
    for _ in range(LENGTH // (FAR + 1)):
        engine.step(FAR + 1)
        engine.lose(dies=True)
        engine.come_back()
    engine.step(LENGTH)
    assert bench.of(Error) == []
    assert bench.of(Done)


async def test_an_engine_that_says_that_it_ends_is_lost_before_its_connection_is(bench):
    """Nothing more is asked of it, not even by those that come meanwhile."""
    engine = Engine(bench)
    for stream in (1, 2):
        bench.client("a", Generate(stream=stream, prompt_ids=b"abcd", params=SamplingParams(seed=stream)))
    engine.obey()
    engine.step(4)
    (first, second), asked = engine.open, len(bench.engine)
    bench.from_engine(Error(code="engine_lost", message="the device fell off the bus", stream=first))
    bench.client("a", Generate(stream=3, prompt_ids=b"abcd", params=SamplingParams(seed=3)))
    bench.from_engine(Error(code="draining", message="the time is over", stream=second))
    bench.client("a", Cancel(stream=3))
    assert bench.of(Error) == []
    assert [m.stream for m in bench.of(Done)] == [3]
    assert len(bench.engine) == asked
    engine.lose(dies=True)
    engine.come_back()
    engine.step(LENGTH)
    assert [m.stream for m in bench.of(Done)] == [3, 1, 2]
    assert bench.of(Error) == []


@pytest.mark.parametrize("server", [{"replay_timeout_ms": 0}, {}])
async def test_where_no_engine_is_waited_for_the_last_word_of_this_one_is_told(make_bench, server):
    bench = make_bench(server=server)
    number = bench.start()
    if not server:
        bench.gateway.drain()
    bench.from_engine(Error(code="engine_lost", message="the device fell off the bus", stream=number))
    assert [(m.code, m.message) for m in bench.of(Error)] == [("engine_lost", "the device fell off the bus")]


async def test_a_stream_that_was_begun_does_not_end_because_the_next_engine_is_full(bench):
    engine = Engine(bench)
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    engine.obey()
    engine.step(FAR + 1)
    engine.lose(dies=True)
    begin, engine.begin = (
        engine.begin,
        lambda message: bench.from_engine(
            Error(code="overloaded", message="full", stream=message.stream, retry_after_ms=10)
        ),
    )
    engine.come_back()
    assert bench.of(Error) == []
    engine.begin = begin
    await asyncio.sleep(0.05)
    engine.obey()
    engine.step(LENGTH)
    assert bench.of(Done)
    bench.client("a", Generate(stream=2, prompt_ids=b"abcd"))
    bench.from_engine(Error(code="overloaded", message="full", stream=bench.engine[-1].stream, retry_after_ms=10))
    assert [m.stream for m in bench.of(Error)] == [2], "one that was not is told"


async def test_a_link_that_breaks_is_no_death(bench):
    engine = Engine(bench)
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    engine.obey()
    for dies in (True, False, False, False):
        engine.lose(dies=dies)
        engine.come_back()
    engine.step(LENGTH)
    assert bench.of(Error) == []
    assert bench.of(Done)


async def test_a_stream_that_waits_can_be_cancelled_and_cut(bench):
    for stream in (1, 2):
        number = bench.start(stream=stream)
        bench.from_engine(tokens((number, 0, 0, ids_of("abc"))))
    bench.gateway.engine_lost(EngineLost("gone"))
    bench.client("a", Cancel(stream=1))
    bench.client("a", Finish(stream=2, at=2))
    assert [(m.stream, m.reason, m.num_tokens) for m in bench.of(Finished)] == [(1, "cancelled", 3), (2, "stop", 2)]
    bench.gateway.engine_ready(WELCOME)
    assert [(m.stream, m.usage.completion) for m in bench.of(Done)] == [(1, 3), (2, 2)]
    assert len(bench.gateway._upstream) == 0


@pytest.mark.parametrize("code", [None, "engine_lost", "draining"])
async def test_what_a_client_ended_is_ended_though_the_engine_that_was_told_died(bench, code):
    """One that hangs takes what it is sent, and does nothing about it."""
    engine = Engine(bench)
    for stream in (1, 2):
        bench.client("a", Generate(stream=stream, prompt_ids=b"abcd", params=SamplingParams(seed=stream)))
    engine.obey()
    engine.step(4)
    bench.client("a", Cancel(stream=1))
    bench.client("a", Finish(stream=2, at=3))
    for number in engine.open if code else ():
        bench.from_engine(Error(code=code, message="that is that", stream=number))
    engine.lose(dies=True)
    assert [(m.stream, m.reason, m.num_tokens) for m in bench.of(Finished)] == [(1, "cancelled", 4)]
    engine.come_back()
    engine.step(LENGTH)
    assert [(m.reason, m.num_tokens) for m in bench.of(Finished)[1:]] == [("stop", 3)]
    assert [(m.stream, m.usage.completion) for m in bench.of(Done)] == [(1, 4), (2, 3)]
    assert not bench.of(Error)
    assert not bench.gateway._upstream


@pytest.mark.parametrize("is_full", [False, True])
async def test_a_cancel_while_the_next_engine_is_asked_is_not_lost_either(bench, is_full):
    engine = Engine(bench)
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    engine.obey()
    engine.step(FAR + 1)
    engine.lose(dies=True)
    bench.gateway.engine_ready(WELCOME)
    asked = bench.to_engine(Resume)[-1]
    bench.client("a", Cancel(stream=1))
    answer = Error(code="unknown_stream", message="never heard", stream=asked.stream)
    if is_full:
        answer = Error(code="overloaded", message="full", stream=asked.stream, retry_after_ms=10)
    bench.from_engine(answer)
    assert [m.reason for m in bench.of(Finished)] == ["cancelled"]
    assert bench.of(Done)
    assert len(bench.to_engine(Generate)) == 1


async def test_a_pause_goes_to_the_engine_and_ends_with_a_resume(bench):
    engine = Engine(bench)
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    engine.obey()
    accepted = bench.of(Accepted)[0]
    bench.client("a", Pause(stream=1))
    bench.lose("a")
    bench.client("b", Resume(stream=2, request_id=accepted.request_id, resume_key=accepted.resume_key))
    assert [m.paused for m in bench.to_engine(Pause)] == [True, False]


async def test_one_that_does_not_come_back_is_cancelled_and_one_that_says_goodbye_at_once(make_bench):
    bench = make_bench(server={"resume_grace_ms": 40})
    engine = Engine(bench)
    for peer, reason in (("a", None), ("b", Cancelled("goodbye"))):
        bench.client(peer, Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
        engine.obey()
        if reason is None:
            bench.lose(peer)
        else:
            bench.gateway.on_lost(bench.connections[peer], reason)
    assert len(bench.to_engine(Cancel)) == 1
    assert len(bench.gateway._continuity.survivors.orphans) == 1
    await asyncio.sleep(0.1)
    assert len(bench.to_engine(Cancel)) == 2
    assert not bench.gateway._continuity.survivors.orphans
    engine.obey()
    assert len(bench.gateway._upstream) == 0


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"resume_key": "other"}, "unknown_stream", "request_id"),
        ({"received": b"\xff\0\0\0"}, "invalid_request", "received"),
        ({"received": b"123"}, "invalid_request", "received"),
        ({"recall": True}, "unsupported", "recall"),
    ],
)
async def test_a_resume_that_cannot_be_is_refused_by_name(bench, change, code, field):
    engine = Engine(bench)
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    engine.obey()
    accepted = bench.of(Accepted)[0]
    asked = {"request_id": accepted.request_id, "resume_key": accepted.resume_key} | change
    bench.client("b", Resume(stream=4, **asked))
    engine.obey()
    assert [(m.code, m.field, m.stream) for m in bench.of(Error, "b")] == [(code, field, 4)]
    assert bench.of(Error, "a") == []


async def test_a_stream_that_was_begun_at_the_engine_is_not_the_gateways(bench):
    engine = Engine(bench)
    engine.begin(Generate(stream=999, prompt_ids=b"abcd", params=SamplingParams(seed=1), memo=b"junk"))
    (asked,) = engine.asked.values()
    bench.client("b", Resume(stream=4, request_id=asked.request_id, resume_key=asked.key))
    engine.obey()
    assert [m.code for m in bench.of(Error, "b")] == ["protocol"]
    assert len(bench.gateway._upstream) == 0


@pytest.mark.parametrize("field", ["memo", "replay"])
async def test_what_is_for_gateways_is_refused_of_clients(bench, field):
    value = {"memo": b"x", "replay": {"request_id": "x", "resume_key": "y", "output_ids": ()}}[field]
    if field == "replay":
        from pagewire_transport.messages import Replay

        value = Replay(**value)
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd", **{field: value}))
    assert [(m.code, m.field) for m in bench.of(Error)] == [("unsupported", field)]


@pytest.mark.parametrize("how", ["known here", "recalled from the engine"])
async def test_id_and_key_in_other_hands_resume_nothing_where_there_are_curve_keys(bench, how):
    """F52: nor do they disturb whose stream it is."""
    engine = Engine(bench)
    for peer in ("alice", "alice again", "bob"):
        bench.connections[peer].user = peer.split()[0]
    asked = Generate(stream=1, prompt_ids=b"abcd", params=SamplingParams(seed=1))
    if how == "known here":
        bench.client("alice", asked)
        engine.obey()
        accepted = bench.of(Accepted, "alice")[0]
        names = {"request_id": accepted.request_id, "resume_key": accepted.resume_key}
    else:
        memo = msgspec.msgpack.encode(asked_in(asked, "prompt_ids", "", "alice"))
        engine.begin(msgspec.structs.replace(asked, stream=999, memo=memo))
        (known,) = engine.asked.values()
        names = {"request_id": known.request_id, "resume_key": known.key}
    bench.client("bob", Resume(stream=4, **names))
    engine.obey()
    assert [(m.code, m.field, m.stream) for m in bench.of(Error, "bob")] == [("unknown_stream", "request_id", 4)]
    assert bench.of(Accepted, "bob") == []
    assert bench.of(Error, "alice") == []
    bench.client("alice again", Resume(stream=5, **names))
    engine.obey()
    assert [m.stream for m in bench.of(Accepted, "alice again")] == [5]
