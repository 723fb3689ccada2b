"""The block pool: which KV blocks are free, and how many hold each of the others."""

from __future__ import annotations

import numpy as np

from pagewire.errors import InternalError
from pagewire.step.step import NULL_BLOCK, Int32Array


class BlockPool:
    """Blocks 1 … num_blocks − 1, each in exactly one state; block 0 is the null block and never leaves.

           take                    retire (radix tree)
    FREE ────────▶ OWNED (ref > 0) ────────────────────▶ CACHED (ref 0, held by the tree)
      ▲               │        ▲                            │   │
      │   release     │        └──────── revive ────────────┘   │
      ├───────────────┘                                         │
      └──────────────────────── reclaim ────────────────────────┘

    Free blocks are an array used as a stack: taken and returned by slices, most recently freed first. A linked list would
    serve as well for one block, but a step takes many at once, and only cached blocks ever leave from the middle of an
    order; that order is the tree's.

    Every operation costs a few numpy calls (about 1 µs each) plus O(1) a block, however large the pool; a single block
    takes a path of plain Python. Block ids are int32 [n] without order; ids may repeat in `share` and `release`.

    Attributes:
        ref: int32 [num_blocks], holders of each block.
        num_free, num_owned, num_cached: blocks in each state; they sum to num_blocks − 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InternalError(f"a pool needs its null block, has {num_blocks}")
        self.num_blocks = num_blocks
        self.ref: Int32Array = np.zeros(num_blocks, np.int32)
        self.num_free = num_blocks - 1
        self.num_owned = 0
        self.num_cached = 0
        # The top is the end; ids descend, so that a fresh pool gives 1, 2, 3, …
        self._free: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._mark: Int32Array = np.zeros(num_blocks, np.int32)  # scratch of `_distinct`

    # ---- free ⇄ owned ------------------------------------------------------------------------------------------------

    def try_take(self, n: int) -> Int32Array | None:
        """`n` free blocks, now with one holder each; None, and nothing taken, where there are not so many."""
        left = self.num_free - n
        if left < 0:
            return None
        blocks = self._free[left : self.num_free][::-1].copy()
        self.ref[blocks] = 1
        self.num_free = left
        self.num_owned += n
        return blocks

    def take(self, n: int) -> Int32Array:
        """`n` free blocks, now with one holder each.

        Raises:
            InternalError: there are not so many; whoever calls this has counted.
        """
        blocks = self.try_take(n)
        if blocks is None:
            raise InternalError(f"{n} blocks were taken of {self.num_free} free ones")
        return blocks

    def share(self, blocks: Int32Array) -> None:
        """One more holder for each, which must be owned.

        Never for blocks in a radix tree, whose holders the tree counts (`RadixTree.acquire`, `RadixTree.fork`).

        Raises:
            InternalError: some block is free or cached; nothing changed.
        """
        if not self.ref[blocks].all():
            raise InternalError(f"blocks that nobody owns were shared: {self._ids(blocks, self.ref[blocks] == 0)}")
        np.add.at(self.ref, blocks, 1)

    def release(self, blocks: Int32Array) -> Int32Array:
        """One holder less for each; those without any left become free. Returns these.

        Raises:
            InternalError: a block had fewer holders than that. The counts are wrong from then on.
        """
        ref = self.ref
        if blocks.size == 0:
            return blocks
        if blocks.size == 1:
            block = blocks[0]
            left = ref[block] - 1
            if left > 0:
                ref[block] = left
                return blocks[:0]
            freed = blocks
            released_twice = left < 0
        else:
            np.subtract.at(ref, blocks, 1)
            left = ref[blocks]
            freed = blocks[left <= 0]
            released_twice = np.count_nonzero(ref[freed]) > 0
            if freed.size > 1:
                freed = self._distinct(freed)
        if released_twice:
            raise InternalError(f"blocks were released more often than taken: {self._ids(freed, ref[freed] <= 0)}")
        ref[freed] = 0
        self.num_owned -= freed.size
        self._push(freed)
        return freed

    # ---- owned ⇄ cached → free, for the radix tree -------------------------------------------------------------------

    def retire(self, blocks: Int32Array) -> None:
        """The last holder of each (distinct) block let go, and the tree keeps it.

        Raises:
            InternalError: somebody shared a block behind the tree's back. The counts are wrong from then on.
        """
        ref = self.ref
        left = ref.take(blocks)
        left -= 1
        ref[blocks] = left
        if np.count_nonzero(left):
            raise InternalError(f"cached blocks have other holders: {self._ids(blocks, left != 0)}")
        self.num_owned -= blocks.size
        self.num_cached += blocks.size

    def revive(self, blocks: Int32Array) -> None:
        """Cached (distinct) blocks get a holder."""
        self.ref[blocks] = 1
        self.num_cached -= blocks.size
        self.num_owned += blocks.size

    def reclaim(self, blocks: Int32Array) -> None:
        """Cached (distinct) blocks, evicted from the tree, become free."""
        self.num_cached -= blocks.size
        self._push(blocks)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Each block is in one state and the counts say so. O(num_blocks).

        Which blocks are cached is known to the tree alone: its own check compares.
        """
        free, ref = self._free[: self.num_free], self.ref
        assert NULL_BLOCK not in free, "the null block is free"
        assert ref[NULL_BLOCK] == 0, "the null block is owned"
        assert ref.min() >= 0, np.flatnonzero(ref < 0)
        assert np.unique(free).size == free.size, "a block is free twice"
        assert not ref[free].any(), f"free blocks have holders: {self._ids(free, ref[free] != 0)}"
        assert self.num_owned == np.count_nonzero(ref), (self.num_owned, np.count_nonzero(ref))
        assert self.num_cached >= 0, self.num_cached
        assert self.num_free + self.num_owned + self.num_cached == self.num_blocks - 1

    def free_blocks(self) -> Int32Array:
        """The ids of all free blocks, a copy; for checks."""
        return self._free[: self.num_free].copy()

    def _push(self, blocks: Int32Array) -> None:
        end = self.num_free + blocks.size
        if end >= self.num_blocks:
            raise InternalError("more blocks were returned than there are")
        self._free[self.num_free : end] = blocks[::-1]
        self.num_free = end

    def _distinct(self, blocks: Int32Array) -> Int32Array:
        """Each id once, in O(1) an id: of equal ids the last to leave its mark stays. Sorting would cost ten times that."""
        order = np.arange(blocks.size, dtype=np.int32)
        self._mark[blocks] = order
        keep = self._mark[blocks] == order
        return blocks if keep.all() else blocks[keep]

    @staticmethod
    def _ids(blocks: Int32Array, where: np.ndarray) -> list[int]:
        return [int(block) for block in blocks[where][:8]]
