"""Slots: what arrays of the engine index live sequences by."""

from __future__ import annotations

from collections import deque


class Slots:
    """Small ints for live sequences, the longest unused one first."""

    def __init__(self) -> None:
        self._free: deque[int] = deque()
        self._next = 0

    def take(self) -> int:
        """A slot that nobody has."""
        if self._free:
            return self._free.popleft()
        self._next += 1
        return self._next - 1

    def give_back(self, slot: int) -> None:
        """Nobody has it any more."""
        self._free.append(slot)
