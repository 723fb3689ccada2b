"""`pagewire wire-check`: an engine's door keeps the protocol, and a server that does not is found out."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests.cli.echo_server import EchoServer
from tests.server.bench import serve

from pagewire.cli import wire_check
from pagewire_client.wire_check import check_server
from pagewire_transport.door import Door
from pagewire_transport.handler import DoorLimits
from pagewire_transport.messages import Pong, Tokens


async def outcomes(url, **options):
    return {outcome.name: outcome async for outcome in check_server(url, **options)}


async def test_an_engine_keeps_the_protocol(capsys):
    """One line a check, and how many there were."""
    async with serve(max_message_bytes=2**20, heartbeat_ms=100, heartbeat_timeout_ms=400) as server:
        running = asyncio.create_task(server.core.run(0.001))
        code = await wire_check._check(server.endpoint, None, None, {"timeout_s": 5.0, "patience_s": 3.0})
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        *lines, last = capsys.readouterr().out.splitlines()
        assert [line for line in lines if not line.startswith("ok    ")] == []
        assert (code, last) == (0, f"{len(lines)} kept, 0 broken, 0 not applicable")
        assert len(lines) > 45
        assert server.faults == []


async def test_a_slow_server_is_not_a_broken_one(monkeypatch):
    """A stream may take longer than a server waits for a silent client."""
    from pagewire_client.wire_check import connection_checks, stream_checks

    name = "a stream is resumed by who has its key"
    monkeypatch.setattr(connection_checks, "CHECKS", {})
    monkeypatch.setattr(stream_checks, "CHECKS", {name: stream_checks.CHECKS[name]})
    async with serve(heartbeat_ms=50, heartbeat_timeout_ms=300) as server:
        running = asyncio.create_task(server.core.run(0.02))
        found = await outcomes(server.endpoint, timeout_s=5.0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert found[name].verdict == "ok", found[name].why


@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        ("swaps nonces", "ping is answered with its nonce"),
        ("skips a token", "a stream: accepted, tokens, finished, done"),
    ],
)
async def test_a_server_that_breaks_it_is_found_out(broken, found_by, monkeypatch):
    from pagewire_transport import connection

    encode = connection.encode

    def lie(message):
        if broken == "swaps nonces" and isinstance(message, Pong):
            message = Pong(nonce=message.nonce + 1)
        if broken == "skips a token" and isinstance(message, Tokens):
            message = Tokens(streams=message.streams, starts=b"\7\0\0\0", ids=message.ids)
        return encode(message)

    monkeypatch.setattr(connection, "encode", lie)
    from pagewire_client.wire_check import connection_checks, stream_checks

    monkeypatch.setattr(
        connection_checks, "CHECKS", {found_by: connection_checks.CHECKS.get(found_by)} if "ping" in found_by else {}
    )
    monkeypatch.setattr(
        stream_checks, "CHECKS", {found_by: stream_checks.CHECKS.get(found_by)} if "stream" in found_by else {}
    )
    door = Door("ipc://*", handler=EchoServer(), limits=DoorLimits(), on_fault=lambda *_: None)
    try:
        found = await outcomes(door.url, timeout_s=0.5)
        assert found[found_by].verdict == "FAIL"
        assert found[found_by].why
    finally:
        await door.close()
