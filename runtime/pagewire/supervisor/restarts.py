"""When a part that died is started again: at once if it had served, later the more often it dies young, and not for ever."""

from __future__ import annotations

from typing import Final

LONGEST_S: Final = 30.0
"""Between a death and the next start, at most."""

SETTLED_S: Final = 5.0
"""A part that was ready for so long served: its death says nothing about the next start, which is not held back."""

HEALTHY_S: Final = 60.0
"""A part that was ready for so long has recovered: earlier deaths no longer count towards the limit."""


class Restarts:
    """Counts deaths in a row. Pure: the time that the part served is passed in.

    Two counts, since they answer different questions. How long to wait: deaths of parts that had hardly served, which a
    start right away would only repeat. Whether to go on: all deaths inside a minute of service each. One count for both
    was rejected: a part that dies once in half a minute would soon be waited for as long as its streams are kept.

    Args:
        limit: restarts in a row; 0: none.
        backoff_s: before the first; each that follows a death in the first `SETTLED_S` of service waits twice as long.
        longest_s: so long at most, or `backoff_s` where that is longer.
    """

    def __init__(self, limit: int, backoff_s: float, longest_s: float = LONGEST_S) -> None:
        self.limit = limit
        self.num_in_a_row = 0
        self.num_total = 0
        self._num_young = 0
        self._backoff_s = backoff_s
        self._longest_s = max(backoff_s, longest_s)

    def next_delay_s(self, served_s: float) -> float | None:
        """Seconds to wait before the next start; None: give up.

        Args:
            served_s: how long it was ready before it died; 0 if it never was.
        """
        if served_s >= HEALTHY_S:
            self.num_in_a_row = 0
        if served_s >= SETTLED_S:
            self._num_young = 0
        if self.num_in_a_row >= self.limit:
            return None
        # The exponent is bounded, since a float is not: 2 ** 1024 overflows.
        delay_s = min(self._backoff_s * 2.0 ** min(self._num_young, 30), self._longest_s)
        self._num_young += 1
        self.num_in_a_row += 1
        self.num_total += 1
        return delay_s


def longest_wait_s(*kept_ms: int) -> float:
    """The longest wait for a part for which streams are kept so long, 0 where they are not: a quarter of it.

    The rest is for loading, and for the clients to come back.
    """
    return min([LONGEST_S, *(0.25e-3 * kept for kept in kept_ms if kept)])
