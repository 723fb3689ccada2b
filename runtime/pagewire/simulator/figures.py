"""What a simulated run showed: latencies of every token, and what memory held, over time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagewire.scheduler.admission import Admission
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.scheduler import Scheduler
from pagewire.scheduler.sequence import Sequence
from pagewire.simulator.traces import Arrival

_Times = npt.NDArray[np.int64]

TTFT_TARGET_NS: Final = 250_000_000
ITL_TARGET_NS: Final = 12_000_000


@dataclass(slots=True)
class Served:
    """What became of a request. Times are of the virtual clock; -1: never."""

    arrival: Arrival
    admitted_ns: int = -1
    first_ns: int = -1
    ended_ns: int = -1
    is_good: bool = False
    error: str = ""
    num_late: int = 0


@dataclass(slots=True)
class Window:
    """A stretch of virtual time. Counts are of the stretch, states those at its end."""

    end_ns: int
    ttft_p95_ms: float = math.nan
    itl_p50_ms: float = math.nan
    itl_p99_ms: float = math.nan
    num_ended: int = 0
    num_good: int = 0
    num_tokens: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    running: int = 0
    waiting: int = 0
    pool: int = 0
    owned: int = 0
    cached: int = 0
    live_tokens: int = 0


class Growing:
    """An int64 array that is appended to."""

    def __init__(self) -> None:
        self._data: _Times = np.empty(1 << 16, np.int64)
        self.size = 0

    def extend(self, values: _Times) -> None:
        """Append."""
        end = self.size + values.size
        if end > self._data.size:
            self._data = np.concatenate((self._data, np.empty(max(end, self._data.size), np.int64)))
        self._data[self.size : end] = values
        self.size = end

    def values(self, start: int = 0) -> _Times:
        """From `start` on, a view."""
        return self._data[start : self.size]


@dataclass(frozen=True, slots=True)
class Counting:
    """The time that figures are of: latencies of requests that arrive in it, tokens that come in it."""

    from_ns: int = 0
    until_ns: int = 2**62

    def has(self, at_ns: int) -> bool:
        """Whether it is then."""
        return self.from_ns <= at_ns < self.until_ns


@dataclass(slots=True)
class _Mark:
    """Counters when the present window began."""

    gaps: int = 0
    ttfts: int = 0
    ended: int = 0
    good: int = 0
    tokens: int = 0
    hit: int = 0
    prompt: int = 0
    preemptions: int = 0
    recomputed: int = 0
    computed: int = 0


class Figures:
    """Collects; a few whole-array operations a step.

    Args:
        window_ns: how long a window is.
        ttft_ns, itl_ns: a request is good that has its first token, and 99 of 100 gaps, within these.
        counting: which of it counts; default: all.
        continues: what arrives had its first token elsewhere: until the next it is a gap.
    """

    def __init__(
        self,
        window_ns: int,
        *,
        ttft_ns: int = TTFT_TARGET_NS,
        itl_ns: int = ITL_TARGET_NS,
        counting: Counting | None = None,
        continues: bool = False,
    ) -> None:
        self.window_ns = window_ns
        self.windows: list[Window] = []
        self.served: list[Served] = []
        self.gaps = Growing()
        self.ttfts = Growing()
        self.num_steps = 0
        self.num_tokens = 0
        self.num_good = 0
        self.num_ended = 0
        self.num_refused = 0
        self.num_computed = 0
        self.longest_wait_ns = 0
        self.longest_step_ns = 0
        self._targets = ttft_ns, itl_ns
        self.counting = counting if counting is not None else Counting()
        self._continues = continues
        self._next_window_ns = window_ns
        self._mark = _Mark()
        self._by_slot: dict[int, Served] = {}
        self._last: _Times = np.zeros(1024, np.int64)
        self._late: npt.NDArray[np.int32] = np.zeros(1024, np.int32)
        self._counts: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def submitted(self, arrival: Arrival, sequence: Sequence) -> None:
        """A request was taken."""
        slot = sequence.slot
        if slot >= self._last.size:
            grown = np.zeros(self._last.size, np.int64)
            self._last = np.concatenate((self._last, grown))
            self._late = np.concatenate((self._late, grown.astype(np.int32)))
            self._counts = np.concatenate((self._counts, grown.astype(np.bool_)))
        self._late[slot] = 0
        self._counts[slot] = self.counting.has(arrival.at_ns)
        self._by_slot[slot] = served = Served(arrival)
        self.served.append(served)

    def refused(self, arrival: Arrival, error: str) -> None:
        """A request was not taken."""
        self.num_refused += 1
        self.served.append(Served(arrival, error=error))

    def tokens(self, outcome: StepOutcome, at_ns: int, *, may_be_first: bool) -> None:
        """Tokens reach their clients."""
        slots = outcome.slots
        if slots.size == 0:
            return
        if self.counting.has(at_ns):
            self.num_tokens += slots.size
        gaps = at_ns - self._last.take(slots)
        self._last[slots] = at_ns
        if may_be_first:
            first = outcome.starts == 0
            if first.any():
                for slot in slots[first].tolist():
                    self._first(self._by_slot[slot], slot, at_ns)
                slots, gaps = slots[~first], gaps[~first]
        late = gaps > self._targets[1]
        if late.any():
            self._late[slots] += late
        counts = self._counts.take(slots)
        self.gaps.extend(gaps if counts.all() else gaps[counts])

    def _first(self, served: Served, slot: int, at_ns: int) -> None:
        served.first_ns = at_ns
        ttft = at_ns - served.arrival.at_ns
        self.longest_wait_ns = max(self.longest_wait_ns, ttft)
        if self._continues:
            self._late[slot] += ttft > self._targets[1]
        if self._counts[slot]:
            (self.gaps if self._continues else self.ttfts).extend(np.array([ttft], np.int64))

    def ended(self, sequence: Sequence, at_ns: int) -> None:
        """A request ended, after its last token."""
        served = self._by_slot.pop(sequence.slot)
        served.ended_ns = at_ns
        if sequence.first_scheduled_ns is not None:
            served.admitted_ns = sequence.first_scheduled_ns
        served.num_late = int(self._late[sequence.slot])
        gaps = max(0, sequence.num_output - 1 + self._continues)
        in_time = self._continues or 0 <= served.first_ns < served.arrival.at_ns + self._targets[0]
        served.is_good = in_time and served.num_late <= gaps - math.ceil(0.99 * gaps)
        self.num_ended += 1
        self.num_good += served.is_good

    # ---- over time ---------------------------------------------------------------------------------------------------

    def advance(self, now_ns: int, scheduler: Scheduler) -> None:
        """Time went on to `now_ns`: windows that are over are closed."""
        while now_ns >= self._next_window_ns:
            self._close(self._next_window_ns, scheduler)
            self._next_window_ns += self.window_ns

    def finish(self, now_ns: int, scheduler: Scheduler) -> None:
        """The run is over."""
        self.advance(now_ns, scheduler)
        self._close(now_ns, scheduler)

    def _close(self, end_ns: int, scheduler: Scheduler) -> None:
        mark, admission, departures = self._mark, scheduler.admission, scheduler.departures
        recomputed = sum(s.num_recomputed for s in scheduler.batch.sequences if s is not None)
        now = _Mark(
            self.gaps.size, self.ttfts.size, self.num_ended, self.num_good, self.num_tokens, admission.num_hit_tokens,
            admission.num_prompt_tokens, departures.num_preemptions, recomputed, self.num_computed,
        )  # fmt: skip
        gaps, ttfts = self.gaps.values(mark.gaps), self.ttfts.values(mark.ttfts)
        pool = scheduler.memory.pool
        self.windows.append(
            Window(
                end_ns,
                percentile_ms(ttfts, 95),
                percentile_ms(gaps, 50),
                percentile_ms(gaps, 99),
                now.ended - mark.ended,
                now.good - mark.good,
                now.tokens - mark.tokens,
                now.hit - mark.hit,
                now.prompt - mark.prompt,
                now.preemptions - mark.preemptions,
                max(0, now.recomputed - mark.recomputed),
                now.computed - mark.computed,
                scheduler.num_running,
                scheduler.num_waiting,
                scheduler.memory.num_usable,
                pool.num_owned,
                pool.num_cached,
                live_tokens(scheduler),
            )
        )
        self._mark = now


def live_tokens(scheduler: Scheduler) -> int:
    """Slots of owned blocks that hold, or are about to hold, K and V that somebody needs.

    Not counted: the rest of a sequence's last block, blocks of a prompt that no planned step has computed yet, and
    what sequences left behind a fence. A block that several hold counts once.
    """
    batch, block_size = scheduler.batch, scheduler.memory.block_size
    idle = 0
    for sequence in batch.sequences:
        if sequence is not None:
            row = sequence.row
            idle += int(batch.num_blocks[row]) * block_size - int(batch.num_scheduled[row])
    ref = scheduler.memory.pool.ref
    behind = sum(int((ref[blocks] == 1).sum()) for blocks in scheduler.departures.held_blocks())
    return scheduler.memory.pool.num_owned * block_size - idle - behind * block_size


def percentile_ms(values: _Times, q: float) -> float:
    """The smallest value that at least q percent do not exceed, in ms; NaN of nothing."""
    if values.size == 0:
        return math.nan
    rank = min(values.size - 1, max(0, math.ceil(q / 100 * values.size) - 1))
    return float(np.partition(values, rank)[rank]) / 1e6


@dataclass(slots=True)
class Summary:
    """The figures of a whole run. Latencies in ms, rates a second, shares from 0 to 1."""

    requests: int
    refused: int
    unfinished: int
    seconds: float
    steps: int
    throughput: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    itl_p50: float
    itl_p95: float
    itl_p99: float
    itl_max: float
    goodput: float
    good_share: float
    hit_rate: float
    preemptions: int
    recomputed_share: float
    longest_wait: float
    kv_use: float
    kv_use_max: float
    live_share: float
    owned_share: float
    streams_p50: float
    streams_max: int
    digest: str = ""


def summarise(
    figures: Figures,
    scheduler: Scheduler,
    seconds: float,
    digest: str = "",
    *,
    first: Figures | None = None,
    hits: Admission | None = None,
) -> Summary:
    """Of a run that is finished.

    `live_share` is of windows in which at least half the pool was owned; where there are none, of all.

    Args:
        figures: of the cards that decode.
        scheduler: theirs.
        seconds: that are counted.
        digest: of the decisions.
        first: of the cards that prefill, where they are others.
        hits: of their prefix cache.
    """
    gaps, windows = figures.gaps.values(), figures.windows
    begun = figures if first is None else first
    ttfts = begun.ttfts.values()
    admission = scheduler.admission if hits is None else hits
    busy = [w for w in windows if w.owned * 2 >= w.pool] or [w for w in windows if w.owned] or windows
    slots = scheduler.memory.block_size
    recomputed = sum(w.recomputed_tokens for w in windows)
    computed = figures.num_computed + (first.num_computed if first is not None else 0)
    tokens = figures.num_tokens + (first.num_tokens if first is not None else 0)
    running = sorted(w.running for w in windows)
    counted, good = _num_good(figures, first)
    ended = begun.num_ended if first is None else sum(s.ended_ns >= 0 for s in figures.served)
    if first is not None:
        ended += sum(s.arrival.num_output == 1 and s.ended_ns >= 0 for s in first.served)
    return Summary(
        requests=len(begun.served),
        refused=begun.num_refused,
        unfinished=max(0, len(begun.served) - begun.num_refused - ended),
        seconds=seconds,
        steps=figures.num_steps,
        throughput=tokens / max(seconds, 1e-9),
        ttft_p50=percentile_ms(ttfts, 50),
        ttft_p95=percentile_ms(ttfts, 95),
        ttft_p99=percentile_ms(ttfts, 99),
        itl_p50=percentile_ms(gaps, 50),
        itl_p95=percentile_ms(gaps, 95),
        itl_p99=percentile_ms(gaps, 99),
        itl_max=percentile_ms(gaps, 100),
        goodput=good / max(seconds, 1e-9),
        good_share=good / max(1, counted),
        hit_rate=admission.num_hit_tokens / max(1, admission.num_prompt_tokens),
        preemptions=scheduler.departures.num_preemptions,
        recomputed_share=recomputed / max(1, computed),
        longest_wait=begun.longest_wait_ns / 1e9,
        kv_use=sum(w.live_tokens for w in windows) / max(1, slots * sum(w.pool for w in windows)),
        kv_use_max=max(w.live_tokens / (slots * w.pool) for w in windows),
        live_share=sum(w.live_tokens for w in busy) / max(1, slots * sum(w.owned for w in busy)),
        owned_share=max(w.owned / w.pool for w in windows),
        streams_p50=float(running[len(running) // 2]),
        streams_max=running[-1],
        digest=digest,
    )


def _num_good(figures: Figures, first: Figures | None) -> tuple[int, int]:
    """Requests that count, and those of them that kept their promise; with cards of their own for prompts, on both."""
    begun = figures if first is None else first
    counted = [served for served in begun.served if figures.counting.has(served.arrival.at_ns)]
    late = {served.arrival.number for served in figures.served if not served.is_good} if first is not None else set()
    return len(counted), sum(served.is_good and served.arrival.number not in late for served in counted)
