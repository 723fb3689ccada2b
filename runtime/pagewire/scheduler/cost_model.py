"""How long a step takes, learnt from the steps that were.

What is predicted: the time that one step occupies the card, from the end of the step before it to its own end, while
there is always a next one queued. Launching, which happens while the step before computes, is not in it.

    ns =  c0                                      weights are read, kernels start
       +  c1 · tokens  +  c2 · max(0, tokens − knot)     products: first bound by memory, beyond the knot by arithmetic
       +  c3                                      if there is prefill: its attention is a kernel of its own
       +  c4 · prefill tokens
       +  c5 · prefill pairs                      attention of chunks: each token looks at all before it
       +  c6 · decode rows                        sampling
       +  c7 · decode KV tokens                   attention of decode: KV is read once

`tokens` is padded to the graph that the step runs in, and what its graph costs beyond the first line is learnt apart
(`cost_buckets`). All coefficients are ≥ 0: more work never takes less time, which
is what lets a planner search for the largest chunk that fits.

How it is learnt. Least squares of the relative error with slow forgetting, kept as two 8 × 8 systems (`cost_sums`), one of the
steps with prefill and one of those without: an hour of pure decode does not make prefill forgotten. Each new step moves a few
coordinates to their optimum (Gauss–Seidel, clipped at 0). Steps that are far off their prediction, as errors go, count
less (Huber): a pause of the host is no news about the card. Where nothing was seen, the prior stands.

Rejected: recursive least squares (its covariance winds up when a server does the same step for an hour, and its
coefficients change sign); gradient descent (a rate that suits all features does not exist).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from pagewire.scheduler.cost_buckets import BucketCosts
from pagewire.scheduler.cost_prior import PRIOR, Coefficients
from pagewire.scheduler.cost_sums import DecayingSums
from pagewire.step.step import StepPlan

_NUM: Final = 8
_MEMORY: Final = 2000
"""Steps of each kind after which a step counts a third."""
_PRIOR_WEIGHT: Final = 0.0025
"""The prior counts like one step whose noise is 5 %, where the prior's own is 100 %."""
_HUBER: Final = 3.0
"""Errors beyond so many times the median error count linearly."""
_SPREAD_MIN: Final = 0.005
_MARGIN_MAX: Final = 0.5
_MARGIN_QUANTILE: Final = 0.99
_MARGIN_STEPS: Final = 512
"""The latest steps, of which the margin is the quantile: some seconds, so that what was off while the model learnt, or while the
host paused, is soon forgotten. A running estimate (up by 99 parts where exceeded, down by one where not) took half a minute for it."""
_MARGIN_EVERY: Final = 32
"""Steps from one look at them to the next."""
_MARGIN_LEAST: Final = 128
"""Of fewer, one in a hundred is the worst of all: a single pause of the host would be the margin."""
_SURPRISE: Final = 0.3
_COORDINATES: Final = 3
"""Moved to their optimum by each step that is learnt from."""
_EVERY: Final = 4
"""Steps of pure decode hardly differ from one another: of those that took about as long as predicted one in four is learnt
from, and counts for all. Not among the first, of which there are few."""
_FIRST: Final = 64
_RESCALE_AT: Final = (5, 15)
"""After so many steps a prior that is off as a whole (another card, another model) is scaled."""
_RESCALE_MAX: Final = 1e4
_ANCHOR_EVERY: Final = 1024
_VERSION: Final = 1
_NUMBER_MAX: Final = 1e18
"""No run leaves larger ones: in ns, thirty years. Those that a float holds, and no sum of them, would make predictions infinite."""


class StepWork(NamedTuple):
    """What a step computes, as far as its time depends on it. All are ≥ 0. A tuple: a plan makes a dozen of them.

    Attributes:
        prefill_tokens: of all chunks.
        prefill_pairs: Σ over chunks of tokens × (context before the chunk + half the chunk): who looks at whom.
        decode_rows: sequences that get one token each.
        decode_kv: Σ over decode rows of the positions that they look at.
    """

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    decode_rows: int = 0
    decode_kv: int = 0

    def with_chunk(self, num_tokens: int, context: int) -> StepWork:
        """The same and a chunk of `num_tokens` after `context` tokens."""
        return StepWork(
            self.prefill_tokens + num_tokens,
            self.prefill_pairs + pairs(num_tokens, context),
            self.decode_rows,
            self.decode_kv,
        )


