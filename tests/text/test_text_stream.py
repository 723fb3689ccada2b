"""Tokens in, text out, ended at the first stop string: equal to the whole decode cut with `find` (F40, F41)."""

from hypothesis import given
from hypothesis import strategies as st

from pagewire_client.text.byte_table import ByteTable
from pagewire_client.text.text_stream import TextStream

ALPHABET = "ab é日👩"
PIECES = tuple(bytes([i]) for i in range(256)) + tuple(s.encode() for s in ("ab", "日a", " a", "aba", "👩é"))
TABLES = [ByteTable(PIECES), ByteTable(PIECES, frozenset({0x61, 258}), strips_space=True)]


def oracle(table, ids, stops):
    """(text, stop, at): whole decodes of growing prefixes, no state."""
    whole = table.decode(ids)
    ends = [(whole.find(s) + len(s), -len(s), s) for s in stops if s in whole]
    if not ends:
        return whole, None, None
    end, length, stop = min(ends)
    # Only characters that no later byte can change count as complete.
    for at in range(1, len(ids) + 1):
        if len(table.decode(ids[:at]).rstrip("�")) >= end or at == len(ids):
            return whole[: end + length], stop, at
    raise AssertionError


@st.composite
def texts(draw):
    """Valid text as tokens: cut into pieces at random bytes."""
    data, ids = draw(st.text(ALPHABET, max_size=24)).encode(), []
    while data:
        fitting = [i for i, piece in enumerate(PIECES) if data.startswith(piece)]
        chosen = draw(st.sampled_from(fitting))
        ids.append(chosen)
        data = data[len(PIECES[chosen]) :]
    return ids


STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4).map(tuple)


@given(texts(), STOPS, st.lists(st.integers(0, 4)), st.sampled_from(TABLES), st.booleans())
def test_against_the_whole_decode(ids, stops, sizes, table, include):
    text, stop, at = oracle(table, ids, stops)
    stream, shown, given_ids = TextStream(table, stops, include_stop=include), "", ids
    for size in [*sizes, len(ids)]:
        run, given_ids = given_ids[:size], given_ids[size:]
        delta = stream.push(run)
        shown += delta.text
        if delta.stop:
            break
    if stream.stop is None:
        delta = stream.flush()
        shown += delta.text
    assert shown == (text + stop if include and stop else text)
    assert (stream.stop.stop, stream.stop.at) == (stop, at) if stop else stream.stop is None
    if stop:
        assert stream.push([0x62, 0x63]).text == ""


@given(st.lists(st.integers(0, 255), max_size=20), st.lists(st.integers(0, 3)))
def test_flush_intervals_do_not_matter_for_arbitrary_bytes(ids, sizes):
    """Also where text is invalid and U+FFFD itself is a stop."""
    stops = ("�", "ab", "\x00")

    def run(pushes):
        stream = TextStream(TABLES[0], stops)
        text = "".join([stream.push(part).text for part in pushes] + [stream.flush().text])
        return text, stream.stop

    parts, rest = [], ids
    for size in sizes:
        parts, rest = [*parts, rest[:size]], rest[size:]
    assert run([*parts, rest]) == run([[i] for i in ids]) == run([ids])


def test_the_token_that_completes_the_stop_counts():
    stream = TextStream(TABLES[0], ("bc",))
    assert stream.push(list(b"xab")).text == "xa"
    delta = stream.push(list(b"cdef"))
    assert (delta.text, delta.stop.stop, delta.stop.at) == ("", "bc", 4)
    assert stream.push(list(b"more")).text == ""


def test_a_stop_completed_by_the_end():
    stream = TextStream(TABLES[0], ("a�",))
    assert stream.push([0x61, 0xE2]).text == ""
    delta = stream.flush()
    assert (delta.text, delta.stop.stop, delta.stop.at) == ("", "a�", 2)


def test_memory_of_a_stream_is_bounded_by_its_longest_stop():
    stream = TextStream(TABLES[0], ("a" * 30 + "b",))
    for _ in range(500):
        stream.push(list(b"aaaaaaa"))
        assert len(stream._matcher._held) <= 30
        assert len(stream._detokeniser._held) <= 3
