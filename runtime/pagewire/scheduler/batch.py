"""The running batch as a struct of arrays: the cost of a step does not grow by a Python loop over its sequences.

A row is a stable place, the same index here and in the worker's resident state. Lengths of a row, in tokens:

    num_known       the ledger: prompt and committed outputs
    num_scheduled   positions whose KV is written once all planned steps are done
    num_computed    positions whose KV is written and whose step was applied; kept up to date during prefill only

In prefill num_computed ≤ num_scheduled < num_known. From then on the row is exactly one token behind what planned steps
will bring: num_scheduled + 1 tokens are predicted, and num_known − 1 positions are computed. So decoding moves two of
the numbers, each once a step.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Final, NamedTuple, TypeVar

import numpy as np

from pagewire.request.request import TokenArray
from pagewire.scheduler.in_flight import RowIndex
from pagewire.scheduler.sequence import NO_ROW, Sequence, SequenceState
from pagewire.step.step import NULL_BLOCK, Int32Array

NO_LIMIT: Final = 2**31 - 1
"""Headroom of an empty batch."""

_Key = TypeVar("_Key", int, float)


def _backed_when_written(rows: int, columns: int) -> Int32Array:
    """int32 zeros that take address space, and memory once they are written.

    In small pages: for large arrays numpy asks for huge ones, and the kernel was seen to take 5 ms to find and clear one,
    within a plan (F27). On Windows there is no such choice.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros((rows, columns), np.int32)
    memory = mmap.mmap(-1, 4 * rows * columns, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32).reshape(rows, columns)


class DecodeSet(NamedTuple):
    """The rows that decode, with what a step needs of them; the same object from step to step until one joins or leaves.

    All arrays have the length of `rows`, and are read-only, since several plans share them.
    """

    rows: RowIndex
    narrow_rows: Int32Array
    epochs: Int32Array
    slots: Int32Array
    num_prompt: Int32Array
    ledger_starts: RowIndex
    """Where the rows begin in `Batch.ledger_cells`."""


