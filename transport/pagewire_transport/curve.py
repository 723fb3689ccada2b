"""CURVE: ZeroMQ's own encryption and authentication, by files of keys. Keys are 40 characters of Z85.

    key file     one JSON object, mode 0600: {"name": …, "public": …, "secret": …, "created": …}
    allow-list   one JSON object a line: {"name": …, "public": …, "created": …}

A server has a key file and an allow-list; a client has a key file and the server's public key. The list is read again
whenever the file changes, so that a key that is taken off it counts for nothing at once.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils import z85

from pagewire_transport.errors import ConfigError
from pagewire_transport.watched_file import OTHERS_READ, OTHERS_WRITE, WatchedFile, read_private

ZAP_DOMAIN: Final = b"pagewire"
USER: Final = "User-Id"
"""The message property in which libzmq tells whose connection a frame came by: the client's public key."""

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"
_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_KEY_BYTES: Final = 32
_LARGEST_FILE: Final = 4 * 2**20


class KeyPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key file."""

    name: str
    public: str
    secret: str
    created: str = ""

    def __repr__(self) -> str:
        """Without the secret: it has no place in a log."""
        return f"KeyPair(name={self.name!r}, public={self.public!r})"


class Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of an allow-list."""

    name: str
    public: str
    created: str = ""


def checked_key(text: str, what: str) -> str:
    """`text`, which is a key.

    Raises:
        ConfigError: it is none.
    """
    if not _KEY.fullmatch(text):
        raise ConfigError("must be a key of CURVE: 40 characters of Z85", field=what)
    return text


def load_key_pair(path: str | os.PathLike[str]) -> KeyPair:
    """Both keys of a file.

    Raises:
        ConfigError: it cannot be read, others may read it, it holds no keys, or they do not belong together.
    """
    path = Path(path).expanduser()
    data = read_private(path, most_bytes=_LARGEST_FILE, forbidden=OTHERS_READ, because="the secret in it")
    try:
        pair = msgspec.json.decode(data, type=KeyPair)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no file of `pagewire keys curve new`: {error}") from None
    if not _KEY.fullmatch(pair.secret) or zmq.curve_public(pair.secret.encode()).decode() != pair.public:
        raise ConfigError(f"{path}: the secret and the public key do not belong together")
    return pair


def load_allowed(path: str | os.PathLike[str]) -> dict[str, Allowed]:
    """Who may connect, by public key.

    Raises:
        ConfigError: the file cannot be read, others may write it, or a line is none; the line is named.
    """
    path = Path(path).expanduser()
    data = read_private(path, most_bytes=_LARGEST_FILE, forbidden=OTHERS_WRITE, because="let themselves in")
    out: dict[str, Allowed] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=Allowed)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if not _KEY.fullmatch(entry.public):
            raise ConfigError(f"{path}, line {number}: `public` must be 40 characters of Z85")
        if entry.public in out or any(entry.name == other.name for other in out.values()):
            raise ConfigError(f"{path}, line {number}: the name or the key stands there twice")
        out[entry.public] = entry
    return out


class AllowList:
    """An allow-list as its file is now; one that is gone or damaged lets nobody in."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read it.

        Raises:
            ConfigError: as `load_allowed`.
        """
        self._file: WatchedFile[dict[str, Allowed]] = WatchedFile(path, load_allowed, {})

    @property
    def problem(self) -> str | None:
        """Why it lets nobody in."""
        return self._file.problem

    def name_of(self, public: str) -> str | None:
        """Whose key this is; None: nobody's."""
        entry = self._file.contents().get(public)
        return entry.name if entry is not None else None

    def reload(self) -> int:
        """Read it whether it changed or not; how many it lets in.

        Raises:
            ConfigError: it is damaged, and lets nobody in.
        """
        return len(self._file.reload())


@dataclass(frozen=True, slots=True)
class ClientCurve:
    """What a client needs to talk to a server with keys."""

    server_key: str
    """The server's public key."""
    pair: KeyPair

    @classmethod
    def load(cls, server_key: str, key_file: str | os.PathLike[str]) -> ClientCurve:
        """Raises ConfigError: no key, or no file of keys."""
        return cls(checked_key(server_key, "server_key"), load_key_pair(key_file))

    def set_options(self, socket: zmq.Socket[Any]) -> None:
        """Before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret.encode())


@dataclass(frozen=True, slots=True)
class ServerCurve:
    """What a server needs: its keys, and whom it lets in."""

    pair: KeyPair
    allowed: AllowList = field(compare=False)

    @classmethod
    def load(cls, key_file: str | os.PathLike[str], allow_file: str | os.PathLike[str]) -> ServerCurve:
        """Raises ConfigError: as `load_key_pair` and `load_allowed`."""
        return cls(load_key_pair(key_file), AllowList(allow_file))

    def set_options(self, socket: zmq.Socket[Any]) -> None:
        """Before it binds, and after there is a `ZapHandler` in its context."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody gets in, rather than everybody


class ZapHandler:
    """Answers libzmq's question whether a peer may connect (ZeroMQ RFC 27), on the event loop.

    pyzmq's own runs in a thread, or on zmq.asyncio; here it is one more socket that the loop watches. The handshake waits
    meanwhile, in libzmq's thread, and nobody else does.
    """

    def __init__(self, context: zmq.Context[Any], name_of: Callable[[str], str | None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._name_of = name_of
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        self._loop.add_reader(self._socket.fileno(), self._round)
        self._loop.call_soon(self._round)  # its descriptor stays silent until it was found empty once
        self._is_open = True

    def _round(self) -> None:
        while self._is_open:
            try:
                self._answer(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.ZMQError:
                return

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Frames: routing id, empty, version, request id, domain, address, peer's id, mechanism, credentials."""
        known = (
            len(frames) == 9 and frames[2] == _ZAP_VERSION and frames[7] == b"CURVE" and len(frames[8]) == _KEY_BYTES
        )
        key = z85.encode(frames[8]).decode() if known else ""
        is_allowed = known and self._name_of(key) is not None
        verdict = (b"200", b"OK", key.encode(), b"") if is_allowed else (b"400", b"not on the list", b"", b"")
        self._socket.send_multipart([*frames[:2], _ZAP_VERSION, *frames[3:4], *verdict], zmq.NOBLOCK)

    def close(self) -> None:
        """Before the context ends."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)
