"""The engine loop on a virtual clock: the very scheduler, pool, tree and `Pipeline`; only card and clients are modelled.

1. arrivals whose time has come are submitted;
2. the oldest step is applied, if the loop has seen its end;
3. while `Pipeline.can_plan`, steps are planned; the modelled card begins each when the one before ends;
4. the clock jumps to whatever comes next.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from pagewire.errors import PagewireError
from pagewire.request.request import Request
from pagewire.scheduler.constants import ones
from pagewire.scheduler.pipeline import Pipeline
from pagewire.scheduler.scheduler import Scheduler
from pagewire.simulator.figures import Figures
from pagewire.simulator.traces import Arrival, Workload
from pagewire.step.step import StepPlan, StepResult
from pagewire_transport.params import SamplingParams

_OUTPUT: Final = 2**30
"""Generated tokens lie above all prompts' ids: nobody's prompt continues them."""


class Card(Protocol):
    """How long steps take."""

    def step_ns(self, plan: StepPlan) -> int:
        """Of this plan."""
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """What the engine's loop takes beside the card, and how even steps are, measured on one (`perf/timeline.py`, recordings).

    Attributes:
        launch_ns, launch_row_ns: from the decision to plan to the step's being on the card, and the same a row.
        seen_ns: from the end of a step to its being applied.
        client_ns: from there to the client.
        submit_ns: from the client to the scheduler.
        spread: of a step's time, as a part of it: one standard deviation.
        late_share, late: so many steps are seen later, by anything up to this part of their time.
    """

    launch_ns: int = 450_000
    launch_row_ns: int = 900
    seen_ns: int = 250_000
    client_ns: int = 250_000
    submit_ns: int = 250_000
    spread: float = 0.02
    late_share: float = 0.01
    late: float = 0.2


class _Unevenness:
    """Factors on the times of steps, always the same ones; without them no margin would ever be needed."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._rng = np.random.default_rng(0)
        self._factors: list[float] = []

    def next(self) -> float:
        """Of the next step."""
        if not self._factors:
            host, rng = self._host, self._rng
            even = 1 + host.spread * rng.standard_normal(1024)
            late = host.late * rng.random(1024) * (rng.random(1024) < host.late_share)
            self._factors = np.maximum(0.5, even + late).tolist()
        return self._factors.pop()


@dataclass(slots=True)
class _Running:
    plan: StepPlan
    done_ns: int
    has_chunks: bool


