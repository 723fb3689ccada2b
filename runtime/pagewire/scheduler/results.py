"""What a step brought: tokens into the ledger, prompts into the radix tree, and who ended by it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pagewire.errors import NumericError, PagewireError
from pagewire.scheduler.batch import Batch
from pagewire.scheduler.commit import commit_logprobs, trim_prompt_logprobs
from pagewire.scheduler.constants import ascending, ones
from pagewire.scheduler.departures import Departures
from pagewire.scheduler.in_flight import PlannedStep, RowIndex
from pagewire.scheduler.memory import KvMemory
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.prefix_waits import PrefixWaits
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import Int32Array, SampleFlag, StepPlan, StepResult
from pagewire_transport.messages import FinishReason


class End(Protocol):
    """Ends a sequence; see `Departures.end`."""

    def __call__(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_ns: int,
        *,
        stop: int | None = None,
        error: PagewireError | None = None,
    ) -> bool:
        """False: it had ended."""
        ...


class Results:
    """Commits results. Whole-array operations, but for sequences that something happens to."""

    def __init__(self, batch: Batch, memory: KvMemory, departures: Departures, prefixes: PrefixWaits, end: End) -> None:
        self._batch = batch
        self._memory = memory
        self._departures = departures
        self._prefixes = prefixes
        self._end = end

    def commit_step(self, plan: StepPlan, planned: PlannedStep, result: StepResult, now_ns: int) -> StepOutcome:
        """Everything of a step but the fence that it is."""
        has_chunks = plan.rows.size > plan.num_decode
        samples, rows = self._drawn(plan, planned, result)
        outcome = self._commit(plan, planned, result, samples, rows)
        if has_chunks:
            self._advance_chunks(plan, result, outcome)
            self._finish_prefills(plan, samples, now_ns)
        self._end_sampled(plan, result, samples, rows, outcome.token_ids, now_ns, reaches_limit=planned.reaches_limit)
        if has_chunks:
            self._finish_unsampled(plan, now_ns)
        return outcome

    def _advance_chunks(self, plan: StepPlan, result: StepResult, outcome: StepOutcome) -> None:
        """Positions of prompts that are computed now, and their log-probabilities."""
        batch = self._batch
        for entry in range(plan.num_decode, plan.rows.size):  # one or two in most steps
            row = plan.rows[entry]
            if batch.epoch[row] == plan.epochs[entry]:
                batch.num_computed[row] = plan.starts[entry] + plan.num_tokens[entry]
        for rows_of in result.prompt_logprobs:
            row = plan.rows[rows_of.entry]
            if batch.epoch[row] == plan.epochs[rows_of.entry]:
                trimmed = trim_prompt_logprobs(batch.sequences[row], rows_of)
                if trimmed is not None:
                    outcome.prompt_logprobs.append(trimmed)

    def _drawn(self, plan: StepPlan, planned: PlannedStep, result: StepResult) -> tuple[Int32Array, RowIndex]:
        """Samples whose token counts, and the rows that it goes to: all of them, in most steps."""
        num_samples = plan.sample_rows.size
        assert result.counts.size == result.flags.size == num_samples
        complete = result.token_ids.size == num_samples
        if complete and planned.departures == self._batch.num_departures:
            return ascending(num_samples), planned.sample_rows
        assert complete or result.token_ids.size == result.counts.sum(), "tokens and counts disagree"
        drawn = self._batch.epoch.take(planned.sample_rows) == plan.sample_epochs
        if not complete:
            drawn &= result.counts == 1
        samples = drawn.nonzero()[0]
        return samples.astype(np.int32), planned.sample_rows.take(samples)

    def _commit(
        self, plan: StepPlan, planned: PlannedStep, result: StepResult, samples: Int32Array, rows: RowIndex
    ) -> StepOutcome:
        """Append the drawn tokens to the ledger."""
        batch, token_ids, together = self._batch, result.token_ids, planned.decode_set
        if together is not None and rows is together.rows:
            known, slots, num_prompt = plan.starts + 1, together.slots, together.num_prompt
            cells = together.ledger_starts + known
        else:
            known, slots, num_prompt = batch.num_known.take(rows), batch.slot.take(rows), batch.num_prompt.take(rows)
            cells = rows * batch.ledger.shape[1] + known
        if token_ids.size != samples.size:
            complete = token_ids.size == result.counts.size  # a token each: no need to add up where they lie
            token_ids = token_ids.take(samples if complete else (np.cumsum(result.counts) - result.counts)[samples])
        batch.ledger_cells[cells] = token_ids
        batch.num_known[rows] = known + 1
        outcome = StepOutcome(plan.step, slots, known - num_prompt, ones(rows.size), token_ids, samples)
        if result.logprobs is not None:
            outcome.logprobs = commit_logprobs(result.logprobs, samples, result.counts.size)
        return outcome

    def _end_sampled(
        self,
        plan: StepPlan,
        result: StepResult,
        samples: Int32Array,
        rows: RowIndex,
        token_ids: Int32Array,
        now_ns: int,
        *,
        reaches_limit: bool,
    ) -> None:
        """End who stopped, reached its limit, or had no good logits."""
        batch = self._batch
        flagged = np.count_nonzero(result.flags) > 0
        if not flagged and not reaches_limit:
            return
        ends = batch.num_known.take(rows) >= batch.limit.take(rows)
        if flagged:
            stopped = (result.flags[samples] & SampleFlag.STOPPED) != 0
            for i in np.flatnonzero(stopped):
                self._end(self._sequence_in(rows[i]), "stop", now_ns, stop=int(token_ids[i]))
            ends &= ~stopped
        if np.count_nonzero(ends):
            for row in rows[ends]:
                self._end(self._sequence_in(row), "length", now_ns)
        if flagged:
            for s in np.flatnonzero(result.flags & SampleFlag.NUMERIC):
                row = plan.sample_rows[s]
                if batch.epoch[row] == plan.sample_epochs[s]:
                    error = NumericError("the model gave NaN or infinite logits for this request")
                    self._end(self._sequence_in(row), "error", now_ns, error=error)

    def _finish_unsampled(self, plan: StepPlan, now_ns: int) -> None:
        """Prompts that were computed for their log-probabilities alone (max_tokens 0)."""
        batch = self._batch
        for row, epoch in zip(plan.rows[plan.num_decode :], plan.epochs[plan.num_decode :], strict=True):
            sequence = batch.sequences[row] if batch.epoch[row] == epoch else None
            if sequence is None or sequence.request.max_tokens > 0:
                continue
            if batch.num_computed[row] == batch.num_known[row]:
                self._end(sequence, "length", now_ns)

    def _sequence_in(self, row: np.intp | np.int32) -> Sequence:
        sequence = self._batch.sequences[row]
        assert sequence is not None
        return sequence

    def _finish_prefills(self, plan: StepPlan, samples: Int32Array, now_ns: int) -> None:
        """First tokens: their prompts are computed, and proven by good logits; now they may be found by others."""
        batch = self._batch
        for s in samples[samples.searchsorted(plan.num_decode) :].tolist():
            row, entry = int(plan.sample_rows[s]), int(plan.sample_entries[s])
            sequence = self._sequence_in(np.intp(row))
            if sequence.first_token_ns is None:
                sequence.first_token_ns = now_ns
            sequence.is_proven = True
            computed = int(plan.starts[entry] + plan.num_tokens[entry])
            batch.num_computed[row] = computed
            if row == plan.rows[entry]:  # followers hold the same blocks
                self._memory.publish(sequence, batch.ledger[row, :computed], batch.blocks(row))
            self._departures.wake(self._prefixes.end(sequence))
