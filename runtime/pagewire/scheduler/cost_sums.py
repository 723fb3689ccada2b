"""Sums of a weighted least squares that forgets: what the cost model keeps of the steps of one kind."""

from __future__ import annotations

from typing import Final

_GAIN_MAX: Final = 1e100
"""Weights grow instead of all that was before them shrinking; brought back to 1 before a float could overflow."""


class DecayingSums:
    """Σ w x xᵀ and Σ w x y over observations (x, y), where each new one lets the weights w of those before it decay.

    Plain floats: of eight features a handful is not 0, and whole-array operations on so few cost ten times what they compute.
    """

    def __init__(self, num: int) -> None:
        self._rows = [[0.0] * num for _ in range(num)]
        self._sides = [0.0] * num
        self._gain = 1.0

    def add(self, x: list[float], y: float, weight: float, decay: float) -> None:
        """One more, after what was before counts `decay` (0 … 1) times what it did."""
        self._gain /= decay
        if self._gain > _GAIN_MAX:
            self._normalise()
        weight *= self._gain
        present = [(i, value) for i, value in enumerate(x) if value]
        for i, value in present:
            weighted = weight * value
            self._sides[i] += weighted * y
            row = self._rows[i]
            for j, other in present:
                row[j] += weighted * other

    def pull(self, j: int, theta: list[float]) -> tuple[float, float]:
        """Of coordinate `j`: the diagonal, and the residual Σ w x_j (y − x · theta)."""
        row, gain = self._rows[j], self._gain
        explained = 0.0
        for a, b in zip(row, theta, strict=True):
            explained += a * b
        return row[j] / gain, (self._sides[j] - explained) / gain

    def _normalise(self) -> None:
        self._rows = [[value / self._gain for value in row] for row in self._rows]
        self._sides = [value / self._gain for value in self._sides]
        self._gain = 1.0
