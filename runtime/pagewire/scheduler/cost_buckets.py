"""What the tokens of a step cost, by the graph that it runs in: a formula, and what the graph's own steps took beyond it.

    ns(tokens) = c0 + c1 · padded + c2 · max(0, padded − knot) + offset of the graph

Products are computed in tiles: 320 tokens may take no longer than 288, and 352 a sixth longer. No formula knows where; each
graph's steps tell. Offsets are a running mean of what the formula leaves, and small against it. More tokens never take less: a
graph costs no less than the smaller ones of its kind, and a step with prefill no less than without it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np

_OFFSET_MAX: Final = 0.15
"""Of what the formula says, at most."""
_FIRST: Final = 8
"""The formula counts like so many steps of a graph."""
_MEMORY: Final = 64

Buckets = tuple[int, ...]


class BucketCosts:
    """Costs of two kinds of graphs: of steps without prefill (False) and with it (True).

    Args:
        decode: token counts that steps without prefill are padded to, ascending; beyond the last, or without any, nothing is padded.
        mixed: those of steps with prefill.
    """

    def __init__(self, decode: Buckets, mixed: Buckets) -> None:
        self.buckets: Final[tuple[Buckets, Buckets]] = decode, mixed
        self._offsets = [0.0] * len(decode), [0.0] * len(mixed)
        self._num_seen = [0] * len(decode), [0] * len(mixed)
        self._tokens = np.array((*decode, *mixed), np.float64)
        self._costs: tuple[list[float], list[float]] = [], []
        self._is_stale = True
        self.set_formula(1.0, 0.0, 0.0, 0.0)

    def set_formula(self, step: float, token: float, beyond: float, knot: float) -> None:
        """Coefficients, ns: of a step, of a token, and of one beyond the knot."""
        self._step, self._token, self._beyond, self._knot = step, token, beyond, knot
        self._is_stale = True

    def _refresh(self) -> None:
        """Once for all that was learnt since the last prediction, and of whole arrays: a loop over them took longer than the learning."""
        self._is_stale = False
        tokens = self._tokens
        if not tokens.size:
            return
        formula = self._step + self._token * tokens + self._beyond * np.maximum(0.0, tokens - self._knot)
        most = _OFFSET_MAX * formula  # which moves: an offset that was small against it may not be any more
        decode, mixed = self._offsets
        costs = formula + np.minimum(most, np.maximum(-most, np.array(decode + mixed)))
        n = len(decode)
        self._costs = np.maximum.accumulate(costs[:n]).tolist(), np.maximum.accumulate(costs[n:]).tolist()

    def _formula(self, tokens: int) -> float:
        ns = self._step + self._token * tokens
        return ns + self._beyond * (tokens - self._knot) if tokens > self._knot else ns

    def padded(self, prefill_tokens: int, decode_rows: int) -> int:
        """Tokens that a step computes, empty ones included; no fewer than without the prefill."""
        tokens = _padded(self.buckets[False], decode_rows)
        if prefill_tokens == 0:
            return tokens
        return max(tokens, _padded(self.buckets[True], prefill_tokens + decode_rows))

    def ns(self, prefill_tokens: int, decode_rows: int) -> float:
        """Of a step with so many of each."""
        alone = self._cost(False, decode_rows)
        return max(alone, self._cost(True, prefill_tokens + decode_rows)) if prefill_tokens else alone

    def _cost(self, kind: bool, tokens: int) -> float:
        if self._is_stale:
            self._refresh()
        costs = self._costs[kind]
        at = bisect_left(self.buckets[kind], tokens)
        if at < len(costs):
            return costs[at]
        ns = self._formula(tokens)
        return max(ns, costs[-1]) if costs else ns

    def learn(self, prefill_tokens: int, decode_rows: int, ns: float, weight: float = 1.0) -> None:
        """A step's tokens took so long; `weight` 0 … 1: how far that is believed."""
        kind = prefill_tokens > 0
        at = bisect_left(self.buckets[kind], prefill_tokens + decode_rows)
        if at == len(self.buckets[kind]):
            return
        formula, offsets = self._formula(self.buckets[kind][at]), self._offsets[kind]
        self._num_seen[kind][at] += 1
        rate = weight * max(1 / _MEMORY, 1 / (_FIRST + self._num_seen[kind][at]))
        most = _OFFSET_MAX * formula
        known = min(most, max(-most, offsets[at]))  # what is not believed is not to be unlearnt either
        offsets[at] = known + rate * (min(most, max(-most, float(ns) - formula)) - known)
        self._is_stale = True

    def to_state(self) -> list[list[tuple[int, float]]]:
        """(tokens, offset) of each graph of each kind."""
        return [list(zip(*both, strict=True)) for both in zip(self.buckets, self._offsets, strict=True)]

    def restore(self, state: Sequence[Sequence[tuple[int, float]]]) -> None:
        """As saved; of graphs that are not there any more nothing is kept. The formula is as it was then."""
        for kind, saved in zip((False, True), state, strict=True):
            known = dict(saved)
            self._offsets[kind][:] = [known.get(tokens, 0.0) for tokens in self.buckets[kind]]
        self._is_stale = True

    def check_invariants(self) -> None:
        """Costs are above 0 and ascend."""
        self._refresh()
        for costs in self._costs:
            assert all(cost > 0 for cost in costs), costs
            assert costs == sorted(costs), costs


def _padded(buckets: Buckets, num_tokens: int) -> int:
    at = bisect_left(buckets, num_tokens)
    return buckets[at] if at < len(buckets) else num_tokens
