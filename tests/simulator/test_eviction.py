"""The optimum is an optimum: no schedule of evictions does better, the tree never does."""

from functools import cache
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.small import conversations

from pagewire.simulator.eviction import Use, optimal_hit_tokens, parts_of, tree_hit_tokens
from pagewire.simulator.traces import Arrival


def best_by_trying(needs, room):
    """Most hits of a cache of `room` single parts, over all choices of what to keep."""

    @cache
    def best(turn, kept):
        if turn == len(needs):
            return 0
        part, others = needs[turn], tuple(one for one in kept if one != needs[turn])
        # While it runs it is in memory itself; afterwards it may stay.
        left = [c for n in range(min(room - 1, len(others)) + 1) for c in combinations(others, n)]
        options = [tuple(sorted(c)) for c in left] + [tuple(sorted((*c, part))) for c in left]
        return (part in kept) + max(best(turn + 1, option) for option in options)

    return best(0, ())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_no_choice_of_evictions_finds_more(needs, room):
    uses = [Use(i, i, ((part, 1),), 1) for i, part in enumerate(needs)]
    assert optimal_hit_tokens(uses, room) == best_by_trying(tuple(needs), room)


def test_the_tree_never_beats_the_optimum():
    trace = conversations(num=30)
    uses = [Use(i, i, parts_of(arrival, 16), arrival.num_prompt) for i, arrival in enumerate(trace)]
    unbounded = tree_hit_tokens(trace, 1_000_000)
    assert unbounded == optimal_hit_tokens(uses, 1_000_000)
    for size in (4_096, 16_384, 65_536):
        found, best = tree_hit_tokens(trace, size), optimal_hit_tokens(uses, size)
        assert found <= best <= unbounded


def test_parts_leave_a_token_to_compute():
    assert parts_of(Arrival(0, 0, 1024, 1, (5, 6)), 16) == ((5, 512), (6, 496))
    assert parts_of(Arrival(0, 0, 1025, 1, (5, 6, 7)), 16) == ((5, 512), (6, 512))
    assert parts_of(Arrival(0, 0, 10, 1, (5,)), 16) == ()
