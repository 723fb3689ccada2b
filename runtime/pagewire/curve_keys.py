"""Making and changing the files of CURVE keys; `pagewire_transport.curve` says what they hold and reads them.

Files are replaced as a whole and have mode 0600, as those of API keys (`keys`).
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import zmq

from pagewire.config import ServerConfig
from pagewire.errors import ConfigError
from pagewire.keys import check_name, locked, write_lines
from pagewire_transport.curve import Allowed, KeyPair, ServerCurve, checked_key, load_allowed


def make(path: str | os.PathLike[str], name: str, *, now: datetime) -> KeyPair:
    """A new key file.

    Args:
        path: of the file, which must not be there.
        name: letters, digits and `._@-`, 64 at most.
        now: in UTC.

    Raises:
        ConfigError: a bad name, a file that is there, or one that cannot be written.
    """
    path = Path(path).expanduser()
    check_name(name)
    public, secret = zmq.curve_keypair()
    while public.startswith(b"-"):  # a command line would take it for a flag
        public, secret = zmq.curve_keypair()
    pair = KeyPair(name=name, public=public.decode(), secret=secret.decode(), created=_text(now))
    with locked(path):
        if path.exists():
            raise ConfigError(f"{path} is there already; remove it first, or name another --file")
        write_lines(path, [pair])
    return pair


def allow(path: str | os.PathLike[str], name: str, public: str, *, now: datetime) -> None:
    """Let a key in.

    Args:
        path: of the allow-list; made if it is missing.
        name: whose key it is, as in `make`.
        public: the key.
        now: in UTC.

    Raises:
        ConfigError: a bad name or key, one that stands there already, or a file that cannot be read or written.
    """
    path = Path(path).expanduser()
    check_name(name)
    entry = Allowed(name=name, public=checked_key(public, "the public key"), created=_text(now))
    with locked(path):
        known = list(load_allowed(path).values()) if path.exists() else []
        for other in known:
            if name == other.name or public == other.public:
                raise ConfigError(f"{path} has the key {other.public} as {other.name!r} already; revoke it first")
        write_lines(path, [*known, entry])


def revoke(path: str | os.PathLike[str], name: str) -> None:
    """Take a key off the list.

    Raises:
        ConfigError: there is none of that name, or the file cannot be read or written.
    """
    path = Path(path).expanduser()
    with locked(path):
        known = list(load_allowed(path).values())
        rest = [entry for entry in known if entry.name != name]
        if len(rest) == len(known):
            names = ", ".join(entry.name for entry in known) or "none"
            raise ConfigError(f"there is no key {name!r} in {path}; there are: {names}")
        write_lines(path, rest)


def server_curve(config: ServerConfig) -> ServerCurve | None:
    """The keys of a server that is to have some.

    Raises:
        ConfigError: one of the two files is not given, cannot be read, or is damaged; `field` names it.
    """
    files = {"curve_key_file": config.curve_key_file, "curve_allow_file": config.curve_allow_file}
    if not any(files.values()):
        return None
    for name, path in files.items():
        if not path:
            other = next(other for other in files if other != name)
            raise ConfigError(f"is missing: {other} alone lets nobody in", field=f"server.{name}")
    if not zmq.has("curve"):
        raise ConfigError("this build of libzmq has no CURVE", field="server.curve_key_file")
    return ServerCurve.load(config.curve_key_file, config.curve_allow_file)


def _text(now: datetime) -> str:
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def shown(allowed: dict[str, Allowed]) -> list[str]:
    """A line for each entry."""
    width = max((len(entry.name) for entry in allowed.values()), default=0)
    return [f"{entry.name:{width}}  since {entry.created or 'some day'}  {entry.public}" for entry in allowed.values()]
