"""Where a server listens: ipc in a private folder unless told otherwise, TCP on loopback, anything public with keys only.

ipc:///run/user/1000/pagewire/server.sock     a socket file; 107 bytes of path at most
ipc://*                                       a fresh file in the private folder
tcp://127.0.0.1:5570   tcp://[::1]:5570       loopback; `localhost` is 127.0.0.1
tcp://127.0.0.1:*      tcp://127.0.0.1:0      a free port, picked by the kernel at bind (never searched: F9)
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq

from pagewire_transport.errors import ConfigError

MAX_IPC_PATH: Final = 107
"""`sun_path` has 108 bytes, the last of which is NUL."""

_MAX_PORT: Final = 65535

_SWEEPS: Final = 3
_SWEEP_S: Final = 0.01
"""A sweep holds a lock for microseconds; a lock that is held so much longer is a server's."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed address. For ipc, `path` is absolute ("" for a fresh one); for tcp, `port` 0 means any free one."""

    scheme: str
    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        """As libzmq takes it."""
        if self.scheme == "ipc":
            return f"ipc://{self.path or '*'}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"

    @property
    def is_ipv6(self) -> bool:
        """Needs the socket's IPV6 option."""
        return ":" in self.host

    @property
    def is_private(self) -> bool:
        """Only this machine reaches it."""
        if self.scheme == "ipc":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False


def parse(url: str, *, field: str = "url") -> Endpoint:
    """An endpoint from its URL.

    Raises:
        ConfigError: another scheme, a port out of range, or a path that is too long or not private to this user.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise ConfigError(f"{url!r} is no endpoint: give ipc://PATH or tcp://HOST:PORT", field=field)
    if scheme == "ipc":
        return Endpoint("ipc", path="" if rest == "*" else _checked_path(rest, field))
    host, separator, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not separator or not host or (":" in host and not rest.startswith("[")):
        raise ConfigError(f"{url!r} needs a host and a port: tcp://127.0.0.1:5570, tcp://[::1]:5570", field=field)
    if port != "*" and not (port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT):
        raise ConfigError(f"{port!r} is no port: give 0 to {_MAX_PORT}, where 0 or * takes a free one", field=field)
    return Endpoint("tcp", host="127.0.0.1" if host == "localhost" else host, port=0 if port == "*" else int(port))


def _checked_path(path: str, field: str) -> str:
    if path.startswith("@"):
        # Anybody on the machine may connect to a name in the abstract namespace; files have owners.
        raise ConfigError("abstract ipc names are not private to you; give a path", field=field)
    if not path or "\0" in path:
        raise ConfigError("ipc:// needs a path", field=field)
    absolute = os.path.abspath(path)  # noqa: PTH100  (`Path.resolve` follows links, and the path may not exist)
    if len(os.fsencode(absolute)) > MAX_IPC_PATH:
        raise ConfigError(
            f"{absolute} has {len(os.fsencode(absolute))} bytes; a socket's path has room for {MAX_IPC_PATH}",
            field=field,
        )
    return absolute


def private_folder() -> Path:
    """A folder that nobody but this user can enter, made if missing.

    `$XDG_RUNTIME_DIR/pagewire` where the session has such a folder, else `pagewire-<user id>` in the folder for temporary
    files.

    Raises:
        ConfigError: it exists and belongs to somebody else, or others may enter it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and _is_private_folder(Path(runtime)):
        folder = Path(runtime) / "pagewire"
    else:
        folder = Path(tempfile.gettempdir()) / f"pagewire-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private_folder(folder):
        raise ConfigError(f"{folder} must be a folder of yours that nobody else may enter (chmod 700, or remove it)")
    return folder


def default_endpoint() -> str:
    """Where a server listens and a client looks if neither is told."""
    return f"ipc://{_checked_path(str(private_folder() / 'server.sock'), 'bind')}"


def ipc_path(url: str) -> str:
    """The path of an ipc endpoint; "" for any other."""
    return parse(url).path if url.startswith("ipc://") else ""


def is_refused(url: str) -> bool:
    """Nobody can listen there: an ipc endpoint whose socket is missing, or was left behind by a server that died.

    False where only trying tells: TCP, and a server that is too busy to answer.
    """
    path = ipc_path(url)
    if not path:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except OSError:
            return False
    return False


