"""Texts that arrive in parts equal the whole decode, wherever they are cut (F40)."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagewire_client.text.byte_table import ByteTable
from pagewire_client.text.detokeniser import Detokeniser

PIECES = (
    *(bytes([i]) for i in range(256)),
    "é".encode(),
    "日本".encode(),
    b" the",
    b" ",
    "👩‍👩‍👧".encode(),
    "👩".encode()[:2],
    "👩".encode()[2:] + b"x" + "日".encode()[:1],
    b"<|end|>",
    b"",
)
SPECIAL = PIECES.index(b"<|end|>")
PLAIN = ByteTable(PIECES, frozenset({SPECIAL}))
SPACED = ByteTable(PIECES, frozenset({SPECIAL}), strips_space=True)
IDS = st.lists(st.integers(0, len(PIECES) + 3), max_size=40)


def cut(items, sizes):
    """`items` in runs of the given sizes, the rest at the end."""
    at = 0
    for size in sizes:
        yield items[at : at + size]
        at += size
    yield items[at:]


def joined(table, runs, **kwargs):
    detokeniser = Detokeniser(table, **kwargs)
    return "".join([detokeniser.push(run) for run in runs] + [detokeniser.flush()])


@given(IDS, st.lists(st.integers(0, 5)), st.booleans(), st.sampled_from([PLAIN, SPACED]))
@example([0xF0, 0x9F, 0x91], [1, 1], True, PLAIN)
@example([SPECIAL, 0x20, 0x20, 0x41], [1, 1, 1], True, SPACED)
@example([0xE2, 0x28, 0xA1], [1, 1], True, PLAIN)
def test_parts_join_to_the_whole_decode(ids, sizes, skip, table):
    assert joined(table, cut(ids, sizes), skip_special=skip) == table.decode(ids, skip_special=skip)


@given(st.text(min_size=1))
def test_a_text_cut_at_every_byte(text):
    data = list(text.encode("utf-8", "replace"))
    expected = bytes(data).decode()
    for at in range(len(data) + 1):
        assert joined(PLAIN, [data[:at], data[at:]]) == expected
    assert joined(PLAIN, [[byte] for byte in data]) == expected


def test_a_character_comes_with_its_last_byte_and_not_later():
    detokeniser = Detokeniser(PLAIN)
    assert [detokeniser.push([byte]) for byte in "a€👩".encode()] == ["a", "", "", "€", "", "", "", "👩"]


def test_whole_decode_replaces_each_maximal_invalid_part():
    assert PLAIN.decode([0xE2, 0x82, 0x41, 0xFF, 0xC3]) == "�A��"


def test_one_leading_space_goes_and_only_one():
    assert SPACED.decode([0x20, 0x20, 0x41]) == " A"
    assert joined(SPACED, [[0x20], [0x20], [0x41]]) == " A"
    assert PLAIN.decode([0x20, 0x41]) == " A"


def test_special_tokens_show_only_when_asked_for():
    assert PLAIN.decode([0x41, SPECIAL]) == "A"
    assert PLAIN.decode([0x41, SPECIAL], skip_special=False) == "A<|end|>"


@pytest.mark.parametrize("ids", [[len(PIECES)], [len(PIECES) + 7, 0x41], [0x41, 2**31 - 1]])
def test_ids_beyond_the_table_have_no_text(ids):
    assert joined(PLAIN, [ids]) == PLAIN.decode(ids)
    assert joined(PLAIN, [[i] for i in ids]) == PLAIN.decode(ids)


@given(IDS.filter(bool), IDS)
def test_tokens_until_counts_the_tokens_that_a_character_needs(ids, before):
    detokeniser = Detokeniser(PLAIN)
    detokeniser.push(before)
    mark = detokeniser.mark()
    text = detokeniser.push(ids)
    for num_chars in range(1, len(text) + 1):
        count = detokeniser.tokens_until(mark, ids, num_chars)
        lengths = []
        for taken in (count - 1, count):
            again = Detokeniser(PLAIN)
            again.push(before)
            lengths.append(len(again.push(ids[:taken])))
        assert lengths[0] < num_chars <= lengths[1]
