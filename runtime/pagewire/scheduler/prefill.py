"""Prefill: chunks of prompts, and what starts when the last of them is planned: decoding, and the forks of a request."""

from __future__ import annotations

from typing import Final

import numpy as np

from pagewire.scheduler.admission import Admission
from pagewire.scheduler.batch import Batch
from pagewire.scheduler.departures import Departures
from pagewire.scheduler.draft import Drafts
from pagewire.scheduler.in_flight import InFlight
from pagewire.scheduler.memory import KvMemory
from pagewire.scheduler.pacing import TokenBudget
from pagewire.scheduler.sequence import NO_ROW, Sequence, SequenceState
from pagewire.step.step import RowJoin

MOST_PLACED: Final = 65_536
"""Known tokens of those that are admitted in one plan, about. The budget counts what is computed; placing a long prompt that
is cached costs the loop a millisecond all the same (its tokens and blocks are copied), and many may wait for one prefix (F27).
"""


class Prefill:
    """Plans the prompts' part of a step."""

    def __init__(
        self,
        batch: Batch,
        memory: KvMemory,
        departures: Departures,
        admission: Admission,
        in_flight: InFlight,
        drafts: Drafts,
        *,
        eos_ids: tuple[int, ...],
    ) -> None:
        self._batch = batch
        self._memory = memory
        self._departures = departures
        self._admission = admission
        self._in_flight = in_flight
        self._drafts = drafts
        self._eos_ids = eos_ids

    def plan(self, step: int, budget: TokenBudget, now_ns: int) -> None:
        """Chunks for sequences in prefill, then for newcomers, within the budget."""
        for sequence in tuple(self._departures.prefilling):
            if budget.tokens <= 0:
                return
            if not sequence.is_leaving:
                self._chunk(sequence, budget)
        num_placed = 0
        while budget.tokens > 0 and num_placed < MOST_PLACED:
            num_known = self._admit(step, budget, now_ns)
            if not num_known:
                return
            num_placed += num_known

    def plan_by_due(self, step: int, budget: TokenBudget, now_ns: int) -> None:
        """Chunks for who is due first, in prefill or waiting, within the budget."""
        if not self._departures.prefilling and self._admission.is_closed():
            self._admission.most_urgent(now_ns)  # who is late lets others go first while they wait, too
            return
        begun = [sequence for sequence in self._departures.prefilling if not sequence.is_leaving]
        if len(begun) > 1:
            begun.sort(key=_urgency, reverse=True)
        num_placed = 0
        # The queue: its first cannot be admitted now, and nobody goes past it. Who could take a row from somebody who was
        # just given one may do so in the next step.
        is_closed = False
        while budget.tokens > 0:
            first = None if is_closed else self._admission.most_urgent(now_ns)
            if first is not None and (not begun or _urgency(first) < _urgency(begun[-1])):
                num_known = self._admit(step, budget, now_ns, first)
                num_placed += num_known
                is_closed = not num_known or num_placed >= MOST_PLACED or not self._admission.has_row
            elif begun:
                sequence = begun.pop()
                if sequence.row != NO_ROW and not sequence.is_leaving:  # it may just have given way to `first`
                    self._chunk(sequence, budget)
            else:
                return

    def _admit(self, step: int, budget: TokenBudget, now_ns: int, first: Sequence | None = None) -> int:
        """Tokens that are known of who was admitted, `first` of the queue or whoever is; 0: nobody was."""
        admitted = self._admission.admit_next(step, now_ns, self._drafts.current, first)
        if admitted is None:
            return 0
        self._drafts.current.join(self._join_of(admitted))
        self._chunk(admitted, budget)
        return int(self._batch.num_known[admitted.row])

    def _chunk(self, sequence: Sequence, budget: TokenBudget) -> None:
        """Schedule the next tokens of a sequence in prefill, as many as the budget has."""
        batch, row = self._batch, sequence.row
        assert row != NO_ROW
        start = int(batch.num_scheduled[row])
        known = int(batch.num_known[row])
        n = budget.take(start, known - start)
        if n == 0:
            return
        chunk = self._drafts.current.add_chunk(row, start, batch.ledger[row, start : start + n])
        batch.num_scheduled[row] = start + n
        self._in_flight.planning_chunks.add(row)
        top = sequence.request.params.prompt_logprobs
        if top is not None and start < sequence.num_prompt:
            self._drafts.current.want_prompt_logprobs(chunk, top)
        if start + n == known:
            self._departures.prefilling.remove(sequence)
            if known < batch.limit[row]:
                self._start_decoding(sequence, chunk)
                self._fork(sequence, chunk)

    def _start_decoding(self, sequence: Sequence, chunk: int) -> None:
        batch, row = self._batch, sequence.row
        self._drafts.current.sample(chunk, row)
        sequence.state = SequenceState.RUNNING
        if sequence.is_paused:
            batch.set_paused(sequence, True)
        room = int(batch.limit[row] - batch.num_known[row]) - 1
        self._in_flight.planning_last |= room == 0
        if room > 0 and not sequence.is_paused:
            batch.start_decoding(row, room)

    def _fork(self, leader: Sequence, chunk: int) -> None:
        """The leader's followers start: they share its full blocks; its partial tail is copied in the next step."""
        followers, leader.followers = leader.followers, []
        tails, leader.fork_blocks = leader.fork_blocks, leader.fork_blocks[:0]
        self._departures.num_reserved_rows -= len(followers)
        shared = self._batch.blocks(leader.row)
        tail = shared[shared.size - 1 :] if tails.size else shared[:0]
        shared = shared[: shared.size - tail.size]
        if followers:
            self._memory.fork(leader, shared, followers)
        for i, follower in enumerate(followers):
            follower.leader = None
            follower.num_cached = leader.num_cached
            follower.first_scheduled_ns = leader.first_scheduled_ns
            row = self._batch.place(follower)
            blocks = np.concatenate([shared, tails[i : i + tail.size]])
            self._batch.append_blocks(row, blocks)
            self._batch.num_scheduled[row] = leader.num_prompt
            self._in_flight.planning_chunks.add(row)
            self._drafts.current.set_blocks(row, 0, blocks)
            self._drafts.current.join(self._join_of(follower))
            self._start_decoding(follower, chunk)
            if tail.size:
                # The tail's KV is written by this very step. Both ends stay alive until the copy is done.
                self._memory.share(tail)
                self._memory.share(blocks[-1:])
                self._drafts.next.copy_block(int(tail[0]), int(blocks[-1]))

    def _join_of(self, sequence: Sequence) -> RowJoin:
        row, request = sequence.row, sequence.request
        return RowJoin(
            row=row,
            epoch=int(self._batch.epoch[row]),
            params=request.params,
            seed=sequence.seed,
            prompt_ids=request.prompt_ids,
            output_ids=sequence.output,
            eos_ids=() if request.params.ignore_eos else self._eos_ids,
        )


def _urgency(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.due_ns, -sequence.request.priority, sequence.order
