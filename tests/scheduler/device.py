"""A device for the scheduler's tests: it believes nothing. KV is what was written, and every read is checked.

The next token of a row is a function of the tokens that its KV really holds and of its seed, so any slip in the
bookkeeping changes the tokens or trips a check. Steps run when the test completes them, which may be late.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagewire.step.step import NULL_BLOCK, RowJoin, SampleFlag, StepPlan, StepResult

VOCAB = 50
EOS = 7


def next_token(history: list[int], seed: int) -> int:
    """What the model says after `history`: the one function that device and oracle share."""
    return zlib.crc32(np.array([*history, seed], np.int64).tobytes()) % VOCAB


def expected(prompt: list[int], seed: int, max_tokens: int, *, stops: tuple[int, ...] = (EOS,)) -> list[int]:
    """The tokens of a request that is alone in the world."""
    history = list(prompt)
    for _ in range(max_tokens):
        history.append(next_token(history, seed))
        if history[-1] in stops:
            break
    return history[len(prompt) :]


@dataclass
class _Row:
    join: RowJoin
    history: list[int]
    done: bool = False
    blocks: dict[int, int] = field(default_factory=dict)


class Device:
    """Executes plans in order, as late as the test likes. `poison`: prompts whose logits are NaN."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv = np.full((num_blocks, block_size), -1, np.int64)
        self.rows: dict[int, _Row] = {}
        self.tables: dict[int, dict[int, int]] = {}
        self.queue: deque[StepPlan] = deque()
        self.writing: deque[dict[int, tuple[int, int]]] = deque()  # block → (row, epoch), a dict a queued step
        self.planned_tables: dict[int, dict[int, int]] = {}
        self.num_prefilled = 0
        self.poisoned: set[tuple[int, ...]] = set()

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan; checks what must hold when it is made."""
        self._check_plan(plan)
        self.queue.append(plan)

    def _check_plan(self, plan: StepPlan) -> None:
        assert np.unique(plan.rows).size == plan.rows.size, "a row twice in a step"
        assert plan.num_tokens.min() >= 1
        assert plan.token_ids.size == plan.num_tokens[plan.num_decode :].sum()
        assert (plan.num_tokens[: plan.num_decode] == 1).all()
        cells = list(zip(plan.block_rows.tolist(), plan.block_cols.tolist(), strict=True))
        assert len(set(cells)) == len(cells), "a cell of the block table twice in a step"
        for (row, col), block in zip(cells, plan.block_ids.tolist(), strict=True):
            assert block != NULL_BLOCK
            self.planned_tables.setdefault(row, {})[col] = block
        writing = {}
        for row, start, n, epoch in zip(plan.rows, plan.starts, plan.num_tokens, plan.epochs, strict=True):
            for col in range(start // self.block_size, (start + n - 1) // self.block_size + 1):
                block = self.planned_tables[int(row)][int(col)]
                assert writing.setdefault(block, (row, epoch)) == (row, epoch), "two rows write one block"
                for older in self.writing:
                    owner = older.get(block, (row, epoch))
                    assert owner == (row, epoch), f"block {block} has a new owner before its last step is done"
                writing[block] = (row, epoch)
        self.writing.append(writing)

    def complete(self) -> StepResult:
        """Run the oldest plan."""
        plan = self.queue.popleft()
        self.writing.popleft()
        for row in plan.leaves:
            del self.rows[int(row)]
        for join in plan.joins:
            assert join.row not in self.rows, "a row joined twice"
            self.rows[join.row] = _Row(join, [*join.prompt_ids.tolist(), *join.output_ids.tolist()])
        for row, col, block in zip(plan.block_rows, plan.block_cols, plan.block_ids, strict=True):
            self.rows[int(row)].blocks[int(col)] = int(block)
        for src, dst in zip(plan.copy_src, plan.copy_dst, strict=True):
            self.kv[dst] = self.kv[src]
        seen = self._forward(plan)
        return self._sample(plan, seen)

    def _forward(self, plan: StepPlan) -> list[list[int]]:
        tokens = plan.token_ids.tolist()
        self.num_prefilled += len(tokens)
        seen, writes = [], []
        for entry, (r, start, n) in enumerate(zip(plan.rows, plan.starts, plan.num_tokens, strict=True)):
            row = self.rows[int(r)]
            if entry < plan.num_decode:
                inputs = [row.history[-1]]
                if not row.done:
                    assert start == len(row.history) - 1, (start, len(row.history))
            else:
                inputs, tokens = tokens[:n], tokens[n:]
                assert inputs == row.history[start : start + n], "a chunk of other tokens"
            past = [] if row.done else [self._read(row, p) for p in range(start)]
            if not row.done:
                assert past == row.history[:start], f"row {r} reads other KV than it wrote, from {start}"
                writes += [(row, start + i, token) for i, token in enumerate(inputs)]
            seen.append(past + inputs)
        for row, position, token in writes:
            self.kv[row.blocks[position // self.block_size], position % self.block_size] = token
        return seen

    def _read(self, row: _Row, position: int) -> int:
        return int(self.kv[row.blocks[position // self.block_size], position % self.block_size])

    def _sample(self, plan: StepPlan, seen: list[list[int]]) -> StepResult:
        counts, flags, token_ids = [], [], []
        for entry, r in zip(plan.sample_entries, plan.sample_rows, strict=True):
            row = self.rows[int(r)]
            if row.done:
                counts.append(0), flags.append(SampleFlag.DROPPED)
                continue
            if tuple(row.join.prompt_ids.tolist()) in self.poisoned:
                counts.append(0), flags.append(SampleFlag.NUMERIC)
                row.done = True
                continue
            token = next_token(seen[entry], row.join.seed)
            row.history.append(token)
            stops = (*row.join.eos_ids, *row.join.params.stop_token_ids)
            row.done = token in stops
            counts.append(1), token_ids.append(token), flags.append(SampleFlag.STOPPED if row.done else SampleFlag.OK)
        return StepResult(
            plan.step, np.array(counts, np.int32), np.array(token_ids, np.int32), np.array(flags, np.uint8)
        )