class Batch:
    """Arrays of `max_rows` rows; memory of the ledger and of the tables is touched only where rows reach.

    Costs: place and displace O(length of the sequence); every array is updated by whole-array operations otherwise.
    """

    def __init__(self, max_rows: int, max_model_len: int, block_size: int) -> None:
        self.max_rows = max_rows
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        self.ledger = _backed_when_written(max_rows, max_model_len)
        self.ledger_cells = self.ledger.reshape(-1)
        """All of the ledger under one index: to write one token a row takes half the time so."""
        self.table = _backed_when_written(max_rows, self.max_blocks)
        self.num_blocks = np.zeros(max_rows, np.int32)
        # What a decode set holds of its rows is taken by one operation.
        self._constant = np.zeros((4, max_rows), np.int32)
        self._constant[0] = np.arange(max_rows)
        self.epoch, self.slot, self.num_prompt = self._constant[1:]
        self.num_computed = np.zeros(max_rows, np.int32)
        self.num_scheduled = np.zeros(max_rows, np.int32)
        self.num_known = np.zeros(max_rows, np.int32)
        self.limit = np.zeros(max_rows, np.int32)
        self.itl_ns = np.full(max_rows, np.inf)
        self.decodes = np.zeros(max_rows, np.bool_)  # changed by `set_decodes` alone
        self._decode_set: DecodeSet | None = None
        self.headroom = NO_LIMIT  # steps in which no decoding row can reach its limit
        self.sequences: list[Sequence | None] = [None] * max_rows
        # Lowest row first: a small batch stays at the front of every array.
        self.num_placed = 0
        self.num_by_priority: dict[int, int] = {}  # placed ones
        self._num_by_itl: dict[float, int] = {}  # likewise
        self.num_paused = 0  # placed ones whose state that is; changed by `set_paused` and `detach`
        self.num_departures = 0
        self._high = 0
        self._free_rows = list(range(max_rows - 1, -1, -1))

    def set_decodes(self, rows: RowIndex | int, value: bool | np.bool_) -> None:
        """Whether `rows` take part in the next decode steps."""
        self.decodes[rows] = value
        self._decode_set = None

    def set_paused(self, sequence: Sequence, value: bool) -> None:
        """Whether a placed sequence, whose prompt is computed, is PAUSED or RUNNING."""
        sequence.state = SequenceState.PAUSED if value else SequenceState.RUNNING
        self.num_paused += 1 if value else -1

    def start_decoding(self, row: int, room: int) -> None:
        """From the next plan on, `row` decodes; it may have `room` tokens more."""
        self.set_decodes(row, True)
        self.headroom = min(self.headroom, room)

    def decode_set(self) -> DecodeSet:
        """Who decodes. O(1) as long as nobody joined or left, otherwise a few whole-array operations."""
        if self._decode_set is None:
            rows = self.decodes[: self._high].nonzero()[0]
            constant, ledger_starts = self._constant.take(rows, axis=1), rows * self.ledger.shape[1]
            for array in (rows, constant, ledger_starts):
                array.setflags(write=False)
            self._decode_set = DecodeSet(rows, constant[0], constant[1], constant[2], constant[3], ledger_starts)
        return self._decode_set

    def tightest_ns(self, rows: RowIndex) -> float:
        """The tightest promise between two tokens among `rows`; infinity of none. O(1) where all in the batch have the same."""
        if not rows.size:
            return math.inf
        if len(self._num_by_itl) == 1:
            return next(iter(self._num_by_itl))
        return float(np.minimum.reduce(self.itl_ns.take(rows)))

    @property
    def num_in_use(self) -> int:
        """One more than the highest row that has a sequence or had one: whole-array operations stop there."""
        return self._high

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody has."""
        return len(self._free_rows)

    @property
    def num_rows(self) -> int:
        """Rows in use, those waiting for their last step included."""
        return self.max_rows - len(self._free_rows)

    def place(self, sequence: Sequence) -> int:
        """Give `sequence` a row and write what is known of it there. It has no blocks yet."""
        known = sequence.known_ids()
        row = self._free_rows.pop()
        self._high = max(self._high, row + 1)
        self.ledger[row, : known.size] = known
        self.num_blocks[row] = 0
        self.num_prompt[row] = sequence.num_prompt
        self.num_computed[row] = self.num_scheduled[row] = 0
        self.num_known[row] = known.size
        self.limit[row] = sequence.limit
        self.slot[row] = sequence.slot
        self.itl_ns[row] = itl_ns = sequence.itl_ns
        self._num_by_itl[itl_ns] = self._num_by_itl.get(itl_ns, 0) + 1
        self.sequences[row] = sequence
        sequence.row = row
        sequence.num_known = self.num_known
        self.num_placed += 1
        priority = sequence.request.priority
        self.num_by_priority[priority] = self.num_by_priority.get(priority, 0) + 1
        return row

    def append_blocks(self, row: int, blocks: Int32Array) -> None:
        """Extend a row's block table."""
        have = int(self.num_blocks[row])
        self.table[row, have : have + blocks.size] = blocks
        self.num_blocks[row] = have + blocks.size

    def blocks(self, row: int) -> Int32Array:
        """Block ids of a row, a view."""
        return self.table[row, : self.num_blocks[row]]

    def known_ids(self, row: int) -> TokenArray:
        """Prompt and committed outputs of a row, a view."""
        return self.ledger[row, : self.num_known[row]]

    def output_ids(self, row: int) -> TokenArray:
        """Committed outputs of a row, a view."""
        return self.ledger[row, self.num_prompt[row] : self.num_known[row]]

    def num_valid(self, row: int) -> int:
        """Leading positions whose KV is written by applied steps."""
        sequence = self.sequences[row]
        assert sequence is not None
        if sequence.state is SequenceState.PREFILLING:
            return int(self.num_computed[row])
        return max(int(self.num_computed[row]), int(self.num_known[row]) - 1)

    def detach(self, row: int) -> Sequence:
        """The sequence leaves its row, taking its tokens along; results still on their way are recognised as stale.

        The row and its blocks stay taken until `vacate`.
        """
        sequence = self.sequences[row]
        assert sequence is not None
        sequence.output = self.output_ids(row).copy()
        sequence.row = NO_ROW
        sequence.num_known = None
        self.sequences[row] = None
        self.set_decodes(row, False)
        self.epoch[row] += 1
        self.num_departures += 1
        self.num_placed -= 1
        self.num_paused -= sequence.state is SequenceState.PAUSED
        _count_down(self._num_by_itl, sequence.itl_ns)
        _count_down(self.num_by_priority, sequence.request.priority)
        return sequence

    def vacate(self, row: int) -> None:
        """The row may be given to another sequence."""
        assert self.sequences[row] is None, row
        self.table[row, : self.num_blocks[row]] = NULL_BLOCK
        self.num_blocks[row] = 0
        self._free_rows.append(row)

    def check_invariants(self) -> None:
        """Raise AssertionError where the arrays contradict one another."""
        free = set(self._free_rows)
        assert len(free) == len(self._free_rows)
        placed = [sequence.request.priority for sequence in self.sequences if sequence is not None]
        assert self.num_placed == len(placed)
        assert self.num_paused == sum(s.state is SequenceState.PAUSED for s in self.sequences if s is not None)
        assert self.num_by_priority == {priority: placed.count(priority) for priority in placed}
        promised = [sequence.itl_ns for sequence in self.sequences if sequence is not None]
        assert self._num_by_itl == {itl_ns: promised.count(itl_ns) for itl_ns in promised}
        for row, sequence in enumerate(self.sequences):
            if sequence is None:
                assert not self.decodes[row], row
                continue
            assert row not in free, row
            assert sequence.row == row, (sequence.row, row)
            assert self.slot[row] == sequence.slot
            computed, scheduled = int(self.num_computed[row]), int(self.num_scheduled[row])
            known, limit = int(self.num_known[row]), int(self.limit[row])
            assert 0 <= computed <= scheduled, (row, computed, scheduled)
            assert self.num_prompt[row] <= known <= limit, (row, known, limit)
            assert scheduled <= self.num_blocks[row] * self.block_size, row
            if self._decode_set is not None:
                assert (row in self._decode_set.rows) == self.decodes[row], row
            if self.decodes[row]:
                assert sequence.state is SequenceState.RUNNING, (row, sequence.state)
                assert known <= scheduled + 1 < limit, (row, known, scheduled, limit)
            blocks = self.blocks(row)
            assert (blocks != NULL_BLOCK).all(), row
            assert np.unique(blocks).size == blocks.size, row


def _count_down(num_by: dict[_Key, int], key: _Key) -> None:
    """One less of `key`."""
    left = num_by[key] - 1
    if left:
        num_by[key] = left
    else:
        del num_by[key]
