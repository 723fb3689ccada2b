"""Files of who may come in: read with care, and read again when they change."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from pagewire_transport.errors import ConfigError

Contents = TypeVar("Contents")

OTHERS_READ: Final = stat.S_IRWXG | stat.S_IRWXO
OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def read_private(path: Path, *, most_bytes: int, forbidden: int, because: str, hint: str = "") -> bytes:
    """What a file of keys holds.

    Args:
        path: of the file.
        most_bytes: a larger one is none.
        forbidden: bits that its mode must not have.
        because: in the middle of a sentence: "others may … {because}".
        hint: behind the message that it cannot be read.

    Raises:
        ConfigError: it cannot be read, is too large, or others may do with it what they should not.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}{hint}") from None
    if mode & forbidden:
        doing = "write" if forbidden == OTHERS_WRITE else "read"
        raise ConfigError(f"others may {doing} {path}, and so {because}: chmod 600 {path}")
    if len(data) > most_bytes:
        raise ConfigError(f"{path} has more than {most_bytes} bytes; is it the file of keys?")
    return data


class WatchedFile(Generic[Contents]):
    """What a file holds, as it is now: a change counts at once, without a restart. Costs one `stat` a look.

    Args:
        path: of the file.
        load: reads it; raises `ConfigError`.
        nothing: counts in place of a file that is gone or damaged; `problem` then says why.

    Raises:
        ConfigError: as `load`.
    """

    def __init__(self, path: str | os.PathLike[str], load: Callable[[Path], Contents], nothing: Contents) -> None:
        self.path = Path(path).expanduser()
        self.problem: str | None = None
        self._load = load
        self._nothing = nothing
        self._seen = self._identity()
        self._contents = load(self.path)

    def contents(self) -> Contents:
        """What it holds now."""
        now = self._identity()
        if now != self._seen:
            self._seen = now
            try:
                self._contents, self.problem = self._load(self.path), None
            except ConfigError as error:
                self._contents, self.problem = self._nothing, error.message
        return self._contents

    def reload(self) -> Contents:
        """Read it whether it changed or not.

        Raises:
            ConfigError: it is damaged, and counts as `nothing`.
        """
        self._seen = None
        contents = self.contents()
        if self.problem is not None:
            raise ConfigError(self.problem)
        return contents

    def _identity(self) -> tuple[int, int, int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
