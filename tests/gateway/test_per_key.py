"""Limits of one CURVE key: streams over all its connections, and those that wait for it to come back."""

from __future__ import annotations

import msgspec
import pytest
from tests.gateway.bench import Bench, accepted

from pagewire_transport.messages import Accepted, Done, Error, Generate, Resume, Timings, Usage
from pagewire_transport.params import SamplingParams


def make(most=3, **server):
    bench = Bench(server={"max_streams_per_key": most, **server})
    for peer in ("alice", "alice too", "bob", "nobody"):
        bench.connections[peer].user = "" if peer == "nobody" else peer.split()[0]
    return bench


def ask(bench, peer, stream):
    """The number towards the engine; None: refused."""
    before = len(bench.engine)
    bench.client(peer, Generate(stream=stream, prompt_ids=b"abcd", params=SamplingParams(seed=1)))
    if len(bench.engine) == before:
        return None
    number = bench.engine[-1].stream
    bench.from_engine(msgspec.structs.replace(accepted(number), resume_key=f"key{number}"))
    return number


def end(bench, number):
    usage, timings = Usage(prompt=1, completion=0), Timings(queue_ns=0, first_token_ns=0, total_ns=0)
    bench.from_engine(Done(stream=number, seed=1, usage=usage, timings=timings))


def refusals(bench, peer):
    return [(m.code, m.field, m.stream, bool(m.retry_after_ms)) for m in bench.of(Error, peer)]


async def test_a_key_has_so_many_streams_over_all_its_connections():
    bench = make()
    first = ask(bench, "alice", 1)
    assert ask(bench, "alice", 2)
    assert ask(bench, "alice too", 1)
    assert ask(bench, "alice too", 2) is None
    assert ask(bench, "alice", 3) is None
    assert refusals(bench, "alice too") == [("overloaded", "stream", 2, True)]
    assert refusals(bench, "alice") == [("overloaded", "stream", 3, True)]
    assert ask(bench, "bob", 1), "another key is not concerned"
    assert all(ask(bench, "nobody", stream) for stream in (1, 2, 3, 4)), "nor are those without one"
    end(bench, first)
    assert ask(bench, "alice too", 2), "what ended makes room"


@pytest.mark.parametrize("then", ["comes back", "grace is over", "says goodbye"])
async def test_who_breaks_off_does_not_escape_it(then):
    """The streams go on meanwhile; they count until they have a client again or end."""
    bench = make(most=2)
    for stream in (1, 2):
        assert ask(bench, "alice", stream)
    told = bench.of(Accepted, "alice")
    if then == "says goodbye":
        from pagewire.errors import Cancelled

        bench.gateway.on_lost(bench.connections["alice"], Cancelled("bye"))
        bench.gateway.check_invariants()
        assert ask(bench, "alice too", 1)
        return
    bench.lose("alice")
    assert ask(bench, "alice too", 1) is None
    if then == "comes back":
        for message in told:  # to go on with what it has is always allowed
            names = {"request_id": message.request_id, "resume_key": message.resume_key}
            bench.client("alice too", Resume(stream=10 + message.stream, **names))
        assert [m.stream for m in bench.of(Accepted, "alice too")] == [11, 12]
        assert ask(bench, "alice too", 2) is None
    else:
        bench.gateway._continuity.survivors.close()
        bench.gateway.check_invariants()
        assert ask(bench, "alice too", 2)
    assert refusals(bench, "alice too")[0] == ("overloaded", "stream", 1, True)


async def test_nothing_is_left_of_keys_that_are_gone():
    bench = make()
    for peer in ("alice", "alice too", "bob"):
        ask(bench, peer, 1)
        bench.lose(peer)
    bench.gateway._continuity.survivors.close()
    counted = bench.gateway._per_key
    assert not counted._clients
    assert not counted._orphans
    assert len(counted._orphans_of) == 0
