"""Connections that libzmq accepted and that have not said hello (any more). Pure: events and times in, whom to cut out.

libzmq itself accepts as many connections as there are file descriptors, and keeps each for as long as the other side likes:
one that says nothing, one that was refused, one that was lost for its silence. So the door keeps count:

    accepted ──▶ stranger ── hello ──▶ known ── lost ──▶ stranger, anew
                    │ longer than `timeout_ms`; one of more than `max_num`: the one that waits longest; says too much
                    ▼
                   cut

The oldest goes and not the newest: whoever means it has said hello within milliseconds, so that under a flood most newcomers
get in, where a full house would stay full of those who want nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Wire:
    """One accepted connection.

    Attributes:
        number: its file descriptor in this process.
        inode: of the socket behind the number, which tells it from a later one under the same number.
    """

    __slots__ = ("inode", "number", "peer", "since_ns")

    def __init__(self, number: int, inode: int, since_ns: int) -> None:
        self.number = number
        self.inode = inode
        self.since_ns = since_ns
        self.peer: bytes | None = None
        """Who it is, once it said hello."""


class Strangers:
    """All accepted connections, strangers in the order of their waiting. Every operation is O(1), but for `overdue`.

    Args:
        max_num: strangers at most.
        timeout_ms: how long one may stay one.
    """

    def __init__(self, *, max_num: int, timeout_ms: int) -> None:
        self._max_num = max_num
        self._timeout_ns = timeout_ms * 1_000_000
        self._wires: dict[int, Wire] = {}
        self._strangers: dict[Wire, None] = {}  # the one that waits longest first
        self._known: dict[bytes, Wire] = {}

    def __len__(self) -> int:
        return len(self._strangers)

    def __iter__(self) -> Iterator[Wire]:
        return iter(self._strangers)

    @property
    def num_wires(self) -> int:
        """Accepted connections, those among them that are being cut."""
        return len(self._wires)

    def knows(self, peer: bytes) -> bool:
        """It said hello, and its connection is there."""
        return peer in self._known

    def accepted(self, number: int, inode: int, now_ns: int) -> Wire | None:
        """A new one; the one to cut for it, if there are too many."""
        self.closed(
            number
        )  # its end was not told: libzmq says nothing where a peer took its own old connection's place
        wire = self._wires[number] = Wire(number, inode, now_ns)
        self._strangers[wire] = None
        return self._one_too_many()

    def closed(self, number: int) -> None:
        """It is gone. Idempotent."""
        wire = self._wires.pop(number, None)
        if wire is not None:
            self._strangers.pop(wire, None)
            self._forget_peer(wire)

    def welcomed(self, number: int, peer: bytes) -> None:
        """It said hello and was let in. A number that is not known changes nothing."""
        wire = self._wires.get(number)
        if wire is not None:
            self._strangers.pop(wire, None)
            self._forget_peer(wire)
            before = self._known.get(peer)
            if before is not None:
                before.peer = None
            wire.peer = peer
            self._known[peer] = wire

    def refused(self, number: int, now_ns: int) -> None:
        """It said hello and was told to try again: its time begins anew."""
        wire = self._wires.get(number)
        if wire is not None and wire in self._strangers:
            self._wait(wire, now_ns)

    def left(self, peer: bytes, now_ns: int) -> Wire | None:
        """The door has lost `peer`, which may say hello again; the one to cut, as in `accepted`. Idempotent."""
        wire = self._known.pop(peer, None)
        if wire is None:
            return None
        wire.peer = None
        self._wait(wire, now_ns)
        return self._one_too_many()

    def overdue(self, now_ns: int) -> Iterator[Wire]:
        """Those to cut since their time is over; each is told once."""
        while self._strangers:
            wire = next(iter(self._strangers))
            if now_ns - wire.since_ns <= self._timeout_ns:
                return
            del self._strangers[wire]
            yield wire

    def give_up(self, wires: Iterable[Wire]) -> None:
        """These are cut for a reason of their own."""
        for wire in wires:
            self._strangers.pop(wire, None)

    def _wait(self, wire: Wire, now_ns: int) -> None:
        self._strangers.pop(wire, None)
        wire.since_ns = now_ns
        self._strangers[wire] = None

    def _one_too_many(self) -> Wire | None:
        if len(self._strangers) <= self._max_num:
            return None
        oldest = next(iter(self._strangers))
        del self._strangers[oldest]
        return oldest

    def _forget_peer(self, wire: Wire) -> None:
        if wire.peer is not None:
            del self._known[wire.peer]
            wire.peer = None

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        for number, wire in self._wires.items():
            assert wire.number == number
            assert wire.peer is None or self._known[wire.peer] is wire
        for wire in self._strangers:
            assert self._wires[wire.number] is wire
            assert wire.peer is None
        for peer, wire in self._known.items():
            assert wire.peer == peer
            assert self._wires[wire.number] is wire
        waits = [wire.since_ns for wire in self._strangers]
        assert waits == sorted(waits)
        assert len(self._strangers) <= self._max_num
