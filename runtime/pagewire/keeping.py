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


class GraceClock:
    """Time that stands still while nobody is there who could come back: grace is for those who can.

    Args:
        most_ms: so long it stands still at a stretch; then it goes on, so that nothing is kept for ever.
    """

    def __init__(self, most_ms: int) -> None:
        self._most_ns = most_ms * 1_000_000
        self._stood_ns = 0
        self._left_ns = self._most_ns
        self._looked_ns: int | None = None
        self._was_anybody = True

    def look(self, now_ns: int, *, is_anybody: bool) -> int:
        """The time that has passed for them, ns. Until the next look it goes on, or not, as `is_anybody` says.

        Args:
            now_ns: never less than at the last look.
            is_anybody: somebody is there now.
        """
        if not self._was_anybody and self._looked_ns is not None:
            stood_ns = min(now_ns - self._looked_ns, self._left_ns)
            self._stood_ns += stood_ns
            self._left_ns -= stood_ns
        if is_anybody:
            self._left_ns = self._most_ns
        self._looked_ns, self._was_anybody = now_ns, is_anybody
        return now_ns - self._stood_ns


class Limits(NamedTuple):
    """What may be kept, of those without a reader and of those that are over, each."""

    grace_ms: int
    max_num: int
    max_bytes: int


class _Known(NamedTuple, Generic[Item]):
    item: Item
    key: str


class Survivors(Generic[Item]):
    """Streams that can be resumed, by request id: read by somebody, lost by their reader, or told to the end.

                      lose                         grace over
        has a reader ──────▶ orphan: goes on ─────────────────────▶ `end`, forgotten
          ▲  │   ▲             │
          │  │   └──── take ───┤
          │  │ tell            │
          │  ▼                 │
          │ told: kept in case its last words were lost ──────────▶ forgotten
          └──── take ──────────┘                         grace over

    Args:
        limits: of what is kept.
        end: ends an orphan whose time is over.
        gone: told of each stream that is known no more, after `end`.
    """

    def __init__(
        self,
        limits: Limits,
        end: Callable[[Item], None],
        gone: Callable[[Item], None] = lambda item: None,  # noqa: ARG005
    ) -> None:
        self._end = end
        self._gone = gone
        self._known: dict[str, _Known[Item]] = {}
        self._orphans: Keeper[str] = Keeper(**limits._asdict(), give_up=self._give_up_orphan)
        self._told: Keeper[str] = Keeper(**limits._asdict(), give_up=self.forget)
        self._told_to: dict[str, object] = {}
        self._told_by_reader: dict[object, dict[str, None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._known

    @property
    def num_orphans(self) -> int:
        """Streams that nobody reads now."""
        return len(self._orphans)

    @property
    def orphans(self) -> list[Item]:
        """Those."""
        return [self._known[name].item for name in self._orphans]

    @property
    def is_keeping(self) -> bool:
        """`expire` has something to look at."""
        return bool(len(self._orphans) or len(self._told))

    def add(self, name: str, key: str, item: Item) -> None:
        """A stream that has a reader."""
        assert name not in self._known, name
        self._known[name] = _Known(item, key)

    def find(self, name: str, key: str) -> Item | None:
        """The stream, whoever has it. None: there is none, or the key is another's."""
        known = self._known.get(name)
        return known.item if known is not None and is_same_key(known.key, key) else None

    def has(self, name: str, item: Item) -> bool:
        """The stream of this name is this one."""
        known = self._known.get(name)
        return known is not None and known.item is item

    def take(self, name: str) -> None:
        """It has a reader again."""
        self._orphans.take(name)
        self._told.take(name)
        self._untell(name)

    def lose(self, name: str, num_bytes: int, now_ns: int) -> None:
        """Its reader is gone."""
        self._orphans.put(name, name, num_bytes, now_ns)

    def tell(self, name: str, reader: object, num_bytes: int, now_ns: int) -> None:
        """All of it was sent to `reader`."""
        self._told_to[name] = reader
        self._told_by_reader.setdefault(reader, {})[name] = None
        self._told.put(name, name, num_bytes, now_ns)

    def farewell(self, reader: object) -> None:
        """`reader` said that it will not come back: what it was told is forgotten."""
        for name in list(self._told_by_reader.get(reader, ())):
            self.forget(name)

    def lost(self, reader: object) -> None:
        """`reader` is gone, but may come back as another one."""
        for name in self._told_by_reader.pop(reader, ()):
            del self._told_to[name]

    def forget(self, name: str) -> None:
        """It cannot be resumed any more. Idempotent."""
        self.take(name)
        known = self._known.pop(name, None)
        if known is not None:
            self._gone(known.item)

    def expire(self, now_ns: int) -> None:
        """End and forget those whose time is over."""
        self._orphans.expire(now_ns)
        self._told.expire(now_ns)

    def clear(self) -> None:
        """Nobody comes back any more."""
        self._orphans.clear()
        self._told.clear()

    def _give_up_orphan(self, name: str) -> None:
        self.take(name)
        item = self._known.pop(name).item
        self._end(item)
        self._gone(item)

    def _untell(self, name: str) -> None:
        reader = self._told_to.pop(name, None)
        if reader is not None:
            names = self._told_by_reader[reader]
            del names[name]
            if not names:
                del self._told_by_reader[reader]

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        self._orphans.check_invariants()
        self._told.check_invariants()
        for name in (*self._orphans, *self._told):
            assert name in self._known
            assert not (name in self._orphans and name in self._told)
        assert set(self._told_to) <= set(self._told)
        listed = [name for names in self._told_by_reader.values() for name in names]
        assert sorted(listed) == sorted(self._told_to)
