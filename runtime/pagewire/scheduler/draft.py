"""A step plan in the making: deltas that wait for the next plan, and the entries of the one being made."""

from __future__ import annotations

from typing import Final

import numpy as np

from pagewire.request.request import TokenArray
from pagewire.scheduler.batch import DecodeSet
from pagewire.scheduler.constants import ascending, ones
from pagewire.scheduler.in_flight import RowIndex
from pagewire.step.step import Int32Array, RowJoin, StepPlan

_EMPTY: Final = np.empty(0, np.int32)
_Finished = tuple[StepPlan, RowIndex, RowIndex]


class Draft:
    """Collects what the worker must be told. `finish` makes the plan of it and ends its life.

    Deltas (leaves, joins, blocks, copies) may come at any time; entries only while a plan is being made.
    """

    def __init__(self) -> None:
        self._leaves: list[int] = []
        self._joins: list[RowJoin] = []
        self._block_rows: list[Int32Array] = []
        self._block_cols: list[Int32Array] = []
        self._block_ids: list[Int32Array] = []
        self._copies: list[tuple[int, int]] = []
        self._rows: list[int] = []
        self._starts: list[int] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[TokenArray] = []
        self._sampled: list[int] = []  # rows, and the chunks that they draw from
        self._sampled_chunks: list[int] = []
        self._prompt_logprobs: dict[int, int] = {}

    @property
    def has_chunks(self) -> bool:
        """Some prefill is in it."""
        return bool(self._rows)

    def leave(self, row: int) -> None:
        """The worker may forget `row`."""
        self._leaves.append(row)

    def join(self, join: RowJoin) -> None:
        """The worker sets up a row."""
        self._joins.append(join)

    def set_blocks(self, row: int, first_col: int, blocks: Int32Array) -> None:
        """A run of one row's block table."""
        rows = np.empty(blocks.size, np.int32)
        rows.fill(row)
        cols = ascending(blocks.size)
        self._block_rows.append(rows)
        self._block_cols.append(cols + np.int32(first_col) if first_col else cols)
        self._block_ids.append(blocks)

    def grow_blocks(self, rows: Int32Array, cols: Int32Array, blocks: Int32Array) -> None:
        """One new block for each of many rows."""
        self._block_rows.append(rows)
        self._block_cols.append(cols)
        self._block_ids.append(blocks)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy a block before the forward pass."""
        self._copies.append((src, dst))

    def drop_copies(self, blocks: Int32Array) -> Int32Array:
        """Forget copies whose destination is among `blocks`; the ends of those that were forgotten."""
        if not self._copies:
            return _EMPTY
        gone = [copy for copy in self._copies if copy[1] in blocks]
        self._copies = [copy for copy in self._copies if copy[1] not in blocks]
        return np.array(gone, np.int32).reshape(-1)

    def copies(self) -> list[tuple[int, int]]:
        """The copies so far."""
        return self._copies

    def add_chunk(self, row: int, start: int, token_ids: TokenArray) -> int:
        """Prefill `token_ids` at position `start` of `row`; the index of the chunk."""
        self._rows.append(row)
        self._starts.append(start)
        self._num_tokens.append(token_ids.size)
        self._token_ids.append(token_ids.copy())  # the ledger's row may have another owner before the worker reads it
        return len(self._rows) - 1

    def sample(self, chunk: int, row: int) -> None:
        """Draw from the last logits of `chunk` for `row`."""
        self._sampled.append(row)
        self._sampled_chunks.append(chunk)

    def want_prompt_logprobs(self, chunk: int, top: int) -> None:
        """Log-probabilities of the chunk's next prompt tokens."""
        self._prompt_logprobs[chunk] = top

    def finish(
        self,
        step: int,
        decode_rows: RowIndex,
        decode_starts: Int32Array,
        epoch: Int32Array,
        decode_set: DecodeSet | None = None,
    ) -> _Finished:
        """The plan and the rows it names: decode entries first, each with its sample, then the chunks."""
        num_decode = decode_rows.size
        rows = sample_rows = decode_rows
        starts, num_tokens, entries = decode_starts, ones(num_decode), ascending(num_decode)
        if self._rows:
            num_entries = num_decode + len(self._rows)
            rows = np.concatenate((rows, np.array(self._rows, np.intp)))
            columns = np.empty((2, num_entries), np.int32)
            columns[0, :num_decode] = starts
            columns[1, :num_decode] = 1
            columns[:, num_decode:] = self._starts, self._num_tokens
            starts, num_tokens = columns[0], columns[1]
            if self._sampled == self._rows:
                # Every chunk with one sample, its own: what a prompt's last chunk is unless it forks.
                sample_rows, entries = rows, ascending(num_entries)
            elif self._sampled:
                entries = np.concatenate((entries, np.array(self._sampled_chunks, np.int32) + np.int32(num_decode)))
                sample_rows = np.concatenate((sample_rows, np.array(self._sampled, np.intp)))
        if decode_set is not None and rows is decode_set.rows:
            narrow, epochs = decode_set.narrow_rows, decode_set.epochs
        else:
            narrow, epochs = rows.astype(np.int32), epoch.take(rows)
        same = sample_rows is rows
        plan = StepPlan(
            step=step,
            rows=narrow,
            starts=starts,
            num_tokens=num_tokens,
            epochs=epochs,
            num_decode=num_decode,
            token_ids=_joined(self._token_ids),
            sample_entries=entries,
            sample_rows=narrow if same else sample_rows.astype(np.int32),
            sample_epochs=epochs if same else epoch.take(sample_rows),
            leaves=np.array(self._leaves, np.int32) if self._leaves else _EMPTY,
            joins=self._joins,
            block_rows=_joined(self._block_rows),
            block_cols=_joined(self._block_cols),
            block_ids=_joined(self._block_ids),
        )
        if self._copies:
            copies = np.array(self._copies, np.int32)
            plan.copy_src, plan.copy_dst = copies[:, 0], copies[:, 1]
        if self._prompt_logprobs:
            plan.prompt_logprobs = {num_decode + chunk: top for chunk, top in self._prompt_logprobs.items()}
        return plan, rows, sample_rows


class Drafts:
    """The draft of the step to come, and that of the one after, for what already must wait for it."""

    def __init__(self) -> None:
        self.current = Draft()
        self.next = Draft()

    def turn(self) -> None:
        """The step to come is planned."""
        self.current, self.next = self.next, Draft()


def _joined(parts: list[Int32Array]) -> Int32Array:
    if not parts:
        return _EMPTY
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
