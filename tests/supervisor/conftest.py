"""A server of fake children in a folder of its own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from pagewire.config import from_mapping
from pagewire.supervisor.server import Server


@pytest.fixture
def base():
    """A short path: ipc endpoints have room for 107 bytes, and pytest's own folders are long."""
    path = Path(tempfile.mkdtemp(prefix="pw-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_server(monkeypatch, base):
    """A server whose children are `fake_child.py`, behaving as told."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def make(behaviour: str = "", *, on_draining=lambda num_streams: None, **server):
        server = {"start_timeout_ms": 10_000, "restart_max": 0, "bind": f"ipc://{base}/gateway.sock", **server}
        config = from_mapping({"model": {"name": behaviour, "path": str(base)}, "server": server})
        return Server(
            config, engine_module="fake_child", gateway_module="fake_child", base=base, on_draining=on_draining
        )

    return make
