"""Connections on which nothing is being answered: which of them have been so for too long, or are too many.

    made ──▶ fresh ── asks ──▶ busy ── answered ──▶ resting ── asks ──▶ busy …
               └── too long, or one too many: closed ──┘

Of too many it is the turn of the fresh where they are more than half of what may be, else of the resting; in both the one goes that waits
longest. Who means it asks within milliseconds: so a flood of connections that say nothing, or a header a second, closes its own,
and so does one of connections that were answered once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class IdleConnections(Generic[Item]):
    """Every operation is O(1) for each connection that it is about.

    Args:
        max_num: connections that are fresh or resting, at most.
        patience_s: how long each may be so.
    """

    def __init__(self, max_num: int, patience_s: float) -> None:
        self._max_num = max_num
        self._patience_s = patience_s
        self._fresh: dict[Item, float] = {}  # those that wait longest first, in both
        self._resting: dict[Item, float] = {}

    def __len__(self) -> int:
        return len(self._fresh) + len(self._resting)

    def made(self, one: Item, now_s: float) -> None:
        """It is there, and has asked nothing yet."""
        self._fresh[one] = now_s

    def asks(self, one: Item) -> None:
        """A request of it is being answered."""
        self._fresh.pop(one, None)
        self._resting.pop(one, None)

    def rests(self, one: Item, now_s: float) -> None:
        """It was answered, and may ask again."""
        self._resting[one] = now_s

    def gone(self, one: Item) -> None:
        """It is over. Idempotent."""
        self.asks(one)

    def too_many(self) -> Iterator[Item]:
        """Those to close since they are too many; each is told once."""
        while len(self) > self._max_num:
            table = self._fresh if len(self._fresh) > self._max_num // 2 else self._resting
            one = next(iter(table))
            del table[one]
            yield one

    def overdue(self, now_s: float) -> Iterator[Item]:
        """Those to close since their time is over; each is told once."""
        for table in (self._fresh, self._resting):
            while table:
                one, since_s = next(iter(table.items()))
                if now_s - since_s <= self._patience_s:
                    break
                del table[one]
                yield one

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        assert not self._fresh.keys() & self._resting.keys()
        for table in (self._fresh, self._resting):
            assert list(table.values()) == sorted(table.values())
