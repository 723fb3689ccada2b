"""Where servers of this user and machine are found: one private folder a server, alive exactly as long as its lock.

    <private folder of the user>/    0700, see `pagewire_transport.endpoints`
        <random>/                    one running server
            lock                     held (flock) by the supervisor; the kernel lets go when it dies
            engine.sock              where the gateway meets the engine
            server.json              written once the server is ready: url, model, process id

The lock and not the process id says whether a server lives: ids are reused, and a kill -9 leaves files behind.
Dead folders are swept when the next server starts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagewire_transport.endpoints import private_folder


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a running server tells those who look for it."""

    url: str
    model: str
    pid: int
    started: float
    """Seconds since 1970, to prefer the newest."""


@dataclass
class ServerFolder:
    """The folder of one server, held while this object is open."""

    path: Path
    _lock: int

    @classmethod
    def create(cls, base: Path | None = None) -> ServerFolder:
        """Make and lock a folder, and sweep those of dead servers."""
        base = base or private_folder()
        _sweep(base)
        path = Path(tempfile.mkdtemp(prefix="", dir=base))
        draft = path / "lock.new"
        lock = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft.rename(path / "lock")  # never seen unlocked: another server's sweep would take it for dead
        return cls(path, lock)

    def endpoint(self, name: str) -> str:
        """An ipc endpoint inside this folder."""
        return f"ipc://{self.path / name}.sock"

    def publish(self, record: ServerRecord) -> None:
        """Make the server findable; readers see the whole record or none."""
        draft = self.path / "server.json.new"
        draft.write_bytes(msgspec.json.encode(record))
        draft.rename(self.path / "server.json")

    def close(self) -> None:
        """Remove the folder and let go of the lock. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def find_servers(base: Path | None = None) -> list[ServerRecord]:
    """The running servers of this user, newest first."""
    records = []
    for folder in _folders(base or private_folder()):
        try:
            record = msgspec.json.decode((folder / "server.json").read_bytes(), type=ServerRecord)
        except (OSError, msgspec.DecodeError):
            continue
        if _is_alive(folder):
            records.append(record)
    return sorted(records, key=lambda record: record.started, reverse=True)


def _folders(base: Path) -> list[Path]:
    return [path for path in base.iterdir() if path.is_dir()]


def _is_alive(folder: Path) -> bool:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _sweep(base: Path) -> None:
    """Remove dead servers' folders. One without a lock file may be a server that is just starting: left alone."""
    for folder in _folders(base):
        if (folder / "lock").exists() and not _is_alive(folder):
            shutil.rmtree(folder, ignore_errors=True)
