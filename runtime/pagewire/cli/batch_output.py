"""The file of a batch's answers: appended to as they come, so that a stop at any moment loses nothing, and then sorted.

Each record carries `line`, the number of the line that it answers (from 1), and `of`, a hash of that line. A batch that is
run again takes the records that are whole as done, cuts off half a line at the end (a kill -9 or a full disk leaves one),
and refuses a file whose records answer other lines.

A record is one `write`; the operating system has it when that returns, whatever happens to this process afterwards. A
crash of the machine may lose the last seconds, whose lines are then answered again. One `fsync` a record was rejected: it
takes longer than a small model's answer.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from pagewire.errors import ConfigError

_HASH_DIGITS = 16


class _Head(msgspec.Struct):
    """What is read of a record."""

    line: int
    of: str
    error: Any = None


def hash_of(line: bytes) -> str:
    """Which line a record answers, in short."""
    return hashlib.sha256(line.strip()).hexdigest()[:_HASH_DIGITS]


class BatchOutput:
    """The open file. `done` maps the number of each answered line to its hash, `num_errors` counts records of errors."""

    def __init__(self, path: Path) -> None:
        """Open or make it, and read what is done.

        Raises:
            ConfigError: another batch writes it, it cannot be opened, or it holds something else.
        """
        self.path = path
        self.done: dict[int, str] = {}
        self.num_errors = 0
        self._spans: dict[int, tuple[int, int]] = {}
        self._size = 0
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"another batch writes {path} now") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, number: int, line: bytes, record: Mapping[str, Any]) -> None:
        """Write the record that answers `line`."""
        of = hash_of(line)
        data = msgspec.json.encode({"line": number, "of": of, **record}) + b"\n"
        written = 0
        while written < len(data):  # an unbuffered file may take less; the rest then makes the line whole
            written += self._file.write(data[written:]) or 0
        self._note(number, of, len(data), is_error=record.get("error") is not None)

    def sort(self) -> None:
        """Put the records in the order of their lines, all at once: the file is the old one or the new one."""
        if list(self._spans) == sorted(self._spans):
            return
        draft = self.path.with_name(f".{self.path.name}.sorting")
        with draft.open("wb") as out:
            for number in sorted(self._spans):
                start, size = self._spans[number]
                out.write(os.pread(self._file.fileno(), size, start))
            out.flush()
            os.fsync(out.fileno())
        draft.replace(self.path)

    def _read(self) -> None:
        self._file.seek(0)
        with os.fdopen(os.dup(self._file.fileno()), "rb") as whole:
            for index, data in enumerate(whole, start=1):
                if not data.endswith(b"\n"):
                    break  # half a line: written again
                try:
                    head = msgspec.json.decode(data, type=_Head)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise ConfigError(f"{self.path}, line {index} is no record of a batch: {error}") from None
                if head.line in self.done:
                    raise ConfigError(f"{self.path} answers line {head.line} twice; move it away")
                self._note(head.line, head.of, len(data), is_error=head.error is not None)
        self._file.truncate(self._size)

    def _note(self, number: int, of: str, size: int, *, is_error: bool) -> None:
        self.done[number] = of
        self.num_errors += is_error
        self._spans[number] = (self._size, size)
        self._size += size
