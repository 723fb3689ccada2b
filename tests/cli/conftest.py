"""A server that the test plays, published where commands look for one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.cli.echo_server import EchoServer

from pagewire.supervisor.rendezvous import ServerFolder
from pagewire_transport.door import Door
from pagewire_transport.handler import DoorLimits
from pagewire_transport.servers import ServerRecord


@pytest.fixture
async def served():
    """(the server, its URL, the folder for temporary files in which it was published)."""
    temporary = Path(tempfile.mkdtemp(prefix="pw-"))
    private = temporary / f"pagewire-{os.getuid()}"
    private.mkdir(mode=0o700)
    server = EchoServer()
    door = Door(f"ipc://{temporary}/s.sock", handler=server, limits=DoorLimits(), on_fault=lambda doing, error: None)
    folder = ServerFolder.create(private)
    folder.publish(ServerRecord(url=door.url, model="m", pid=os.getpid(), started=1.0))
    yield server, door.url, temporary
    folder.close()
    await door.close()
    shutil.rmtree(temporary, ignore_errors=True)
