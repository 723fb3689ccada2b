"""A device for tests that believes nothing: KV is what was written, every read is checked, steps end when told to.

`PureFakeDevice.submit(plan)` queues a step and checks what must hold when it is planned; `complete()` runs the oldest
one, all of it, at that moment: its reads and writes happen as late as they ever could (F14).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagewire.step.step import (
    NULL_BLOCK,
    Int32Array,
    LogprobRows,
    PromptLogprobRows,
    RowJoin,
    SampleFlag,
    StepPlan,
    StepResult,
)
from pagewire.worker.fake_kv import FakeKv, Owner, QueuedTouches, Touches, ensure
from pagewire.worker.fake_model import NextToken, choose, hash_tokens, top_logprobs
from pagewire.worker.interface import LogitMasks, WorkerShape

Predicate = Callable[[RowJoin], bool]


def fake_shape(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_rows: int = 8,
    max_model_len: int = 1024,
    vocab_size: int = 101,
    eos_ids: tuple[int, ...] = (0,),
) -> WorkerShape:
    """The shape of a small worker."""
    return WorkerShape(
        num_blocks=num_blocks,
        block_size=block_size,
        max_rows=max_rows,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        kv_bytes=0,
        model_name="fake",
    )


@dataclass(slots=True)
class _Row:
    """One tenancy of a row, as the device knows it."""

    join: RowJoin
    buffer: Int32Array
    size: int
    table: Int32Array
    is_done: bool = False

    @property
    def history(self) -> Int32Array:
        """All its tokens, int32 [size]."""
        return self.buffer[: self.size]

    def append(self, token: int) -> None:
        self.buffer[self.size] = token
        self.size += 1

    @property
    def owner(self) -> Owner:
        return self.join.row, self.join.epoch

    @property
    def stops(self) -> frozenset[int]:
        return frozenset((*self.join.eos_ids, *self.join.params.stop_token_ids))

    @property
    def forbidden(self) -> frozenset[int]:
        num_output = self.size - len(self.join.prompt_ids)
        return self.stops if num_output < self.join.params.min_tokens else frozenset()


@dataclass(slots=True)
class _Poison:
    matches: Predicate
    from_position: int


@dataclass(slots=True)
class _Seen:
    """What an entry's forward pass saw: all tokens up to its last position, and whether any was NaN."""

    tokens: Int32Array
    poisoned: bool


@dataclass(slots=True)
class _Planned:
    """A row as of the last plan submitted: the host's view, ahead of the device's."""

    epoch: int
    blocks: dict[int, int] = field(default_factory=dict)


