"""The owner's door: who can reach it, and what `pagewire admin` does there."""

from __future__ import annotations

import asyncio
import stat
import sys
from datetime import UTC, datetime

import msgspec
import pytest
from tests.chaos.rig import Served, temporary_folder
from tests.cli.echo_server import environment_of

import pagewire_client
from pagewire import curve_keys
from pagewire.cli.model_path import demo_model
from pagewire.supervisor.server import serve
from pagewire_client.text.byte_table import ByteTable
from pagewire_client.wire_check import check_server
from pagewire_transport.curve import ClientCurve
from pagewire_transport.servers import find_servers

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


async def admin(folder, *arguments):
    """`pagewire admin …`: code, output, error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.cli.main", "admin", *arguments, env=environment_of(folder),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, out.decode(), err.decode()


async def test_a_whole_server_with_keys_is_looked_at_reloaded_and_drained():
    with temporary_folder() as folder:
        key_file, allowed = folder / "server.key", folder / "allowed"
        server_key = curve_keys.make(key_file, "server", now=NOW).public
        alice = curve_keys.make(folder / "alice.key", "alice", now=NOW)
        curve_keys.allow(allowed, "alice", alice.public, now=NOW)
        server = await Served.start(
            folder, "--bind", "tcp://127.0.0.1:0", "--curve-key-file", str(key_file), "--curve-allow-file", str(allowed)
        )
        try:
            url = await server.ready()
            (private,) = [path for path in folder.iterdir() if path.name.startswith("pagewire-")]
            (record,) = find_servers(private)
            socket = record.admin.removeprefix("ipc://")
            from pathlib import Path

            assert stat.S_IMODE(Path(socket).stat().st_mode) == 0o600
            assert stat.S_IMODE(Path(socket).parent.stat().st_mode) == 0o700
            keys = {"server_key": server_key, "key_file": folder / "alice.key"}
            async with pagewire_client.connect(url, **keys) as client:
                stream = client.generate([1, 2, 3], max_tokens=4)
                assert len((await stream.result()).token_ids) == 4
                curve = ClientCurve.load(server_key, folder / "alice.key")
                found = [outcome async for outcome in check_server(url, curve=curve, timeout_s=20)]
                assert [outcome for outcome in found if outcome.verdict == "FAIL"] == []
                assert len(found) > 40
                load = await client.load()
                assert load.ready
                assert load.kv_blocks > 0
                code, out, err = await admin(folder, "stats")
                assert (code, err) == (0, "")
                assert "gateway_connections" in out
                assert await admin(folder, "reload", url) == (0, "CURVE: 1 keys\n", "")
                allowed.write_text("damaged")
                code, out, err = await admin(folder, "reload", record.admin)
                assert (code, out, "line 1" in err) == (2, "", True)
            code, out, _ = await admin(folder, "drain")
            assert (code, out) == (0, "no stream is open; the server stops now\n")
            assert await server.ended() == 0
            assert (await admin(folder, "stats"))[0] == 1
        finally:
            await server.close()


async def test_the_supervisor_stops_when_the_gateway_was_asked_to(make_server):
    server = make_server("gateway=asks_to_stop")
    await asyncio.wait_for(serve(server, stop=asyncio.Event(), announce=lambda server: None), 20)


@pytest.mark.model
@pytest.mark.skipif(demo_model() is None, reason="the demo model is not installed")
def test_the_files_of_a_tokenizer_suffice_to_make_text_of_ids():
    from pagewire.text.files import tokenizer_files
    from pagewire.text.tokenizer import load_text_model

    text = load_text_model(demo_model())
    files = tokenizer_files(demo_model(), text)
    assert set(files) == {"vocabulary.msgpack", "chat_template.jinja"}
    vocabulary = msgspec.msgpack.decode(files["vocabulary.msgpack"])
    table = ByteTable(tuple(vocabulary["pieces"]), frozenset(vocabulary["special"]), vocabulary["strips_space"])
    ids = text.encode("Grüße, 世界! 🙂")
    assert table.decode(ids) == "Grüße, 世界! 🙂"
    assert files["chat_template.jinja"].decode() == text.chat_template


def test_a_folder_is_served_as_it_is(tmp_path):
    from types import SimpleNamespace

    from pagewire.text.files import tokenizer_files

    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "secret.json").write_bytes(b"no")
    text = SimpleNamespace(byte_table=ByteTable((b"a", b"\xff"), frozenset({1})), chat_template="t")
    files = tokenizer_files(tmp_path, text)
    assert set(files) == {"vocabulary.msgpack", "tokenizer.json", "chat_template.jinja"}
    assert files["tokenizer.json"] == b"{}"
    assert files["chat_template.jinja"] == b"t"
