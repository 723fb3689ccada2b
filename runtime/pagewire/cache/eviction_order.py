"""The order in which cached nodes leave."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

import numpy as np

from pagewire.cache.radix_node import RadixNode

FOUND_IS_YOUNGER: Final = 0.25
"""What was found again counts as so much younger than it is: as a part of the pool, in blocks that came into the tree since."""


class EvictionOrder:
    """Nodes without users in the order in which they leave: the least recently used first, but what was found again later.

    Most prompts are never continued, and what was found once is found again more often than what never was. So there are
    two intrusive, doubly linked lists, of nodes that nobody found and of those that somebody did, each from the least to
    the most recently used; the older of the two heads leaves, where those found count as younger by a part of the pool.
    Age is counted in blocks that came into the tree, which needs no clock and is the pool's own measure: a block that is
    never used again is kept for about as many as the pool holds.

    A heap of leaves by time would cost O(log n) a touch, and a list of leaves alone would have to find a parent's place again
    when its last child leaves. Here all cached nodes are linked, and every node leaves before its ancestors: a path is
    appended from its deepest node up, and who finds a node has found all above it, which keeps that true without any
    search. So the oldest node is always a leaf.

    Rejected: a protected list of fixed size (segmented LRU), which kept dead conversations; counting how often a node was
    found: no better than whether.

    Each operation is O(1).

    Args:
        num_blocks: of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self.younger = int(num_blocks * FOUND_IS_YOUNGER)
        self._age = 0
        self._rings = _ring(), _ring()

    @property
    def oldest(self) -> RadixNode | None:
        """Who leaves next."""
        once, found = self._rings
        a, b = once.newer, found.newer
        assert a is not None
        assert b is not None
        if a is once:
            return None if b is found else b
        return a if b is found or a.stamp <= b.stamp + self.younger else b

    def pass_blocks(self, n: int) -> None:
        """`n` blocks came into the tree: all others are older by so many."""
        self._age += n

    def append(self, node: RadixNode) -> None:
        """Link `node` as the most recently used of its kind."""
        ring = self._rings[node.is_found]
        newest = ring.older
        assert newest is not None
        node.stamp = self._age
        node.older, node.newer = newest, ring
        newest.newer = ring.older = node

    def remove(self, node: RadixNode) -> None:
        """Unlink `node`."""
        older, newer = node.older, node.newer
        assert older is not None
        assert newer is not None
        older.newer, newer.older = newer, older
        node.older = node.newer = None

    def touch(self, node: RadixNode) -> None:
        """`node`, linked, becomes the most recently used."""
        self.remove(node)
        self.append(node)

    def __iter__(self) -> Iterator[RadixNode]:
        """In the order in which they leave; for checks."""
        once, found = (list(_linked(ring)) for ring in self._rings)
        return heapq.merge(once, found, key=lambda node: node.stamp + self.younger * node.is_found)


def _ring() -> RadixNode:
    """An empty list: its `newer` is the oldest node."""
    ring = RadixNode(None, bytearray(), np.empty(0, np.int32), 0)
    ring.older = ring.newer = ring
    return ring


def _linked(ring: RadixNode) -> Iterator[RadixNode]:
    node = ring.newer
    while node is not ring:
        assert node is not None
        yield node
        node = node.newer