class Simulation:
    """Runs one workload to its end.

    Args:
        scheduler: fresh.
        card: gives the time of each step.
        workload: where requests come from.
        figures: collects what happens.
        host: what the loop takes.
        overlap: plan one step ahead.
        on_ended: called with a request's number and the time when it ended, for what follows a run elsewhere.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        card: Card,
        workload: Workload,
        figures: Figures,
        *,
        host: Host | None = None,
        overlap: bool = True,
        on_ended: Callable[[Arrival, int], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.pipeline = Pipeline(scheduler, overlap=overlap)
        self.figures = figures
        self.now_ns = 0
        self._card = card
        self._workload = workload
        self._host = host if host is not None else Host()
        self._unevenness = _Unevenness(self._host)
        self._on_ended = on_ended
        self._running: deque[_Running] = deque()
        self._free_ns = 0  # when the card is through with what it has
        self._digest = hashlib.blake2b(digest_size=16)
        self._zeros = np.zeros(1024, np.uint8)
        self._arrivals: dict[int, Arrival] = {}  # by slot

    @property
    def digest(self) -> str:
        """Of all decisions so far: which step, when, whose tokens, into which blocks."""
        return self._digest.hexdigest()

    def run(self, until_ns: int = 2**62, on_progress: Callable[[int], None] | None = None) -> None:
        """Until nothing is left to do, or the clock passes `until_ns`."""
        run_together((self,), until_ns, on_progress)

    def next_event(self) -> int | None:
        """When there is something to do; None: never, unless somebody else brings work."""
        arrives = self._workload.next_ns()
        done = self._running[0].done_ns if self._running else None
        if arrives is None:
            return done
        arrives = max(arrives + self._host.submit_ns, self.now_ns)
        return arrives if done is None or arrives < done else done

    def turn(self, now_ns: int) -> None:
        """It is `now_ns`: as one turn of the engine's loop."""
        self.now_ns = now_ns
        self.figures.advance(now_ns, self.scheduler)
        while (at_ns := self._workload.next_ns()) is not None and at_ns + self._host.submit_ns <= self.now_ns:
            self._submit(self._workload.take())
        if self._running and self._running[0].done_ns <= self.now_ns:
            self._apply(self._running.popleft())
        while self.pipeline.can_plan():
            plan = self.pipeline.plan(self.now_ns)
            if plan is None:
                break
            self._launch(plan)

    def _submit(self, arrival: Arrival) -> None:
        params = SamplingParams(max_tokens=arrival.num_output, seed=arrival.number, ignore_eos=True)
        request = Request(str(arrival.number), arrival.prompt_ids(), params, self.now_ns)
        try:
            sequence = self.scheduler.submit(request, self.now_ns)[0]
        except PagewireError as error:
            self.figures.refused(arrival, error.code)
            self._workload.ended(self.now_ns + (error.retry_after_ms or 0) * 1_000_000)
            return
        self._arrivals[sequence.slot] = arrival
        self.figures.submitted(arrival, sequence)

    def _launch(self, plan: StepPlan) -> None:
        digest = self._digest
        digest.update(b"%d %d" % (plan.step, self.now_ns))
        for part in (plan.rows, plan.starts, plan.num_tokens, plan.sample_rows, plan.block_ids):
            digest.update(part.data)
        host = self._host
        begins = max(self._free_ns, self.now_ns + host.launch_ns + host.launch_row_ns * plan.rows.size)
        took = int(self._card.step_ns(plan) * self._unevenness.next())
        self._free_ns = begins + took
        figures = self.figures
        figures.num_steps += 1
        figures.num_computed += plan.total_tokens
        figures.longest_step_ns = max(figures.longest_step_ns, took)
        self._running.append(_Running(plan, self._free_ns + host.seen_ns, plan.rows.size > plan.num_decode))

    def _apply(self, running: _Running) -> None:
        plan = running.plan
        outcome = self.pipeline.apply(self._result(plan), self.now_ns)
        at_ns = self.now_ns + self._host.client_ns
        self.figures.tokens(outcome, at_ns, may_be_first=running.has_chunks)
        for sequence in outcome.ended:
            self.figures.ended(sequence, at_ns)
            self._workload.ended(at_ns)
            arrival = self._arrivals.pop(sequence.slot)
            if self._on_ended is not None:
                self._on_ended(arrival, at_ns)

    def _result(self, plan: StepPlan) -> StepResult:
        """A token for each sample, that follows from its position alone."""
        n = plan.sample_rows.size
        if n > self._zeros.size:
            self._zeros = np.zeros(2 * n, np.uint8)
        entries = plan.sample_entries
        reach = (
            plan.starts if n == plan.num_decode == plan.rows.size else plan.starts[entries] + plan.num_tokens[entries]
        )
        return StepResult(plan.step, ones(n), reach | np.int32(_OUTPUT), self._zeros[:n])


def run_together(
    simulations: Sequence[Simulation], until_ns: int = 2**62, on_progress: Callable[[int], None] | None = None
) -> None:
    """Engines on one virtual clock, what one brings about for another included; the first goes first where times are equal."""
    turn = 0
    while True:
        due = [(at_ns, i) for i, one in enumerate(simulations) if (at_ns := one.next_event()) is not None]
        if not due or (first := min(due))[0] > until_ns:
            break
        simulations[first[1]].turn(first[0])
        turn += 1
        if on_progress is not None and turn & 0xFFF == 0:
            on_progress(first[0])
    for simulation in simulations:
        simulation.figures.finish(simulation.now_ns, simulation.scheduler)
