"""The header of a GGUF file: key-value metadata and where each tensor lies, read without touching a tensor.

Follows the GGUF specification, versions 2 and 3, little-endian:

    "GGUF" │ version u32 │ tensors u64 │ pairs u64 │ pairs × (key, type u32, value) │ tensors × info │ padding │ data
    key, str = length u64, bytes in UTF-8        array = type u32, length u64, values
    info = name str │ dimensions u32 │ dimensions × u64, innermost first │ type u32 │ offset u64 from the data's start

`gguf.GGUFReader` was rejected here: it makes a numpy view of every string (seconds for a vocabulary), and it trusts
lengths, so that a truncated file can make it loop for ever. Here every length is checked against what is left.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

from pagewire.errors import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LAYOUTS: Final = {code: struct.Struct("<" + code) for code in _SCALARS.values()}
_MAX_DEPTH: Final = 4  # arrays of arrays; none is known to be used
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` outermost dimension first, `kind` the ggml type, `offset` from the start of the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata as plain numbers, booleans, strings and lists of these; tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: str | PathLike[str]) -> GGUFHeader:
    """Read and check the header.

    Raises:
        ModelError: the file is missing, no GGUF, of an unknown version, truncated or malformed.
    """
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, str(path)).header()
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except ValueError:  # mmap's word for an empty file
        raise ModelError(f"{path} is empty; get the file again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


class _Reader:
    """A cursor over the header."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self._path} is no GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self._path} is GGUF version {version}; versions 2 and 3, little-endian, can be read")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):  # a count that lies ends at the end of the file
            key = self._string()
            if key in metadata:
                raise self._malformed(f"has the key {key!r} twice")
            metadata[key] = self._value(self._scalar("I"), 0)
        infos = dict(self._tensor_info() for _ in range(num_tensors))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._malformed(f"is aligned to {alignment!r}, which is no power of two")
        start = -(-self._at // alignment) * alignment
        tensors = {name: TensorInfo(shape, kind, start + offset) for name, (shape, kind, offset) in infos.items()}
        return GGUFHeader(metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name, num_dimensions = self._string(), self._scalar("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._malformed(f"gives tensor {name!r} {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        return name, (shape, self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise self._malformed(f"has a value of unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        if depth > _MAX_DEPTH:
            raise self._malformed("nests arrays too deeply")
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._need(8 * length)
            return [self._string() for _ in range(length)]
        if kind == _ARRAY:
            self._need(12 * length)
            return [self._array(depth + 1) for _ in range(length)]
        if kind not in _SCALARS:
            raise self._malformed(f"has an array of unknown type {kind}")
        self._need(length * struct.calcsize(_SCALARS[kind]))
        layout = struct.Struct(f"<{length}{_SCALARS[kind]}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return list(values)

    def _string(self) -> str:
        length = self._scalar("Q")
        self._need(length)
        start, self._at = self._at, self._at + length
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            raise self._malformed("has a string that is not UTF-8") from None

    def _scalar(self, code: str) -> Any:
        layout = _LAYOUTS[code]
        self._need(layout.size)
        start, self._at = self._at, self._at + layout.size
        return layout.unpack_from(self._data, start)[0]

    def _need(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ModelError(f"{self._path} is truncated inside its header; get the file again")

    def _malformed(self, what: str) -> ModelError:
        return ModelError(f"{self._path} {what} (near byte {self._at})")
