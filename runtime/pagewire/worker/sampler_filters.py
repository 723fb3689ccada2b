"""top-k and top-p as a floor: the least logit that stays. One row at a time, so that no neighbour can change a bit.

Both keep whole sets of equal logits: top-k keeps every token that is at least as likely as the k-th, top-p the smallest
set {logit ≥ floor} whose mass reaches p. So a floor says it all, no order among equals is invented, and a kernel may
look for the floor in any way it likes.

A full sort of the vocabulary is the last resort: most of the mass lies a few nats below the maximum, so the search
starts with the few tokens there and widens only where they do not suffice.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from pagewire.step.step import Float32Array

_DEPTHS: Final = (2.0, 5.0, 10.0, 20.0)
"""How far below the maximum to look, in nats at the row's temperature."""


def top_k_floor(row: Float32Array, top: np.float32, k: int) -> np.float32:
    """The k-th largest of `row`, float32 [V] with maximum `top`; 1 ≤ k ≤ V."""
    head = row
    for depth in _DEPTHS:
        head = np.compress(row >= top - np.float32(depth), row)  # a third of row[…]'s time
        if head.size >= k:
            break
    else:
        head = row
    kth: np.float32 = np.partition(head, head.size - k)[head.size - k]
    return kth


def top_p_floor(kept: Float32Array, top: np.float32, temperature: np.float32, p: float) -> np.float32:
    """The floor of top-p among `kept`, float32 [≥ 1] with maximum `top`: what top-k left. 0 < p < 1.

    Weights are float32, their sums float64.
    """
    mass = weights(kept, top, temperature)
    target = p * mass.sum(dtype=np.float64)
    head = mass
    for depth in _DEPTHS:
        narrow = np.compress(mass >= np.float32(math.exp(-depth)), mass)
        if narrow.sum(dtype=np.float64) >= target:
            head = narrow
            break
    descending = np.sort(head)[::-1]
    at = np.searchsorted(np.cumsum(descending, dtype=np.float64), target)
    least = descending[min(int(at), descending.size - 1)]  # p so near to 1 that rounding decides: all of it stays
    floor: np.float32 = np.compress(mass >= least, kept).min()
    return floor


def weights(logits: Float32Array, top: np.float32, temperature: np.float32) -> Float32Array:
    """Unnormalised probabilities, 1 for the maximum."""
    scaled = logits - top
    if temperature != 1:
        scaled /= temperature
    np.exp(scaled, out=scaled)
    return scaled
