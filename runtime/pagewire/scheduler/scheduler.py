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

import numpy as np

from pagewire.config import SchedulerConfig
from pagewire.errors import ConfigError, DeadlineExceeded, InternalError, PagewireError
from pagewire.request.request import Request, TokenArray
from pagewire.scheduler.admission import Admission
from pagewire.scheduler.batch import NO_LIMIT, Batch
from pagewire.scheduler.cost_model import CostModel
from pagewire.scheduler.departures import Departures
from pagewire.scheduler.draft import Drafts
from pagewire.scheduler.in_flight import InFlight, PlannedStep, RowIndex
from pagewire.scheduler.memory import KvMemory
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.pacing import Pacer, TokenBudget
from pagewire.scheduler.prefill import Prefill
from pagewire.scheduler.prefix_waits import PrefixWaits
from pagewire.scheduler.promises import Promises
from pagewire.scheduler.results import Results
from pagewire.scheduler.sequence import NO_ROW, Sequence, SequenceState
from pagewire.scheduler.slots import Slots
from pagewire.scheduler.victims import choose_victim
from pagewire.scheduler.waiting import WaitingQueue
from pagewire.step.step import Int32Array, StepPlan, StepResult
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
        max_step_tokens: int | None = None,
        cost_model: CostModel | None = None,
    ) -> None:
        if config.max_step_tokens < max_rows:
            raise ConfigError(f"must be at least max_rows ({max_rows})", field="scheduler.max_step_tokens")
        if num_blocks < 2:
            raise ConfigError("KV memory holds no block: give it more bytes", field="cache.kv_bytes")
        self.config = config
        self.max_step_tokens = min(config.max_step_tokens, max_step_tokens or config.max_step_tokens)
        """What the configuration allows, or the worker gains from, whichever is less."""
        self.eos_ids = eos_ids
        self.memory = KvMemory(num_blocks, block_size, prefix_cache=prefix_cache)
        self.max_len = min(max_model_len, self.memory.num_usable * block_size)
        """Longest sequence that can be served: the model's context, or the whole pool."""
        self.batch = Batch(max_rows, self.max_len, block_size)
        self.waiting = WaitingQueue()
        self.prefixes = PrefixWaits(block_size, config.max_prefix_wait_steps if prefix_cache else 0)
        self._in_flight = InFlight()
        self.departures = Departures(self.batch, self.memory, self.waiting, self.prefixes, self._in_flight)
        self.pacer = Pacer(config, self.batch, cost_model or CostModel(), max_step_tokens=self.max_step_tokens)
        self.promises = Promises(config, self.memory, self.waiting, self.departures.prefilling, self.pacer)
        self.admission = Admission(
            self.batch,
            self.memory,
            self.waiting,
            self.prefixes,
            self.departures,
            self.pacer,
            self.promises,
            config,
        )
        self._drafts = Drafts()
        self.prefill = Prefill(
            self.batch,
            self.memory,
            self.departures,
            self.admission,
            self._in_flight,
            self._drafts,
            eos_ids=eos_ids,
        )
        self._results = Results(self.batch, self.memory, self.departures, self.prefixes, self._end)
        self._next_step = 0
        self._next_order = 0
        self._slots = Slots()
        self._live: dict[int, Sequence] = {}  # by order

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_ns: int) -> list[Sequence]:
        """Queue a request: its `n` sequences, the first of which prefills for all.

        Raises:
            PromptTooLong: it could never run, whatever else ends.
            Overloaded: the queue is full, or what was promised could not be kept.
        """
        n = request.params.n
        self.admission.check_fits(request, self.max_len)
        if self.num_waiting + n > self.config.max_waiting and self.num_waiting > 0:
            raise self.promises.full(self.num_waiting, request, now_ns)
        terms = self.promises.terms(request, now_ns)
        sequences = [
            Sequence(request, choice, request.seed + choice, self._next_order + choice, self._slots.take())
            for choice in range(n)
        ]
        self._next_order += n
        self._live.update((s.order, s) for s in sequences)
        if terms is not None:
            for sequence in sequences:
                self.promises.give(terms, sequence)
        if any(ids.size for ids in request.output_ids):
            self._replay(sequences, now_ns)
            return sequences
        leader, followers = sequences[0], sequences[1:]
        for follower in followers:
            follower.leader = leader
        leader.followers = followers
        if request.max_tokens == 0 and request.params.prompt_logprobs is None:
            for sequence in sequences:
                self._end(sequence, "length", now_ns)
        else:
            self.waiting.push(leader)
        return sequences

    def _replay(self, sequences: list[Sequence], now_ns: int) -> None:
        """Go on where another engine was: as after a preemption, each for itself. Those that were complete end."""
        for sequence, output in zip(sequences, sequences[0].request.output_ids, strict=True):
            params = sequence.request.params
            stops = params.stop_token_ids if params.ignore_eos else (*self.eos_ids, *params.stop_token_ids)
            sequence.output = output
            last = int(output[-1]) if output.size else None
            if last is not None and last in stops:
                self._end(sequence, "stop", now_ns, stop=last)
            elif output.size >= sequence.request.max_tokens:
                self._end(sequence, "length", now_ns)
            else:
                self.waiting.push(sequence)

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
            self.batch.set_paused(sequence, True)
            self.batch.set_decodes(sequence.row, False)
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
            self.batch.set_paused(sequence, False)
            row = sequence.row
            room = int(self.batch.limit[row] - self.batch.num_scheduled[row]) - 1
            if room > 0 and not sequence.is_leaving:
                self.batch.start_decoding(row, room)
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
        step, batch, in_flight = self._next_step, self.batch, self._in_flight
        if self.pacer.is_active:
            self._end_expired(now_ns)
        self.admission.wake_expired(step)
        everyone = batch.decode_set()
        rows, starts = self._decode_rows(everyone.rows, now_ns)
        in_flight.begin(step, rows)
        if self.pacer.is_active:
            self.prefill.plan_by_due(step, self.pacer.budget(everyone, rows, starts), now_ns)
        elif self.departures.prefilling or len(self.waiting):
            self.prefill.plan(step, TokenBudget(self.max_step_tokens - rows.size), now_ns)
        if rows.size == 0 and not self._drafts.current.has_chunks:
            in_flight.abandon()
            return None
        decode_set = everyone if rows is everyone.rows else None
        if rows.size:
            self._advance(rows, starts)
        plan, named, sampled = self._drafts.current.finish(step, rows, starts, batch.epoch, decode_set)
        if plan.rows.size > rows.size:
            decode_set = None
        self._drafts.turn()
        if plan.copy_src.size:
            self.departures.release_at(step, np.concatenate([plan.copy_src, plan.copy_dst]))
        in_flight.commit(PlannedStep(step, named, sampled, in_flight.planning_last, decode_set, batch.num_departures))
        if self.pacer.is_active:
            self.pacer.planned(step, now_ns)
        self._next_step = step + 1
        return plan

    def _end_expired(self, now_ns: int) -> None:
        for sequence in self.promises.expired(now_ns):
            self.fail(sequence, DeadlineExceeded("not done within the time asked for", field="deadline_ms"), now_ns)

    def _decode_rows(self, rows: RowIndex, now_ns: int) -> tuple[RowIndex, Int32Array]:
        """Those of `rows` that decode in this step, and the position that each computes, with a block for it."""
        batch = self.batch
        starts = batch.num_scheduled.take(rows)
        crossing = (starts & (batch.block_size - 1) == 0).nonzero()[0]
        if crossing.size == 0:
            return rows, starts
        growing = rows.take(crossing)
        blocks = self.memory.try_take(growing.size)
        if blocks is not None:
            self._grow(growing, blocks)
            return rows, starts
        granted = self._grow_by_seniority(growing, now_ns)
        keep = batch.decodes[rows]
        keep[crossing] &= np.isin(growing, granted)
        return rows[keep], starts[keep]

    def _advance(self, rows: RowIndex, starts: Int32Array) -> None:
        """`rows` get a token each by this step: number starts + 2 of their sequences."""
        batch = self.batch
        batch.num_scheduled[rows] = starts + 1
        # Nobody can reach its limit before the smallest room that was left is used up.
        batch.headroom -= 1
        if batch.headroom > 0:
            return
        room = batch.limit.take(rows) - starts - 2
        self._in_flight.planning_last |= not room.all()
        batch.set_decodes(rows[room == 0], False)
        left = batch.limit[batch.decodes] - batch.num_scheduled[batch.decodes] - 1
        batch.headroom = int(left.min()) if left.size else NO_LIMIT

    def _grow(self, rows: RowIndex, blocks: Int32Array) -> None:
        cols = self.batch.num_blocks.take(rows)
        self.batch.table[rows, cols] = blocks
        self.batch.num_blocks[rows] = cols + 1
        self._drafts.current.grow_blocks(rows.astype(np.int32), cols, blocks)

    def _grow_by_seniority(self, rows: RowIndex, now_ns: int) -> list[int]:
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
                self.departures.preempt(victim, self._drafts.current)
                block = self.memory.try_take(1)
            if block is not None:
                row = sequence.row
                self._grow(np.array([row]), block)
                granted.append(row)
                demand -= 1
            elif self.departures.num_promised_blocks < demand:
                # Nobody is junior, nothing is on its way: step back. Alone it cannot come here, since no sequence is
                # admitted that the whole pool cannot hold.
                if batch.num_rows == 1:
                    self.fail(sequence, InternalError("KV blocks ran out for the only sequence"), now_ns)
                else:
                    self.departures.preempt(sequence, self._drafts.current)
        return granted

    # ---- results -----------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutcome:
        """Commit a step: the oldest that is planned and not applied."""
        planned = self._in_flight.steps.popleft()
        assert result.step == plan.step == planned.step, (result.step, plan.step, planned.step)
        if self.pacer.is_active:
            self.pacer.applied(plan.step, now_ns)
        outcome = self._results.commit_step(plan, planned, result, now_ns)
        self.departures.pass_fence(plan.step, self._drafts.current)
        outcome.ended = self._report_ended()
        return outcome

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
        ended = self.departures.end(sequence, reason, now_ns, self._drafts.current, stop=stop, error=error, keep=keep)
        if ended:
            del self._live[sequence.order]
        return ended

    def _report_ended(self) -> list[Sequence]:
        ended = self.departures.take_ended()
        for sequence in ended:
            self._slots.give_back(sequence.slot)
        if ended and self.pacer.is_active:
            self.promises.ended(ended)
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
        return len(self._in_flight.steps)

    def check_invariants(self) -> None:
        """Every block has exactly the references that somebody can name; queues, rows and states agree."""
        self.batch.check_invariants()
        # A row behind a fence keeps its table until it is vacated; its blocks are named by the fence, once.
        holders = [self.batch.blocks(s.row) for s in self.batch.sequences if s is not None]
        holders += [s.fork_blocks for s in self._live.values()]
        holders += list(self.departures.held_blocks())
        pending = self._drafts.current.copies() + self._drafts.next.copies()
        holders += [np.array(pending, np.int32).reshape(-1)]
        expected = np.bincount(np.concatenate(holders), minlength=self.memory.pool.num_blocks)
        actual = self.memory.pool.ref
        wrong = np.flatnonzero(expected != actual)
        assert wrong.size == 0, [(int(b), int(expected[b]), int(actual[b])) for b in wrong[:8]]
        self.waiting.check_invariants()
        self.pacer.check_invariants()
        self.memory.pool.check_invariants()
        self.memory.tree.check_invariants()
        for sequence in self._live.values():
            assert sequence.is_live
            has_row = sequence.row != NO_ROW
            in_row = sequence.state in (SequenceState.PREFILLING, SequenceState.RUNNING, SequenceState.PAUSED)
            assert has_row == in_row, sequence.state
            assert (sequence in self.departures.prefilling) == (sequence.state is SequenceState.PREFILLING)
            if not has_row:
                places = (
                    (sequence in self.waiting) + sequence.is_held + sequence.is_paused + (sequence.leader is not None)
                )
                assert places == 1 or (places == 2 and sequence.is_paused and sequence.leader is not None), places
        reserved = sum(len(s.followers) for s in self._live.values() if s.row != NO_ROW)
        assert reserved == self.departures.num_reserved_rows, (reserved, self.departures.num_reserved_rows)
