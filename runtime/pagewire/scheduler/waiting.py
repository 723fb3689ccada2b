"""Who waits for admission, and who of them is next.

Two rules. Inside a client: the earliest due first; where nothing is promised, all are due at once, and so it is the
highest priority, then seniority. Between clients: who was served no more than a share ahead of the one served least may
go, and of these the one whose first is due earliest. A due time never moves but once (see `postpone`), so everybody who
waits becomes the earliest; a client that waits is served nothing, so others come to be a share ahead of it: nobody starves.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from pagewire.scheduler.sequence import Sequence

SHARE_TOKENS: Final = 8192
"""A client may be so many tokens ahead of another that waits. Small: fair at once; large: promises decide alone."""
_MAX_IDLE: Final = 4096
"""Clients that are remembered while nothing of theirs waits; beyond that the longest idle is forgotten."""
_NEVER: Final = int(np.iinfo(np.int64).max)
_FEW: Final = 64
"""Up to so many clients a loop over them is faster than whole-array operations."""

_Entry = tuple[int, int, int]


class _Client:
    """One client's waiting sequences, in a heap; an entry whose sequence left is skipped when it surfaces."""

    __slots__ = ("due", "heap", "members", "place", "served")

    def __init__(self, place: int, served: float) -> None:
        self.place = place
        self.served = served
        self.due = _NEVER
        self.heap: list[_Entry] = []
        self.members: dict[int, Sequence] = {}

    def first(self) -> Sequence | None:
        """The first, which stays."""
        heap, members = self.heap, self.members
        while heap:
            entry = heap[0]
            sequence = members.get(entry[2])
            if sequence is not None and sequence.due_ns == entry[0]:
                return sequence
            heapq.heappop(heap)
        return None


