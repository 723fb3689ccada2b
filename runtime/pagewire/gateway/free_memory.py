"""What thousands of connections leave behind when they are gone: free memory that the C library keeps for itself.

libzmq takes about 20 KiB a connection and frees them. glibc keeps them in arenas full of holes, and would take the size of
the largest buffer freed for what belongs there, too. Measured: ten thousand connections, each with a frame of 1 MiB half sent,
left 150 MiB resident, of which 9 were in use; a second flood of that kind 50 more. Requests over HTTP whose clients left are
cycles (task, its end, the frames that it passed), which the collector, tamed as it is, finds after hours.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from typing import Any, Final

_M_MMAP_THRESHOLD: Final = -3
_APART: Final = 128 * 2**10
"""glibc's own first value; set, it stays: what is larger goes back to the system when it is freed."""
_MANY: Final = 1000
_QUIET: Final = 0.5
"""It is quiet when so few were closed as a part of the most in such a time: clients that connect anew for each request never cease.
A flood that closes less than twice as many as they do is not told from them; what it leaves goes with the next."""
_LEAST_LOOKS: Final = 8
"""From one time to the next: clients that come in waves are no reason to collect every second."""


class FreeMemory:
    """Hands it back to the system once many connections were closed and it has become quiet. Elsewhere than on glibc: nothing.

    Args:
        num_closed: connections that were closed since the start.
    """

    def __init__(self, num_closed: Callable[[], int]) -> None:
        self._num_closed = num_closed
        self._seen = self._handed_back_at = num_closed()
        self._most = 0  # from one look to the next, since it was handed back
        self._looks = _LEAST_LOOKS  # since then
        self._library: Any = None
        self._work: asyncio.Future[int] | None = None
        try:
            library = ctypes.CDLL(None)
            library.mallopt(_M_MMAP_THRESHOLD, _APART)
            library.malloc_trim.argtypes = [ctypes.c_size_t]
        except (OSError, AttributeError, TypeError):
            return
        self._library = library

    def look(self) -> None:
        """To be called now and then. Handing back is for a thread: a tenth of a second after ten thousand connections."""
        before, self._seen = self._seen, self._num_closed()
        closed = self._seen - before
        is_quiet = closed < max(_MANY // 20, _QUIET * self._most)
        self._most = max(self._most, closed)
        self._looks += 1
        if not is_quiet or self._looks < _LEAST_LOOKS or self._seen - self._handed_back_at < _MANY:
            return
        self._handed_back_at, self._most, self._looks = self._seen, 0, 0
        gc.collect()  # of what was made since the start; milliseconds
        if self._library is not None and (self._work is None or self._work.done()):
            self._work = asyncio.get_running_loop().run_in_executor(None, self._library.malloc_trim, 0)
