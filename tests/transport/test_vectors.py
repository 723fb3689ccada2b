"""The golden vectors and the protocol's page are what the codec makes, and what they say of themselves is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.config import ServerConfig
from pagewire_transport.codec import decode_client, decode_server, stream_to_refuse
from pagewire_transport.errors import PagewireError

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "transport" / "vectors"


def load(name):
    return json.loads((VECTORS / name).read_text())["vectors"]


@pytest.mark.parametrize("script", ["protocol_vectors.py", "protocol_tables.py"])
def test_what_is_made_of_the_messages_is_up_to_date(script):
    """The vectors, and the tables and examples of PROTOCOL.md."""
    path = ROOT / "scripts" / script
    done = subprocess.run([sys.executable, str(path), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["client.json", "server.json", "tolerated.json", "refused.json"])
def test_names_are_unique(name):
    names = [vector["name"] for vector in load(name)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("vector", load("refused.json"), ids=lambda vector: vector["name"])
def test_refused(vector):
    frame = bytes.fromhex(vector["frame"])
    with pytest.raises(PagewireError) as caught:
        decode_client(frame) if vector["from"] == "client" else decode_server(frame)
    assert caught.value.code == vector["code"]
    if vector["from"] == "client":
        assert (caught.value.field, stream_to_refuse(frame)) == (vector["field"], vector["stream"])


@pytest.mark.parametrize("vector", load("server.json"), ids=lambda vector: vector["name"])
def test_a_client_takes_every_message_of_a_server(vector):
    assert decode_server(bytes.fromhex(vector["frame"])).__struct_config__.tag == vector["message"]["t"]


@pytest.mark.parametrize(
    "name",
    [
        "max_connections", "max_connections_per_key", "max_strangers", "hello_timeout_ms", "max_streams_per_connection",
        "max_streams_per_key", "heartbeat_ms", "heartbeat_timeout_ms", "resume_grace_ms",
        "max_kept_streams",
    ],
)  # fmt: skip
def test_the_page_tells_the_settings_defaults(name):
    section = (ROOT / "transport" / "PROTOCOL.md").read_text().partition("\n## Limits and defaults\n")[2]
    row = next(line for line in section.splitlines() if f"`{name}`" in line)
    assert f"{getattr(ServerConfig(), name):,}" in row


def test_every_link_inside_the_page_leads_somewhere():
    text = (ROOT / "transport" / "PROTOCOL.md").read_text()
    headings = {line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
