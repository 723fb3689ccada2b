"""What is promised to a request when it comes: or, where that could not be kept, an answer at once that says so.

                 arrival ─────────── due ──────────────────────▶ time
    waiting, the earliest due first │ late: lets those go first who can still be in time, once (`grace_of`)

A promise of the server (`ttft_target_ms`) is about its queue: a request is refused if it would *wait* longer than that, and it is
due so much after its arrival and the time that its own prefill takes, at most twice as much. So short prompts pass a long one that has time: in the
simulator, at 45 chat requests a second, a third fewer are refused. A promise that the client asks for (`ttft_ms`) is about
the request: its own prefill counts as well.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Final

from pagewire.config import SchedulerConfig
from pagewire.errors import Overloaded
from pagewire.request.request import Request
from pagewire.scheduler.memory import KvMemory
from pagewire.scheduler.pacing import MS, Pacer
from pagewire.scheduler.sequence import Sequence
from pagewire.scheduler.waiting import WaitingQueue

PATIENCE_NS: Final = 10_000 * MS
"""When the first token of a request is due that is promised nothing."""
PRIORITY_NS: Final = 1_000 * MS
"""A priority of one more is due so much earlier. So priorities age: the lowest passes the highest after 200 s."""
_GRACE_MIN_NS: Final = 1_000 * MS
_GRACE: Final = 3
_OWN_PART: Final = 0.25
"""Of the server's target, at most, is kept for a prompt's own prefill when it is asked whether it is late already. So a short prompt has
its first token in time; a long one, about whose length nothing is promised, is not late before it has waited."""
_TRUSTED: Final = 15
"""Steps after which predictions are good enough to refuse somebody."""
_RETRY_MS: Final = (50, 60_000)
_END_RATE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request was promised; see `Sequence` for the fields. `num_uncached`: prompt tokens to compute."""

    share: str
    due_ns: int
    first_token_due_ns: int | None
    itl_ns: float
    deadline_ns: int | None
    num_uncached: int
    prefill_ns: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a newcomer would have its first token, in ns from now; `own_ns` of it is its own prefill."""

    total_ns: float
    own_ns: float

    @property
    def ms(self) -> int:
        """The whole, in ms."""
        return math.ceil(self.total_ns / MS)


class Promises:
    """Makes terms, or refuses. O(waiting), as one whole-array operation, for each request; nothing per step."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KvMemory,
        waiting: WaitingQueue,
        prefilling: list[Sequence],
        pacer: Pacer,
    ) -> None:
        self._config = config
        self._memory = memory
        self._waiting = waiting
        self._prefilling = prefilling
        self._pacer = pacer
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._sweep_at = 64
        self._ended_ns = 0
        self._end_interval_ns = 0.0
        self.is_blocked = False
        """The queue's first could not be admitted, for want of rows, blocks or time."""
        self.num_refused = 0
        self.num_late = 0

    # ---- a request comes ---------------------------------------------------------------------------------------------

    def terms(self, request: Request, now_ns: int) -> Terms | None:
        """The request's terms; None where nothing is promised to anybody.

        Raises:
            Overloaded: what it asks for, or what is promised to everybody, could not be kept.
        """
        pacer, wishes = self._pacer, request.wishes
        if not pacer.is_active:
            if not wishes.is_any:
                return None
            pacer.is_active = True
        config = self._config
        ttft_ms = config.ttft_target_ms if wishes.ttft_ms is None else wishes.ttft_ms
        itl_ms = config.itl_target_ms if wishes.itl_ms is None else wishes.itl_ms
        arrival = request.arrival_ns
        first_token_due_ns = arrival + int(ttft_ms * MS) if ttft_ms else None
        deadline_ns = arrival + int(wishes.deadline_ms * MS) if wishes.deadline_ms else None
        num_uncached = int(request.prompt_ids.size) - self._memory.num_cached(request.namespace, request.prompt_ids)
        own_ns = self._own_ns(num_uncached, int(request.prompt_ids.size))
        due_ns = first_token_due_ns or arrival + PATIENCE_NS
        if first_token_due_ns is not None and wishes.ttft_ms is None:
            due_ns += int(min(own_ns, ttft_ms * MS))  # a giant is not passed for ever
        if deadline_ns is not None:
            due_ns = min(due_ns, deadline_ns)
        due_ns = max(0, due_ns - request.priority * PRIORITY_NS)
        forecast = self.forecast(num_uncached, int(request.prompt_ids.size), due_ns, now_ns)
        if pacer.model.num_observed >= _TRUSTED and not request.output_ids:  # whoever was taken before is taken again
            self._refuse_ttft(request, ttft_ms, forecast)
            self._refuse_itl(request, itl_ms, forecast)
        return Terms(
            share=request.client,
            due_ns=due_ns,
            first_token_due_ns=first_token_due_ns,
            itl_ns=itl_ms * MS if itl_ms else math.inf,
            deadline_ns=deadline_ns,
            num_uncached=num_uncached,
            prefill_ns=forecast.own_ns,
        )

    def give(self, terms: Terms, sequence: Sequence) -> None:
        """`sequence` has these terms."""
        sequence.share = terms.share
        sequence.due_ns = terms.due_ns
        sequence.first_token_due_ns = terms.first_token_due_ns
        sequence.itl_ns = terms.itl_ns
        sequence.num_uncached = terms.num_uncached
        sequence.prefill_ns = terms.prefill_ns
        if terms.deadline_ns is not None:
            sequence.deadline_ns = terms.deadline_ns
            heapq.heappush(self._deadlines, (terms.deadline_ns, sequence.order, sequence))

    def full(self, num_waiting: int, request: Request, now_ns: int) -> Overloaded:
        """The answer of a queue that is full."""
        message = f"{num_waiting} sequences are waiting"
        if not self._pacer.is_active or self._pacer.model.num_observed < _TRUSTED:
            return Overloaded(message, retry_after_ms=1000)
        size = int(request.prompt_ids.size)
        forecast = self.forecast(size, size, now_ns + PATIENCE_NS, now_ns)
        return Overloaded(message, retry_after_ms=_retry_ms(forecast.ms / 2), predicted_ttft_ms=forecast.ms)

    def _refuse_ttft(self, request: Request, ttft_ms: float, forecast: Forecast) -> None:
        wishes = request.wishes
        limit_ns, asked, field = ttft_ms * MS, bool(wishes.ttft_ms), "ttft_ms"
        if wishes.deadline_ms and (not limit_ns or wishes.deadline_ms * MS < limit_ns):
            limit_ns, asked, field = wishes.deadline_ms * MS, True, "deadline_ms"
        waits_ns = forecast.total_ns - forecast.own_ns
        if not limit_ns or (forecast.total_ns if asked else waits_ns) <= limit_ns:
            return
        self.num_refused += 1
        can_help = forecast.own_ns <= limit_ns or not asked
        over_ms = (forecast.total_ns - (limit_ns if can_help and asked else limit_ns + forecast.own_ns)) / MS
        raise Overloaded(
            f"the first token would come after about {forecast.ms} ms, promised are {limit_ns / MS:g}",
            field=field if asked else None,
            retry_after_ms=_retry_ms(over_ms) if can_help else None,
            predicted_ttft_ms=forecast.ms,
        )

    def _refuse_itl(self, request: Request, itl_ms: float, forecast: Forecast) -> None:
        if not request.wishes.itl_ms or self._pacer.would_keep(itl_ms * MS, int(request.prompt_ids.size)):
            return
        self.num_refused += 1
        raise Overloaded(
            f"a token every {itl_ms:g} ms cannot be promised beside {self._pacer.decode_work.decode_rows} other streams",
            field="itl_ms",
            retry_after_ms=_retry_ms(1000) if self._pacer.decode_work.decode_rows else None,
            predicted_ttft_ms=forecast.ms,
        )

    def forecast(self, num_uncached: int, num_prompt: int, due_ns: int, now_ns: int) -> Forecast:
        """For a prompt of `num_prompt` tokens, `num_uncached` of them to compute, that is due at `due_ns`."""
        pacer = self._pacer
        num_ahead, tokens_ahead = self._waiting.ahead_of(due_ns)
        tokens_ahead += sum(pacer.num_left(s) for s in self._prefilling if s.due_ns <= due_ns)
        per_step, step_ns = pacer.prefill_pace(num_prompt - num_uncached // 2)
        own_ns = self._own_ns(num_uncached, num_prompt)
        waits_ns = pacer.in_flight_ns(now_ns) + tokens_ahead / per_step * step_ns
        if self.is_blocked and len(self._waiting):
            waits_ns = max(waits_ns, (num_ahead + 1) * self._end_interval_ns)
        return Forecast(waits_ns + own_ns, own_ns)

    def _own_ns(self, num_uncached: int, num_prompt: int) -> float:
        """What the prefill of such a prompt takes beside the streams that decode now."""
        pacer = self._pacer
        per_step, step_ns = pacer.prefill_pace(num_prompt - num_uncached // 2)
        if num_uncached < per_step:  # one step, which need not be a full one
            return pacer.model.predict(pacer.decode_work.with_chunk(num_uncached, num_prompt - num_uncached))
        return num_uncached / per_step * step_ns

    # ---- time passes -------------------------------------------------------------------------------------------------

    def let_others_go(self, sequence: Sequence, now_ns: int) -> bool:
        """The queue's first: if it cannot be in time any more, let those go before it who can, once; whether it did."""
        due_ns = sequence.first_token_due_ns
        if due_ns is None or sequence.is_late or sequence.first_token_ns is not None:
            return False
        request, own_ns = sequence.request, sequence.prefill_ns
        if request.wishes.ttft_ms is None:
            own_ns = min(own_ns, _OWN_PART * (due_ns - request.arrival_ns))
        if now_ns + own_ns <= due_ns:
            return False
        sequence.is_late = True
        self.num_late += 1
        grace = max(_GRACE_MIN_NS, _GRACE * (due_ns - sequence.request.arrival_ns))
        self._waiting.postpone(sequence, sequence.due_ns + grace)
        return True

    def expired(self, now_ns: int) -> list[Sequence]:
        """Live sequences whose deadline passed since the last call."""
        deadlines, out = self._deadlines, []
        while deadlines and deadlines[0][0] <= now_ns:
            sequence = heapq.heappop(deadlines)[2]
            if sequence.is_live:
                out.append(sequence)
        return out

    def ended(self, sequences: list[Sequence]) -> None:
        """They made room."""
        now_ns = max(sequence.finished_ns or 0 for sequence in sequences)
        for sequence in sequences:
            self._waiting.charge(sequence.share, sequence.num_output)
        interval = (now_ns - self._ended_ns) / len(sequences)
        if self._ended_ns:
            for _ in sequences:
                self._end_interval_ns += _END_RATE * (interval - self._end_interval_ns)
        self._ended_ns = now_ns
        if len(self._deadlines) > self._sweep_at:  # those that ended in time are not found otherwise
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_live]
            heapq.heapify(self._deadlines)
            self._sweep_at = 64 + 2 * len(self._deadlines)


def _retry_ms(ms: float) -> int:
    return int(min(max(ms, _RETRY_MS[0]), _RETRY_MS[1]))
