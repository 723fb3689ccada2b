"""Peers that send what is no message: after so many of them they are not listened to for a while. Pure: the time is passed in."""

from __future__ import annotations

from typing import Final

_MAX_REMEMBERED: Final = 1024
_IGNORED_FOR_NS: Final = 60 * 10**9


class Offenders:
    """Bounded: beyond 1,024 of each kind the first is forgotten. Every operation is O(1), but for `expire`.

    Args:
        max_offences: so many, and a peer is ignored.
    """

    def __init__(self, max_offences: int) -> None:
        self._max_offences = max_offences
        self._offences: dict[bytes, int] = {}
        self._ignored: dict[bytes, int] = {}

    @property
    def num(self) -> int:
        """Of the longer of both lists."""
        return max(len(self._offences), len(self._ignored))

    def is_ignored(self, peer: bytes, now_ns: int) -> bool:
        """What it says is not even answered."""
        until_ns = self._ignored.get(peer)
        if until_ns is None:
            return False
        if now_ns < until_ns:
            return True
        del self._ignored[peer]
        return False

    def offended(self, peer: bytes, now_ns: int) -> None:
        """Once more."""
        offences = self._offences.pop(peer, 0) + 1
        if offences >= self._max_offences:
            self.ignore(peer, now_ns)
        else:
            _remember(self._offences, peer, offences)

    def ignore(self, peer: bytes, now_ns: int) -> None:
        """From now on, for a minute."""
        _remember(self._ignored, peer, now_ns + _IGNORED_FOR_NS)

    def forgive(self, peer: bytes) -> None:
        """It said what it should."""
        self._offences.pop(peer, None)

    def expire(self, now_ns: int) -> None:
        """Listen again to those whose minute is over."""
        for peer in [peer for peer, until_ns in self._ignored.items() if until_ns <= now_ns]:
            del self._ignored[peer]


def _remember(table: dict[bytes, int], peer: bytes, value: int) -> None:
    """Put it last, and forget the first if there are too many."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > _MAX_REMEMBERED:
        del table[next(iter(table))]
