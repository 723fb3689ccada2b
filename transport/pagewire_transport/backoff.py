"""How long to wait before one connects again: not at all, then longer each time, and nobody as long as his neighbour."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

FIRST_S: Final = 0.05
"""Before the second attempt; the first is made at once."""
LONGEST_S: Final = 2.0
"""Between two attempts, at most: so much later than the server the last of its clients is back."""


class Backoff:
    """Pauses between attempts: 0, then up to `first_s`, doubled each time, up to `longest_s`.

    Each is drawn from its upper half, so that clients which lost one server at one moment do not all come back at another.

    Args:
        longest_s: of a pause.
        chance: uniform in [0, 1).
    """

    def __init__(self, longest_s: float = LONGEST_S, chance: Callable[[], float] = random.random) -> None:
        self._longest_s = longest_s
        self._chance = chance
        self._next_s = 0.0

    def next_s(self) -> float:
        """The pause before the attempt that is due, seconds."""
        pause_s = self._next_s
        self._next_s = min(max(FIRST_S, 2 * pause_s), self._longest_s)
        return pause_s * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        """A connection was good: the next attempt is a first one."""
        self._next_s = 0.0

    def own_retries_ms(self) -> tuple[int, int]:
        """First and longest pause for libzmq, which tries again by itself where nobody listens."""
        share = 0.5 + 0.5 * self._chance()
        return max(1, round(1000 * FIRST_S * share)), max(1, round(1000 * self._longest_s * share))
