"""Stop strings: found at their last character, never leaked, nothing held that cannot become one (F41)."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from pagewire_client.text.stop_matcher import StopMatcher, compile_stops

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5).map(tuple)


def first_stop(text, stops):
    """(start, stop) of the stop that is complete first, the longest of those; None. The slow, obvious way."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def may_become(text, stops):
    """Length of the longest suffix of `text` that is a proper prefix of a stop."""
    return max(k for k in range(len(text) + 1) if any(s[:k] == text[len(text) - k :] and k < len(s) for s in stops))


@given(TEXT, STOPS, st.lists(st.integers(0, 4)))
@example("aabaab", ("aab", "a"), [1])
@example("abab", ("b", "ab"), [])
@example("aaab", ("aab",), [1, 1, 1])
def test_against_the_obvious_way(text, stops, sizes):
    matcher, shown, seen = StopMatcher(stops), "", ""
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)] + [len(text)]
    for start, end in pairwise(cuts):
        part = text[start:end]
        safe, match = matcher.push(part)
        shown, seen = shown + safe, seen + part
        expected = first_stop(seen, stops)
        if expected is None:
            assert match is None
            assert len(shown) == len(seen) - may_become(seen, stops)
        else:
            assert match is not None
            assert (len(shown), match.stop) == expected
            assert len(seen) - len(part) + match.end == expected[0] + len(expected[1])
            assert matcher.push("more") == ("", match)
            assert matcher.flush() == ""
            return
        if end >= len(text):
            break
    assert shown + matcher.flush() == seen


def test_a_stop_cut_at_every_character():
    stop = "<|end of turn|>"
    for at in range(len(stop) + 1):
        matcher = StopMatcher((stop,))
        first = matcher.push("Hi " + stop[:at])
        if at < len(stop):
            assert first == ("Hi ", None)
            safe, match = matcher.push(stop[at:] + " never")
            assert safe == ""
        else:
            match = first[1]
        assert match is not None
        assert match.stop == stop


def test_one_stop_a_prefix_of_another():
    for stops in (("ab", "abc"), ("abc", "ab")):
        safe, match = StopMatcher(stops).push("xxabc")
        assert (safe, match and match.stop, match and match.end) == ("xx", "ab", 4)


def test_one_stop_a_suffix_of_another_the_longer_wins():
    for stops in (("bc", "abc"), ("abc", "bc")):
        safe, match = StopMatcher(stops).push("xxabcd")
        assert (safe, match and match.stop) == ("xx", "abc")


def test_a_stop_inside_another_wins_because_it_is_complete_first():
    safe, match = StopMatcher(("abcde", "c")).push("abcde")
    assert (safe, match and match.stop) == ("ab", "c")


def test_held_text_is_given_once_it_cannot_become_a_stop():
    matcher = StopMatcher(("STOP",))
    assert matcher.push("abcST") == ("abc", None)
    assert matcher.push("O") == ("", None)
    assert matcher.push("x") == ("STOx", None)
    assert matcher.push("S") == ("", None)
    assert matcher.flush() == "S"


def test_stops_with_characters_that_regular_expressions_know():
    for stop in ("^a", "]b", "-", "\\", "[[x", "--", "&&", "||", "~~", "\n\n", "a\x00", "👩‍👩", " "):
        safe, match = StopMatcher((stop, "zz")).push(f"xy{stop}w")
        assert (safe, match and match.stop) == ("xy", stop)


def test_work_is_linear_in_the_text():
    """Fallbacks are bounded by advances: on text made of a stop's prefix, steps stay near the text's length."""
    steps = 0

    class Counting(list):
        def __getitem__(self, index):
            nonlocal steps
            steps += 1
            return super().__getitem__(index)

    stops = ("a" * 255 + "b", "a" * 128 + "c")
    matcher = StopMatcher(stops)
    matcher._automaton = compile_stops.__wrapped__(stops)
    matcher._automaton.nodes = Counting(matcher._automaton.nodes)
    text = ("a" * 254 + "d") * 40
    for at in range(0, len(text), 3):
        matcher.push(text[at : at + 3])
    assert steps < 6 * len(text)
