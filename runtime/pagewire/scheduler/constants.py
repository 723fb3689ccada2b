"""Arrays of constants, made once: most steps want 1, 1, 1, … and 0, 1, 2, … of some length."""

from __future__ import annotations

import numpy as np

from pagewire.step.step import Int32Array


class _Grown:
    """Views of read-only arrays that grow by doubling."""

    def __init__(self) -> None:
        self.grow(1024)

    def grow(self, size: int) -> None:
        self.ones: Int32Array = np.ones(size, np.int32)
        self.ascending: Int32Array = np.arange(size, dtype=np.int32)
        self.ones.flags.writeable = self.ascending.flags.writeable = False
        self.size = size


_grown = _Grown()


def ones(n: int) -> Int32Array:
    """int32 [n] of 1, read-only."""
    if n > _grown.size:
        _grown.grow(2 * n)
    return _grown.ones[:n]


def ascending(n: int) -> Int32Array:
    """int32 [n]: 0 … n − 1, read-only."""
    if n > _grown.size:
        _grown.grow(2 * n)
    return _grown.ascending[:n]
