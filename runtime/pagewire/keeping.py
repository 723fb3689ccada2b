"""What nobody reads now, kept for a while in case its reader comes back. Pure: the time is passed in.

Engine and gateway keep streams in the same way: those whose reader was lost, and those that are over but whose last
words may have been lost on the way. Both are bounded in time, number and bytes; the oldest goes first.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")


class _Entry(NamedTuple, Generic[Item]):
    item: Item
    num_bytes: int
    until_ns: int


class Keeper(Generic[Item]):
    """Items by name. All operations are O(1), but for those that give up several.

    Args:
        grace_ms: how long each is kept.
        max_num: so many at most.
        max_bytes: of all of them at most.
        give_up: told of each that is not kept any longer; not of those that were taken.
    """

    def __init__(self, *, grace_ms: int, max_num: int, max_bytes: int, give_up: Callable[[Item], None]) -> None:
        self._grace_ns = grace_ms * 1_000_000
        self._max_num = max_num
        self._max_bytes = max_bytes
        self._give_up = give_up
        self._entries: dict[str, _Entry[Item]] = {}  # the oldest first, and so the one whose time ends first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Item]:
        return (entry.item for entry in self._entries.values())

    def put(self, name: str, item: Item, num_bytes: int, now_ns: int) -> None:
        """Keep it from now on; the oldest are given up where there is no room, in the worst case this one."""
        assert name not in self._entries, name
        self._entries[name] = _Entry(item, num_bytes, now_ns + self._grace_ns)
        self.num_bytes += num_bytes
        while len(self._entries) > self._max_num or self.num_bytes > self._max_bytes:
            self._drop_oldest()

    def take(self, name: str) -> Item | None:
        """Somebody wants it back, or it need not be kept. None: it is not here."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        self.num_bytes -= entry.num_bytes
        return entry.item

    def expire(self, now_ns: int) -> None:
        """Give up those whose time is over."""
        while self._entries and next(iter(self._entries.values())).until_ns <= now_ns:
            self._drop_oldest()

    def clear(self) -> None:
        """Give up all."""
        while self._entries:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        item = self.take(next(iter(self._entries)))
        assert item is not None
        self._give_up(item)

    def check_invariants(self) -> None:
        """The bytes add up, and times are in order."""
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values())
        times = [entry.until_ns for entry in self._entries.values()]
        assert times == sorted(times)
        assert len(self._entries) <= self._max_num
        assert self.num_bytes <= self._max_bytes


def is_same_key(one: str, other: str) -> bool:
    """Compared in a time that does not tell where they differ. An empty key is nobody's."""
    return bool(one) and hmac.compare_digest(one.encode(), other.encode())
