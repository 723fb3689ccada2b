"""The file: a magic word, then frames; the first is a header, each other a call of the scheduler with all that it was told.

    "PWRECORD" │ frame │ frame │ …          frame = length u32, little-endian │ msgpack

Every clock value is in it, every request, every result; so the scheduler, which reads nothing else, decides the same. Of
each plan the check sums of its parts are kept: a difference has a name. A file that ends within a frame was cut, and
counts up to there. Prompts are in it as token ids: whoever gets the file can read them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from pagewire.config import SchedulerConfig
from pagewire.errors import ConfigError
from pagewire.request.request import Request

MAGIC: Final = b"PWRECORD"
VERSION: Final = 1
MAX_FRAME: Final = 1 << 30
NO_STEP: Final = -1
_LENGTH: Final = struct.Struct("<I")


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all frames: a list that begins with the name of its kind."""


class Header(_Event, frozen=True):
    """How the scheduler was made, and by which version."""

    version: int
    pagewire: str
    num_blocks: int
    block_size: int
    max_rows: int
    max_model_len: int
    config: SchedulerConfig
    eos_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    max_step_tokens: int | None = None
    cost_model: dict[str, Any] = {}
    """See `scheduler.py`; {}: as by default."""


class Submitted(_Event, frozen=True):
    """A request came. `order` of its first sequence; `error`: the code, where it was refused."""

    now_ns: int
    request: Request
    order: int = -1
    error: str = ""


class Ended(_Event, frozen=True):
    """Somebody ended a sequence: cancel, fail (`error`, `message`) or finish_at (`at`)."""

    now_ns: int
    order: int
    how: str
    at: int = 0
    error: str = ""
    message: str = ""


class Paused(_Event, frozen=True):
    """A sequence's reader does not keep up."""

    order: int


class Resumed(_Event, frozen=True):
    """It does again."""

    order: int


class Taken(_Event, frozen=True):
    """Ends were reported that no step brought."""

    orders: tuple[int, ...]


class Planned(_Event, frozen=True):
    """A step was planned. `sums`: of its parts, as in `PARTS`; `step` −1: nothing could be planned. `error`: what was raised."""

    now_ns: int
    step: int = NO_STEP
    sums: tuple[int, ...] = ()
    error: str = ""


class Applied(_Event, frozen=True):
    """A result was applied: arrays as bytes, int32 and (flags) uint8. `ended`: whose end it brought, by order."""

    now_ns: int
    step: int
    counts: bytes
    token_ids: bytes
    flags: bytes
    forward_ns: int
    ended: tuple[int, ...] = ()
    error: str = ""


class Cut(_Event, frozen=True):
    """The recorder fell behind its limit and stopped."""

    num_bytes: int


Event = Submitted | Ended | Paused | Resumed | Taken | Planned | Applied | Cut


def _encode_array(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.astype(np.int32, copy=False).tobytes()
    raise NotImplementedError(f"{type(value)} does not belong into a recording")


def _decode_array(kind: type, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is np.ndarray and isinstance(value, bytes) and len(value) % 4 == 0:
        return np.frombuffer(value, np.int32)
    raise ValueError("an array is no bytes of int32")


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_header: Final = msgspec.msgpack.Decoder(Header, dec_hook=_decode_array)
_event: Final = msgspec.msgpack.Decoder(Event, dec_hook=_decode_array)


def frame(event: Header | Event) -> bytes:
    """One frame."""
    body = _encoder.encode(event)
    return _LENGTH.pack(len(body)) + body


def read(path: Path) -> tuple[Header, Iterator[Event]]:
    """The header, and the events as they are asked for.

    Raises:
        ConfigError: no recording, of another version, or damaged; while iterating, too.
    """
    try:
        with path.open("rb") as file:
            data = file.read(len(MAGIC))
            data += file.read() if data == MAGIC else b""  # what is no recording may be of any size, or without end
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="file") from None
    if not data.startswith(MAGIC):
        raise ConfigError(f"{path} is no recording of `pagewire serve --record`", field="file")
    bodies = _bodies(path, data)
    body = next(bodies, None)
    if body is None:
        raise ConfigError(f"{path} ends before its header", field="file")
    version = _version(body)
    if version != VERSION:
        raise ConfigError(f"{path} is of version {version}; this Pagewire reads {VERSION}", field="file")
    header = _decoded(path, _header, body)
    return header, (_decoded(path, _event, body) for body in bodies)


def _bodies(path: Path, data: bytes) -> Iterator[memoryview]:
    at, view = len(MAGIC), memoryview(data)
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > MAX_FRAME:
            raise ConfigError(f"{path} is damaged at byte {at}: a frame of {length} bytes", field="file")
        if at + length > len(data):
            return  # cut while it was written
        yield view[at : at + length]
        at += length


def _version(body: memoryview) -> object:
    """Looked at first: other versions may have other fields."""
    try:
        values = msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return values[1] if isinstance(values, list) and len(values) > 1 else None


def _decoded(path: Path, decoder: Any, body: memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}", field="file") from None
