"""Test doubles of a worker: `PureFakeDevice` for tests without a loop, `FakeWorker` for an engine's. Neither needs torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pagewire.clock import Clock
from pagewire.step.step import StepPlan, StepResult
from pagewire.worker.fake_device import Predicate, PureFakeDevice, fake_shape
from pagewire.worker.fake_kv import BookkeepingError
from pagewire.worker.fake_model import NextToken, continuation, hash_tokens
from pagewire.worker.interface import LogitMasks, WorkerShape

__all__ = [
    "BookkeepingError",
    "FakeWorker",
    "PureFakeDevice",
    "continuation",
    "fake_shape",
    "hash_tokens",
]

Latency = int | Callable[[StepPlan], int]
"""Nanoseconds that a step takes, or a function that says so for each."""


@dataclass(slots=True)
class _Launched:
    """A step on its way."""

    plan: StepPlan
    forward: asyncio.Future[None]
    latency_ns: int
    sample: asyncio.Future[StepResult] | None = None
    masks: LogitMasks | None = None
    due_ns: int | None = None


class FakeWorker:
    """A `Worker` around a `PureFakeDevice`. Steps run one after another and end in one of three ways.

    - `latency` given, no `clock`: each takes so long on the loop's own time; 0 ends it in the loop's next turn.
    - `latency` and `clock`: each is due when that clock says so; `complete_due()` ends those that are.
    - `latency=None`: held until `release(n)`.

    Every mistake in the bookkeeping that the device finds is raised where it shows (launch or handle) and kept in
    `violations`, so that a test sees it even where an engine turns the exception into failed requests.

    Attributes:
        device: the device; its counters and `poison` serve here too.
        plans: every plan launched, in order; `keep_plans=False` keeps none (long runs).
        violations: mistakes found so far.
        is_closed: `close` was called.
    """

    def __init__(
        self,
        shape: WorkerShape | None = None,
        *,
        model: NextToken | None = None,
        latency: Latency | None = 0,
        clock: Clock | None = None,
        keep_plans: bool = True,
    ) -> None:
        self.device = PureFakeDevice(shape, model=model)
        self.plans: list[StepPlan] = []
        self.violations: list[BookkeepingError] = []
        self.is_closed = False
        self._latency = latency
        self._clock = clock
        self._keep_plans = keep_plans
        self._queue: deque[_Launched] = deque()
        self._credit = 0  # releases that came before their steps
        self._is_hanging = False
        self._launch_error: Exception | None = None
        self._step_errors: dict[str, Exception] = {}
        self._timer: asyncio.Handle | None = None
        self._is_free_at_s = 0.0

    # ---- Worker ------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> WorkerShape:
        """Of the device."""
        return self.device.shape

    def launch_forward(self, plan: StepPlan) -> asyncio.Future[None]:
        """Check and queue a step."""
        if self._launch_error is not None:
            error, self._launch_error = self._launch_error, None
            raise error
        if self.is_closed:
            raise BookkeepingError(f"step {plan.step} is launched on a closed worker")
        if self._queue and self._queue[-1].sample is None:
            raise BookkeepingError(f"step {plan.step} is launched before step {self._queue[-1].plan.step} may sample")
        with self._noting():
            self.device.submit(plan)
        if self._keep_plans:
            self.plans.append(plan)
        latency = self._latency(plan) if callable(self._latency) else self._latency
        launched = _Launched(plan, asyncio.get_running_loop().create_future(), latency or 0)
        self._queue.append(launched)
        return launched.forward

    def launch_sample(self, plan: StepPlan, masks: LogitMasks | None = None) -> asyncio.Future[StepResult]:
        """Let the last step launched draw its tokens; from now on it can end."""
        launched = self._queue[-1] if self._queue else None
        if launched is None or launched.plan is not plan or launched.sample is not None:
            raise BookkeepingError(f"launch_sample of step {plan.step} does not follow its launch_forward")
        launched.sample = asyncio.get_running_loop().create_future()
        launched.masks = masks
        if self._clock is not None:
            since = self._queue[-2].due_ns if len(self._queue) > 1 else None
            launched.due_ns = max(self._clock.now_ns(), since or 0) + launched.latency_ns
        self._go_on()
        return launched.sample

    async def close(self) -> None:
        """End what is queued; what hangs is cancelled. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._queue:
            if self._is_hanging or self._queue[0].sample is None:
                launched = self._queue.popleft()
                launched.forward.cancel()
                if launched.sample is not None:
                    launched.sample.cancel()
            else:
                self._complete()

    # ---- what a test does --------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Steps launched and not complete."""
        return len(self._queue)

    def release(self, n: int = 1) -> None:
        """End the `n` oldest steps, or, as far as there are none yet, the next ones as soon as they come."""
        self._credit += n
        self._go_on()

    def release_all(self) -> None:
        """End all that is queued, and from now on every step in the loop's next turn."""
        self._latency, self._clock, self._credit = 0, None, 0
        for launched in self._queue:
            launched.latency_ns = 0
        self._go_on()

    def complete_due(self) -> int:
        """End the steps that are due by the worker's clock; how many."""
        assert self._clock is not None, "made without a clock"
        num = 0
        while not self._is_hanging and self._queue and (due := self._queue[0].due_ns) is not None:
            if due > self._clock.now_ns():
                break
            self._complete()
            num += 1
        return num

    def hang(self) -> None:
        """From now on no step ends, whatever its latency, until `unhang`."""
        self._is_hanging = True

    def unhang(self) -> None:
        """Go on where it hung."""
        self._is_hanging = False
        self._go_on()

    def poison(self, target: int | Predicate, *, from_position: int = 0) -> None:
        """See `PureFakeDevice.poison`."""
        self.device.poison(target, from_position=from_position)

    def fail_launch(self, error: Exception) -> None:
        """The next `launch_forward` raises."""
        self._launch_error = error

    def fail_step(self, error: Exception, *, stage: Literal["forward", "sample"] = "sample") -> None:
        """The handle of the next step that ends raises: that of its `forward` (its sample then never ends) or `sample`."""
        self._step_errors[stage] = error

    def check(self) -> None:
        """Raise the first mistake found, if any."""
        if self.violations:
            raise self.violations[0]

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """End what may end now, and see to it that what may end later will."""
        while self._credit and not self._is_hanging and self._queue and self._queue[0].sample is not None:
            self._credit -= 1
            self._complete()
        ready = self._queue and self._queue[0].sample is not None
        if self._latency is None or self._clock is not None or self._is_hanging or not ready or self._timer:
            return
        loop = asyncio.get_running_loop()
        due = max(self._is_free_at_s, loop.time()) + self._queue[0].latency_ns * 1e-9
        self._is_free_at_s = due
        self._timer = loop.call_at(due, self._tick) if self._queue[0].latency_ns else loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._queue and not self._is_hanging:
            self._complete()
        self._go_on()

    def _complete(self) -> None:
        """End the oldest step."""
        launched = self._queue.popleft()
        assert launched.sample is not None
        error: Exception | None = None
        try:
            with self._noting():
                result = self.device.complete(launched.masks)
            result.forward_ns = launched.latency_ns
        except BookkeepingError as found:
            error = found
        if (fault := self._step_errors.pop("forward", None)) is not None:
            _fail(launched.forward, fault)
            return
        if not launched.forward.done():
            launched.forward.set_result(None)
        error = self._step_errors.pop("sample", error)
        if error is not None:
            _fail(launched.sample, error)
        elif not launched.sample.done():  # done: its owner cancelled it
            launched.sample.set_result(result)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BookkeepingError as error:
            self.violations.append(error)
            raise


def _fail(handle: asyncio.Future[Any], error: Exception) -> None:
    if not handle.done():
        handle.set_exception(error)
