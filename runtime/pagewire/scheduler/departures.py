"""The one way out: whatever ends or interrupts a sequence, all that it holds is released here, once, in any state.

Rows and blocks come back at the *fence*: when the last planned step that names them was applied. Until then the worker
may still write there, and nothing of it may be handed to anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagewire.errors import PagewireError
from pagewire.request.request import TokenArray
from pagewire.scheduler.batch import Batch
from pagewire.scheduler.draft import Draft
from pagewire.scheduler.in_flight import InFlight
from pagewire.scheduler.memory import KvMemory
from pagewire.scheduler.prefix_waits import PrefixWaits
from pagewire.scheduler.sequence import NO_ROW, Sequence, SequenceState
from pagewire.scheduler.waiting import WaitingQueue
from pagewire.step.step import Int32Array
from pagewire_transport.messages import FinishReason

_NO_BLOCKS: Int32Array = np.empty(0, np.int32)


@dataclass(slots=True)
class _Leaving:
    """What a sequence left behind, until the fence."""

    row: int
    sequence: Sequence
    valid_ids: TokenArray
    """Tokens whose KV is written and proven: may be published. A view of the ledger, whose row nobody has before the release."""
    blocks: Int32Array
    """A view of the block table, likewise."""
    fork_blocks: Int32Array


class Departures:
    """Ends and preempts sequences. O(blocks of the sequence) each; nothing per step unless something leaves."""

    def __init__(
        self, batch: Batch, memory: KvMemory, waiting: WaitingQueue, prefixes: PrefixWaits, in_flight: InFlight
    ) -> None:
        self._batch = batch
        self._memory = memory
        self._waiting = waiting
        self._prefixes = prefixes
        self._in_flight = in_flight
        self._leaving: dict[int, list[_Leaving]] = {}  # by the step that is their fence
        self._preempting: dict[int, list[Sequence]] = {}  # likewise
        self._copying: dict[int, list[Int32Array]] = {}  # ends of block copies, likewise
        self.ended: list[Sequence] = []
        self.prefilling: list[Sequence] = []  # owned by the scheduler's prefill; here since leaving means leaving it
        self.num_reserved_rows = 0
        self.num_preemptions = 0

    # ---- ways out ----------------------------------------------------------------------------------------------------

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_ns: int,
        draft: Draft,
        *,
        stop: int | None = None,
        error: PagewireError | None = None,
        keep: int | None = None,
    ) -> bool:
        """Finish `sequence`; False if it had finished before (nothing happens).

        `keep`: how many generated tokens stay. `error` also means that its KV is not to be trusted: nothing of it is
        published (F32).
        """
        if not sequence.is_live:
            return False
        self._leave_queues(sequence)
        if sequence.row != NO_ROW:
            self._leave_row(sequence, draft, publish=error is None, keep=keep)
        elif keep is not None:
            sequence.output = sequence.output[:keep]
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason, sequence.stop, sequence.error = reason, stop, error
        sequence.finished_ns = now_ns
        self.ended.append(sequence)
        return True

    def preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Take row and blocks; the sequence waits again with its seniority and all its tokens.

        A token in flight is committed first: with a step on its way, this completes at that step's fence.
        """
        row = sequence.row
        self._batch.set_decodes(row, False)
        sequence.is_leaving = True
        fence = self._in_flight.fence_of(row)
        if fence is not None:
            self._preempting.setdefault(fence, []).append(sequence)
        else:
            self._complete_preemption(sequence, draft)

    def release_at(self, step: int, blocks: Int32Array) -> None:
        """Give back references to `blocks`, ends of copies in `step`, once it is applied."""
        self._copying.setdefault(step, []).append(blocks)

    def pass_fence(self, step: int, draft: Draft) -> None:
        """`step` was applied: what it was the last to name comes back."""
        for sequence in self._preempting.pop(step, ()):
            if sequence.is_live and sequence.is_leaving:
                self._complete_preemption(sequence, draft)
        for leaving in self._leaving.pop(step, ()):
            self._release(leaving, draft)
        for blocks in self._copying.pop(step, ()):
            self._memory.release_plain(blocks)

    # ---- what is still to come ---------------------------------------------------------------------------------------

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that fences will bring, shared ones counted in."""
        promised = sum(leaving.blocks.size for group in self._leaving.values() for leaving in group)
        for group in self._preempting.values():
            promised += sum(int(self._batch.num_blocks[s.row]) for s in group if s.is_live and s.row != NO_ROW)
        return promised

    def held_blocks(self) -> Iterator[Int32Array]:
        """Every run of blocks held behind a fence, once a holder (for invariants)."""
        for group in self._leaving.values():
            for leaving in group:
                yield leaving.blocks
                yield leaving.fork_blocks
        for runs in self._copying.values():
            yield from runs

    def take_ended(self) -> list[Sequence]:
        """Who ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _leave_queues(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        if sequence.is_held:
            self._prefixes.remove(sequence)
        if sequence.leader is not None:  # a follower that has not started
            leader = sequence.leader
            leader.followers.remove(sequence)
            sequence.leader = None
            if leader.row != NO_ROW:
                self.num_reserved_rows -= 1
                if leader.fork_blocks.size:
                    self._memory.release_plain(leader.fork_blocks[-1:])
                    leader.fork_blocks = leader.fork_blocks[:-1]
        elif sequence.followers and sequence.row == NO_ROW:  # a leader that has not started
            self._free_followers(sequence)

    def _free_followers(self, leader: Sequence) -> None:
        """Its leader is gone: each follower waits on its own; what the leader published, it will find."""
        for follower in leader.followers:
            follower.leader = None
            if not follower.is_paused:
                self._waiting.push(follower)
        leader.followers = []

    def _leave_row(self, sequence: Sequence, draft: Draft, *, publish: bool, keep: int | None = None) -> None:
        batch, row = self._batch, sequence.row
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        self.wake(self._prefixes.end(sequence))
        computed = batch.num_valid(row) if publish and sequence.is_proven else 0
        if keep is not None:  # a stop string was found late: what came after it does not count
            computed = min(computed, sequence.num_prompt + keep)
        blocks, valid = batch.blocks(row), batch.ledger[row, :computed]
        batch.detach(row)
        if keep is not None:
            sequence.output = sequence.output[:keep]
        fork_blocks, sequence.fork_blocks = sequence.fork_blocks, _NO_BLOCKS
        if sequence.followers:
            self.num_reserved_rows -= len(sequence.followers)
            self._free_followers(sequence)
        dropped = draft.drop_copies(blocks)  # a fork that ends before its tail was copied
        if dropped.size:
            self._memory.release_plain(dropped)
        leaving = _Leaving(row, sequence, valid, blocks, fork_blocks)
        fence = self._in_flight.fence_of(row)
        if fence is not None:
            self._leaving.setdefault(fence, []).append(leaving)
        else:
            self._release(leaving, draft)

    def _complete_preemption(self, sequence: Sequence, draft: Draft) -> None:
        sequence.is_leaving = False
        self._leave_row(sequence, draft, publish=True)
        sequence.state = SequenceState.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if not sequence.is_paused:
            self._waiting.push(sequence)

    def _release(self, leaving: _Leaving, draft: Draft) -> None:
        self._memory.release(leaving.sequence, leaving.valid_ids, leaving.blocks)
        if leaving.fork_blocks.size:
            self._memory.release_plain(leaving.fork_blocks)
        self._batch.vacate(leaving.row)
        draft.leave(leaving.row)

    def wake(self, sequences: list[Sequence]) -> None:
        """Put sequences that were held for a prefix back into the queue."""
        for sequence in sequences:
            if sequence.is_live and not sequence.is_paused:
                self._waiting.push(sequence)
