"""When a part that died is started again: sooner the rarer it dies, and not for ever."""

from __future__ import annotations

from typing import Final

LONGEST_S: Final = 30.0
"""Between a death and the next start."""

HEALTHY_S: Final = 60.0
"""A part that was ready for so long has recovered: earlier deaths no longer count."""


class Restarts:
    """Counts deaths in a row. Pure: the time that the part served is passed in.

    Args:
        limit: restarts in a row; 0: none.
        backoff_s: before the first; each that follows waits twice as long, `LONGEST_S` at most.
    """

    def __init__(self, limit: int, backoff_s: float) -> None:
        self.limit = limit
        self.num_in_a_row = 0
        self.num_total = 0
        self._backoff_s = backoff_s

    def next_delay_s(self, served_s: float) -> float | None:
        """Seconds to wait before the next start; None: give up.

        Args:
            served_s: how long it was ready before it died; 0 if it never was.
        """
        if served_s >= HEALTHY_S:
            self.num_in_a_row = 0
        if self.num_in_a_row >= self.limit:
            return None
        # The exponent is bounded, since a float is not: 2 ** 1024 overflows.
        delay_s = min(self._backoff_s * 2.0 ** min(self.num_in_a_row, 30), LONGEST_S)
        self.num_in_a_row += 1
        self.num_total += 1
        return delay_s
