"""The steps that the worker has: launched in order, taken back in order, each with its two handles."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.step.step import StepPlan, StepResult
from pagewire.worker.interface import LogitMasks, Worker

MaskSource = Callable[[StepPlan], LogitMasks | None]
"""Masks of the plan's samples that have a grammar; called between the launches of forward and sample."""


class WorkerError(Exception):
    """The worker as a whole failed; the message names stage and step."""


@dataclass(slots=True)
class Launch:
    """One step at the worker.

    Attributes:
        since_ns: since when it is the oldest, or was launched; whichever is later.
    """

    plan: StepPlan
    forward: asyncio.Future[None]
    sample: asyncio.Future[StepResult]
    since_ns: int

    @property
    def stage(self) -> str:
        """What it is at."""
        return "sample" if self.forward.done() else "forward"


class Launches:
    """A queue of launches. `wake` is called whenever one may be taken, or the worker failed."""

    def __init__(self, worker: Worker, masks: MaskSource | None, wake: Callable[[], None]) -> None:
        self._worker = worker
        self._masks = masks
        self._wake = wake
        self._queue: deque[Launch] = deque()

    @property
    def oldest(self) -> Launch | None:
        """The launch whose result comes next."""
        return self._queue[0] if self._queue else None

    def launch(self, plan: StepPlan, now_ns: int) -> None:
        """Queue both halves of a step.

        Raises:
            WorkerError: the worker refused.
        """
        try:
            forward: asyncio.Future[None] = asyncio.ensure_future(self._worker.launch_forward(plan))
            masks = self._masks(plan) if self._masks is not None else None
            sample: asyncio.Future[StepResult] = asyncio.ensure_future(self._worker.launch_sample(plan, masks))
        except Exception as error:
            raise WorkerError(f"launch of step {plan.step} failed: {error!r}") from error
        forward.add_done_callback(self._forward_done)
        sample.add_done_callback(self._sample_done)
        self._queue.append(Launch(plan, forward, sample, now_ns))

    def take_done(self, now_ns: int) -> tuple[Launch, StepResult] | None:
        """The oldest launch with its result, if it is complete.

        Raises:
            WorkerError: a handle, of this or a later step, failed.
        """
        for launch in self._queue:
            # A forward that failed may leave a sample that never resolves.
            if launch.forward.done() and (fault := _fault_of(launch.forward)) is not None:
                raise WorkerError(f"forward of step {launch.plan.step} failed: {fault!r}") from fault
        if not self._queue or not self._queue[0].sample.done():
            return None
        launch = self._queue.popleft()
        if (fault := _fault_of(launch.sample)) is not None:
            raise WorkerError(f"sample of step {launch.plan.step} failed: {fault!r}") from fault
        if self._queue:
            self._queue[0].since_ns = now_ns
        return launch, launch.sample.result()

    def _forward_done(self, forward: asyncio.Future[None]) -> None:
        if _fault_of(forward) is not None:  # nothing waits for a forward by itself; only its fault is news
            self._wake()

    def _sample_done(self, sample: asyncio.Future[StepResult]) -> None:
        _fault_of(sample)  # looked at, so that asyncio does not report it a second time
        self._wake()


def _fault_of(handle: asyncio.Future[Any]) -> BaseException | None:
    """Why a handle that is done brings nothing, or None."""
    return asyncio.CancelledError("cancelled") if handle.cancelled() else handle.exception()
