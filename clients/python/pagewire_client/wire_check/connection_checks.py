"""Checks of connections: hello, versions, frames that are none, refusals, questions beside streams."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

import msgspec

from pagewire_client.wire_check.check import Bench, Check, CheckError, SkipCheck, frame
from pagewire_transport.codec import encode
from pagewire_transport.columns import pack
from pagewire_transport.messages import (
    RESERVED_TAGS,
    Drain,
    Error,
    FilePiece,
    Generate,
    GetFile,
    GetLoad,
    GetStats,
    Goodbye,
    Hello,
    Load,
    Ping,
    Pong,
    Reload,
    Stats,
    Welcome,
)

_LARGEST_SENT: Final = 64 * 2**20
_QUIET_S: Final = 0.3

_NO_MESSAGES: Final = {
    "no bytes": b"",
    "a version and nothing else": b"\1",
    "cut in the middle": encode(Ping())[:-1],
    "bytes behind the message": encode(Ping()) + b"\0",
    "a byte that MessagePack does not have": b"\1\xc1",
    "an array": b"\1" + msgspec.msgpack.encode(["ping"]),
    "no `t`": frame(stream=1),
    "an unknown `t`": frame(t="shout"),
    "a server's message": frame(t="pong"),
    "text that is no UTF-8": b"\1\x82\xa1t\xa5hello\xa6client\xa2\xff\xfe",
    "a length beyond the frame": b"\1\x82\xa1t\xa8generate\xa6prompt\xdb\xff\xff\xff\xff",
    "an extension type": b"\1\xd4\0\0",
}
_BAD_FIELDS: Final[dict[str, tuple[dict[str, object], str]]] = {
    "unknown": ({"promt": "x"}, "promt"),
    "of another type": ({"prompt": 5}, "prompt"),
    "unknown, of params": ({"params": {"best_of": 3}}, "params.best_of"),
    "out of range": ({"params": {"temperature": -0.1}}, "params.temperature"),
    "NaN": ({"params": {"temperature": float("nan")}}, "params.temperature"),
    "too large": ({"params": {"n": 1000}}, "params.n"),
    "of an item": ({"params": {"stop": ["a", ""]}}, "params.stop[1]"),
}


async def _welcome(bench: Bench) -> None:
    _, welcome = await bench.welcomed()
    for name in ("vocab_size", "max_model_len", "max_streams", "max_message_bytes", "heartbeat_ms"):
        if getattr(welcome, name) < 1:
            raise CheckError(f"`{name}` is {getattr(welcome, name)}")
    if welcome.version != 1 or 1 not in welcome.versions:
        raise CheckError(f"`version` is {welcome.version}, `versions` are {welcome.versions}")
    if welcome.heartbeat_timeout_ms <= welcome.heartbeat_ms:
        raise CheckError("`heartbeat_timeout_ms` leaves no time for a heartbeat")


async def _common_version(bench: Bench) -> None:
    peer = bench.stranger()
    peer.send(Hello(versions=(1, 250)))
    welcome = await peer.expect(Welcome)
    if welcome.version != 1:
        raise CheckError(f"1 and 250 were offered, `version` is {welcome.version}")


async def _no_common_version(bench: Bench) -> None:
    peer = bench.stranger()
    peer.send(Hello(versions=(250,)))
    await peer.expect_error("version", field="versions")
    await peer.hello()


async def _frame_of_another_version(bench: Bench) -> None:
    peer = await bench.peer()
    peer.send(b"\xfa" + encode(Ping())[1:])
    await peer.expect_error("version")
    await peer.is_alive()


async def _hello_first(bench: Bench) -> None:
    peer = bench.stranger()
    peer.send(Ping())
    await peer.expect_error("protocol", field="hello")
    peer.send(Generate(stream=3, prompt_ids=pack("I", [1])))
    await peer.expect_error("protocol", field="hello", stream=3)
    await peer.hello()


async def _ping(bench: Bench) -> None:
    peer = await bench.peer()
    for nonce in (0, 1, 2**31, 2**63 - 1):
        peer.send(Ping(nonce=nonce))
        pong = await peer.expect(Pong)
        if pong.nonce != nonce:
            raise CheckError(f"asked with {nonce}, answered with {pong.nonce}")


async def _silence(bench: Bench) -> None:
    peer, welcome = await bench.welcomed()
    timeout_s = welcome.heartbeat_timeout_ms / 1000
    if 2 * timeout_s > bench.patience_s:
        raise SkipCheck(
            f"`heartbeat_timeout_ms` is {welcome.heartbeat_timeout_ms}, the patience {bench.patience_s:g} s"
        )
    lively = await bench.peer()
    for _ in range(8):
        await asyncio.sleep(timeout_s / 4)
        await lively.is_alive()
    peer.send(Ping())
    await peer.expect_error("protocol", field="hello")


async def _goodbye(bench: Bench) -> None:
    peer = await bench.peer()
    peer.send(Goodbye())
    peer.send(Ping())
    await peer.expect_error("protocol", field="hello")
    await peer.hello()


async def _encodings(bench: Bench) -> None:
    peer = bench.stranger()
    peer.send(b"\1\xdf\0\0\0\2\xd9\1t\xda\0\5hello\xa8versions\xdc\0\1\xd3" + (1).to_bytes(8, "big"))
    await peer.expect(Welcome)
    peer.send(b"\1\x82\xa5nonce\xcf" + (9).to_bytes(8, "big") + b"\xa1t\xa4ping")
    pong = await peer.expect(Pong)
    if pong.nonce != 9:
        raise CheckError(f"the nonce 9 came back as {pong.nonce}")


async def _several_frames(bench: Bench) -> None:
    peer = await bench.peer()
    peer.send_parts([encode(Ping()), b"more"])
    await peer.expect_error("protocol")
    await peer.is_alive()


async def _too_large(bench: Bench) -> None:
    peer, welcome = await bench.welcomed()
    if welcome.max_message_bytes >= _LARGEST_SENT:
        raise SkipCheck(f"`max_message_bytes` is {welcome.max_message_bytes}")
    peer.send(b"\1" + bytes(welcome.max_message_bytes))
    await peer.expect_error("protocol")
    await peer.is_alive()


async def _offenders(bench: Bench) -> None:
    peer, welcome = await bench.welcomed()
    neighbour = await bench.peer()
    for _ in range(welcome.limits.max_offences):
        peer.send(b"\1\xc1")
    peer.send(Ping())
    while (message := await peer.try_receive(_QUIET_S)) is not None:
        if isinstance(message, Pong):
            raise CheckError(f"after {welcome.limits.max_offences} frames that are none it is still served")
        if not isinstance(message, Error):
            raise CheckError(f"an `error` was due, and there came {message}")
    await neighbour.is_alive()


async def _reserved(bench: Bench) -> None:
    peer, welcome = await bench.welcomed()
    for tag in [*sorted(RESERVED_TAGS)] * (1 + welcome.limits.max_offences // len(RESERVED_TAGS)):
        peer.send(frame(t=tag, id=1))
        await peer.expect_error("unsupported", field="t")
    await peer.is_alive()


async def _admin(bench: Bench) -> None:
    peer = await bench.peer()
    for message in (Drain(), Reload()):
        peer.send(message)
        await peer.expect_error("unauthorized", field="t")
    await peer.is_alive()


async def _questions(bench: Bench) -> None:
    peer = await bench.peer()
    for _ in range(3):
        peer.send(GetLoad())
        peer.send(GetStats())
    for _ in range(3):
        load = await peer.expect(Load)
        if not 0 <= load.kv_blocks_used <= load.kv_blocks or min(load.running, load.waiting) < 0:
            raise CheckError(f"a load that cannot be: {load}")
        await peer.expect(Stats)


async def _files(bench: Bench) -> None:
    peer, welcome = await bench.welcomed()
    peer.send(GetFile(name="no such file"))
    await peer.expect_error("invalid_request", field="name")
    for info in welcome.files:
        peer.send(GetFile(name=info.name, offset=info.size + 1))
        await peer.expect_error("invalid_request", field="offset")
        data = b""
        while True:
            peer.send(GetFile(name=info.name, offset=len(data)))
            piece = await peer.expect(FilePiece)
            if (piece.offset, piece.size) != (len(data), info.size):
                raise CheckError(
                    f"{info.name}: asked for {len(data)} of {info.size}, there came {piece.offset} of {piece.size}"
                )
            if len(piece.data) > welcome.limits.max_file_piece:
                raise CheckError(f"{info.name}: a piece of {len(piece.data)} bytes")
            if not piece.data:
                break
            data += piece.data
        if hashlib.sha256(data).hexdigest() != info.sha256:
            raise CheckError(f"{info.name} is not what its SHA-256 says")


def _no_message(data: bytes) -> Check:
    async def check(bench: Bench) -> None:
        peer = await bench.peer()
        peer.send(data)
        error = await peer.expect(Error)
        if error.code != "protocol" or error.stream is not None:
            raise CheckError(f"an error `protocol` without a stream was due, and there came {error}")
        await peer.is_alive()

    return check


def _bad_field(fields: dict[str, object], field: str) -> Check:
    async def check(bench: Bench) -> None:
        peer, welcome = await bench.welcomed()
        for _ in range(welcome.limits.max_offences + 1):  # it is no offence
            peer.send(frame(t="generate", stream=5, **fields))
            await peer.expect_error("invalid_request", field=field, stream=5)
        await peer.is_alive()

    return check


CHECKS: Final[dict[str, Check]] = {
    "hello is answered with a welcome": _welcome,
    "the version that both speak is taken": _common_version,
    "no common version is refused": _no_common_version,
    "a frame of another version is refused": _frame_of_another_version,
    "hello comes first": _hello_first,
    "ping is answered with its nonce": _ping,
    "the silent are taken for lost, and nobody else": _silence,
    "goodbye ends the connection": _goodbye,
    "every encoding of MessagePack is taken": _encodings,
    "a message of several frames is refused": _several_frames,
    "a frame beyond the limit is refused": _too_large,
    **{f"a frame that is none is refused: {name}": _no_message(data) for name, data in _NO_MESSAGES.items()},
    **{f"a bad field is named: {name}": _bad_field(*case) for name, case in _BAD_FIELDS.items()},
    "who sends nothing but such frames is dropped": _offenders,
    "reserved messages are refused by name": _reserved,
    "drain and reload are not everybody's": _admin,
    "load and stats are told in order": _questions,
    "the tokenizer's files are what is listed": _files,
}
