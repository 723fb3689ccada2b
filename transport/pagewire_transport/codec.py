"""Frames: one version byte, then one message as a MessagePack map.

    byte 0        1 …
    ├─ version ─┼─ {"t": "generate", "stream": 7, …} ──┤

Decoding trusts nothing: whatever the bytes, the outcome is a message or one of the three errors named below. Sizes are
checked before anything is decoded; what a frame may make the decoder allocate is a small multiple of its own size, since
lengths that it declares are compared with what is there, and the structs of `messages` bound every list.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from pagewire_transport.errors import (
    InvalidRequest,
    PagewireError,
    ProtocolError,
    UnsupportedFeature,
    VersionMismatch,
)
from pagewire_transport.messages import PROTOCOL_VERSION, RESERVED_TAGS, FromClient, FromServer, Stream

MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""What a server takes by default; its `welcome` says what it really takes."""
MAX_REPLY_BYTES: Final = 64 * 2**20
"""What a client takes. The largest reply is `prompt_logprobs`: 4 + 8 × top bytes a token of the prompt."""

_VERSION: Final = bytes([PROTOCOL_VERSION])
_LONGEST_TEXT: Final = 300
"""Of an error's message or field: both may quote the peer, who shall not get back megabytes of its own."""

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


class _Head(msgspec.Struct, frozen=True):
    """As much of a message as an error reply needs; everything else is skipped."""

    t: str
    stream: Stream | None = None


class _Tag(msgspec.Struct, frozen=True):
    t: str


_head: msgspec.msgpack.Decoder[_Head] = msgspec.msgpack.Decoder(_Head)
_tag_alone: msgspec.msgpack.Decoder[_Tag] = msgspec.msgpack.Decoder(_Tag)


def encode(message: FromClient | FromServer) -> bytes:
    """The frame of `message`."""
    return _VERSION + _encoder.encode(message)


def decode_client(frame: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> FromClient:
    """What a client sent.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        UnsupportedFeature: the message is reserved for a later version.
        InvalidRequest: a field is missing, unknown, of the wrong type or out of range; `field` is its dotted path.
        ProtocolError: too long, or no message at all.
    """
    body = _body(frame, max_bytes)
    try:
        return _from_client.decode(body)
    except msgspec.ValidationError as error:
        refused = refusal_of(str(error))
        if refused.field == "t" and _tag(body) in RESERVED_TAGS:
            refused = UnsupportedFeature("reserved for a later version of the protocol", field="t")
        elif refused.field is None:  # no map at all
            refused = ProtocolError(f"not a message: {refused.message}")
        raise refused from None
    except Exception as error:  # noqa: BLE001  (nesting too deep, out of memory, …: always the frame's fault)
        raise ProtocolError(f"not a message: {_brief(str(error))}") from None


def decode_server(frame: bytes, max_bytes: int = MAX_REPLY_BYTES) -> FromServer:
    """What a server sent.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        ProtocolError: too long, or no message of this protocol.
    """
    body = _body(frame, max_bytes)
    try:
        return _from_server.decode(body)
    except Exception as error:  # noqa: BLE001  (as above)
        raise ProtocolError(f"not a message: {_brief(str(error))}") from None


def _tag(body: memoryview) -> str:
    """Of a message that did not decode."""
    try:
        return _tag_alone.decode(body).t
    except Exception:  # noqa: BLE001  (hostile bytes; they were refused already)
        return ""


def stream_to_refuse(frame: bytes) -> int | None:
    """The stream that a `generate` or `resume` which did not decode was about, so that the refusal can name it."""
    try:
        head = _head.decode(memoryview(frame)[1:])
    except Exception:  # noqa: BLE001  (hostile bytes; they were refused already)
        return None
    return head.stream if head.t in ("generate", "resume") else None


def convert(values: Any, kind: type[_T]) -> _T:
    """`values` (plain Python) as `kind`, under the same limits as on the wire.

    Raises:
        InvalidRequest: as `decode_client`.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None


def _body(frame: bytes, max_bytes: int) -> memoryview:
    if len(frame) > max_bytes:
        raise ProtocolError(f"a message of {len(frame)} bytes; at most {max_bytes} are taken")
    if not frame:
        raise ProtocolError("an empty frame")
    if frame[0] != PROTOCOL_VERSION:
        raise VersionMismatch(f"a frame of protocol version {frame[0]}; spoken here: {PROTOCOL_VERSION}")
    return memoryview(frame)[1:]


_WHERE: Final = re.compile(r"(?:`key` in )?`\$(.*)`", re.DOTALL)
_ABOUT_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)


def refusal_of(text: str) -> PagewireError:
    """The error for a complaint of msgspec's, which ends in " - at `$.path`" where it knows one."""
    what, _, where = text.rpartition(" - at ")
    found = _WHERE.fullmatch(where)
    if found is None:
        what, path = text, ""
    else:
        path = found[1].lstrip(".").replace("[...]", "")
    about = _ABOUT_FIELD.fullmatch(what)
    if about is not None:
        what = "is unknown" if about[1] == "contains unknown" else "is missing"
        path = f"{path}.{about[2]}" if path else about[2]
    if path == "t":
        return ProtocolError(f"no message of this protocol: {_brief(what)}", field="t")
    return InvalidRequest(_brief(what[:1].lower() + what[1:]), field=_brief(path) or None)


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