def sweep_sockets(folder: Path) -> None:
    """Remove the sockets that servers which were killed left in `folder`: those whose lock can be had."""
    for lock_path in folder.glob("*.sock.lock"):
        try:
            descriptor = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Removed under the lock, socket first: a server that waits for it finds another file there and tries again.
            if _is_same_file(descriptor, str(lock_path)):
                lock_path.with_suffix("").unlink(missing_ok=True)
                lock_path.unlink(missing_ok=True)
        except OSError:  # held: a live server's
            pass
        finally:
            os.close(descriptor)


def _is_private_folder(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


# ---- bind ------------------------------------------------------------------------------------------------------------


class Binding:
    """An address that a socket holds. `release` after the socket's context has ended: libzmq removes the file late."""

    def __init__(self, url: str, lock: _PathLock | None) -> None:
        self.url = url
        """The real one: with the port that was picked."""
        self._lock = lock

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def bind(sock: zmq.Socket[Any], url: str, *, has_keys: bool = False, field: str = "bind") -> Binding:
    """Bind `sock`; for TCP its IPV6 option is set as needed.

    Args:
        sock: not bound yet.
        url: see the head of this file.
        has_keys: the socket has CURVE keys; only then may the address be public (F10).
        field: what a complaint names.

    Raises:
        ConfigError: the address is public and there are no keys, is in use, or cannot be had.
    """
    endpoint = parse(url, field=field)
    if not endpoint.is_private and not has_keys:
        raise ConfigError(
            f"{endpoint.url} can be reached from other machines, and no keys are set: bind to ipc or to loopback, or set "
            "curve_key_file and curve_allow_file (`pagewire keys curve new`)",
            field=field,
        )
    if endpoint.scheme == "tcp":
        sock.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
        _bind(sock, endpoint.url, field)
        bound = sock.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return Binding(bound.rstrip(b"\0").decode(), None)
    path = endpoint.path or _checked_path(str(private_folder() / f"{secrets.token_hex(8)}.sock"), field)
    lock = _PathLock.take(path, field)
    try:
        _bind(sock, f"ipc://{path}", field)
        Path(path).chmod(0o600)
    except BaseException:
        lock.release()
        raise
    return Binding(f"ipc://{path}", lock)


def _bind(sock: zmq.Socket[Any], url: str, field: str) -> None:
    try:
        sock.bind(url)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(
                f"{url} is in use: another server runs there; stop it, or take another address", field=field
            ) from None
        raise ConfigError(f"cannot listen at {url}: {error.strerror}", field=field) from None


class _PathLock:
    """Held while a server listens at an ipc path: `<path>.lock`, by `flock`, which the kernel drops when a process dies.

    libzmq removes a socket file that is in its way, so that a second server would silently take a live one's place.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: str, field: str) -> _PathLock:
        try:
            if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise ConfigError(f"{path} is there and is no socket; it would be overwritten", field=field)
            sweeps_waited = 0
            while True:
                descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # A server that just left removed the file that we opened: its lock excludes nobody, try again.
                    if _is_same_file(descriptor, f"{path}.lock"):
                        break
                except BlockingIOError:
                    if sweeps_waited == _SWEEPS:
                        os.close(descriptor)
                        raise
                    sweeps_waited += 1
                    time.sleep(_SWEEP_S)  # it may be a sweep that looks at it, and no server
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        except BlockingIOError:
            raise ConfigError(
                f"ipc://{path} is in use: another server runs there; stop it, or take another address", field=field
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot listen at ipc://{path}: {error.strerror}", field=field) from None
        lock = cls(path, descriptor)
        if _is_answered(path):  # by a server that takes no such lock
            lock.release()
            raise ConfigError(
                f"ipc://{path} is in use: another server runs there; stop it, or take another address", field=field
            )
        return lock

    def release(self) -> None:
        Path(self._path).unlink(missing_ok=True)  # libzmq leaves it behind when it is closed in a hurry
        Path(f"{self._path}.lock").unlink(missing_ok=True)
        os.close(self._descriptor)


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))  # noqa: PTH116
    except OSError:
        return False


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:  # its backlog is full: somebody has a backlog there
            return True
        except OSError:
            return False
    return True
