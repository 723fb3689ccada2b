"""Truthful health: ready means that tokens move.

Two alarms:

- **stall** (F1): a step runs longer than the limit. Open streams are failed; if the step does come to an end, the
  engine is ready again (a slow disk, a suspended machine: the next request may well be served). Until then requests
  are refused.
- **no progress** (F2): steps may come and go, yet for twice the limit nothing moved with work at hand. That is a fault
  of ours which no waiting cures: the engine fails for good, and whoever supervises it starts another.

What counts as progress: a committed output token; and prompt tokens computed, but since the last committed token no
more of them than the sequences of that time hold together (those still live and those that ended since), which is
enough to compute each once. Beyond, the same tokens are computed again and again (preemption without end) and that
moves nothing. A cancel alone is no progress: clients that give up on a stuck server must not keep it green.

Time is counted as seen: a gap between two checks counts at most twice the interval between them. A process that was
stopped, or a loop that was held up, has not shown that a step is late. (The alternative, plain differences of the
clock, fails every stream of a server that was suspended for a moment.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

_NS: Final = 1e-9
NO_PROGRESS_FACTOR: Final = 2
"""A single step may take nearly the limit, and a request may arrive just after one began."""


class AlarmKind(Enum):
    """Which promise is broken."""

    STALL = "stall"
    NO_PROGRESS = "no_progress"


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why the engine is not ready."""

    kind: AlarmKind
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What the engine has done so far, as the watchdog sees it.

    Attributes:
        step: the oldest step that was launched and is not applied, or None.
        stage: what that step is at, `forward` or `sample`.
        step_since_ns: since when it is the oldest.
        num_running: sequences that hold a row.
        num_waiting: sequences that wait for one.
        num_paused: how many of both are paused, that is, not to be planned: they are no work.
        num_committed: output tokens ever committed.
        num_prefilled: prompt tokens ever computed, repeats included.
        num_ended_tokens: tokens, prompt and output, of all sequences that ever ended.
        num_live_tokens: tokens of all live sequences, asked for only when it matters (it costs a pass over them).
    """

    step: int | None
    stage: str
    step_since_ns: int
    num_running: int
    num_waiting: int
    num_paused: int
    num_committed: int
    num_prefilled: int
    num_ended_tokens: int
    num_live_tokens: Callable[[], int]


class Watchdog:
    """Judges progress from one check to the next. Pure: time and state are passed in.

    Args:
        limit_ns: how long a step may run.
        interval_ns: how often `check` will be called.
    """

    def __init__(self, limit_ns: int, interval_ns: int) -> None:
        self.limit_ns = limit_ns
        self.interval_ns = interval_ns
        self._checked_ns: int | None = None
        self._step: int | None = None
        self._step_ns = 0  # how long the oldest step runs, as seen
        self._quiet_ns = 0  # how long nothing moved although there was work, as seen
        self._committed = 0
        self._prefilled = 0
        self._prefilled_at_commit = 0
        self._ended_at_commit = 0

    def check(self, now_ns: int, progress: Progress) -> Alarm | None:
        """The alarm that stands now, or None."""
        last_ns = self._checked_ns if self._checked_ns is not None else now_ns
        self._checked_ns = now_ns
        passed_ns = min(now_ns - last_ns, 2 * self.interval_ns)

        if progress.step is None or progress.step != self._step:
            self._step = progress.step
            self._step_ns = min(passed_ns, now_ns - progress.step_since_ns) if progress.step is not None else 0
        else:
            self._step_ns += passed_ns

        moved = self._moved(progress)
        has_work = progress.num_running + progress.num_waiting > progress.num_paused
        self._quiet_ns = self._quiet_ns + passed_ns if has_work and not moved else 0

        if self._step_ns > self.limit_ns:
            seconds = self._step_ns * _NS
            return Alarm(AlarmKind.STALL, f"{progress.stage} of step {progress.step} running for {seconds:.1f} s")
        if self._quiet_ns > NO_PROGRESS_FACTOR * self.limit_ns:
            return Alarm(
                AlarmKind.NO_PROGRESS,
                f"no token for {self._quiet_ns * _NS:.1f} s with {progress.num_running} sequences running"
                f" and {progress.num_waiting} waiting, of which {progress.num_paused} paused",
            )
        return None

    def _moved(self, progress: Progress) -> bool:
        if progress.num_committed != self._committed:
            self._committed = progress.num_committed
            self._prefilled = self._prefilled_at_commit = progress.num_prefilled
            self._ended_at_commit = progress.num_ended_tokens
            return True
        if progress.num_prefilled != self._prefilled:
            self._prefilled = progress.num_prefilled
            enough = progress.num_live_tokens() + progress.num_ended_tokens - self._ended_at_commit
            return progress.num_prefilled - self._prefilled_at_commit <= enough
        return False
