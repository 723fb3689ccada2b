"""A server's private folder: made and locked at its start, published when it is ready, swept by the next one if it died.

    <random>/                        see `pagewire_transport.servers`, which reads them
        lock, server.json
        engine.sock                  where the gateway meets the engine
        admin.sock                   where the owner may stop the server

Beside the folders lie the sockets of gateways that took a fresh address; those of dead ones are swept likewise.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagewire_transport.endpoints import private_folder, sweep_sockets
from pagewire_transport.servers import LOCK, RECORD, ServerRecord, is_alive, server_folders


@dataclass
class ServerFolder:
    """The folder of one server, held while this object is open."""

    path: Path
    _lock: int

    @classmethod
    def create(cls, base: Path | None = None) -> ServerFolder:
        """Make and lock a folder, and sweep what dead servers left."""
        base = base or private_folder()
        _sweep(base)
        path = Path(tempfile.mkdtemp(prefix="", dir=base))
        draft = path / "lock.new"
        lock = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft.rename(path / LOCK)  # never seen unlocked: another server's sweep would take it for dead
        return cls(path, lock)

    def endpoint(self, name: str) -> str:
        """An ipc endpoint inside this folder."""
        return f"ipc://{self.path / name}.sock"

    def publish(self, record: ServerRecord) -> None:
        """Make the server findable; readers see the whole record or none."""
        draft = self.path / "server.json.new"
        draft.write_bytes(msgspec.json.encode(record))
        draft.rename(self.path / RECORD)

    def close(self) -> None:
        """Remove the folder and what a killed gateway left beside it, and let go of the lock. Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        sweep_sockets(self.path.parent)
        os.close(self._lock)
        self._lock = -1


def _sweep(base: Path) -> None:
    """Remove what dead servers left. A folder without a lock may be a server that is just starting: left alone."""
    for folder in server_folders(base):
        if (folder / LOCK).exists() and not is_alive(folder):
            shutil.rmtree(folder, ignore_errors=True)
    sweep_sockets(base)
