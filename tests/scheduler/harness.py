"""Drives a Pipeline and a Device, collecting what every sequence got."""

from __future__ import annotations

import numpy as np
from device import EOS, Device

from pagewire.config import SchedulerConfig
from pagewire.request.request import NO_WISHES, Namespace, Request, Wishes
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.pipeline import Pipeline
from pagewire.scheduler.scheduler import Scheduler
from pagewire.scheduler.sequence import Sequence
from pagewire_transport.params import SamplingParams

BLOCK = 4


class Harness:
    """A scheduler with a small block size and a device that checks it. `step()` = plan while possible, then apply one."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_rows: int = 8,
        max_len: int = 200,
        overlap: bool = True,
        cache: bool = True,
        **config,
    ) -> None:
        config.setdefault("max_step_tokens", 16)
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_rows=max_rows,
            max_model_len=max_len,
            config=SchedulerConfig(max_rows=max_rows, **config),
            eos_ids=(EOS,),
            prefix_cache=cache,
        )
        self.pipeline = Pipeline(self.scheduler, overlap=overlap)
        self.device = Device(num_blocks, BLOCK)
        self.now = 1_000
        self.serial = 0
        self.tokens: dict[int, list[int]] = {}  # by slot, of live sequences
        self.by_slot: dict[int, Sequence] = {}
        self.results: dict[tuple[str, int], list[int]] = {}
        self.ended: list[Sequence] = []

    def submit(
        self,
        prompt,
        *,
        max_tokens: int = 8,
        seed: int = 0,
        n: int = 1,
        priority: int = 0,
        tenant: str = "",
        client: str = "",
        wishes: Wishes = NO_WISHES,
        **params,
    ) -> list[Sequence]:
        self.serial += 1
        request = Request(
            f"r{self.serial}",
            np.array(prompt, np.int32),
            SamplingParams(max_tokens=max_tokens, seed=seed, n=n, **params),
            self.now,
            priority,
            Namespace(tenant=tenant),
            wishes=wishes,
            client=client,
        )
        sequences = self.scheduler.submit(request, self.now)
        for sequence in sequences:
            assert sequence.slot not in self.by_slot
            self.by_slot[sequence.slot] = sequence
            self.tokens[sequence.slot] = []
        return sequences

    def plan(self) -> bool:
        self.now += 10
        plan = self.pipeline.plan(self.now) if self.pipeline.can_plan() else None
        if plan is not None:
            self.device.submit(plan)
        self.pipeline.check_invariants()
        return plan is not None

    def apply(self) -> StepOutcome:
        self.now += 10
        outcome = self.pipeline.apply(self.device.complete(), self.now)
        at = 0
        for slot, start, count in zip(outcome.slots, outcome.starts, outcome.counts, strict=True):
            tokens = self.tokens[int(slot)]
            assert start == len(tokens), "an index is skipped or repeated"
            tokens += outcome.token_ids[at : at + count].tolist()
            at += count
        self.collect(outcome.ended)
        self.pipeline.check_invariants()
        return outcome

    def collect(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            tokens = self.tokens.pop(sequence.slot)
            output = self.scheduler.output(sequence, 0, 10**6).tolist()
            assert tokens[: len(output)] == output, "the stream differs from the ledger"
            del self.by_slot[sequence.slot]
            self.results[sequence.request.request_id, sequence.choice] = output
            self.ended.append(sequence)

    def step(self) -> bool:
        """Plan while possible and apply the oldest; whether anything happened."""
        planned = False
        while self.pipeline.can_plan() and self.plan():
            planned = True
        if self.pipeline.num_in_flight:
            self.apply()
            return True
        self.collect(self.scheduler.take_ended())
        return planned

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left; a livelock ends at `limit` steps."""
        for _ in range(limit):
            if not self.step() and not self.scheduler.has_unfinished:
                break
        else:
            raise AssertionError("it never ends")
        self.collect(self.scheduler.take_ended())
        self.check_baseline()

    def check_baseline(self) -> None:
        """All that was held came back."""
        pool = self.scheduler.memory.pool
        assert pool.num_owned == 0, pool.num_owned
        assert self.scheduler.batch.num_free_rows == self.scheduler.batch.max_rows
        assert self.scheduler.departures.num_reserved_rows == 0
        assert not self.scheduler.has_unfinished
        self.pipeline.check_invariants()