class PureFakeDevice:
    """Executes plans in order, each when `complete` is called.

    Attributes:
        num_prefilled: prompt tokens computed, recomputed ones included.
        num_decoded: decode entries computed.
        num_dropped: samples not drawn since their row had stopped.
    """

    def __init__(self, shape: WorkerShape | None = None, *, model: NextToken | None = None) -> None:
        self.shape = shape if shape is not None else fake_shape()
        self.model = model if model is not None else hash_tokens(self.shape.vocab_size)
        self.num_prefilled = self.num_decoded = self.num_dropped = 0
        self._kv = FakeKv(self.shape.num_blocks, self.shape.block_size)
        self._rows: dict[int, _Row] = {}
        self._poisons: list[_Poison] = []
        self._queue: deque[StepPlan] = deque()
        self._planned: dict[int, _Planned] = {}
        self._touches = QueuedTouches()
        self._family: dict[Owner, Owner] = {}
        self._last_step: int | None = None

    @property
    def num_queued(self) -> int:
        """Steps submitted and not complete."""
        return len(self._queue)

    def poison(self, target: int | Predicate, *, from_position: int = 0) -> None:
        """Make KV and logits of a row (or of every row whose join fits) NaN from a position on."""
        matches: Predicate = (lambda join: join.row == target) if isinstance(target, int) else target
        self._poisons.append(_Poison(matches, from_position))

    def heal(self) -> None:
        """No more poison; what was written stays."""
        self._poisons.clear()

    def submit(self, plan: StepPlan) -> None:
        """Queue a step.

        Raises:
            BookkeepingError: the plan contradicts itself, what was planned before, or the fence.
        """
        _check_shapes(plan, self.shape)
        ensure(self._last_step is None or plan.step == self._last_step + 1, f"step {plan.step} is out of order")
        self._last_step = plan.step
        self._plan_rows(plan)
        self._plan_touches(plan)
        self._queue.append(plan)

    def complete(self, masks: LogitMasks | None = None) -> StepResult:
        """Run the oldest step.

        Raises:
            BookkeepingError: it reads other KV than its rows have, or feeds other tokens.
        """
        plan = self._queue.popleft()
        self._touches.pop()
        self._update(plan)
        for src, dst in zip(plan.copy_src.tolist(), plan.copy_dst.tolist(), strict=True):
            self._kv.copy(src, dst)
        seen = self._forward(plan)
        return self._sample(plan, seen, masks)

    # ---- when planned ------------------------------------------------------------------------------------------------

    def _plan_rows(self, plan: StepPlan) -> None:
        """Leaves, joins and block deltas in the host's view."""
        for row in plan.leaves.tolist():
            ensure(row in self._planned, f"step {plan.step}: row {row} leaves, and nobody has it")
            ensure(not self._touches.names(row), f"step {plan.step}: row {row} leaves while a queued step names it")
            self._family.pop((row, self._planned[row].epoch), None)
            del self._planned[row]
        for join in plan.joins:
            ensure(0 <= join.row < self.shape.max_rows, f"step {plan.step}: no row {join.row}")
            ensure(join.row not in self._planned, f"step {plan.step}: row {join.row} is joined twice")
            length = join.prompt_ids.size + join.output_ids.size
            ensure(
                0 < length <= self.shape.max_model_len, f"step {plan.step}: row {join.row} joins with {length} tokens"
            )
            self._planned[join.row] = _Planned(join.epoch)
        cells = set()
        for row, col, block in _triples(plan):
            ensure(row in self._planned, f"step {plan.step}: block {block} for row {row}, which nobody has")
            ensure((row, col) not in cells, f"step {plan.step}: two blocks for column {col} of row {row}")
            ensure(0 < block < self.shape.num_blocks, f"step {plan.step}: block {block} is nobody's to have")
            cells.add((row, col))
            self._planned[row].blocks[col] = block
        for kind, rows, epochs in (
            ("entry", plan.rows, plan.epochs),
            ("sample", plan.sample_rows, plan.sample_epochs),
        ):
            for row, epoch in zip(rows.tolist(), epochs.tolist(), strict=True):
                ensure(row in self._planned, f"step {plan.step}: an {kind} of row {row}, which nobody has")
                now = self._planned[row].epoch
                ensure(now == epoch, f"step {plan.step}: {kind} of row {row} is for epoch {epoch}, it is in {now}")

    def _plan_touches(self, plan: StepPlan) -> None:
        """Blocks that the step will read and write; who shares one with whom."""
        rows = frozenset((*plan.rows.tolist(), *plan.sample_rows.tolist()))
        touches = Touches(plan.step, rows)
        for row, start, num in zip(plan.rows.tolist(), plan.starts.tolist(), plan.num_tokens.tolist(), strict=True):
            planned, owner = self._planned[row], (row, self._planned[row].epoch)
            first = start // self.shape.block_size
            for col in range((start + num - 1) // self.shape.block_size + 1):
                ensure(col in planned.blocks, f"step {plan.step}: row {row} has no block for column {col}")
                block = planned.blocks[col]
                if col * self.shape.block_size < start:
                    touches.reads.setdefault(block, set()).add(owner)
                if col >= first:
                    other = touches.writes.setdefault(block, owner)
                    ensure(other == owner, f"step {plan.step}: {other} and {owner} both write block {block}")
        for block, owner in touches.writes.items():
            readers = touches.reads.get(block, set()) - {owner}
            ensure(not readers, f"step {plan.step}: {owner} writes block {block}, which {readers} read")
        if plan.copy_src.size:
            self._plan_copies(plan, touches)
        self._touches.push(touches, self._family)
        for entry, row, epoch in zip(
            plan.sample_entries.tolist(), plan.sample_rows.tolist(), plan.sample_epochs.tolist(), strict=True
        ):
            leader = int(plan.rows[entry]), int(plan.epochs[entry])
            if leader != (row, epoch):
                self._family[row, epoch] = self._family.get(leader, leader)

    def _plan_copies(self, plan: StepPlan, touches: Touches) -> None:
        """A copy belongs to the row that has its destination; that it reads the leader's block is a fork's right."""
        owner_of = {b: (row, planned.epoch) for row, planned in self._planned.items() for b in planned.blocks.values()}
        written: set[int] = set()
        for src, dst in zip(plan.copy_src.tolist(), plan.copy_dst.tolist(), strict=True):
            ensure(NULL_BLOCK not in (src, dst), f"step {plan.step}: a copy of the null block")
            ensure(src not in written, f"step {plan.step}: block {src} is copied on after it was copied to")
            ensure(dst not in written, f"step {plan.step}: two copies to block {dst}")
            written.add(dst)
            owner = owner_of.get(dst)
            ensure(owner is not None, f"step {plan.step}: a copy to block {dst}, which nobody has")
            assert owner is not None
            ensure(touches.writes.setdefault(dst, owner) == owner, f"step {plan.step}: block {dst} has two writers")
            if src in owner_of:
                touches.reads.setdefault(src, set()).add(owner_of[src])

    # ---- when run ----------------------------------------------------------------------------------------------------

    def _update(self, plan: StepPlan) -> None:
        for row in plan.leaves.tolist():
            del self._rows[row]
        num_cols = -(-self.shape.max_model_len // self.shape.block_size)
        for join in plan.joins:
            history = np.concatenate([join.prompt_ids, join.output_ids])
            buffer = np.zeros(self.shape.max_model_len + 1, np.int32)
            buffer[: history.size] = history
            self._rows[join.row] = _Row(join, buffer, history.size, np.full(num_cols, NULL_BLOCK, np.int32))
        for row, col, block in _triples(plan):
            self._rows[row].table[col] = block

    def _forward(self, plan: StepPlan) -> list[_Seen]:
        """Read, check and write every entry; all reads come before all writes, as in one launch."""
        seen, writes, at = [], [], 0
        for entry, (r, start, num) in enumerate(
            zip(plan.rows.tolist(), plan.starts.tolist(), plan.num_tokens.tolist(), strict=True)
        ):
            row = self._rows[r]
            history = row.history.copy()  # the sample that follows appends
            if entry < plan.num_decode:
                inputs = history[-1:]
                self.num_decoded += 1
            else:
                inputs = plan.token_ids[at : at + num]
                at += num
                self.num_prefilled += num
            if row.is_done:  # its KV goes to the null block, its sample is dropped
                seen.append(_Seen(history, poisoned=False))
                continue
            ensure(
                entry >= plan.num_decode or start == history.size - 1,
                f"step {plan.step}: row {r} decodes position {start}, but its last token is at {history.size - 1}",
            )
            ensure(
                start + num <= history.size, f"step {plan.step}: row {r} computes more than its {history.size} tokens"
            )
            ensure(
                bool((inputs == history[start : start + num]).all()),
                f"step {plan.step}: row {r} computes {inputs.tolist()} at {start}, its tokens are other ones",
            )
            poisoned = self._poisoned(row, start, num) | self._kv.read(row.table, history, start, row.owner)
            seen.append(_Seen(history[: start + num], bool(poisoned.any())))
            writes.append((row, start, inputs, poisoned))
        for row, start, inputs, poisoned in writes:
            self._kv.write(row.table, start, inputs, row.owner, poisoned)
        return seen

    def _poisoned(self, row: _Row, start: int, num: int) -> npt.NDArray[np.bool_]:
        """Which of positions start … start + num − 1 come out as NaN for this row."""
        firsts = [p.from_position for p in self._poisons if p.matches(row.join)]
        return np.arange(start, start + num) >= min(firsts, default=self.shape.max_model_len)

    def _sample(self, plan: StepPlan, seen: list[_Seen], masks: LogitMasks | None) -> StepResult:
        num = plan.sample_rows.size
        flags = np.zeros(num, np.uint8)
        token_ids: list[int] = []
        drawn: list[tuple[int, int, int]] = []  # (sample, token, top log-probabilities asked)
        for s, (entry, r) in enumerate(zip(plan.sample_entries.tolist(), plan.sample_rows.tolist(), strict=True)):
            row = self._rows[r]
            if row.is_done:
                flags[s] = SampleFlag.DROPPED
                self.num_dropped += 1
                continue
            ensure(
                np.array_equal(seen[entry].tokens, row.history),
                f"step {plan.step}: row {r} draws from the logits of other tokens than its own",
            )
            if seen[entry].poisoned or self._poisoned(row, row.size - 1, 1)[0]:
                flags[s] = SampleFlag.NUMERIC
                row.is_done = True
                continue
            token = choose(
                self.model,
                seen[entry].tokens,
                row.join.seed,
                vocab_size=self.shape.vocab_size,
                forbidden=row.forbidden,
                allowed=_allowed(masks, s, self.shape.vocab_size),
            )
            row.append(token)
            row.is_done = token in row.stops
            flags[s] = SampleFlag.STOPPED if row.is_done else SampleFlag.OK
            token_ids.append(token)
            if row.join.params.logprobs is not None:
                drawn.append((s, token, row.join.params.logprobs))
        counts = ((flags & (SampleFlag.NUMERIC | SampleFlag.DROPPED)) == 0).astype(np.int32)
        return StepResult(
            plan.step,
            counts,
            np.array(token_ids, np.int32),
            flags,
            logprobs=self._logprobs(drawn),
            prompt_logprobs=self._prompt_logprobs(plan),
        )

    def _logprobs(self, drawn: list[tuple[int, int, int]]) -> LogprobRows | None:
        if not drawn:
            return None
        made = [top_logprobs(token, num_tops, self.shape.vocab_size) for _, token, num_tops in drawn]
        return LogprobRows(
            samples=np.array([s for s, _, _ in drawn], np.int32),
            chosen=np.array([chosen for chosen, _, _ in made], np.float32),
            top=np.array([num_tops for _, _, num_tops in drawn], np.int32),
            top_ids=np.concatenate([ids for _, ids, _ in made]),
            top_logprobs=np.concatenate([logprobs for _, _, logprobs in made]),
        )

    def _prompt_logprobs(self, plan: StepPlan) -> list[PromptLogprobRows]:
        found = []
        for entry, num_tops in plan.prompt_logprobs.items():
            prompt = self._rows[int(plan.rows[entry])].join.prompt_ids
            start, num = int(plan.starts[entry]), int(plan.num_tokens[entry])
            made = [
                top_logprobs(t, num_tops, self.shape.vocab_size) for t in prompt[start + 1 : start + num + 1].tolist()
            ]
            if made:
                chosen = np.array([c for c, _, _ in made], np.float32)
                tops = np.array([ids for _, ids, _ in made]), np.array([logprobs for _, _, logprobs in made])
                found.append(PromptLogprobRows(entry, start, chosen, *tops))
        return found


def _check_shapes(plan: StepPlan, shape: WorkerShape) -> None:
    """Columns fit together and name things once."""
    step, num_entries, num_samples = plan.step, plan.rows.size, plan.sample_entries.size
    ensure(num_entries > 0, f"step {step} has nothing to do")
    ensure(plan.starts.size == plan.num_tokens.size == plan.epochs.size == num_entries, f"step {step}: ragged entries")
    ensure(plan.sample_rows.size == plan.sample_epochs.size == num_samples, f"step {step}: ragged samples")
    ensure(np.unique(plan.rows).size == num_entries, f"step {step}: a row has two entries")
    ensure(np.unique(plan.sample_rows).size == num_samples, f"step {step}: a row has two samples")
    ensure(int(plan.num_tokens.min()) >= 1, f"step {step}: an entry without tokens")
    ensure(bool((plan.num_tokens[: plan.num_decode] == 1).all()), f"step {step}: a decode entry of several tokens")
    ensure(plan.token_ids.size == plan.num_tokens[plan.num_decode :].sum(), f"step {step}: token ids do not add up")
    ensure(
        bool(((plan.sample_entries >= 0) & (plan.sample_entries < num_entries)).all()),
        f"step {step}: a sample of no entry",
    )
    ends = plan.starts + plan.num_tokens
    ensure(int(ends.max()) <= shape.max_model_len, f"step {step}: a position beyond the model's context")


def _triples(plan: StepPlan) -> zip[tuple[int, int, int]]:
    return zip(plan.block_rows.tolist(), plan.block_cols.tolist(), plan.block_ids.tolist(), strict=True)


def _allowed(masks: LogitMasks | None, sample: int, vocab_size: int) -> npt.NDArray[np.bool_] | None:
    if masks is None or sample not in masks.samples:
        return None
    bits = masks.allowed[np.flatnonzero(masks.samples == sample)[0]].astype("<u4").view(np.uint8)
    return np.unpackbits(bits, bitorder="little")[:vocab_size].astype(np.bool_)
