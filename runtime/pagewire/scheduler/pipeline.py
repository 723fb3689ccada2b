"""The order of plans and results: plan 1, plan 2, apply 1, plan 3, … One owner, for the engine and the simulator alike."""

from __future__ import annotations

from collections import deque

from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.scheduler import Scheduler
from pagewire.step.step import StepPlan, StepResult


class Pipeline:
    """Keeps at most `depth` steps between plan and apply: 2 with overlap, 1 without.

    With depth 2 step N + 1 is planned while N runs: the worker never waits for the host. Deeper would only make stops
    and joins later. Steps are applied in the order in which they were planned.
    """

    def __init__(self, scheduler: Scheduler, *, overlap: bool) -> None:
        self.scheduler = scheduler
        self.depth = 2 if overlap else 1
        self._in_flight: deque[StepPlan] = deque()

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not applied."""
        return len(self._in_flight)

    @property
    def oldest(self) -> StepPlan | None:
        """The plan whose result is applied next."""
        return self._in_flight[0] if self._in_flight else None

    def can_plan(self) -> bool:
        """Whether `plan` may be called now."""
        return len(self._in_flight) < self.depth

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or None where there is nothing to do until a result or a request comes."""
        assert self.can_plan(), "apply the oldest step first"
        plan = self.scheduler.plan(now_ns)
        if plan is not None:
            self._in_flight.append(plan)
        return plan

    def apply(self, result: StepResult, now_ns: int) -> StepOutcome:
        """Commit the oldest step in flight."""
        plan = self._in_flight.popleft()
        return self.scheduler.apply(plan, result, now_ns)

    def check_invariants(self) -> None:
        """As the scheduler's; and the two agree on what is in flight."""
        assert len(self._in_flight) == self.scheduler.num_in_flight <= self.depth
        self.scheduler.check_invariants()
