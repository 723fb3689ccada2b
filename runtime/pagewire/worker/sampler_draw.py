"""The draw: argmax of scaled logits plus Gumbel noise, over the tokens that can win.

Adding independent Gumbel noise to log-probabilities and taking the maximum draws from their distribution (Gumbel 1954).
Noise is what costs, and ours is bounded (`philox.GUMBEL_MIN`, `GUMBEL_MAX`), so most of it need not be computed:

    scaled logit, 0 at the top
    0 ├─ head ─┼─ within reach of the head's best value ─┼─ could win, had the head drawn badly ─┼─ can never win ─▶

A row with few tokens within reach draws among them at once. Otherwise the head draws first. Its best value b says how
far down a token may lie that can still beat it (b − GUMBEL_MAX), and how much noise it must have got: a comparison of
integers leaves a few of the thousands of others, and only those need logarithms. What is left out could not have won,
so the token is that of all noise computed.

Everything is element by element, or a maximum: exact operations, in any batch the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from pagewire.step.step import Float32Array
from pagewire.worker.philox import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    LANES,
    UInt32Array,
    UInt64Array,
    gumbel,
    least_word_above,
    noise_words,
)

Bools = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]

_SLACK: Final = 0.01  # for rounding in float32
REACH: Final = np.float32(GUMBEL_MAX - GUMBEL_MIN + _SLACK)
"""How far below the maximum a scaled logit may lie and still win."""
_HEAD: Final = np.float32(2)
"""How far down the head goes where there are many candidates."""
_FEW: Final = 1024
"""So many candidates draw at once."""


@dataclass(slots=True)
class Draws:
    """What n samples draw from. Columns [n]; `logits` float32 [n, V]."""

    logits: Float32Array
    floors: Float32Array
    """The least logit that may be drawn."""
    tops: Float32Array
    """The largest logit, ≥ the floor."""
    temperatures: Float32Array
    seeds: UInt64Array
    positions: UInt64Array


def draw(draws: Draws) -> Int64Array:
    """One token a sample, int64 [n]. Of equal values the lowest id wins."""
    logits, floors = draws.logits, np.maximum(draws.floors, draws.tops - REACH * draws.temperatures)
    reaching = logits >= floors[:, None]
    many = np.flatnonzero(np.count_nonzero(reaching, axis=1) > _FEW)
    nearest = [_keep_head(draws, i, reaching[i]) for i in many]
    token_ids, values = _draw_few(draws, reaching)
    for i, below in zip(many, nearest, strict=True):
        token_ids[i] = _draw_rest(draws, i, floors[i], token_ids[i], values[i], below)
    return token_ids


def _keep_head(draws: Draws, i: np.intp, reaching: Bools) -> float:
    """Leave only a row's head in `reaching`; how near to the top, scaled, the best of the others may lie."""
    head = draws.tops[i] - _HEAD * draws.temperatures[i]
    np.logical_and(reaching, draws.logits[i] >= head, out=reaching)
    ids = np.flatnonzero(reaching)
    if ids.size <= _FEW:
        return float(-_HEAD)
    reaching[ids[_FEW] :] = False  # a flat distribution: some of the head are as good as all
    return 0.0


def _draw_few(draws: Draws, reaching: Bools) -> tuple[Int64Array, Float32Array]:
    """Winners among the tokens in `reaching`, bool [n, V] with at least one in each row; and their values.

    Candidates of all samples lie one after another in flat arrays, `counts` says how many each has.
    """
    counts = np.count_nonzero(reaching, axis=1)
    starts = np.cumsum(counts) - counts
    flat = np.flatnonzero(reaching)
    token_ids = flat - np.repeat(np.arange(len(counts)) * reaching.shape[1], counts)
    scaled = draws.logits.reshape(-1)[flat] - np.repeat(draws.tops, counts)
    scaled /= np.repeat(draws.temperatures, counts)
    values = scaled + gumbel(_words_of(draws, token_ids, starts))
    best = np.maximum.reduceat(values, starts)
    winners = np.flatnonzero(values == np.repeat(best, counts))
    first = winners[np.searchsorted(winners, starts)]
    return token_ids[first], best


def _words_of(draws: Draws, token_ids: Int64Array, starts: Int64Array) -> UInt32Array:
    """The word of each candidate's noise, uint32 [N]; neighbours that share a counter share its cost."""
    groups = token_ids // LANES
    opens = np.ones(groups.size, np.bool_)
    np.not_equal(groups[1:], groups[:-1], out=opens[1:])
    opens[starts] = True
    sizes = np.add.reduceat(opens, starts, dtype=np.int64)
    seeds, positions = np.repeat(draws.seeds, sizes), np.repeat(draws.positions, sizes)
    words = noise_words(seeds, positions, groups[opens].astype(np.uint64))
    found: UInt32Array = words[token_ids % LANES, np.cumsum(opens) - 1]
    return found


def _draw_rest(
    draws: Draws, i: np.intp, floor: np.float32, token_id: np.int64, value: np.float32, nearest: float
) -> np.int64:
    """The winner of sample i, where `token_id` with `value` is that of its head, and all others are below `nearest`."""
    row, top, temperature = draws.logits[i], draws.tops[i], draws.temperatures[i]
    within = top + temperature * np.float32(float(value) - GUMBEL_MAX - _SLACK)
    reaching = np.zeros(-(-row.size // LANES) * LANES, np.bool_)
    np.greater_equal(row, max(floor, within), out=reaching[: row.size])
    groups = np.flatnonzero(reaching.view(np.uint32))  # four bools that are not all false
    words = noise_words(draws.seeds[i], draws.positions[i], groups.astype(np.uint64)).reshape(-1)
    lucky = np.flatnonzero(words >= least_word_above(float(value) - nearest))
    lanes, at = np.divmod(lucky, groups.size)
    ids = groups[at] * LANES + lanes
    can_win = reaching[ids]
    ids, lucky = ids[can_win], lucky[can_win]
    if ids.size == 0:
        return token_id
    values = (row[ids] - top) / temperature + gumbel(words[lucky])
    best = values.max()
    if best < value:
        return token_id
    first: np.int64 = ids[values == best].min()
    return first if best > value else min(first, token_id)