def pairs(num_tokens: int, context: int) -> float:
    """Pairs of a chunk: each of its tokens with all tokens before it."""
    return num_tokens * (context + 0.5 * num_tokens)


def work_of(plan: StepPlan) -> StepWork:
    """What `plan` computes."""
    n = plan.num_decode
    kv = int(np.add.reduce(plan.starts[:n])) + n
    if plan.rows.size == n:
        return StepWork(0, 0.0, n, kv)
    tokens, starts = plan.num_tokens[n:].astype(np.float64), plan.starts[n:]
    return StepWork(int(plan.token_ids.size), float((tokens * (starts + 0.5 * tokens)).sum()), n, kv)


class CostModel:
    """Predicts and learns. No clock: durations are told. Not thread-safe.

    `observe` O(1), about 15 µs where the step is learnt from, 8 more for the next prediction, 10 more in one of 32; `predict` under 1 µs; `largest_chunk` about fifteen times that.

    Args:
        prior: where nothing was seen yet.
        buckets: token counts that steps without prefill are padded to, ascending; beyond the last, or without any,
            nothing is padded.
        mixed_buckets: those of steps with prefill; None: the same.
    """

    def __init__(
        self,
        prior: Coefficients = PRIOR,
        *,
        buckets: tuple[int, ...] = (),
        mixed_buckets: tuple[int, ...] | None = None,
    ) -> None:
        assert len(prior.values) == _NUM
        assert min(prior.values) >= 0
        assert prior.values[0] > 0
        self._sizes = BucketCosts(buckets, buckets if mixed_buckets is None else mixed_buckets)
        self._knot = prior.knot
        self._c: list[float] = list(prior.values)
        self._anchor = self._c.copy()
        self._set_anchor_weights()
        self._set_formula()
        self._sums = DecayingSums(_NUM), DecayingSums(_NUM)  # of steps without and with prefill
        self._next = 0
        self._first_ratios: list[float] = []
        self.num_observed = 0
        self.largest_prefill = 0
        """Tokens of a step whose time was about as predicted; of more than that nothing is known but the prior."""
        self.spread = 0.1
        """Median of |relative error|, running."""
        self.error = 0.0
        """Mean of |relative error| of the last few hundred steps, 0 … 1."""
        self.bias = 0.0
        """Mean of the relative error: above 0, steps take longer than predicted."""
        self._excesses = np.zeros(_MARGIN_STEPS)
        self._num_excesses = 0
        self.margin = 0.1
        """So much longer than predicted, as a part of the prediction, does only one step in a hundred take."""

    # ---- prediction --------------------------------------------------------------------------------------------------

    @property
    def coefficients(self) -> Coefficients:
        """As learnt so far."""
        return Coefficients(tuple(self._c), self._knot)

    @property
    def buckets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token counts that steps are padded to, without and with prefill."""
        return self._sizes.buckets

    def padded(self, prefill_tokens: int, decode_rows: int) -> int:
        """Tokens that a step computes, empty ones included; no fewer than without the prefill."""
        return self._sizes.padded(prefill_tokens, decode_rows)

    def predict(self, work: StepWork) -> float:
        """Time of a step in ns; > 0, and no less for more work of any kind."""
        return self._time(work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.decode_kv)

    def _time(self, prefill: int, num_pairs: float, rows: int, kv: int) -> float:
        return self._sizes.ns(prefill, rows) + self._beside_size(prefill, num_pairs, rows, kv)

    def _beside_size(self, prefill: int, num_pairs: float, rows: int, kv: int) -> float:
        c = self._c
        ns = c[6] * rows / 64.0 + c[7] * kv / 1e5
        if prefill:
            ns += c[3] + c[4] * prefill / 256.0 + c[5] * num_pairs / 1e6
        return ns

    def largest_chunk(self, work: StepWork, context: int, budget_ns: float, most: int) -> int:
        """The most tokens, 0 … `most`, of a chunk after `context` tokens with which a step of `work` stays in budget."""
        low, high = 0, most
        prefill, num_pairs, rows, kv = work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.decode_kv
        if self._time(prefill + most, num_pairs + pairs(most, context), rows, kv) <= budget_ns:
            return most
        while high - low > 1:
            middle = (low + high) // 2
            if self._time(prefill + middle, num_pairs + pairs(middle, context), rows, kv) <= budget_ns:
                low = middle
            else:
                high = middle
        return low

    def prefill_ns(self, num_tokens: int, context: int, step_tokens: int) -> float:
        """Time on the card of a prompt's `num_tokens` after `context`, in steps of `step_tokens`, nothing beside it."""
        if num_tokens <= 0:
            return 0.0
        steps = -(-num_tokens // max(1, step_tokens))
        mean = num_tokens / steps
        each = self._time(int(mean), 0.0, 0, 0)
        return steps * each + self._c[5] * pairs(num_tokens, context) / 1e6

    # ---- learning ----------------------------------------------------------------------------------------------------

    def observe(self, work: StepWork, duration_ns: float) -> None:
        """A step of `work` took `duration_ns`; times that cannot be (≤ 0) are ignored."""
        if not duration_ns > 0:
            return
        predicted = self.predict(work)
        if self.num_observed < _RESCALE_AT[-1]:
            predicted = self._warm_up(work, predicted, duration_ns)
        self.num_observed += 1
        scale = max(predicted, duration_ns)
        relative = (duration_ns - predicted) / scale  # −1 … 1
        size = abs(relative)
        if size < _SURPRISE:
            self.largest_prefill = max(self.largest_prefill, work.prefill_tokens)
        self._note_error(relative, size, duration_ns / predicted - 1)
        if self.num_observed % _ANCHOR_EVERY == 0:
            # What is not seen any more stays as it was last seen, and does not creep back to the first prior.
            self._anchor = self._c.copy()
        limit = _HUBER * self.spread
        times = 1
        if not work.prefill_tokens and size <= limit and self.num_observed > _FIRST:
            if self.num_observed % _EVERY:
                return
            times = _EVERY
        self._learn(work, duration_ns, scale, 1.0 if size <= limit else limit / size, times)

    def _learn(self, work: StepWork, duration_ns: float, scale: float, belief: float, times: int) -> None:
        sums = self._sums[work.prefill_tokens > 0]
        sums.add(self._features(work), duration_ns, belief * times / (scale * scale), 1 - times / _MEMORY)
        self._improve(_COORDINATES)
        self._set_formula()
        beside = self._beside_size(work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.decode_kv)
        self._sizes.learn(work.prefill_tokens, work.decode_rows, duration_ns - beside, belief)

    def _features(self, work: StepWork) -> list[float]:
        tokens = self.padded(work.prefill_tokens, work.decode_rows)
        return [
            1.0,
            tokens / 256.0,
            max(0.0, tokens - self._knot) / 256.0,
            1.0 if work.prefill_tokens else 0.0,
            work.prefill_tokens / 256.0,
            work.prefill_pairs / 1e6,
            work.decode_rows / 64.0,
            work.decode_kv / 1e5,
        ]

    def _improve(self, num: int) -> None:
        """Move the next `num` coordinates to where the others want them, 0 or more."""
        c, (without, with_prefill) = self._c, self._sums
        for _ in range(num):
            j = self._next
            self._next = (j + 1) % _NUM
            own_a, pull_a = without.pull(j, c)
            own_b, pull_b = with_prefill.pull(j, c)
            weight = self._anchor_weights[j]
            pull = pull_a + pull_b + weight * (self._anchor[j] - c[j])
            least = 1.0 if j == 0 else 0.0
            c[j] = max(least, c[j] + pull / (own_a + own_b + weight))

    def _note_error(self, relative: float, size: float, excess: float) -> None:
        self.spread = max(_SPREAD_MIN, self.spread * (1.03 if size > self.spread else 1 / 1.03))
        rate = max(1 / 256, 1 / (self.num_observed))
        self.error += rate * (size - self.error)
        self.bias += rate * (relative - self.bias)
        if self.num_observed <= _FIRST:
            return  # what was off while nothing was known says nothing of what is known then
        self._excesses[self._num_excesses % _MARGIN_STEPS] = excess
        self._num_excesses += 1
        if self._num_excesses % _MARGIN_EVERY == 0 and self._num_excesses >= _MARGIN_LEAST:
            latest = self._excesses[: min(self._num_excesses, _MARGIN_STEPS)]
            rank = math.ceil(_MARGIN_QUANTILE * latest.size) - 1
            self.margin = min(_MARGIN_MAX, max(0.0, float(np.partition(latest, rank)[rank])))

    def _warm_up(self, work: StepWork, predicted: float, duration_ns: float) -> float:
        """The prediction, after the prior was scaled if the first steps say that it is off as a whole."""
        ratios = self._first_ratios
        ratios.append(duration_ns / predicted)
        if len(ratios) not in _RESCALE_AT:
            return predicted
        factor = min(_RESCALE_MAX, max(1 / _RESCALE_MAX, sorted(ratios)[len(ratios) // 2]))
        self._first_ratios = [ratio / factor for ratio in ratios]
        if 0.67 < factor < 1.5:
            return predicted
        self._c = [c * factor for c in self._c]
        self._anchor = self._c.copy()
        self._set_anchor_weights()
        self._set_formula()
        return self.predict(work)

    def _set_formula(self) -> None:
        c = self._c
        self._sizes.set_formula(c[0], c[1] / 256.0, c[2] / 256.0, self._knot)

    def _set_anchor_weights(self) -> None:
        least = max(1.0, 1e-3 * self._anchor[0])
        self._anchor_weights = [_PRIOR_WEIGHT / max(anchor, least) ** 2 for anchor in self._anchor]

    # ---- state -------------------------------------------------------------------------------------------------------

    def to_state(self) -> dict[str, object]:
        """Plain values for a JSON file."""
        return {
            "version": _VERSION,
            "coefficients": list(self._c),
            "knot": self._knot,
            "observed": self.num_observed,
            "largest_prefill": self.largest_prefill,
            "sizes": self._sizes.to_state(),
            "spread": self.spread,
            "margin": self.margin,
            "error": self.error,
        }

    @classmethod
    def from_state(
        cls,
        state: Mapping[str, object],
        *,
        buckets: tuple[int, ...] = (),
        mixed_buckets: tuple[int, ...] | None = None,
    ) -> CostModel:
        """As saved: what was learnt is the prior of what will be.

        Raises:
            ValueError: not such a state, of another version, or with numbers that no run can have left.
        """
        values, knot = state.get("coefficients"), state.get("knot")
        if state.get("version") != _VERSION or not isinstance(values, list) or len(values) != _NUM:
            raise ValueError("not a cost model of this version")
        numbers = [_number(value, "coefficients") for value in values]
        if numbers[0] <= 0:
            raise ValueError("coefficients: the first must be above 0")
        model = cls(Coefficients(tuple(numbers), _number(knot, "knot")), buckets=buckets, mixed_buckets=mixed_buckets)
        model._sizes.restore(_offsets(state.get("sizes", [[], []])))
        model.num_observed = int(_number(state.get("observed", 0), "observed"))
        model.largest_prefill = int(_number(state.get("largest_prefill", 0), "largest_prefill"))
        model.spread = min(1.0, max(_SPREAD_MIN, _number(state.get("spread", 0.1), "spread")))
        model.margin = min(_MARGIN_MAX, _number(state.get("margin", 0.1), "margin"))
        model.error = min(1.0, _number(state.get("error", 0.0), "error"))
        return model

    def check_invariants(self) -> None:
        """Raise AssertionError where something is not a number, or below 0."""
        assert all(math.isfinite(c) and c >= 0 for c in self._c), self._c
        assert self._c[0] > 0
        self._sizes.check_invariants()
        assert 0 <= self.margin <= _MARGIN_MAX
        assert self.spread >= _SPREAD_MIN


def _offsets(value: object) -> list[list[tuple[int, float]]]:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(kind, list) for kind in value):
        raise ValueError("sizes: not two lists")
    kinds: list[list[tuple[int, float]]] = []
    for kind in value:
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in kind):
            raise ValueError("sizes: not pairs")
        kinds.append([(int(_number(tokens, "sizes")), _number(ns, "sizes", least=-_NUMBER_MAX)) for tokens, ns in kind])
    return kinds


def _number(value: object, name: str, *, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _NUMBER_MAX:
        raise ValueError(f"{name}: not a number of {least:g} to {_NUMBER_MAX:g}")
    return float(value)
