"""A scheduler as small as it can be, right by inspection, with a switch for each mistake that the fake must catch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagewire.step.step import RowJoin, SampleFlag, StepPlan, StepResult
from pagewire.worker.fake import PureFakeDevice, fake_shape
from pagewire_transport.params import SamplingParams

BLOCK = 4
SHAPE = fake_shape(num_blocks=12, block_size=BLOCK, max_rows=3, max_model_len=40, vocab_size=31, eos_ids=(5,))


def ints(values) -> np.ndarray:
    return np.array(list(values), np.int32)


@dataclass(eq=False)
class Live:
    """A sequence in its row."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    row: int = -1
    epoch: int = 0
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_planned: int = 0  # positions planned
    is_ended: bool = False
    is_numeric: bool = False

    @property
    def limit(self) -> int:
        return len(self.prompt) + self.params.max_tokens


class Mini:
    """Plans one chunk or one decode for each row, at most `depth` steps ahead.

    `mistake` names what it does wrong; the hooks say where.
    """

    def __init__(self, device: PureFakeDevice, *, depth: int = 2, mistake: str = "", chunk: int = 6) -> None:
        self.device, self.depth, self.mistake, self.chunk = device, depth, mistake, chunk
        self.free_blocks = deque(range(1, SHAPE.num_blocks))
        self.free_rows = list(range(SHAPE.max_rows))
        self.waiting: deque[Live] = deque()
        self.live: list[Live] = []
        self.plans: deque[tuple[StepPlan, dict[int, Live]]] = deque()
        self.leaving: list[tuple[int, Live]] = []  # (fence, who)
        self.leaves: list[int] = []
        self.step = self.epoch = 0

    def add(self, prompt, *, seed: int = 0, **params) -> Live:
        params.setdefault("max_tokens", 8)
        sequence = Live(list(prompt), SamplingParams(**params), seed)
        self.waiting.append(sequence)
        return sequence

    def run(self) -> None:
        """Until all have ended."""
        for _ in range(500):
            while len(self.plans) < self.depth and self.plan():
                pass
            if not self.plans:
                assert not self.waiting
                assert not self.live
                return
            self.apply(self.device.complete())
        raise AssertionError("it never ends")

    def _grow(self, s: Live, stop: int, deltas) -> bool:
        while len(s.blocks) * BLOCK < stop:
            if not self.free_blocks:
                return False
            block = self.free_blocks.popleft()
            if self.mistake == "share a block" and self.live and self.live[0] is not s:
                block = self.live[0].blocks[-1]
            deltas.append((s.row, len(s.blocks), block))
            s.blocks.append(block)
        return True

    def plan(self) -> bool:
        joins, deltas, entries = [], [], []
        leaves, self.leaves = self.leaves, []
        while self.waiting and self.free_rows:
            need = -(-self.waiting[0].limit // BLOCK)
            if need > len(self.free_blocks) - sum(-(-s.limit // BLOCK) - len(s.blocks) for s in self.live):
                break
            s = self.waiting.popleft()
            s.row, s.epoch, self.epoch = self.free_rows.pop(), self.epoch, self.epoch + 1
            joins.append(RowJoin(s.row, s.epoch, s.params, s.seed, ints(s.prompt), ints([]), SHAPE.eos_ids))
            self.live.append(s)
        for s in self.live:
            start = s.num_planned
            if start + 1 > s.limit - 1 and start >= len(s.prompt):
                continue
            num = min(self.chunk, len(s.prompt) - start) if start < len(s.prompt) else 1
            assert self._grow(s, start + num, deltas)
            entries.append((s, start, num))
            s.num_planned += num
        if not entries:
            self.leaves = leaves
            return False
        entries.sort(key=lambda e: e[1] < len(e[0].prompt))  # decodes first
        self._submit(entries, joins, deltas, leaves)
        return True

    def _submit(self, entries, joins, deltas, leaves) -> None:
        num_decode = sum(start >= len(s.prompt) for s, start, _ in entries)
        tokens = [t for s, start, n in entries[num_decode:] for t in s.prompt[start : start + n]]
        samples = [(e, s) for e, (s, start, n) in enumerate(entries) if start + n >= len(s.prompt)]
        if self.mistake == "wrong chunk" and tokens:
            tokens[-1] += 1
        if self.mistake == "forget a block" and deltas:
            deltas.pop()
        starts = [start for _, start, _ in entries]
        if self.mistake == "skip a position" and num_decode:
            starts[0] += 1
        plan = StepPlan(
            step=self.step,
            rows=ints(s.row for s, _, _ in entries),
            starts=ints(starts),
            num_tokens=ints(n for *_, n in entries),
            epochs=ints(s.epoch for s, _, _ in entries),
            num_decode=num_decode,
            token_ids=ints(tokens),
            sample_entries=ints(e for e, _ in samples),
            sample_rows=ints(s.row for _, s in samples),
            sample_epochs=ints(s.epoch + (self.mistake == "stale epoch") for _, s in samples),
            leaves=ints(leaves),
            joins=joins,
            block_rows=ints(d[0] for d in deltas),
            block_cols=ints(d[1] for d in deltas),
            block_ids=ints(d[2] for d in deltas),
        )
        self.device.submit(plan)
        self.plans.append((plan, {i: s for i, (_, s) in enumerate(samples)}))
        self.step += 1

    def apply(self, result: StepResult) -> None:
        plan, samples = self.plans.popleft()
        assert result.step == plan.step
        tokens = iter(result.token_ids.tolist())
        for i, s in samples.items():
            if result.counts[i]:
                s.output.append(next(tokens))
            s.is_numeric |= bool(result.flags[i] & SampleFlag.NUMERIC)
            done = result.flags[i] != SampleFlag.OK or len(s.output) == s.params.max_tokens
            if done and not s.is_ended:
                self._end(s)
        for fence, s in tuple(self.leaving):
            if plan.step >= fence:
                self.leaving.remove((fence, s))
                self.free_blocks.extendleft(s.blocks)
                self.free_rows.append(s.row)
                self.leaves.append(s.row)

    def _end(self, s: Live) -> None:
        s.is_ended = True
        self.live.remove(s)
        named = [plan.step for plan, _ in self.plans if s.row in plan.rows]
        fence = max(named, default=-1)
        if self.mistake == "free blocks before the fence":
            self.free_blocks.extendleft(s.blocks)
            s.blocks = []
        if self.mistake == "free the row before the fence":
            fence = -1
        self.leaving.append((fence, s))
