"""The keeper against a plain model."""

from __future__ import annotations

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from pagewire.engine.streams import Choice, Stream
from pagewire.keeping import GraceClock, Keeper, Limits, Survivors, is_same_key

GRACE_MS = 10
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 50)),
        st.tuples(st.just("take"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 12), st.just(0)),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_kept_are_the_newest_that_fit_and_are_not_over(operations):
    given_up: list[tuple[int, int]] = []
    keeper = Keeper(grace_ms=GRACE_MS, max_num=3, max_bytes=100, give_up=given_up.append)
    model: dict[str, tuple[tuple[int, int], int, int]] = {}
    now, put, taken = 0, [], []
    for step, (what, number, size) in enumerate(operations):
        name = str(number)
        if what == "put" and name not in model:
            item = (number, step)
            put.append(item)
            keeper.put(name, item, size, now)
            model[name] = (item, size, now + GRACE_MS * 1_000_000)
            while len(model) > 3 or sum(entry[1] for entry in model.values()) > 100:
                del model[next(iter(model))]
        elif what == "take":
            entry = model.pop(name, None)
            got = keeper.take(name)
            assert got == (entry[0] if entry else None)
            if got is not None:
                taken.append(got)
        elif what == "wait":
            now += number * 1_000_000
            keeper.expire(now)
            model = {name: entry for name, entry in model.items() if entry[2] > now}
        keeper.check_invariants()
        assert list(keeper) == [entry[0] for entry in model.values()]
        assert all((str(n) in keeper) == (str(n) in model) for n in range(6))
    keeper.clear()
    assert len(keeper) == keeper.num_bytes == 0
    assert sorted(given_up + taken) == sorted(put)  # each once


def test_keys():
    assert is_same_key("ab", "ab")
    assert not is_same_key("ab", "ac")
    assert not is_same_key("ab", "")
    assert not is_same_key("", "")
    assert not is_same_key("ab", "ä")


def test_each_is_gone_once_however_it_went():
    ended, gone = [], []
    streams = Survivors(Limits(grace_ms=100, max_num=10, max_bytes=1000), ended.append, gone.append)
    for name in ("told", "orphan", "forgotten", "read"):
        streams.add(name, "key", name)
    streams.tell("told", "reader", 1, 0)
    streams.lose("orphan", 1, 0)
    streams.forget("forgotten")
    streams.forget("forgotten")
    streams.expire(200_000_000)
    assert ended == ["orphan"]
    assert sorted(gone) == ["forgotten", "orphan", "told"]
    assert "read" in streams


def test_grace_stands_still_while_nobody_is_there_and_not_for_ever():
    clock = GraceClock(most_ms=50)
    ms = 1_000_000
    looks = [(10, True), (100, False), (130, True), (140, False), (170, False), (200, False), (220, True), (230, False)]
    told = [clock.look(now * ms, is_anybody=is_anybody) // ms for now, is_anybody in looks]
    assert told == [10, 100, 100, 110, 110, 120, 140, 150], "30 ms of the first absence, 50 of 80 of the second"
    assert clock.look(270 * ms, is_anybody=True) // ms == 150, "the next has its own"


class Carried:
    """What a stream holds; it can be watched."""


def test_what_is_gone_needs_no_collector():
    """Streams live for seconds: the collector would take them for old, and look at them practically never."""
    streams = Survivors(Limits(grace_ms=100, max_num=10, max_bytes=1000), lambda stream: None, Stream.dissolve)
    request = Carried()
    alive = weakref.ref(request)
    gc.disable()
    try:
        stream = Stream(1, None, request=request)
        stream.choices = [Choice(stream, index, None, index) for index in range(3)]
        streams.add("one", "key", stream)
        streams.tell("one", "reader", 1, 0)
        del stream, request
        assert alive() is not None
        streams.expire(200_000_000)
        assert alive() is None
    finally:
        gc.enable()
