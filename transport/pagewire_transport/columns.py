"""Packed columns: little-endian on the wire, whatever the machine. No numpy: the client must not need it.

Typecodes are those of `array`: "B" uint8, "H" uint16, "I" uint32, "f" float32.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any, Final

from pagewire_transport.errors import InvalidRequest, ProtocolError

_SIZES: Final = {"B": 1, "H": 2, "I": 4, "f": 4}
assert all(array(code).itemsize == size for code, size in _SIZES.items()), "this platform's C types differ"

_IS_BIG: Final = sys.byteorder == "big"


def pack(typecode: str, values: Iterable[Any]) -> bytes:
    """A column of `values`.

    Raises:
        OverflowError, TypeError: a value that the type cannot hold.
    """
    column = values if isinstance(values, array) and values.typecode == typecode else array(typecode, values)
    if _IS_BIG:
        column = array(typecode, column)
        column.byteswap()
    return column.tobytes()


def pack_token_ids(values: Iterable[int], field: str = "prompt_ids") -> bytes:
    """Token ids as uint32.

    Raises:
        InvalidRequest: something is no token id.
    """
    try:
        return pack("I", values)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequest(f"must be token ids, whole numbers from 0 to 2³² − 1: {error}", field=field) from None


def unpack(typecode: str, column: bytes) -> memoryview[Any]:
    """The values of a column; a view where the machine is little-endian.

    Raises:
        ProtocolError: the bytes are no whole number of values.
    """
    if len(column) % _SIZES[typecode]:
        raise ProtocolError(f"a column of {len(column)} bytes, not a multiple of {_SIZES[typecode]}")
    if _IS_BIG:
        values: array[Any] = array(typecode, column)
        values.byteswap()
        return memoryview(values)
    return memoryview(column).cast(typecode)  # type: ignore[call-overload,no-any-return]
