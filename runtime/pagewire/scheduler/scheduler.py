"""The scheduler: requests in, step plans out, step results in, outcomes out. Pure: no clock, no I/O, no randomness.

One idea serves prefill, decode and resumption alike: every sequence has tokens that are known and positions that are
scheduled, and a step gives each running sequence tokens to catch up. A decoding sequence is one token behind; a new or
resumed one is its whole prompt behind and catches up in chunks.

A step is planned in this order: running sequences decode (a row that crosses a block boundary gets a block), sequences
in prefill go on, the queue is admitted while tokens and blocks last. A sequence is admitted with all blocks of its
known tokens at once: allocating by chunk would admit more, and deadlock two long prompts against each other (F25).

Seniority rules who gives way. When blocks run out, only juniors (lower priority, or younger) of the one in need are
preempted, and where it has no junior, it steps back itself. So the most senior sequence is never preempted, always
progresses, and everyone becomes most senior in the end (F24).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pagewire.config import SchedulerConfig
from pagewire.errors import ConfigError, InternalError, NumericError, Overloaded, PagewireError, PromptTooLong
from pagewire.request.request import Request, TokenArray
from pagewire.scheduler.admission import Admission
from pagewire.scheduler.batch import Batch
from pagewire.scheduler.commit import commit_logprobs, trim_prompt_logprobs
from pagewire.scheduler.departures import Departures
from pagewire.scheduler.draft import Draft
from pagewire.scheduler.memory import KvMemory
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.sequence import NO_ROW, Sequence, SequenceState
from pagewire.scheduler.victims import choose_victim
from pagewire.scheduler.waiting import PrefixWaits, WaitingQueue
from pagewire.step.step import Int32Array, RowJoin, SampleFlag, StepPlan, StepResult
from pagewire_transport.messages import FinishReason


class Scheduler:
    """Decides every step. Not thread-safe: one loop owns it.

    `plan` and `apply` alternate under the order that `Pipeline` keeps; all else may be called between any two calls.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_model_len: int,
        config: SchedulerConfig,
        eos_ids: tuple[int, ...] = (),
        prefix_cache: bool = True,
    ) -> None:
        if config.max_step_tokens < max_rows:
            raise ConfigError(f"must be at least max_rows ({max_rows})", field="scheduler.max_step_tokens")
        if num_blocks < 2:
            raise ConfigError("KV memory holds no block: give it more bytes", field="cache.kv_bytes")
        self.config = config
        self.eos_ids = eos_ids
        self.memory = KvMemory(num_blocks, block_size, prefix_cache=prefix_cache)
        self.max_len = min(max_model_len, self.memory.num_usable * block_size)
        """Longest sequence that can be served: the model's context, or the whole pool."""
        self.batch = Batch(max_rows, self.max_len, block_size)
        self.waiting = WaitingQueue()
        self.prefixes = PrefixWaits(block_size, config.max_prefix_wait_steps if prefix_cache else 0)
        self.departures = Departures(self.batch, self.memory, self.waiting, self.prefixes)
        self.admission = Admission(self.batch, self.memory, self.waiting, self.prefixes, self.departures, config)
        self._draft = Draft()  # the step to come
        self._next_draft = Draft()  # and what already must wait for the one after
        self._next_step = 0
        self._last_applied = -1
        self._next_order = 0
        self._slots = _Slots()
        self._live: dict[int, Sequence] = {}  # by order

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_ns: int) -> list[Sequence]:
        """Queue a request: its `n` sequences, the first of which prefills for all.

        Raises:
            PromptTooLong: it could never run, whatever else ends.
            Overloaded: the queue is full.
        """
        n = request.params.n
        self._check_fits(request)
        if self.num_waiting + n > self.config.max_waiting and self.num_waiting > 0:
            raise Overloaded(f"{self.num_waiting} sequences are waiting", retry_after_ms=1000)
        sequences = [
            Sequence(request, choice, request.seed + choice, self._next_order + choice, self._slots.take())
            for choice in range(n)
        ]
        self._next_order += n
        leader, followers = sequences[0], sequences[1:]
        for follower in followers:
            follower.leader = leader
        leader.followers = followers
        self._live.update((s.order, s) for s in sequences)
        if request.max_tokens == 0 and request.params.prompt_logprobs is None:
            for sequence in sequences:
                self._end(sequence, "length", now_ns)
        else:
            self.waiting.push(leader)
        return sequences

    def _check_fits(self, request: Request) -> None:
        total = request.prompt_ids.size + request.max_tokens
        if total > self.max_len:
            raise PromptTooLong(
                f"{request.prompt_ids.size} prompt tokens and {request.max_tokens} new ones exceed the {self.max_len} "
                "that this server can hold",
                field="prompt_ids",
            )
        if request.params.n > self.batch.max_rows:
            raise PromptTooLong(f"at most {self.batch.max_rows} sequences run at once", field="params.n")
        if self.admission.num_blocks_to_start(request) > self.memory.num_usable:
            raise PromptTooLong(
                f"{request.params.n} continuations of this prompt need more KV memory than there is", field="params.n"
            )

    def cancel(self, sequence: Sequence, now_ns: int) -> bool:
        """End it now; what it generated stays. False: it had ended."""
        return self._end(sequence, "cancelled", now_ns)

    def fail(self, sequence: Sequence, error: PagewireError, now_ns: int) -> bool:
        """End it with an error; nothing of its KV is kept. False: it had ended."""
        return self._end(sequence, "error", now_ns, error=error)

    def finish_at(self, sequence: Sequence, at: int, now_ns: int) -> bool:
        """End it as stopped after its first `at` generated tokens. False: it had ended."""
        return self._end(sequence, "stop", now_ns, keep=min(at, sequence.num_output))

    def pause(self, sequence: Sequence) -> None:
        """Stop generating for it; it keeps row and blocks until somebody needs them. Idempotent."""
        if not sequence.is_live or sequence.is_paused:
            return
        sequence.is_paused = True
        if sequence.state is SequenceState.RUNNING:
            sequence.state = SequenceState.PAUSED
            self.batch.decodes[sequence.row] = False
        elif sequence.row == NO_ROW and sequence.leader is None:
            self.waiting.remove(sequence)
            if sequence.is_held:
                self.prefixes.remove(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Go on with it. Idempotent."""
        if not sequence.is_live or not sequence.is_paused:
            return
        sequence.is_paused = False
        if sequence.state is SequenceState.PAUSED:
            sequence.state = SequenceState.RUNNING
            row = sequence.row
            self.batch.decodes[row] = not sequence.is_leaving and self.batch.num_predicted[row] < self.batch.limit[row]
        elif sequence.row == NO_ROW and sequence.leader is None:
            self.waiting.push(sequence)

    def output(self, sequence: Sequence, start: int, stop: int) -> TokenArray:
        """Committed output tokens start … stop − 1, int32; a copy. Works for live and ended sequences."""
        if sequence.row == NO_ROW:
            return sequence.output[start:stop].copy()
        return self.batch.output_ids(sequence.row)[start:stop].copy()

    def take_ended(self) -> list[Sequence]:
        """Sequences that ended since the last outcome; for when no step is on its way to report them."""
        return self._report_ended()

    # ---- planning ----------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or None where nothing can run now."""
        step, batch = self._next_step, self.batch
        self.admission.wake_expired(step)
        rows = self._decode_rows(now_ns)
        # Named by this step from here on: a preemption further down must wait for its fence.
        batch.last_step[rows] = step
        self._prefill(step, self.config.max_step_tokens - rows.size, now_ns)
        if rows.size == 0 and not self._draft.has_chunks:
            return None
        starts = batch.num_scheduled[rows]
        if rows.size:
            predicted = batch.num_predicted[rows] + 1
            batch.num_scheduled[rows] = starts + 1
            batch.num_predicted[rows] = predicted
            batch.decodes[rows] &= predicted < batch.limit[rows]
        plan = self._draft.finish(step, rows, starts, batch.epoch)
        self._draft, self._next_draft = self._next_draft, Draft()
        if plan.copy_src.size:
            self.departures.release_at(step, np.concatenate([plan.copy_src, plan.copy_dst]))
        self._next_step = step + 1
        return plan

    def _decode_rows(self, now_ns: int) -> Int32Array:
        """Rows that decode in this step, each with a block for its next position."""
        batch = self.batch
        rows = np.flatnonzero(batch.decodes).astype(np.int32)
        if rows.size == 0:
            return rows
        needs = batch.num_scheduled[rows] == batch.num_blocks[rows] * batch.block_size
        if not needs.any():
            return rows
        growing = rows[needs]
        blocks = self.memory.try_take(growing.size)
        if blocks is not None:
            self._grow(growing, blocks)
            return rows
        granted = self._grow_by_seniority(growing, now_ns)
        keep = batch.decodes[rows]
        keep[needs] &= np.isin(growing, granted)
        return rows[keep]

    def _grow(self, rows: Int32Array, blocks: Int32Array) -> None:
        cols = self.batch.num_blocks[rows]
        self.batch.table[rows, cols] = blocks
        self.batch.num_blocks[rows] = cols + 1
        self._draft.grow_blocks(rows, cols, blocks)

    def _grow_by_seniority(self, rows: Int32Array, now_ns: int) -> list[int]:
        """Blocks are short: the most senior rows get theirs, juniors are preempted; who got one."""
        batch, granted, demand = self.batch, [], 0
        sequences = [s for row in rows if (s := batch.sequences[row]) is not None]
        for sequence in sorted(sequences, key=lambda s: (-s.request.priority, s.order)):
            if sequence.is_leaving or sequence.row == NO_ROW:  # preempted for somebody more senior just now
                continue
            demand += 1
            block = self.memory.try_take(1)
            while block is None and self.departures.num_promised_blocks < demand:
                victim = choose_victim(batch, sequence, self.config.max_preemptions)
                if victim is None:
                    break
                self.departures.preempt(victim, self._draft, self._last_applied)
                block = self.memory.try_take(1)
            if block is not None:
                row = sequence.row
                self._grow(np.array([row], np.int32), block)
                granted.append(row)
                demand -= 1
            elif self.departures.num_promised_blocks < demand:
                # Nobody is junior, nothing is on its way: step back. Alone it cannot come here, since no sequence is
                # admitted that the whole pool cannot hold.
                if batch.num_rows == 1:
                    self.fail(sequence, InternalError("KV blocks ran out for the only sequence"), now_ns)
                else:
                    self.departures.preempt(sequence, self._draft, self._last_applied)
        return granted

    def _prefill(self, step: int, budget: int, now_ns: int) -> None:
        """Chunks for sequences in prefill, then for newcomers, within `budget` tokens."""
        for sequence in tuple(self.departures.prefilling):
            if budget <= 0:
                return
            if not sequence.is_leaving:
                budget -= self._chunk(sequence, step, budget)
        while budget > 0:
            admitted = self.admission.admit_next(step, now_ns, self._draft, self._last_applied)
            if admitted is None:
                return
            self._draft.join(self._join_of(admitted))
            budget -= self._chunk(admitted, step, budget)

    def _chunk(self, sequence: Sequence, step: int, budget: int) -> int:
        """Schedule the next tokens of a sequence in prefill; how many."""
        batch, row = self.batch, sequence.row
        start = int(batch.num_scheduled[row])
        known = int(batch.num_known[row])
        n = min(budget, known - start)
        chunk = self._draft.add_chunk(row, start, batch.ledger[row, start : start + n])
        batch.num_scheduled[row] = start + n
        batch.last_step[row] = step
        top = sequence.request.params.prompt_logprobs
        if top is not None and start < sequence.num_prompt:
            self._draft.want_prompt_logprobs(chunk, top)
        if start + n == known:
            self.departures.prefilling.remove(sequence)
            if known < batch.limit[row]:
                self._start_decoding(sequence, chunk)
                self._fork(sequence, chunk, step)
        return n

    def _start_decoding(self, sequence: Sequence, chunk: int) -> None:
        batch, row = self.batch, sequence.row
        self._draft.sample(chunk, row)
        predicted = int(batch.num_known[row]) + 1
        batch.num_predicted[row] = predicted
        sequence.state = SequenceState.PAUSED if sequence.is_paused else SequenceState.RUNNING
        batch.decodes[row] = not sequence.is_paused and predicted < batch.limit[row]

    def _fork(self, leader: Sequence, chunk: int, step: int) -> None:
        """The leader's followers start: they share its full blocks; its partial tail is copied in the next step."""
        followers, leader.followers = leader.followers, []
        tails, leader.fork_blocks = leader.fork_blocks, leader.fork_blocks[:0]
        self.departures.num_reserved_rows -= len(followers)
        shared = self.batch.blocks(leader.row)
        tail = shared[shared.size - 1 :] if tails.size else shared[:0]
        shared = shared[: shared.size - tail.size]
        for i, follower in enumerate(followers):
            follower.leader = None
            follower.num_cached = leader.num_prompt
            follower.first_scheduled_ns = leader.first_scheduled_ns
            row = self.batch.place(follower)
            self.memory.share(shared)
            blocks = np.concatenate([shared, tails[i : i + tail.size]])
            self.batch.append_blocks(row, blocks)
            self.batch.num_scheduled[row] = leader.num_prompt
            self.batch.last_step[row] = step
            self._draft.set_blocks(row, 0, blocks)
            self._draft.join(self._join_of(follower))
            self._start_decoding(follower, chunk)
            if tail.size:
                # The tail's KV is written by this very step. Both ends stay alive until the copy is done.
                self.memory.share(tail)
                self.memory.share(blocks[-1:])
                self._next_draft.copy_block(int(tail[0]), int(blocks[-1]))

    def _join_of(self, sequence: Sequence) -> RowJoin:
        row, request = sequence.row, sequence.request
        return RowJoin(
            row=row,
            epoch=int(self.batch.epoch[row]),
            params=request.params,
            seed=sequence.seed,
            prompt_ids=request.prompt_ids,
            output_ids=self.batch.output_ids(row).copy(),
            eos_ids=() if request.params.ignore_eos else self.eos_ids,
        )

    # ---- results -----------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutcome:
        """Commit a step: the oldest that is planned and not applied."""
        assert result.step == plan.step == self._last_applied + 1, (result.step, plan.step, self._last_applied)
        batch = self.batch
        self._last_applied = plan.step
        ours = batch.epoch[plan.rows] == plan.epochs
        batch.num_computed[plan.rows[ours]] = (plan.starts + plan.num_tokens)[ours]
        outcome = StepOutcome(plan.step)
        for rows in result.prompt_logprobs:
            if ours[rows.entry]:
                trimmed = trim_prompt_logprobs(batch.sequences[plan.rows[rows.entry]], rows)
                if trimmed is not None:
                    outcome.prompt_logprobs.append(trimmed)
        self._commit(plan, result, outcome, now_ns)
        for entry in range(plan.num_decode, plan.rows.size):  # prompts that were computed for their log-probabilities
            sequence = batch.sequences[plan.rows[entry]] if ours[entry] else None
            if sequence is not None and sequence.request.max_tokens == 0:
                if batch.num_computed[sequence.row] == batch.num_known[sequence.row]:
                    sequence.is_proven = True
                    self._end(sequence, "length", now_ns)
        self.departures.pass_fence(plan.step, self._draft)
        outcome.ended = self._report_ended()
        return outcome

    def _commit(self, plan: StepPlan, result: StepResult, outcome: StepOutcome, now_ns: int) -> None:
        """Append the drawn tokens to the ledger; end who stopped, reached its limit or failed."""
        batch, counts = self.batch, result.counts
        assert counts.size == plan.sample_rows.size
        assert result.token_ids.size == np.count_nonzero(counts), "one token a sample at most"
        live = batch.epoch[plan.sample_rows] == plan.sample_epochs
        drawn = live & (counts == 1)
        samples = np.flatnonzero(drawn).astype(np.int32)
        rows = plan.sample_rows[samples]
        token_ids = result.token_ids[(np.cumsum(counts) - counts)[samples]]
        known = batch.num_known[rows]
        batch.ledger[rows, known] = token_ids
        batch.num_known[rows] = known + 1
        outcome.slots, outcome.token_ids, outcome.samples = batch.slot[rows], token_ids, samples
        outcome.starts, outcome.counts = known - batch.num_prompt[rows], counts[samples]
        if result.logprobs is not None:
            outcome.logprobs = commit_logprobs(result.logprobs, samples, counts.size)
        if plan.sample_rows.size > plan.num_decode:
            self._finish_prefills(plan, drawn, now_ns)
        stopped = (result.flags[samples] & SampleFlag.STOPPED) != 0
        for i in np.flatnonzero(stopped | (known + 1 >= batch.limit[rows])):
            sequence = batch.sequences[rows[i]]
            assert sequence is not None
            if stopped[i]:
                self._end(sequence, "stop", now_ns, stop=int(token_ids[i]))
            else:
                self._end(sequence, "length", now_ns)
        for s in np.flatnonzero(live & ((result.flags & SampleFlag.NUMERIC) != 0)):
            sequence = batch.sequences[plan.sample_rows[s]]
            assert sequence is not None
            self.fail(sequence, NumericError("the model gave NaN or infinite logits for this request"), now_ns)

    def _finish_prefills(self, plan: StepPlan, drawn: np.ndarray, now_ns: int) -> None:
        """First tokens: their prompts are computed, and proven by good logits; now they may be found by others."""
        batch = self.batch
        for s in range(plan.num_decode, plan.sample_rows.size):
            if not drawn[s]:
                continue
            row, entry = plan.sample_rows[s], plan.sample_entries[s]
            sequence = batch.sequences[row]
            assert sequence is not None
            if sequence.first_token_ns is None:
                sequence.first_token_ns = now_ns
            sequence.is_proven = True
            computed = batch.num_computed[row] = plan.starts[entry] + plan.num_tokens[entry]
            if row == plan.rows[entry] and self.memory.prefix_cache:  # followers hold the same blocks
                self.memory.publish(sequence, batch.ledger[row, :computed], batch.blocks(row))
            self.departures.wake(self.prefixes.end(sequence))

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_ns: int,
        *,
        stop: int | None = None,
        error: PagewireError | None = None,
        keep: int | None = None,
    ) -> bool:
        ended = self.departures.end(
            sequence, reason, now_ns, self._draft, self._last_applied, stop=stop, error=error, keep=keep
        )
        if ended:
            del self._live[sequence.order]
        return ended

    def _report_ended(self) -> list[Sequence]:
        ended = self.departures.take_ended()
        for sequence in ended:
            self._slots.give_back(sequence.slot)
        return ended

    # ---- facts -------------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row and are not finished."""
        return len(self._live) - self.batch.num_placed

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return self.batch.num_placed

    @property
    def has_unfinished(self) -> bool:
        """Some sequence is live."""
        return bool(self._live)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not applied."""
        return self._next_step - 1 - self._last_applied

    def check_invariants(self) -> None:
        """Every block has exactly the references that somebody can name; queues, rows and states agree."""
        self.batch.check_invariants()
        # A row behind a fence keeps its table until it is vacated; its blocks are named by the fence, once.
        holders = [self.batch.blocks(s.row) for s in self.batch.sequences if s is not None]
        holders += [s.fork_blocks for s in self._live.values()]
        holders += list(self.departures.held_blocks())
        pending = self._draft.copies() + self._next_draft.copies()
        holders += [np.array(pending, np.int32).reshape(-1)]
        expected = np.bincount(np.concatenate(holders), minlength=self.memory.pool.num_blocks)
        actual = self.memory.pool.ref
        wrong = np.flatnonzero(expected != actual)
        assert wrong.size == 0, [(int(b), int(expected[b]), int(actual[b])) for b in wrong[:8]]
        self.memory.pool.check_invariants()
        self.memory.tree.check_invariants()
        for sequence in self._live.values():
            assert sequence.is_live
            has_row = sequence.row != NO_ROW
            in_row = sequence.state in (SequenceState.PREFILLING, SequenceState.RUNNING, SequenceState.PAUSED)
            assert has_row == in_row, sequence.state
            assert (sequence in self.departures.prefilling) == (sequence.state is SequenceState.PREFILLING)
            if not has_row:
                places = (sequence in self.waiting) + sequence.is_held + sequence.is_paused + (sequence.leader is not None)
                assert places == 1 or (places == 2 and sequence.is_paused and sequence.leader is not None), places
        reserved = sum(len(s.followers) for s in self._live.values() if s.row != NO_ROW)
        assert reserved == self.departures.num_reserved_rows, (reserved, self.departures.num_reserved_rows)


class _Slots:
    """Small ints for live sequences, the longest unused one first."""

    def __init__(self) -> None:
        self._free: deque[int] = deque()
        self._next = 0

    def take(self) -> int:
        if self._free:
            return self._free.popleft()
        self._next += 1
        return self._next - 1

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
