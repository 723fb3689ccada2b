"""The running servers of this user and machine: a folder each, alive exactly as long as its lock is held.

    <private folder of the user>/    0700, see `pagewire_transport.endpoints`
        <random>/                    one server
            lock                     held (flock) by the supervisor; the kernel lets go when it dies
            server.json              written once the server is ready: url, model, process id

The lock and not the process id says whether a server lives: ids are reused, and a kill -9 leaves files behind.
Here is the reader's side, which clients need; supervisors write (`pagewire.supervisor.rendezvous`).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from pagewire_transport.endpoints import default_endpoint, ipc_path, private_folder
from pagewire_transport.errors import ConnectionLost

LOCK = "lock"
RECORD = "server.json"


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a running server tells those who look for it."""

    url: str
    admin: str = ""
    """Where its owner may stop it."""
    model: str
    pid: int
    started: float
    """Seconds since 1970, to prefer the newest."""


def find_servers(base: Path | None = None) -> list[ServerRecord]:
    """The servers of this user that are ready, newest first."""
    records = []
    for folder in server_folders(base or private_folder()):
        try:
            record = msgspec.json.decode((folder / RECORD).read_bytes(), type=ServerRecord)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if is_alive(folder):
            records.append(record)
    return sorted(records, key=lambda record: record.started, reverse=True)


def find_url(base: Path | None = None) -> str:
    """Where the newest server of this user is reached; without one the default endpoint, if somebody listens there.

    Raises:
        ConnectionLost: nobody serves; the message tells a server that is starting from none at all.
    """
    servers = find_servers(base)
    if servers:
        return servers[0].url
    if any(is_alive(folder) for folder in server_folders(base or private_folder())):
        raise ConnectionLost("your server is still starting; try again when it says where it serves")
    url = default_endpoint()  # a gateway that was started by hand has no folder
    if not Path(ipc_path(url)).is_socket():
        raise ConnectionLost(
            "no server of yours runs on this machine; start one with `pagewire serve`, or give its URL"
        )
    return url


def server_folders(base: Path) -> list[Path]:
    """The folders of all servers, dead ones too."""
    return [path for path in base.iterdir() if path.is_dir()]


def is_alive(folder: Path) -> bool:
    """Its supervisor runs."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
