"""How much prefill a step may hold: as many tokens as the configuration says, or as fit into the time that was promised.

Every stream that decodes gets its next token when the step ends, so the step may take no longer than the tightest of their
promises. The predicted time of a step (`cost_model`) is taken with its margin. A step always may hold `LEAST_CHUNK`
tokens of prefill: a promise that cannot be kept must not stop prompts for ever.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from pagewire.config import SchedulerConfig
from pagewire.scheduler.batch import Batch, DecodeSet
from pagewire.scheduler.cost_model import CostModel, StepWork
from pagewire.scheduler.in_flight import RowIndex
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import Int32Array

LEAST_CHUNK: Final = 64
"""Tokens; the smallest graph with prefill is that large, so that less would hardly be faster."""
MS: Final = 1_000_000
DELIVERY_NS: Final = 350_000
"""Of a promise that is left to what tokens still pass after their step: its end is seen, they are sent and received, now a little
sooner, now later. On an H200, in bf16 at 40 to 50 requests a second, 99 of 100 gaps that clients saw were within 11.0 to 11.6 ms of the 12."""
_DELIVERY_PART: Final = 0.05
"""Of a short promise at most."""
_NO_WORK: Final = StepWork()


class TokenBudget:
    """So many tokens."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def take(self, start: int, wanted: int) -> int:  # noqa: ARG002  (a budget of time needs to know)
        """How many of `wanted` tokens, from position `start` of a prompt, go into the step: 0 … wanted."""
        n = min(self.tokens, wanted)
        self.tokens -= n
        return n


class TimeBudget(TokenBudget):
    """So many tokens, and so much time."""

    __slots__ = ("_model", "_ns", "work")

    def __init__(self, tokens: int, ns: float, work: StepWork, model: CostModel) -> None:
        super().__init__(tokens)
        self._ns = ns
        self._model = model
        self.work = work
        """Of the step so far."""

    def take(self, start: int, wanted: int) -> int:
        most = n = min(self.tokens, wanted)
        if most <= 0:
            return 0
        if self._ns < math.inf:
            n = self._model.largest_chunk(self.work, start, self._ns, most)
            least = min(most, LEAST_CHUNK)
            if n < least:  # not worth a chunk, unless it is the step's only one
                n = 0 if self.work.prefill_tokens else least
        if n:
            self.work = self.work.with_chunk(n, start)
        self.tokens -= n
        if n < wanted or (self._ns < math.inf and not self._has_time()):
            self.tokens = 0
        return n

    def _has_time(self) -> bool:
        return self._model.predict(self.work.with_chunk(LEAST_CHUNK, 0)) <= self._ns


class _Planned(NamedTuple):
    step: int
    work: StepWork
    planned_ns: int


