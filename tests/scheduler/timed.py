"""A scheduler on a simulated clock, before a card that takes as long as a cost model says; tokens mean nothing here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagewire.config import SchedulerConfig
from pagewire.request.request import Namespace, Request, Wishes
from pagewire.scheduler.cost_model import CostModel, work_of
from pagewire.scheduler.pipeline import Pipeline
from pagewire.scheduler.scheduler import Scheduler
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import StepPlan, StepResult
from pagewire_transport.params import SamplingParams

MS = 1_000_000
BLOCK = 16


@dataclass
class Seen:
    """What a client saw of one sequence."""

    sequence: Sequence
    asked_ns: int
    token_ns: list[int] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.token_ns[0] - self.asked_ns) / MS

    @property
    def gaps_ms(self) -> np.ndarray:
        return np.diff(np.array(self.token_ns)) / MS


class Timed:
    """`step()` plans while it may, then lets time pass until the oldest step is done. `card` may be changed at any time."""

    def __init__(
        self,
        *,
        num_blocks: int = 20_000,
        max_rows: int = 64,
        max_len: int = 100_000,
        noise: float = 0.0,
        seed: int = 0,
        card: CostModel | None = None,
        model: CostModel | None = None,
        check: bool = False,
        **config,
    ) -> None:
        config.setdefault("max_step_tokens", 2048)
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_rows=max_rows,
            max_model_len=max_len,
            config=SchedulerConfig(max_rows=max_rows, **config),
            cost_model=model,
        )
        self.pipeline = Pipeline(self.scheduler, overlap=config.get("overlap", True))
        self.card = card or CostModel()
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        self.now = 1_000 * MS
        self.check = check
        self.queue: deque[tuple[StepPlan, int]] = deque()
        self.seen: dict[int, Seen] = {}  # by order
        self.by_slot: dict[int, Seen] = {}
        self.ended: list[Sequence] = []
        self.chunks: list[int] = []  # prefill tokens of each step
        self.serial = 0

    def submit(
        self,
        prompt: int | np.ndarray,
        *,
        max_tokens: int = 8,
        n: int = 1,
        priority: int = 0,
        client: str = "",
        **wishes,
    ) -> Seen:
        """A prompt of so many random tokens, or of these."""
        self.serial += 1
        ids = self.rng.integers(0, 1 << 30, prompt, np.int32) if isinstance(prompt, int) else prompt
        request = Request(
            str(self.serial),
            ids,
            SamplingParams(max_tokens=max_tokens, seed=self.serial, n=n),
            self.now,
            priority,
            Namespace(),
            wishes=Wishes(**wishes),
            client=client,
        )
        sequences = self.scheduler.submit(request, self.now)
        for sequence in sequences:
            self.seen[sequence.order] = self.by_slot[sequence.slot] = Seen(sequence, self.now)
        return self.seen[sequences[0].order]

    def step(self) -> bool:
        """Whether anything happened."""
        while self.pipeline.can_plan() and (plan := self.pipeline.plan(self.now)) is not None:
            took = self.card.predict(work_of(plan)) * (1 + self.noise * self.rng.standard_normal())
            begun = max(self.now, self.queue[-1][1]) if self.queue else self.now
            self.queue.append((plan, begun + int(took)))
            self.chunks.append(int(plan.token_ids.size))
        if not self.queue:
            self._collect(self.scheduler.take_ended())
            return False
        plan, self.now = self.queue.popleft()
        n = plan.sample_rows.size
        result = StepResult(plan.step, np.ones(n, np.int32), np.full(n, 11, np.int32), np.zeros(n, np.uint8))
        outcome = self.pipeline.apply(result, self.now)
        for slot in outcome.slots.tolist():
            self.by_slot[slot].token_ns.append(self.now)
        self._collect(outcome.ended)
        if self.check:
            self.pipeline.check_invariants()
        return True

    def _collect(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            del self.by_slot[sequence.slot]
        self.ended += ended

    def run_until(self, ns: int) -> None:
        """Steps until the clock is there; an idle card waits."""
        while self.now < ns:
            if not self.step():
                self.now = ns

    def run(self, limit: int = 100_000) -> None:
        """Until nothing is left."""
        for _ in range(limit):
            if not self.step() and not self.scheduler.has_unfinished:
                return
        raise AssertionError("it never ends")
