"""Whether a child still lives, by the beats of its loop: a process may exist and do nothing.

Time is counted as seen, as in the engine's watchdog: a gap between two checks counts at most twice the interval between
them. A supervisor that was stopped, or a machine that slept, has not shown that a child is silent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `stall_s` 0: a stall is waited out for ever."""

    interval_s: float
    """Between two checks."""
    silence_s: float
    """Without a beat."""
    stall_s: float
    """With beats that say that a step is late."""


class Liveness:
    """Judges one child from one check to the next. Pure: time and beats are passed in."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._checked_s: float | None = None
        self._num_beats = 0
        self._silent_s = 0.0
        self._stalled_s = 0.0

    def check(self, now_s: float, num_beats: int, stall: str) -> str | None:
        """Why it should be ended, as a clause about it, or None.

        Args:
            now_s: of a monotonic clock.
            num_beats: heard so far.
            stall: why it stalls, as its last beat said; "" if it does not.
        """
        last_s = self._checked_s if self._checked_s is not None else now_s
        self._checked_s = now_s
        passed_s = min(now_s - last_s, 2 * self._limits.interval_s)
        self._silent_s = self._silent_s + passed_s if num_beats == self._num_beats else 0.0
        self._num_beats = num_beats
        self._stalled_s = self._stalled_s + passed_s if stall else 0.0
        if self._silent_s > self._limits.silence_s:
            return f"did not answer for {self._silent_s:.1f} s"
        if self._limits.stall_s and self._stalled_s > self._limits.stall_s:
            return f"stalled: {stall}"
        return None
