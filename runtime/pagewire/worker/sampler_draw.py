"""The draw: argmax of scaled logits plus Gumbel noise, over the tokens that can win.

Adding independent Gumbel noise to log-probabilities and taking the maximum draws from their distribution (Gumbel 1954).
Our noise is bounded (`philox.GUMBEL_MIN`, `GUMBEL_MAX`), so a token whose scaled logit lies further below the maximum
than the width of that interval can never win: leaving it out changes nothing, and spares its noise.

Candidates of several samples lie one after another in flat arrays, `counts` says how many each has. Everything on them
is element by element, or a maximum: exact operations, in any batch the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagewire.step.step import Float32Array
from pagewire.worker.philox import GUMBEL_MAX, GUMBEL_MIN, LANES, UInt32Array, UInt64Array, gumbel, noise_words

Int64Array = npt.NDArray[np.int64]

REACH: Final = np.float32(GUMBEL_MAX - GUMBEL_MIN + 0.01)
"""How far below the maximum a scaled logit may lie and still win; a margin for rounding included."""

_OWN_PASS: Final = 1024
"""Counters from which on a sample's noise is drawn by itself: scalar keys save two arrays in every round."""


@dataclass(slots=True)
class Candidates:
    """N candidates of n samples, tokens ascending within a sample."""

    counts: Int64Array  # [n], each ≥ 1
    token_ids: Int64Array  # [N]
    logits: Float32Array  # [N]

    @classmethod
    def above(cls, logits: Float32Array, floors: Float32Array) -> Candidates:
        """Tokens of each row of `logits`, float32 [n, V], that reach its floor, float32 [n]."""
        reaching = logits >= floors[:, None]
        counts = np.count_nonzero(reaching, axis=1)
        flat = np.flatnonzero(reaching)
        first = np.repeat(np.arange(len(logits)) * logits.shape[1], counts)
        return cls(counts, flat - first, logits.reshape(-1)[flat])

    @classmethod
    def joined(cls, parts: list[Candidates]) -> Candidates:
        """Candidates of several groups of samples, group after group."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logits for part in parts]),
        )


def draw(
    candidates: Candidates, tops: Float32Array, temperatures: Float32Array, seeds: UInt64Array, positions: UInt64Array
) -> Int64Array:
    """One token a sample, int64 [n]; the arguments besides `candidates` are [n]. Of equal values the lowest id wins."""
    counts = candidates.counts
    scaled = (candidates.logits - np.repeat(tops, counts)) / np.repeat(temperatures, counts)
    values = scaled + gumbel(_words(candidates, seeds, positions))
    starts = np.cumsum(counts) - counts
    best = np.maximum.reduceat(values, starts)
    winners = np.flatnonzero(values == np.repeat(best, counts))
    first = winners[np.searchsorted(winners, starts)]
    return candidates.token_ids[first]


def _words(candidates: Candidates, seeds: UInt64Array, positions: UInt64Array) -> UInt32Array:
    """The word of each candidate's noise, uint32 [N]; a counter that serves several candidates is computed once."""
    counts, token_ids = candidates.counts, candidates.token_ids
    groups = token_ids // LANES
    opens = np.ones(groups.size, np.bool_)
    np.not_equal(groups[1:], groups[:-1], out=opens[1:])
    starts = np.cumsum(counts) - counts
    opens[starts] = True
    distinct = groups[opens].astype(np.uint64)
    num_distinct = np.add.reduceat(opens, starts, dtype=np.int64)
    words = np.empty((distinct.size, LANES), np.uint32)
    ends = np.cumsum(num_distinct)
    small = num_distinct < _OWN_PASS
    for i in np.flatnonzero(~small):
        own = slice(ends[i] - num_distinct[i], ends[i])
        words[own] = noise_words(seeds[i], positions[i], distinct[own])
    if small.any():
        rest = np.repeat(small, num_distinct)
        sizes = num_distinct[small]
        words[rest] = noise_words(np.repeat(seeds[small], sizes), np.repeat(positions[small], sizes), distinct[rest])
    found: UInt32Array = words[np.cumsum(opens) - 1, token_ids % LANES]
    return found
