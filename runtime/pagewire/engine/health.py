"""Says whether the engine is ready, watches that tokens move, and writes down the last decisions when they do not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagewire.clock import Clock
from pagewire.engine.decisions import DecisionLog, write_dump
from pagewire.engine.watchdog import Alarm, AlarmKind, Progress, Watchdog
from pagewire.metrics import Histogram

MAX_DUMPS: Final = 8
"""Dump files that one process leaves; before one more is written, its oldest is removed."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether tokens move; `reason` says why not. `is_stalled`: because a step is late."""

    ready: bool
    reason: str = ""
    is_stalled: bool = False


class Monitor:
    """Health of one engine. Everything happens on its loop, but for the writing of a dump.

    Args:
        limit_ns: how long a step may run.
        progress: what the engine has done so far.
        on_stall: called once when a step begins to be late.
        on_dead: called when waiting will not help.
        dump_dir: where decisions are written.
        loop_lag: how late the loop was, sampled at every check, seconds.
    """

    def __init__(
        self,
        *,
        limit_ns: int,
        clock: Clock,
        progress: Callable[[], Progress],
        on_stall: Callable[[str], None],
        on_dead: Callable[[str], None],
        decisions: DecisionLog,
        dump_dir: Path,
        loop_lag: Histogram,
        log: Any,
    ) -> None:
        self.health = Health(ready=False, reason="not started")
        self.limit_ns = limit_ns
        # Ten checks a limit, and at least four a second: a late step is named soon after it is late.
        self.interval_ns = min(max(limit_ns // 10, 10_000_000), 250_000_000)
        self._clock = clock
        self._progress = progress
        self._on_stall = on_stall
        self._on_dead = on_dead
        self._decisions = decisions
        self._dump_dir = dump_dir
        self._loop_lag = loop_lag
        self._log = log
        self._dumps: deque[Path] = deque()
        self._writing: set[asyncio.Future[Path]] = set()
        self._closed_reason: str | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ready from now on, and watched."""
        self.health = Health(ready=True)
        self._task = asyncio.create_task(self._watch(), name="engine watchdog")

    def close(self, reason: str) -> None:
        """Not ready any more, for good, because of `reason`. A stall is still watched for: it may hold up a drain."""
        self._closed_reason = reason
        self.health = Health(ready=False, reason=reason)

    def fail(self, reason: str) -> None:
        """Not ready any more, for good, and there is nothing left to watch. Writes the last decisions."""
        self.close(reason)
        self.dump(reason)
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """End the watch; a dump being written is waited for, for a moment."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._writing:
            await asyncio.wait(self._writing, timeout=1.0)

    def dump(self, reason: str) -> None:
        """Write the last decisions, off the loop."""
        oldest = self._dumps.popleft() if len(self._dumps) >= MAX_DUMPS else None
        decisions = self._decisions.decisions()

        def write() -> Path:
            if oldest is not None:
                oldest.unlink(missing_ok=True)
            return write_dump(self._dump_dir, reason, decisions)

        written = asyncio.get_running_loop().run_in_executor(None, write)
        self._writing.add(written)
        written.add_done_callback(self._dumped)

    def _dumped(self, written: asyncio.Future[Path]) -> None:
        self._writing.discard(written)
        if written.cancelled():
            return
        error = written.exception()
        if error is not None:
            self._log.error("decisions_lost", error=str(error))
        else:
            self._dumps.append(written.result())
            self._log.error("decisions_written", path=str(written.result()))

    async def _watch(self) -> None:
        watchdog = Watchdog(self.limit_ns, self.interval_ns)
        loop = asyncio.get_running_loop()
        stalled: Alarm | None = None
        while True:
            due = loop.time() + self.interval_ns * 1e-9
            await asyncio.sleep(due - loop.time())
            self._loop_lag.observe(max(0.0, loop.time() - due))
            alarm = watchdog.check(self._clock.now_ns(), self._progress())
            if alarm is None:
                if stalled is not None:
                    self._recovered(stalled)
            elif alarm.kind is AlarmKind.NO_PROGRESS:
                self._on_dead(alarm.reason)
                return
            else:
                self.health = Health(ready=False, reason=alarm.reason, is_stalled=True)
                if stalled is None:
                    self._log.error("engine_stalled", reason=alarm.reason)
                    self.dump(alarm.reason)
                    self._on_stall(alarm.reason)
            stalled = alarm

    def _recovered(self, stalled: Alarm) -> None:
        self._log.warning("engine_recovered", was=stalled.reason)
        reason = self._closed_reason
        self.health = Health(ready=True) if reason is None else Health(ready=False, reason=reason)
