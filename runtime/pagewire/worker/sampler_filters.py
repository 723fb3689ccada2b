"""top-k and top-p as a floor: the least logit that stays. One row at a time, so that no neighbour can change a bit.

Both keep whole sets of equal logits: top-k keeps every token that is at least as likely as the k-th, top-p the smallest
set {logit ≥ floor} whose mass reaches p. So a floor says it all, no order among equals is invented, and a kernel may
look for the floor in any way it likes.

A full sort of the vocabulary is the last resort: most of the mass lies a few nats below the maximum, so the search
starts with the few tokens there and widens only where they do not suffice.
"""

from __future__ import annotations

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
    target = p * float(weights(kept, top, temperature).sum(dtype=np.float64))
    for depth in _DEPTHS:
        head = np.compress(kept >= top - np.float32(depth) * temperature, kept)
        floor = _floor_reaching(head, top, temperature, target)
        if floor is not None:
            return floor
    floor = _floor_reaching(kept, top, temperature, target)
    return floor if floor is not None else kept.min()  # p so near to 1 that rounding decides: all of it stays


def weights(logits: Float32Array, top: np.float32, temperature: np.float32) -> Float32Array:
    """Unnormalised probabilities, 1 for the maximum."""
    scaled = (logits - top) / temperature
    return np.exp(scaled, out=scaled)


def _floor_reaching(head: Float32Array, top: np.float32, temperature: np.float32, target: float) -> np.float32 | None:
    """The logit at which the mass of `head`, most likely first, reaches `target`; None where all of it does not."""
    descending = np.sort(head)[::-1]
    mass = np.cumsum(weights(descending, top, temperature), dtype=np.float64)
    at = int(np.searchsorted(mass, target))
    return descending[at] if at < descending.size else None
