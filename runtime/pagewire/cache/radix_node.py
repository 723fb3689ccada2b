"""A node of the radix tree: a run of blocks under one edge of tokens."""

from __future__ import annotations

import numpy as np

from pagewire.request.request import Namespace
from pagewire.step.step import Int32Array

_NO_BLOCKS: Int32Array = np.empty(0, np.int32)


class RadixNode:
    """A run of full blocks whose holders are the same, and the tokens that they are for.

    An edge is a bytearray of int32 tokens, since runs grow and shrink at their end: both are amortised O(1) a block, and
    comparing is a memcmp. Whoever holds a node holds all above it, so `num_users` never grows downwards.

    Attributes:
        parent: None for a root and for what was removed.
        edge: the tokens, little-endian int32, num_blocks × block_size × 4 bytes.
        blocks: int32 [num_blocks], never written to in place.
        children: by the bytes of their first block's tokens.
        num_users: leases that hold the run; equal to the pool's `ref` of each of its blocks.
        is_found: a prompt that came later had it; then so had all above it. Changed only while it is not linked.
        stamp: when it was linked, as the eviction order counts.
        older, newer: neighbours in the eviction order while `num_users` is 0, else None.
    """

    __slots__ = ("blocks", "children", "edge", "is_found", "newer", "num_users", "older", "parent", "stamp")

    def __init__(self, parent: RadixNode | None, edge: bytearray, blocks: Int32Array, num_users: int) -> None:
        self.parent = parent
        self.edge = edge
        self.blocks = blocks
        self.children: dict[bytes, RadixNode] = {}
        self.num_users = num_users
        self.is_found = False
        self.stamp = 0
        self.older: RadixNode | None = None
        self.newer: RadixNode | None = None

    @property
    def num_blocks(self) -> int:
        """Length of the run."""
        return self.blocks.size

    def num_common_blocks(self, key: bytes, at: int, block_bytes: int) -> int:
        """How many leading blocks of the edge equal `key` from byte `at` on. O(tokens), one memory comparison."""
        num_tokens = min(len(key) - at, len(self.edge)) >> 2
        differs = np.frombuffer(key, np.int32, num_tokens, at) != np.frombuffer(self.edge, np.int32, num_tokens)
        first = int(differs.argmax())
        common = first if differs[first] else num_tokens
        return common * 4 // block_bytes

    def extend(self, edge: bytes, blocks: Int32Array) -> None:
        """Append to the run."""
        self.edge += edge
        self.blocks = np.concatenate((self.blocks, blocks))

    def trim(self, n: int, block_bytes: int) -> Int32Array:
        """Cut off and return the last `n` < num_blocks blocks. O(1)."""
        keep = self.blocks.size - n
        cut, self.blocks = self.blocks[keep:], self.blocks[:keep]
        del self.edge[keep * block_bytes :]
        return cut

    def split(self, k: int, block_bytes: int) -> RadixNode:
        """Put the first `k` blocks into a new node between this one and its parent; returns it.

        This object keeps the lower part, so that whoever holds the whole run, and so points here, still does.
        """
        assert self.parent is not None
        upper = RadixNode(self.parent, self.edge[: k * block_bytes], self.blocks[:k], self.num_users)
        upper.is_found = self.is_found
        self.parent.children[bytes(self.edge[:block_bytes])] = upper
        del self.edge[: k * block_bytes]
        self.blocks = self.blocks[k:]
        self.parent = upper
        upper.children[bytes(self.edge[:block_bytes])] = self
        return upper

    def attach(self, edge: bytes, blocks: Int32Array, num_users: int, block_bytes: int) -> RadixNode:
        """A new child."""
        child = RadixNode(self, bytearray(edge), blocks, num_users)
        self.children[edge[:block_bytes]] = child
        return child

    def detach(self, block_bytes: int) -> RadixNode:
        """Remove this node from its parent; returns the parent."""
        parent = self.parent
        assert parent is not None
        del parent.children[bytes(self.edge[:block_bytes])]
        self.parent = None
        return parent


class RadixRoot(RadixNode):
    """The top of one namespace: an empty run, held by every lease of the namespace.

    Attributes:
        is_dropped: the namespace was dropped while leases were out: nothing here is found or kept any more.
    """

    __slots__ = ("is_dropped", "namespace")

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, bytearray(), _NO_BLOCKS, 0)
        self.namespace = namespace
        self.is_dropped = False
