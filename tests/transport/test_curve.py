"""CURVE: who is let in, who is not, and what a file of keys may hold (F10, F49)."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
import zmq
from tests.server.bench import until
from tests.transport.test_door import Recorder

import pagewire_client
from pagewire import curve_keys
from pagewire.config import ServerConfig
from pagewire_transport.curve import AllowList, ServerCurve, load_allowed, load_key_pair
from pagewire_transport.door import Door
from pagewire_transport.errors import ConfigError, ConnectionLost, Overloaded, Unauthorized
from pagewire_transport.handler import DoorLimits

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="this build of libzmq has no CURVE")


class Keys:
    """A server's files, and those of its users."""

    def __init__(self, folder):
        self.folder = folder
        self.server = curve_keys.make(folder / "server.key", "server", now=NOW)
        self.list = folder / "allowed.jsonl"
        for name in ("alice", "bob", "mallory"):
            pair = curve_keys.make(self.of(name), name, now=NOW)
            if name != "mallory":
                curve_keys.allow(self.list, name, pair.public, now=NOW)

    def of(self, name):
        return self.folder / f"{name}.key"

    @property
    def curve(self):
        return ServerCurve.load(self.folder / "server.key", self.list)

    def connect(self, door, name, **options):
        options = {"server_key": self.server.public, "key_file": self.of(name), "timeout_s": 5, **options}
        return pagewire_client.connect(door.url, **options)


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path)


@asynccontextmanager
async def locked(keys, url="tcp://127.0.0.1:*", **limits):
    handler = Recorder()
    limits = {"heartbeat_timeout_ms": 60_000, **limits}
    door = Door(
        url, handler=handler, limits=DoorLimits(**limits), curve=keys.curve, on_fault=lambda *what: handler.faults.append(what)
    )  # fmt: skip
    try:
        yield door, handler
        assert handler.faults == []
    finally:
        await door.close()


async def test_who_is_on_the_list_is_let_in_and_known_by_the_key(keys):
    async with locked(keys) as (door, _), keys.connect(door, "alice"), keys.connect(door, "bob"):
        assert {connection.user for connection in door.connections} == {
            load_key_pair(keys.of(name)).public for name in ("alice", "bob")
        }
        assert not [
            thread for thread in threading.enumerate() if "zap" in thread.name.lower() or "auth" in thread.name.lower()
        ]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "not on the server's list"),
        ({"server_key": None, "key_file": None}, "asks for keys"),
        ({"server_key": "wrong"}, "another one"),
    ],
    ids=["a key that is not on the list", "no key", "another server's key"],
)
async def test_nobody_else_is(keys, options, why):
    if options.get("server_key") == "wrong":
        options = {"server_key": load_key_pair(keys.of("bob")).public}
    async with locked(keys) as (door, _):
        with pytest.raises(Unauthorized, match=why):
            async with keys.connect(door, "mallory", **options):
                pass
        assert door.connections == []
        async with keys.connect(door, "alice"):
            assert len(door.connections) == 1


async def test_keys_where_the_server_has_none(keys):
    handler = Recorder()
    door = Door("tcp://127.0.0.1:*", handler=handler, limits=DoorLimits(), on_fault=lambda *_: None)
    try:
        with pytest.raises(Unauthorized):
            async with keys.connect(door, "alice"):
                pass
    finally:
        await door.close()


async def test_a_key_that_is_taken_off_the_list_loses_its_connection_and_is_not_let_in_again(keys):
    async with locked(keys) as (door, handler), keys.connect(door, "alice"), keys.connect(door, "bob"):
        curve_keys.revoke(keys.list, "alice")
        door.check_keys()
        assert [connection.user for connection in door.connections] == [load_key_pair(keys.of("bob")).public]
        assert handler.lost[0][1].code == "unauthorized"
        with pytest.raises(Unauthorized):
            async with keys.connect(door, "alice"):
                pass
        curve_keys.allow(keys.list, "alice", load_key_pair(keys.of("alice")).public, now=NOW)
        async with keys.connect(door, "alice"):
            pass


async def test_the_list_is_looked_at_by_itself(keys):
    async with locked(keys, heartbeat_timeout_ms=400) as (door, _), keys.connect(door, "alice"):
        curve_keys.revoke(keys.list, "alice")
        await until(lambda: not door.connections)


async def test_hello_over_a_connection_from_before(keys):
    """libzmq asks once a connection; a hello that comes later is asked about again."""
    async with locked(keys) as (door, _):
        pair = load_key_pair(keys.of("alice"))
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.curve_serverkey = keys.server.public.encode()
            peer.curve_publickey, peer.curve_secretkey = pair.public.encode(), pair.secret.encode()
            peer.connect(door.url)
            from pagewire_transport.codec import decode_server, encode
            from pagewire_transport.messages import Hello

            async def ask():
                peer.send(encode(Hello()))
                while not peer.poll(0):
                    await asyncio.sleep(0.001)
                return decode_server(peer.recv())

            assert (await ask()).version == 1
            curve_keys.revoke(keys.list, "alice")
            door.check_keys()
            assert (await ask()).code == "unauthorized"