class Pacer:
    """Times steps, teaches the cost model, and gives each step its budget. Idle until something is promised.

    Args:
        config: `itl_target_ms` is what every stream is promised that asked for nothing else.
        max_step_tokens: tokens of a step at most.
    """

    def __init__(self, config: SchedulerConfig, batch: Batch, model: CostModel, *, max_step_tokens: int) -> None:
        self.model = model
        self.is_active = config.itl_target_ms > 0 or config.ttft_target_ms > 0
        self.itl_ns = config.itl_target_ms * MS if config.itl_target_ms else math.inf
        self.max_step_tokens = max_step_tokens
        self.decode_work = _NO_WORK
        """Of the decoding rows in the step planned last."""
        self._overlap = config.overlap
        self._batch = batch
        self._work = _NO_WORK
        self._budget: TimeBudget | None = None
        self._in_flight: deque[_Planned] = deque()
        self._applied_ns = 0
        self._tightest = math.inf
        self._tightest_of: DecodeSet | None = None
        self._kv_of: DecodeSet | None = None

    # ---- planning ----------------------------------------------------------------------------------------------------

    def budget(self, everyone: DecodeSet, rows: RowIndex, starts: Int32Array) -> TimeBudget:
        """For a step in which `rows` decode at `starts`."""
        if everyone is not self._tightest_of:
            self._tightest_of = everyone
            self._tightest = self._batch.tightest_ns(everyone.rows)
        n = rows.size
        if everyone is self._kv_of and rows is everyone.rows:  # as in the last step, each a position further
            kv = self.decode_work.decode_kv + n
        else:
            kv = int(np.add.reduce(starts)) + n
        self._kv_of = everyone if rows is everyone.rows else None
        self.decode_work = StepWork(0, 0.0, n, kv) if n else _NO_WORK
        tokens = self.max_step_tokens - n
        if self._tightest < math.inf:
            tokens = min(tokens, self.most_prefill)
        budget = TimeBudget(tokens, self.step_ns(self._tightest), self.decode_work, self.model)
        self._budget = budget
        return budget

    def step_ns(self, promise_ns: float) -> float:
        """What a step may be predicted to take, so that tokens hardly ever come later than `promise_ns` after those before."""
        return (promise_ns - min(DELIVERY_NS, _DELIVERY_PART * promise_ns)) / (1.0 + self.model.margin)

    @property
    def most_prefill(self) -> int:
        """Tokens of prefill beside streams that were promised something: twice what was seen. A card of another kind than the
        prior's may take thirty times as long for them.
        """
        return max(LEAST_CHUNK, 2 * self.model.largest_prefill)

    @property
    def tightest_ns(self) -> float:
        """The tightest promise among the streams that decode, or what newcomers are promised."""
        return min(self._tightest, self.itl_ns)

    def planned(self, step: int, now_ns: int) -> None:
        """`step`, for which the last budget was, is planned."""
        assert self._budget is not None
        self._in_flight.append(_Planned(step, self._budget.work, now_ns))

    def applied(self, step: int, now_ns: int) -> None:
        """`step` is done. Nothing happens for one that was planned before anything was promised."""
        before, self._applied_ns = self._applied_ns, now_ns
        if not self._in_flight or self._in_flight[0].step != step:
            return
        planned = self._in_flight.popleft()
        # A step that was launched to an idle card has its launch in its time, which with overlap others have not.
        if planned.planned_ns <= before or not self._overlap:
            self.model.observe(planned.work, now_ns - max(before, planned.planned_ns))

    # ---- what is to come ---------------------------------------------------------------------------------------------

    def in_flight_ns(self, now_ns: int) -> float:
        """Until the planned steps are done."""
        if not self._in_flight:
            return 0.0
        total = sum(self.model.predict(planned.work) for planned in self._in_flight)
        return max(0.0, total - (now_ns - max(self._applied_ns, self._in_flight[0].planned_ns)))

    def num_left(self, sequence: Sequence) -> int:
        """Tokens of a sequence in prefill that no step holds yet."""
        return int(self._batch.num_known[sequence.row] - self._batch.num_scheduled[sequence.row])

    def prefill_pace(self, context: int) -> tuple[int, float]:
        """Tokens of prefill in each step while the present streams decode, and the step's time, ns."""
        most = max(1, self.max_step_tokens - self.decode_work.decode_rows)
        n = most
        if self.tightest_ns < math.inf:
            budget_ns = self.step_ns(self.tightest_ns)
            most = min(most, self.most_prefill)
            n = max(min(most, LEAST_CHUNK), self.model.largest_chunk(self.decode_work, context, budget_ns, most))
        return n, self.model.predict(self.decode_work.with_chunk(n, context))

    def has_room_for(self, sequence: Sequence, prefilling: list[Sequence]) -> bool:
        """Whether all streams, and `sequence` with them, could decode within what the server promises to everybody.

        Only the server's own promise holds others back: what one client asks for must not keep the others waiting.
        """
        if self.itl_ns == math.inf or self._batch.num_placed == 0:
            return True
        budget_ns = self.step_ns(self.itl_ns)
        known = sequence.num_prompt + sequence.num_output
        kv = self.decode_work.decode_kv + known + sum([s.num_prompt + s.num_output for s in prefilling])
        rows = self._batch.num_placed + 1 + len(sequence.followers)
        if self.model.predict(StepWork(0, 0.0, rows, kv).with_chunk(LEAST_CHUNK, 0)) <= budget_ns:
            return True
        # Where no stream could have what is promised, not even alone, waiting would help nobody.
        return self.model.predict(StepWork(0, 0.0, 1, known).with_chunk(LEAST_CHUNK, 0)) > budget_ns

    def would_keep(self, itl_ns: float, num_tokens: int) -> bool:
        """Whether one more stream, of `num_tokens`, and all others would decode within `itl_ns` now."""
        work = self.decode_work
        more = StepWork(0, 0.0, work.decode_rows + 1, work.decode_kv + num_tokens)
        return self.model.predict(more.with_chunk(LEAST_CHUNK, 0)) <= self.step_ns(itl_ns)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """The model is sound, and what is thought to be read by the streams that decode is what they have."""
        self.model.check_invariants()
        together = self._kv_of
        if together is not None and together is self._batch.decode_set():
            held = int(self._batch.num_scheduled.take(together.rows).sum())
            assert self.decode_work.decode_kv == held, (self.decode_work, held)
