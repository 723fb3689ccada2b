"""How much each of many has: connections of a key, streams of a key."""

from __future__ import annotations


class Tally:
    """Counts by name. Names that have nothing are not kept, so that it is no larger than what is counted. O(1)."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, name: str) -> int:
        """How many it has."""
        return self._counts.get(name, 0)

    def add(self, name: str) -> None:
        """One more."""
        self._counts[name] = self._counts.get(name, 0) + 1

    def remove(self, name: str) -> None:
        """One less; it has one."""
        count = self._counts[name] - 1
        if count:
            self._counts[name] = count
        else:
            del self._counts[name]
