"""Numbers of streams."""

from __future__ import annotations

import tracemalloc

from pagewire_transport.messages import MAX_STREAM
from pagewire_transport.numbers import StreamNumbers


def test_each_is_the_next_that_is_free():
    numbers = StreamNumbers()
    assert [numbers.next({2, 3, 5}) for _ in range(4)] == [1, 4, 6, 7]


def test_they_begin_again():
    numbers = StreamNumbers(MAX_STREAM - 1)
    assert [numbers.next({1}) for _ in range(3)] == [MAX_STREAM, 2, 3]


def test_those_that_were_given_are_not_kept():
    """A gateway gives one for each stream of its life."""
    numbers = StreamNumbers()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000):
            numbers.next(())
        assert tracemalloc.get_traced_memory()[0] - before < 1_000
    finally:
        tracemalloc.stop()
