"""Log-probabilities of the model's own distribution: log-softmax of the raw logits, for the rows that asked.

One row at a time, so that no neighbour changes a bit. Finite always: below `LOGPROB_MIN`, and where the logits are
broken, it is `LOGPROB_MIN` that is told (−inf and NaN have no place in JSON).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagewire.step.step import Float32Array, Int32Array
from pagewire.worker.sampler_filters import top_k_floor, weights

LOGPROB_MIN: Final = np.float32(-9999.0)


def score(logits: Float32Array, token_ids: Int32Array, num_tops: int) -> tuple[Float32Array, Int32Array, Float32Array]:
    """Log-probabilities of one token in each row, and of the most likely ones.

    Args:
        logits: float32 [N, V], raw.
        token_ids: int32 [N].
        num_tops: T ≤ V.

    Returns:
        chosen float32 [N], top_ids int32 [N, T] (most likely first, of equals the lowest id first), top_logprobs
        float32 [N, T].
    """
    chosen = np.empty(len(logits), np.float32)
    top_ids = np.empty((len(logits), num_tops), np.int32)
    top_logprobs = np.empty((len(logits), num_tops), np.float32)
    with np.errstate(all="ignore"):
        for i, row in enumerate(logits):
            log_total = _log_sum_exp(row)
            chosen[i] = row[token_ids[i]] - log_total
            if num_tops:
                top_ids[i] = most_likely(row, num_tops)
                top_logprobs[i] = row[top_ids[i]] - log_total
    return _finite(chosen), top_ids, _finite(top_logprobs)


def most_likely(row: Float32Array, k: int) -> Int32Array:
    """The `k` tokens with the largest logits, largest first, of equals the lowest id first; 1 ≤ k ≤ V."""
    if not np.isfinite(row.max()):  # broken, or empty: any answer will do that has the right shape
        return np.arange(k, dtype=np.int32)
    reaching = np.flatnonzero(row >= top_k_floor(row, row.max(), k))
    return reaching[np.argsort(-row[reaching], kind="stable")[:k]].astype(np.int32)


def _log_sum_exp(row: Float32Array) -> np.float64:
    top = row.max()
    total: np.float64 = np.log(weights(row, top, np.float32(1)).sum(dtype=np.float64)) + np.float64(top)
    return total


def _finite(logprobs: Float32Array) -> Float32Array:
    finite: Float32Array = np.maximum(logprobs, LOGPROB_MIN)
    finite[~np.isfinite(finite)] = LOGPROB_MIN
    return finite
