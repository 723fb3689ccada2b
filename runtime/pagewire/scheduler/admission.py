"""Who may start: rows, blocks and shared prefixes decide."""

from __future__ import annotations

import numpy as np

from pagewire.cache.lease import Match
from pagewire.config import SchedulerConfig
from pagewire.errors import PromptTooLong
from pagewire.request.request import Request, TokenArray
from pagewire.scheduler.batch import Batch
from pagewire.scheduler.departures import Departures
from pagewire.scheduler.draft import Draft
from pagewire.scheduler.memory import KvMemory
from pagewire.scheduler.pacing import Pacer
from pagewire.scheduler.prefix_waits import PrefixWaits
from pagewire.scheduler.promises import Promises
from pagewire.scheduler.sequence import Sequence, SequenceState
from pagewire.scheduler.victims import choose_paused, choose_victim
from pagewire.scheduler.waiting import WaitingQueue

WATERMARK = 0.01
"""Share of the pool that admission leaves to running sequences: without it a newcomer is preempted in the next step."""


class Admission:
    """Admits the first of the queue, never one behind it: bypassing would starve large requests."""

    def __init__(
        self,
        batch: Batch,
        memory: KvMemory,
        waiting: WaitingQueue,
        prefixes: PrefixWaits,
        departures: Departures,
        pacer: Pacer,
        promises: Promises,
        config: SchedulerConfig,
    ) -> None:
        self._batch = batch
        self._memory = memory
        self._waiting = waiting
        self._prefixes = prefixes
        self._departures = departures
        self._pacer = pacer
        self._promises = promises
        self._config = config
        self._watermark = int(memory.num_usable * WATERMARK)
        self._refused: tuple[int, ...] | None = None
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_recomputed_tokens = 0

    def num_blocks_to_start(self, request: Request) -> int:
        """Blocks that a request needs before its first token: its prompt, and a partial tail for each follower."""
        num_prompt = int(request.prompt_ids.size)
        has_tail = num_prompt % self._memory.block_size != 0
        return self._memory.blocks_for(num_prompt) + (request.params.n - 1 if has_tail else 0)

    def check_fits(self, request: Request, max_len: int) -> None:
        """Refuse what could never run, whatever else ends.

        Raises:
            PromptTooLong: it is longer than `max_len`, has more sequences than there are rows, or needs more blocks.
        """
        total = request.prompt_ids.size + request.max_tokens
        if total > max_len:
            raise PromptTooLong(
                f"{request.prompt_ids.size} prompt tokens and {request.max_tokens} new ones exceed the {max_len} "
                "that this server can hold",
                field="prompt_ids",
            )
        if request.params.n > self._batch.max_rows:
            raise PromptTooLong(f"at most {self._batch.max_rows} sequences run at once", field="params.n")
        if self.num_blocks_to_start(request) > self._memory.num_usable:
            raise PromptTooLong(
                f"{request.params.n} continuations of this prompt need more KV memory than there is", field="params.n"
            )

    def wake_expired(self, step: int) -> None:
        """Sequences that waited long enough for somebody else's prefix go back to the queue."""
        self._departures.wake(self._prefixes.expired(step))

    @property
    def has_row(self) -> bool:
        """Somebody could be placed without taking a row from anybody."""
        return self._batch.num_free_rows > self._departures.num_reserved_rows

    def is_closed(self) -> bool:
        """Whoever is first, nobody who waits can be placed: there is no row, nor one that could be taken from somebody."""
        batch, waiting = self._batch, self._waiting
        if self.has_row or batch.num_paused or not waiting:
            return False
        self._promises.is_blocked = min(batch.num_by_priority, default=waiting.top_priority) >= waiting.top_priority
        return self._promises.is_blocked

    def most_urgent(self, now_ns: int) -> Sequence | None:
        """The first of the queue, where something is promised: first who can still be in time."""
        while (sequence := self._waiting.peek()) is not None:
            if not self._promises.let_others_go(sequence, now_ns):
                break
        return sequence

    def _first(self, now_ns: int) -> Sequence | None:
        return self.most_urgent(now_ns) if self._pacer.is_active else self._waiting.peek()

    def admit_next(self, step: int, now_ns: int, draft: Draft, first: Sequence | None = None) -> Sequence | None:
        """Place the first waiting sequence with all blocks of its known tokens; None where it must wait.

        `first`: what `most_urgent` just said, where it was asked.
        """
        sequence = self._admit(step, now_ns, draft, first)
        self._promises.is_blocked = (sequence is None or not self.has_row) and len(self._waiting) > 0
        return sequence

    def _admit(self, step: int, now_ns: int, draft: Draft, sequence: Sequence | None) -> Sequence | None:
        pacer = self._pacer
        while sequence is not None or (sequence := self._first(now_ns)) is not None:
            if self._batch.num_free_rows - self._departures.num_reserved_rows < 1 + len(sequence.followers):
                self._preempt_for(sequence, draft)
                return None
            if pacer.is_active and not pacer.has_room_for(sequence, self._departures.prefilling):
                return None
            if self._stamp(sequence) == self._refused:
                return None
            known = sequence.known_ids()
            wants_prompt_logprobs = sequence.request.params.prompt_logprobs is not None
            match = self._memory.match(sequence, known[:0] if wants_prompt_logprobs else known)
            producer = None
            if not wants_prompt_logprobs:
                producer = self._prefixes.producer_of(sequence, known, match.num_blocks, step)
            if producer is not None:
                self._waiting.remove(sequence)
                self._prefixes.hold(sequence, producer, step)
                sequence = None
                continue
            if self._take_blocks(sequence, known, match, draft, now_ns):
                self._prefixes.begin(sequence, known)
                return sequence
            return None
        return None

    def _stamp(self, sequence: Sequence) -> tuple[int, ...]:
        """While it is the same, whoever was refused is refused again."""
        return sequence.order, self._memory.num_available, self._memory.tree.version, self._batch.num_paused

    def _take_blocks(self, sequence: Sequence, known: TokenArray, match: Match, draft: Draft, now_ns: int) -> bool:
        """Blocks for what is known of it, and a row; or nothing."""
        blocks = self._memory.acquire(sequence, match)
        num_tails = len(sequence.followers) if known.size % self._memory.block_size else 0
        need = self._memory.blocks_for(known.size) - blocks.size
        if not self._can_spare(sequence, need + num_tails):
            self._memory.release(sequence, known[:0], blocks)
            self._refused = self._stamp(sequence)
            self._preempt_for(sequence, draft)
            return False
        fresh = self._memory.try_take(need + num_tails)
        assert fresh is not None
        own = fresh[:need]
        self._place(sequence, np.concatenate((blocks, own)) if blocks.size else own, blocks.size, draft, now_ns)
        sequence.fork_blocks = fresh[need:]
        return True

    def _place(self, sequence: Sequence, blocks: np.ndarray, num_hit: int, draft: Draft, now_ns: int) -> None:
        self._waiting.remove(sequence)
        hit = num_hit * self._memory.block_size
        row = self._batch.place(sequence)
        self._batch.append_blocks(row, blocks)
        self._batch.num_scheduled[row] = self._batch.num_computed[row] = hit
        draft.set_blocks(row, 0, blocks)
        if sequence.state is SequenceState.WAITING:
            sequence.num_cached = min(hit, sequence.num_prompt)
            self.num_hit_tokens += hit
            self.num_prompt_tokens += sequence.num_prompt
        else:
            recomputed = int(self._batch.num_known[row]) - hit
            sequence.num_recomputed += recomputed
            self.num_recomputed_tokens += recomputed
        if sequence.first_scheduled_ns is None:
            sequence.first_scheduled_ns = now_ns
        sequence.state = SequenceState.PREFILLING
        sequence.is_proven = False
        self._departures.num_reserved_rows += len(sequence.followers)
        self._departures.prefilling.append(sequence)
        if self._pacer.is_active:
            self._waiting.charge(sequence.share, int(self._batch.num_known[row]) - hit)

    def _can_spare(self, sequence: Sequence, need: int) -> bool:
        """Whether `need` blocks may go to `sequence`, the running ones considered."""
        spare = self._memory.num_available - need
        if self._batch.num_placed == 0:
            return spare >= 0
        if sequence.num_preemptions < self._config.max_preemptions:
            return spare >= self._watermark
        # Preempted often enough: it comes back only when nothing that runs can push it out again.
        batch, rows = self._batch, np.array([s.row for s in self._batch.sequences if s is not None])
        total = -(-batch.limit[rows] // batch.block_size) - batch.num_blocks[rows]
        own = self._memory.blocks_for(sequence.limit) - self._memory.blocks_for(
            sequence.num_prompt + sequence.num_output
        )
        return spare >= int(total.sum()) + own

    def _preempt_for(self, sequence: Sequence, draft: Draft) -> None:
        """A waiting sequence takes the place of one of lower priority, never of an equal; of a paused one in any case.

        That one is back when its reader is, so however often it was preempted, nothing is preempted for ever.
        """
        if self._batch.num_paused:
            paused = None if self._departures.num_promised_blocks else choose_paused(self._batch)
            if paused is not None:
                self._departures.preempt(paused, draft)
                self._refused = None
            return
        if min(self._batch.num_by_priority, default=0) >= sequence.request.priority:
            return  # nobody to take a place of: no need to look at every row
        if self._departures.num_promised_blocks:
            return  # one at a time: what is on its way may suffice
        victim = choose_victim(self._batch, sequence, self._config.max_preemptions)
        if (
            victim is not None
            and victim.request.priority < sequence.request.priority
            and victim.num_preemptions < self._config.max_preemptions
        ):
            self._departures.preempt(victim, draft)
            self._refused = None
