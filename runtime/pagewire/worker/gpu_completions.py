"""Steps that the card has, each until its results are in host memory; then its handles resolve, in order.

Nobody waits and no thread helps. When a step ends is known well from its like before, so the loop sleeps until shortly
before and then asks the event at every turn (measured: 21 µs from the event to the coroutine; a thread that waits takes
94 and more, a host function 183). A step that is late is asked about every millisecond: a hang must not burn the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from pagewire.step.step import StepResult
from pagewire.worker.gpu_device import Event

_MARGIN_S: Final = 0.0015
"""Timers of the loop are whole milliseconds: sleep until so long before the end, then ask."""
_LATE_S: Final = 0.005
_LATE_ASK_S: Final = 0.001
_WEIGHT: Final = 0.2
"""Of the newest duration in the running mean."""


@dataclass(slots=True)
class Pending:
    """One step.

    Attributes:
        kind: steps of a kind take about the same time.
        done: its results are in host memory.
        result: reads them.
    """

    kind: Hashable
    done: Event
    result: Callable[[float], StepResult]
    forward: asyncio.Future[None]
    sample: asyncio.Future[StepResult]
    launched: float


class Completions:
    """The queue of pending steps of one event loop."""

    def __init__(self) -> None:
        self._queue: deque[Pending] = deque()
        self._durations: dict[Hashable, float] = {}
        self._last_done = 0.0
        self._is_armed = False
        self._failure: Exception | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing is pending."""
        return not self._queue

    def add(self, pending: Pending) -> None:
        """Resolve its handles when it is done."""
        self._queue.append(pending)
        if not self._is_armed:
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        now = time.perf_counter()
        head = self._queue[0]
        due = max(head.launched, self._last_done) + self._durations.get(head.kind, 0.0)
        self._is_armed = True
        if due - now > _MARGIN_S + 0.0005:
            loop.call_later(due - now - _MARGIN_S, self._ask)
        elif now - due > _LATE_S:
            loop.call_later(_LATE_ASK_S, self._ask)
        else:
            loop.call_soon(self._ask)

    def _ask(self) -> None:
        self._is_armed = False
        try:
            while self._queue and self._queue[0].done.query():
                self._settle(self._queue.popleft())
        except Exception as error:  # noqa: BLE001  (the device failed: nothing that follows can be trusted)
            self._fail(error)
        if self._queue:
            self._arm()

    def _settle(self, pending: Pending) -> None:
        now = time.perf_counter()
        duration = now - max(pending.launched, self._last_done)
        self._last_done = now
        known = self._durations.get(pending.kind, duration)
        self._durations[pending.kind] = known + _WEIGHT * (duration - known)
        result = pending.result(duration)
        if not pending.forward.done():
            pending.forward.set_result(None)
        if not pending.sample.done():
            pending.sample.set_result(result)

    def _fail(self, error: Exception) -> None:
        pending, self._queue = self._queue, deque()
        for step in pending:
            for handle in (step.forward, step.sample):
                if not handle.done():
                    handle.set_exception(error)
