"""Floors of top-k and top-p against a full sort, at the size where the short ways are taken."""

from __future__ import annotations

import numpy as np
import pytest

from pagewire.worker.sampler_filters import top_k_floor, top_p_floor

VOCAB = 4099


def row_of(spread: float) -> np.ndarray:
    return (np.random.default_rng(3).standard_normal(VOCAB) * spread).astype(np.float32)


@pytest.mark.parametrize("spread", [0.1, 1, 3, 10, 50])
@pytest.mark.parametrize("k", [1, 2, 17, 1000, VOCAB - 1, VOCAB])
def test_top_k_is_the_kth_largest(spread, k):
    row = row_of(spread)
    assert top_k_floor(row, row.max(), k) == np.sort(row)[-k]


@pytest.mark.parametrize("spread", [0.1, 1, 3, 10, 50])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_top_p_is_the_smallest_set_of_that_mass(spread, temperature):
    row, temperature = row_of(spread), np.float32(temperature)
    top = row.max()
    descending = np.sort(row)[::-1]
    mass = np.cumsum(np.exp((descending.astype(np.float64) - top) / temperature))
    for p in np.linspace(0.01, 0.999, 60):
        floor = top_p_floor(row, top, temperature, float(p))
        num_kept = np.count_nonzero(row >= floor)
        # Weights are float32, so the mass may be off by a few units of its last place.
        assert mass[num_kept - 1] >= p * mass[-1] * (1 - 1e-6), "enough"
        assert num_kept == 1 or mass[num_kept - 2] <= p * mass[-1] * (1 + 1e-6), "and no token more"


def test_top_p_next_to_one_keeps_all():
    row = row_of(1.0)
    assert top_p_floor(row, row.max(), np.float32(1), 1 - 2**-53) == row.min()


def test_equal_logits_stay_together():
    row = np.array([1, 3, 2, 3, 3, 2], np.float32)
    assert top_k_floor(row, row.max(), 2) == 3
    assert top_p_floor(row, row.max(), np.float32(1), 0.01) == 3
    assert top_p_floor(row, row.max(), np.float32(1), 0.9) == 2
