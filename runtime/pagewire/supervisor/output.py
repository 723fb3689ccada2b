"""What a child writes to its standard error: passed on, and its last telling line kept to explain its death.

A thread for each child, since writing to our own standard error may wait for a stopped terminal (F8): the supervisor's
loop must not, and the child does not either, as its logging drops what a full pipe does not take.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import threading
from typing import Final

_LONGEST_LINE: Final = 16_384
_LONGEST_WORDS: Final = 300
_QUIET: Final = re.compile(rb"timestamp=\S+ level=(debug|info|warning) ")
_LOUD: Final = re.compile(rb"timestamp=\S+ level=error process=\S+ ")
_FATAL: Final = b"Fatal Python error: "


class Output:
    """Reads a pipe up to its end and closes it. Made on a running loop; `ended` resolves there.

    Args:
        fd: the read end.
        name: of the child.
    """

    def __init__(self, fd: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = fd
        self._rest = b""
        self._last = b""
        self._is_final = False
        self.ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name=f"output of the {name}", daemon=True).start()

    @property
    def last_words(self) -> str:
        """The last line that was no routine; what the interpreter said of a crash comes before all others. May be ""."""
        words = self._last.decode("utf-8", "replace")
        return words if len(words) <= _LONGEST_WORDS else words[:_LONGEST_WORDS] + " …"

    def _run(self) -> None:
        try:
            while data := os.read(self._fd, 65_536):
                self._take(data)
                with contextlib.suppress(OSError, ValueError):  # ours is closed: there is nobody to tell
                    if sys.stderr is not None:
                        _write(sys.stderr.fileno(), data)
        except OSError:
            pass
        finally:
            os.close(self._fd)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LONGEST_LINE:]
        for line in lines:
            words = _LOUD.sub(b"", line).strip()
            if words and not self._is_final and not _QUIET.match(line):
                self._last = words
            if words.startswith(_FATAL):  # what follows is the stack
                self._last, self._is_final = words, True


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
