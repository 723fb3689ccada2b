"""API keys of a server: a file of names and hashes, in which no key can be read.

One JSON object a line, made by `pagewire keys new`:

    {"name": "laptop", "sha256": "<64 hex digits, of the whole key in ASCII>", "created": "2026-01-31T12:00:00Z"}

A key is `pw_` and 43 characters from 32 random bytes. Nobody guesses that, so that a plain hash suffices: the slow,
salted ones are for passwords that people invent, and would cost every request milliseconds.

The file is replaced as a whole (written beside, then renamed), so that a reader sees the old keys or the new ones. It is
written with mode 0600; one that others may write is refused, since whoever writes it lets himself in.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from pagewire.errors import ConfigError
from pagewire_transport.watched_file import OTHERS_WRITE, WatchedFile, read_private

PREFIX: Final = "pw_"
_RANDOM_BYTES: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LARGEST_FILE: Final = 16 * 2**20


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of the file.

    Attributes:
        name: whose key it is, unique in the file; what logs and metrics may show.
        sha256: of the key, in lower-case hexadecimal digits.
        created: when, ISO 8601 in UTC.
    """

    name: str
    sha256: str
    created: str = ""


class KeySet:
    """The keys that a server takes. Immutable; an empty one takes none."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)
        self._digests = [(bytes.fromhex(key.sha256), key.name) for key in self._keys]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def check(self, presented: str) -> str | None:
        """The name of the key that `presented` is, or None.

        Takes the same time whatever is presented: it is hashed, and the hash is compared with every key's, in constant
        time each (F49). A dict of hashes was rejected: finding one there takes longer than not finding one.
        """
        digest = hashlib.sha256(presented.encode("utf-8", "surrogatepass")).digest()
        found: str | None = None
        for known, name in self._digests:
            if hmac.compare_digest(known, digest):
                found = name
        return found


class KeyFile:
    """The keys of a file as it is now; one that is gone or damaged takes nobody in."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read it.

        Raises:
            ConfigError: as `load`.
        """
        self._file: WatchedFile[KeySet] = WatchedFile(path, load, KeySet())

    @property
    def problem(self) -> str | None:
        """Why it takes nobody in."""
        return self._file.problem

    def check(self, presented: str) -> str | None:
        """As `KeySet.check`, on the file's present contents."""
        return self._file.contents().check(presented)

    def reload(self) -> int:
        """Read it whether it changed or not; how many keys it has.

        Raises:
            ConfigError: it is damaged, and takes nobody in.
        """
        return len(self._file.reload())


def load(path: str | os.PathLike[str]) -> KeySet:
    """The keys of a file.

    Raises:
        ConfigError: it cannot be read, others may write it, or a line is no key; the line is named.
    """
    path = Path(path).expanduser()
    data = read_private(
        path,
        most_bytes=_LARGEST_FILE,
        forbidden=OTHERS_WRITE,
        because="let themselves in",
        hint="; `pagewire keys new NAME` makes a key",
    )
    keys: list[Key] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            keys.append(_key(line, f"{path}, line {number}"))
            if any(key.name == keys[-1].name for key in keys[:-1]):
                raise ConfigError(f"{path}, line {number}: there is another key with the name {keys[-1].name!r}")
    return KeySet(keys)


def add(path: str | os.PathLike[str], name: str, *, now: datetime) -> str:
    """Make a key, write its line, and give the key: it is nowhere else and cannot be had again.

    Args:
        path: of the file; made if it is missing.
        name: letters, digits and `._@-`, 64 at most.
        now: in UTC.

    Raises:
        ConfigError: a bad name, one that is taken, or a file that cannot be read or written.
    """
    path = Path(path).expanduser()
    check_name(name)
    key = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    made = Key(name=name, sha256=hashlib.sha256(key.encode()).hexdigest(), created=now.strftime("%Y-%m-%dT%H:%M:%SZ"))
    with locked(path):
        keys = list(load(path)) if path.exists() else []
        if any(other.name == name for other in keys):
            raise ConfigError(f"there is a key {name!r} in {path}; revoke it first, or take another name")
        write_lines(path, [*keys, made])
    return key


def revoke(path: str | os.PathLike[str], name: str) -> None:
    """Take a key's line out of the file.

    Raises:
        ConfigError: there is no such key, or the file cannot be read or written.
    """
    path = Path(path).expanduser()
    with locked(path):
        keys = list(load(path))
        rest = [key for key in keys if key.name != name]
        if len(rest) == len(keys):
            names = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"there is no key {name!r} in {path}; there are: {names}")
        write_lines(path, rest)


def check_name(name: str) -> None:
    """Raises ConfigError: no name for a key."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a key: up to 64 letters, digits and . _ @ -")


def _key(line: bytes, where: str) -> Key:
    try:
        key = msgspec.json.decode(line, type=Key)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no key: {error}") from None
    if not _SHA256.fullmatch(key.sha256):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits in lower case")
    if not _NAME.fullmatch(key.name):
        raise ConfigError(f"{where}: {key.name!r} is no name for a key: up to 64 letters, digits and . _ @ -")
    return key


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile. The folder is locked: the file itself is replaced."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_lines(path: Path, values: Iterable[msgspec.Struct]) -> None:
    """Replace a file as a whole: a JSON object a line, mode 0600.

    Raises:
        ConfigError: it cannot be written.
    """
    data = b"".join(msgspec.json.encode(value) + b"\n" for value in values)
    draft = ""
    try:
        descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).replace(path)
    except OSError as error:
        if draft:
            Path(draft).unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
