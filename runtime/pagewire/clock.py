"""Time, passed in. Nothing below the engine loop reads a clock of its own; tests and the simulator bring theirs."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Says what time it is, in nanoseconds since an arbitrary start."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """A clock that moves when told to. Starts at an odd offset, so that mixing it with another clock fails at once."""

    def __init__(self, start_ns: int = 7_000_000_000_000_019) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_ns(self, ns: int) -> None:
        """Move forward by `ns` ≥ 0."""
        assert ns >= 0, ns
        self._now_ns += ns
