"""Decaying sums against the whole history, in numpy."""

import numpy as np
import pytest

from pagewire.scheduler import cost_sums


@pytest.mark.parametrize("gain_max", [1e100, 3.0], ids=["weights grow", "weights are brought back"])
def test_are_those_of_all_observations_with_their_weights(gain_max, monkeypatch):
    monkeypatch.setattr(cost_sums, "_GAIN_MAX", gain_max)
    rng = np.random.default_rng(4)
    sums, theta = cost_sums.DecayingSums(4), rng.random(4)
    x, y = rng.random((50, 4)) * (rng.random((50, 4)) < 0.7), rng.random(50)
    weight, decay = rng.random(50) + 0.1, rng.choice([1.0, 0.9, 0.5], 50)
    for i in range(50):
        sums.add(x[i].tolist(), y[i], weight[i], decay[i])
    left = weight * np.append(np.cumprod(decay[:0:-1])[::-1], 1.0)
    system, side = (left[:, None] * x).T @ x, (left[:, None] * x).T @ y
    for j in range(4):
        assert sums.pull(j, theta.tolist()) == pytest.approx((system[j, j], side[j] - system[j] @ theta))
