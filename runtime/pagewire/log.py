"""Logging: structlog to stderr, one line an event, written by a thread of its own so that no loop waits for a terminal.

Events are nouns and verbs in the past (`request_refused`, `engine_ready`); what varies goes into keys. Nothing is
logged per token or per step. A log line that finds the queue full is dropped and counted: a stopped terminal must not
stop a server (F8).
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from typing import Final, TextIO

import structlog

_CAPACITY: Final = 10_000
_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class LogWriter:
    """Stands where structlog expects a file: `write` never waits, a thread does the writing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_CAPACITY)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        """Nothing to do: the thread flushes when it has nothing more to write."""

    def close(self, timeout: float = 1.0) -> None:
        """Write what is queued, for at most `timeout` seconds."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (text := self._lines.get()) is not None:
            try:
                self._stream.write(text)
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # the terminal is gone: there is nobody left to tell
                return


def configure(process: str, *, level: str = "info", stream: TextIO | None = None) -> LogWriter:
    """Set up logging for this process, once, before the first event.

    Args:
        process: bound to every event (`engine`, `gateway`, `supervisor`).
        level: `debug`, `info`, `warning` or `error`.
        stream: where to; stderr by default.

    Returns:
        the writer; it is closed at exit, and tells how many lines it dropped.
    """
    writer = LogWriter(stream or sys.stderr)
    atexit.register(writer.close)
    structlog.configure(
        processors=[
            lambda _logger, _method, event: {"process": process, **event},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(
                key_order=["timestamp", "level", "process", "event"], bool_as_flag=False
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(writer),  # type: ignore[arg-type]  # only write and flush are used
        cache_logger_on_first_use=True,
    )
    return writer
