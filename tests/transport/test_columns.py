"""Packed columns, on either kind of machine."""

from __future__ import annotations

import sys
from array import array

import pytest

from pagewire_transport import columns
from pagewire_transport.columns import pack, pack_token_ids, unpack
from pagewire_transport.errors import InvalidRequest, ProtocolError


@pytest.mark.parametrize(
    ("code", "values"), [("B", [0, 255]), ("H", [1, 65535]), ("I", [7, 2**32 - 1]), ("f", [0.5, -2.0])]
)
def test_round_trip(code, values):
    assert list(unpack(code, pack(code, values))) == values
    assert list(unpack(code, pack(code, array(code, values)))) == values
    assert list(unpack(code, b"")) == []


def test_little_endian_on_the_wire(monkeypatch):
    assert pack("I", [1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"
    # A machine of the other kind holds the same numbers as the bytes in the other order.
    monkeypatch.setattr(columns, "_IS_BIG", sys.byteorder == "little")
    given = array("I", [0x01000000])
    assert pack("I", given) == b"\1\0\0\0"
    assert given[0] == 0x01000000  # not changed under the caller's hands
    assert list(unpack("I", b"\1\0\0\0")) == [0x01000000]


@pytest.mark.parametrize("bad", [[-1], [2**32], ["1"], [1.5], [None], "abc", 5])
def test_what_is_no_token_id(bad):
    with pytest.raises(InvalidRequest) as caught:
        pack_token_ids(bad)
    assert caught.value.field == "prompt_ids"


def test_a_column_of_a_strange_length():
    with pytest.raises(ProtocolError):
        unpack("I", b"12345")
