"""Numbers of streams: each new one gets the next that is free."""

from __future__ import annotations

from collections.abc import Container

from pagewire_transport.messages import MAX_STREAM


class StreamNumbers:
    """Counts from 1 to `MAX_STREAM`, and then again. Holds one number (`itertools.cycle` would keep all that it ever gave)."""

    def __init__(self, last: int = 0) -> None:
        self._last = last

    def next(self, in_use: Container[int]) -> int:
        """The next number that is not in use; there must be one."""
        while True:
            self._last = self._last % MAX_STREAM + 1
            if self._last not in in_use:
                return self._last
