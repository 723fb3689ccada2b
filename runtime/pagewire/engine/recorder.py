"""Writes what the scheduler is told and decides to a file, off the loop: `pagewire serve --record FILE`.

The loop encodes and appends to a queue; a thread writes. The queue has a bound: beyond it the recording ends, and says so,
since a recording with a hole is none and the engine waits for no disk. An engine that is started again writes
another file (FILE.1, FILE.2, …): what the one before did is what somebody may want to look at.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog

from pagewire.errors import ConfigError
from pagewire.recording.events import MAGIC, Cut, Event, frame
from pagewire.recording.scheduler import RecordedScheduler, header_of

MAX_PENDING_BYTES: Final = 64 << 20
_EVERY_S: Final = 0.1

_log = structlog.get_logger("pagewire.engine")


class Recorder:
    """One file. `record` is called on the loop's thread alone.

    Args:
        path: FILE, or the first of FILE.1, FILE.2, … that does not exist.
        max_pending_bytes: that may wait to be written.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str, *, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self.path, self._file = _create(Path(path).expanduser())
        self._max_pending_bytes = max_pending_bytes
        self._frames: deque[bytes] = deque()
        self._num_taken = 0  # bytes; the loop's
        self._num_written = 0  # the thread's
        self._is_open = True
        self._closing = threading.Event()
        self._frames.append(MAGIC)
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()
        _log.info("recording", path=str(self.path))

    def make_scheduler(self, **arguments: Any) -> RecordedScheduler:
        """A scheduler that is recorded here; the only one of this file."""
        self._append(frame(header_of(**arguments)))
        return RecordedScheduler(self.record, **arguments)

    def record(self, event: Event) -> None:
        """Take an event. Never waits, never raises for the file's sake."""
        if self._is_open:
            self._append(frame(event))

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._is_open = False
        self._closing.set()
        self._thread.join(5.0)

    def _append(self, data: bytes) -> None:
        pending = self._num_taken - self._num_written
        if pending + len(data) > self._max_pending_bytes:
            self._is_open = False
            data = frame(Cut(pending))
            _log.error("recording_cut", path=str(self.path), pending_bytes=pending)
        self._num_taken += len(data)
        self._frames.append(data)

    def _write(self) -> None:
        try:
            with self._file as file:
                while not self._closing.wait(_EVERY_S):
                    self._drain(file)
                self._drain(file)
        except OSError as error:
            self._is_open = False
            _log.error("recording_failed", path=str(self.path), reason=error.strerror)

    def _drain(self, file: BinaryIO) -> None:
        while self._frames:
            data = self._frames.popleft()
            file.write(data)
            self._num_written += len(data)
        file.flush()


def _create(path: Path) -> tuple[Path, BinaryIO]:
    """A file that did not exist, for its owner alone: prompts are in it."""
    for number in itertools.count():
        tried = path.with_name(f"{path.name}.{number}") if number else path
        try:
            number_of_file = os.open(tried, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot write {tried}: {error.strerror}", field="engine.record") from None
        return tried, os.fdopen(number_of_file, "wb", buffering=1 << 20)
    raise AssertionError
