"""What a client may ask a door beside streams: load, stats, files; and what it may not: to stop the server."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from tests.server.bench import RawPeer, until
from tests.transport.test_door import opened

import pagewire_client
from pagewire_transport.codec import decode_server, encode
from pagewire_transport.errors import InvalidRequest, ProtocolError
from pagewire_transport.files import Files
from pagewire_transport.limits import MAX_FILE_PIECE
from pagewire_transport.messages import (
    AdminDone,
    Drain,
    Error,
    FilePiece,
    GetFile,
    GetLoad,
    GetStats,
    Hello,
    Load,
    Pong,
    Reload,
    Stats,
)

DATA = bytes(range(256)) * 600


async def test_load_is_what_the_counters_say():
    async with opened() as (door, handler):
        handler.stats = lambda: {
            "sequences_running": 3.0, "sequences_waiting": 2.0, "gateway_prompts_waiting": 1.0, "kv_blocks": 9.0,
            "kv_blocks_used": 4.0,
        }  # fmt: skip
        with RawPeer(door.url) as peer:
            await peer.hello()
            peer.send(GetLoad())
            assert await peer.read() == Load(ready=True, running=3, waiting=3, kv_blocks=9, kv_blocks_used=4)


async def test_a_file_comes_in_bounded_pieces():
    async with opened(files=Files({"tokenizer.json": DATA})) as (door, _):
        with RawPeer(door.url) as peer:
            peer.send(Hello())
            (info,) = (await peer.read()).files
            assert (info.name, info.size) == ("tokenizer.json", len(DATA))
            got = b""
            while True:
                peer.send(GetFile(name=info.name, offset=len(got)))
                piece = await peer.read()
                assert isinstance(piece, FilePiece)
                assert (piece.offset, piece.size) == (len(got), info.size)
                assert len(piece.data) <= MAX_FILE_PIECE
                got += piece.data
                if not piece.data:
                    break
            assert hashlib.sha256(got).hexdigest() == info.sha256


@pytest.mark.parametrize(
    ("asked", "field"), [(GetFile(name="../secret"), "name"), (GetFile(name="tokenizer.json", offset=len(DATA) + 1), "offset")]
)  # fmt: skip
async def test_no_other_file_and_nothing_beyond_its_end(asked, field):
    async with opened(files=Files({"tokenizer.json": DATA})) as (door, handler):
        with RawPeer(door.url) as peer:
            await peer.hello()
            peer.send(asked)
            error = await peer.read()
            assert (error.code, error.field, error.stream) == ("invalid_request", field, None)
            assert handler.lost == []


async def test_who_asks_and_does_not_read_is_refused_answers():
    """Else the server would keep them: megabytes, for a few bytes of questions."""
    async with opened(files=Files({"a": DATA})) as (door, _):
        with RawPeer(door.url) as peer:
            await peer.hello()
            (connection,) = door.connections
            connection._unsent.append(encode(Pong()))  # as if the peer took nothing
            for message in (GetFile(name="a"), GetStats(), GetLoad()):
                door._take(connection, encode(message))
            kept = [decode_server(frame) for frame in list(connection._unsent)[1:]]
            assert [message.code for message in kept] == ["overloaded"] * 3


async def test_admin_messages_are_refused_to_everybody():
    async with opened() as (door, handler):
        with RawPeer(door.url) as peer:
            await peer.hello()
            for message in (Drain(), Reload()):
                peer.send(message)
                error = await peer.read()
                assert isinstance(error, Error)
                assert (error.code, error.field) == ("unauthorized", "t")
            assert handler.lost == []


async def test_reserved_messages_are_refused_by_name_and_no_offence():
    async with opened(max_offences=2) as (door, handler):
        with RawPeer(door.url) as peer:
            await peer.hello()
            for _ in range(5):
                peer.send(b"\1" + msgspec.msgpack.encode({"t": "kv_offer", "request": "r", "blocks": [1, 2]}))
                error = await peer.read()
                assert (error.code, error.field) == ("unsupported", "t")
            peer.send(GetStats())
            assert await peer.read() == Stats(values={})
            assert handler.lost == []


async def test_the_admin_of_a_door_is_asked():
    class Owner:
        def drain(self):
            return "2 streams are open"

        def reload(self):
            raise AssertionError

    async with opened(admin=Owner()) as (door, handler):
        with RawPeer(door.url) as peer:
            peer.send(Drain())  # not before hello
            assert (await peer.read()).field == "hello"
            peer.send(Hello())
            await until(lambda: door.connections)
            await peer.read()
            peer.send(Drain())
            assert await peer.read() == AdminDone(what="drain", message="2 streams are open")
            assert handler.faults == []


async def test_the_python_client_fetches_whole_files_and_notices_a_wrong_one():
    files = Files({"tokenizer.json": DATA, "empty": b""})
    async with opened(files=files) as (door, _), pagewire_client.connect(door.url) as client:
        assert await client.file("tokenizer.json") == DATA
        assert await client.file("empty") == b""
        with pytest.raises(InvalidRequest) as caught:
            await client.file("other")
        assert caught.value.field == "name"
        files._contents["tokenizer.json"] = DATA[:-1] + b"x"
        with pytest.raises(ProtocolError):
            await client.file("tokenizer.json")
        assert (await client.load()).kv_blocks == 0
        files._contents.clear()  # refused: the question is answered, and the next one is not mixed up with it
        with pytest.raises(InvalidRequest):
            await client.file("tokenizer.json")
        assert await client.stats() == {}
