"""The order in which cached nodes leave."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagewire.cache.radix_node import RadixNode


class EvictionOrder:
    """Nodes without users from the least to the most recently used: an intrusive, doubly linked list.

    A heap of leaves by time would cost O(log n) a touch and need a clock, and a list of leaves alone would have to find a
    parent's place again when its last child leaves. Here all cached nodes are linked, and every node stands before its
    ancestors: a path is appended from its deepest node up, which keeps that true without any search. So the oldest
    node is always a leaf.

    Each operation is O(1).
    """

    def __init__(self) -> None:
        self._ring = RadixNode(None, bytearray(), np.empty(0, np.int32), 0)  # its `newer` is the oldest node
        self._ring.older = self._ring.newer = self._ring

    @property
    def oldest(self) -> RadixNode | None:
        """Who leaves next."""
        node = self._ring.newer
        return None if node is self._ring else node

    def append(self, node: RadixNode) -> None:
        """Link `node` as the most recently used."""
        ring, newest = self._ring, self._ring.older
        assert newest is not None
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
        """From the oldest; for checks."""
        node = self._ring.newer
        while node is not self._ring:
            assert node is not None
            yield node
            node = node.newer