class WaitingQueue:
    """push and remove O(log waiting of the client); peek O(1), and one whole-array operation over clients after a change.

    A preempted sequence keeps what it was due, and its seniority, and so goes before newcomers.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._members: dict[int, Sequence] = {}
        # By slot, of sequences to which something is promised: when they are due, and tokens to compute; 0: not here.
        self._slot_due = np.full(64, _NEVER, np.int64)
        self._slot_tokens = np.zeros(64, np.int64)
        self._served: dict[str, float] = {}  # tokens, of every client known
        self._floor = 0.0
        self._free: list[int] = []
        # By place: what the client was served (infinity: nobody has the place), and when its first is due.
        self._lead = np.full(8, np.inf)
        self._due = np.full(8, _NEVER, np.int64)
        self._by_place: list[_Client | None] = []
        self._first: Sequence | None = None
        self._is_stale = False
        self.top_priority = 0
        """No sequence here has a higher one. Found anew when the queue was empty."""

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.order in self._members

    @property
    def num_clients(self) -> int:
        """Clients of which something waits."""
        return len(self._clients)

    def push(self, sequence: Sequence) -> None:
        """Add; a sequence that is in the queue already stays once."""
        if sequence.order in self._members:
            return
        client = self._clients.get(sequence.share)
        if client is None:
            client = self._enter(sequence.share)
        priority = sequence.request.priority
        self.top_priority = max(self.top_priority, priority) if self._members else priority
        self._members[sequence.order] = client.members[sequence.order] = sequence
        heapq.heappush(client.heap, (sequence.due_ns, -priority, sequence.order))
        if sequence.due_ns:
            self._note(sequence)
        self._refresh(client)

    def peek(self) -> Sequence | None:
        """The first, which stays."""
        if self._is_stale:
            self._first, self._is_stale = self._find_first(), False
        return self._first

    def remove(self, sequence: Sequence) -> bool:
        """Take out; whether it was there."""
        if self._members.pop(sequence.order, None) is None:
            return False
        name = sequence.share
        client = self._clients[name]
        del client.members[sequence.order]
        if sequence.due_ns:
            self._slot_due[sequence.slot] = _NEVER
        if not client.members:
            self._leave(name, client)
            return True
        # A sequence that is pushed again while its stale entry is still buried would be listed twice, which does no
        # harm: both entries lead to the same member. What must not happen is a heap that only grows.
        if len(client.heap) > 64 and len(client.heap) > 4 * len(client.members):
            client.heap = [(s.due_ns, -s.request.priority, s.order) for s in client.members.values()]
            heapq.heapify(client.heap)
        self._refresh(client)
        return True

    def postpone(self, sequence: Sequence, due_ns: int) -> None:
        """It cannot be in time any more: let those go first who still can."""
        assert due_ns >= sequence.due_ns
        sequence.due_ns = due_ns
        if sequence.order in self._members:
            client = self._clients[sequence.share]
            heapq.heappush(client.heap, (due_ns, -sequence.request.priority, sequence.order))
            self._note(sequence)
            self._refresh(client)

    def ahead_of(self, due_ns: int) -> tuple[int, int]:
        """How many wait that are due no later, and the tokens that they have to compute."""
        before = self._slot_due <= due_ns
        return int(np.count_nonzero(before)), int(np.add.reduce(self._slot_tokens[before]))

    def charge(self, name: str, tokens: int) -> None:
        """A client was served. It gets ahead only of others that wait: what nobody else wanted is free."""
        waiting = self._clients.get(name)
        served = max(self._served.get(name, 0.0), self._floor) + tokens
        if len(self._clients) == (waiting is not None):
            self._floor = served
        if waiting is not None:
            self._served[name] = waiting.served = self._lead[waiting.place] = served
            self._is_stale = True
        elif served > self._floor:
            self._served[name] = served
            if len(self._served) > _MAX_IDLE + len(self._clients):
                self._forget_idle()
        else:
            self._served.pop(name, None)

    def sequences(self) -> list[Sequence]:
        """All of them, in no particular order."""
        return list(self._members.values())

    def _note(self, sequence: Sequence) -> None:
        slot = sequence.slot
        while slot >= self._slot_due.size:
            self._slot_due = np.concatenate((self._slot_due, np.full(self._slot_due.size, _NEVER, np.int64)))
            self._slot_tokens = np.concatenate((self._slot_tokens, np.zeros_like(self._slot_tokens)))
        self._slot_due[slot] = sequence.due_ns
        self._slot_tokens[slot] = sequence.num_uncached

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _enter(self, name: str) -> _Client:
        """Nothing of the client waited. It is owed nothing for the time when it asked for nothing."""
        place = self._free.pop() if self._free else len(self._by_place)
        if place == len(self._by_place):
            self._by_place.append(None)
            if place == self._lead.size:
                self._lead = np.concatenate((self._lead, np.full(place, np.inf)))
                self._due = np.concatenate((self._due, np.full(place, _NEVER, np.int64)))
        served = max(self._served.pop(name, 0.0), self._floor)
        client = self._clients[name] = self._by_place[place] = _Client(place, served)
        self._served[name] = served
        self._lead[place] = served
        return client

    def _leave(self, name: str, client: _Client) -> None:
        del self._clients[name]
        self._by_place[client.place] = None
        self._lead[client.place] = np.inf
        self._due[client.place] = _NEVER
        self._free.append(client.place)
        if self._served.get(name, 0.0) <= self._floor:  # as one never seen
            self._served.pop(name, None)
        self._is_stale = True

    def _refresh(self, client: _Client) -> None:
        first = client.first()
        assert first is not None
        client.due = self._due[client.place] = first.due_ns
        self._is_stale = True

    def _find_first(self) -> Sequence | None:
        clients = self._clients
        if not clients:
            return None
        if len(clients) == 1:  # it is ahead of nobody: the floor stays
            return next(iter(clients.values())).first()
        if len(clients) > _FEW:
            return self._find_first_of_many()
        least = min([client.served for client in clients.values()])
        self._floor = max(self._floor, least)
        bound = least + SHARE_TOKENS
        best: _Client | None = None
        for client in clients.values():
            # Of equal ones the lowest place, as below. `min` with a key takes three times as long.
            if client.served <= bound and (
                best is None or client.due < best.due or (client.due == best.due and client.place < best.place)
            ):
                best = client
        assert best is not None
        return best.first()

    def _find_first_of_many(self) -> Sequence | None:
        n = len(self._by_place)
        lead = self._lead[:n]
        least = float(lead.min())
        self._floor = max(self._floor, least)
        due = np.where(lead <= least + SHARE_TOKENS, self._due[:n], _NEVER)
        client_at = self._by_place[int(due.argmin())]
        assert client_at is not None
        return client_at.first()

    def _forget_idle(self) -> None:
        for name in self._served:
            if name not in self._clients:
                del self._served[name]
                return

    def check_invariants(self) -> None:
        """Raise AssertionError where clients, members and arrays disagree."""
        assert sum(len(client.members) for client in self._clients.values()) == len(self._members)
        for name, client in self._clients.items():
            assert client.members, name
            assert self._by_place[client.place] is client
            first = client.first()
            assert first is not None
            assert first.due_ns == self._due[client.place] == min(s.due_ns for s in client.members.values())
            assert client.due == first.due_ns
            assert client.served == self._lead[client.place] == self._served[name]
        assert all(s.request.priority <= self.top_priority for s in self._members.values())
        promised = [s for s in self._members.values() if s.due_ns]
        assert np.count_nonzero(self._slot_due != _NEVER) == len(promised)
        assert all(self._slot_due[s.slot] == s.due_ns for s in promised)
        n = len(self._by_place)
        assert int((self._lead[:n] != np.inf).sum()) == len(self._clients)
        assert len(self._free) == n - len(self._clients)