async def test_a_damaged_list_lets_nobody_in(keys):
    async with locked(keys) as (door, _):
        keys.list.write_text("{")
        with pytest.raises(Unauthorized):
            async with keys.connect(door, "alice"):
                pass
        with pytest.raises(ConfigError, match="line 1"):
            AllowList.reload(door._curve.allowed)


async def test_a_public_address_needs_keys(keys):
    async with locked(keys, "tcp://0.0.0.0:*") as (door, _):
        assert door.url.startswith("tcp://0.0.0.0:")
        port = door.url.rpartition(":")[2]
        async with pagewire_client.connect(
            f"tcp://127.0.0.1:{port}", server_key=keys.server.public, key_file=keys.of("alice")
        ):
            pass
    with pytest.raises(ConfigError, match="curve_key_file") as caught:
        Door("tcp://0.0.0.0:*", handler=Recorder(), limits=DoorLimits(), on_fault=lambda *_: None)
    assert caught.value.field == "bind"


async def test_the_loop_answers_zap_while_handshakes_hang(keys):
    """A peer that begins a handshake and says no more holds up nobody."""
    async with locked(keys) as (door, _):
        host, _, port = door.url.removeprefix("tcp://").rpartition(":")
        writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(20)]
        begun = time.monotonic()
        async with keys.connect(door, "alice"):
            assert time.monotonic() - begun < 5
        for writer in writers:
            writer.close()


@pytest.mark.parametrize(("given", "missing"), [("server_key", "key_file"), ("key_file", "server_key")])
async def test_a_client_needs_both_keys(keys, given, missing):
    options = {given: keys.server.public if given == "server_key" else keys.of("alice")}
    with pytest.raises(ConfigError) as caught:
        async with pagewire_client.connect("tcp://127.0.0.1:1", **options):
            pass
    assert caught.value.field == missing


async def test_no_server_is_another_error_than_no_key(keys):
    options = {"server_key": keys.server.public, "key_file": keys.of("alice")}
    with pytest.raises(ConnectionLost):
        async with pagewire_client.connect("tcp://127.0.0.1:1", timeout_s=0.3, **options):
            pass


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_key_file_is_private_and_its_secret_is_not_shown(keys):
    path = keys.of("alice")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    pair = load_key_pair(path)
    assert pair.secret not in repr(pair)
    assert not pair.public.startswith("-")
    assert pair.secret not in keys.list.read_text()
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key_pair(path)


def test_a_list_that_others_may_write_is_refused(keys):
    keys.list.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_allowed(keys.list)


@pytest.mark.parametrize("change", [{"secret": "x" * 40}, {"secret": "short"}, {"public": "y" * 40}, {"more": 1}])
def test_keys_that_do_not_belong_together(keys, change):
    path = keys.of("alice")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError):
        load_key_pair(path)


def test_names_and_keys_stand_on_the_list_once(keys):
    public = load_key_pair(keys.of("alice")).public
    for name, key in (
        ("alice", load_key_pair(keys.of("mallory")).public),
        ("carol", public),
        ("a b", public),
        ("carol", "x"),
    ):
        with pytest.raises(ConfigError):
            curve_keys.allow(keys.list, name, key, now=NOW)
    with pytest.raises(ConfigError, match="alice, bob"):
        curve_keys.revoke(keys.list, "carol")
    with pytest.raises(ConfigError, match="there already"):
        curve_keys.make(keys.of("alice"), "alice", now=NOW)


@pytest.mark.parametrize("given", ["curve_key_file", "curve_allow_file"])
def test_a_server_needs_both_files(keys, given):
    config = ServerConfig(**{given: str(keys.list)})
    with pytest.raises(ConfigError) as caught:
        curve_keys.server_curve(config)
    assert caught.value.field.startswith("server.curve_")
    assert caught.value.field != f"server.{given}"
    assert curve_keys.server_curve(ServerConfig()) is None


async def test_a_key_has_so_many_connections_and_another_is_not_concerned(keys):
    async with locked(keys, max_connections_per_key=2) as (door, _), keys.connect(door, "bob"):
        async with keys.connect(door, "alice"), keys.connect(door, "alice"):
            with pytest.raises(Overloaded, match="2 connections") as refused:
                async with keys.connect(door, "alice", timeout_s=0.3):
                    pass
            assert refused.value.retry_after_ms
            async with keys.connect(door, "bob"):
                assert len(door.connections) == 4
        await until(lambda: len(door.connections) == 1)
        async with keys.connect(door, "alice"):
            assert len(door.connections) == 2
        await until(lambda: len(door._of_key) == 1)
