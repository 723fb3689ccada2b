"""KV blocks as the scheduler needs them: pool and radix tree behind one face, eviction included."""

from __future__ import annotations

from pagewire.cache.block_pool import BlockPool
from pagewire.cache.radix_tree import Match, RadixTree
from pagewire.request.request import TokenArray
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import Int32Array


class KvMemory:
    """Takes, shares and releases blocks for sequences.

    What is available is what is free plus what is cached: cached blocks are evicted only when free ones run out.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        self.block_size = block_size
        self.num_usable = num_blocks - 1  # all but the null block
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size)
        self.prefix_cache = prefix_cache

    @property
    def num_available(self) -> int:
        """Blocks that `try_take` could give."""
        return self.pool.num_free + self.pool.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def try_take(self, n: int) -> Int32Array | None:
        """`n` blocks, each with one reference; None, and nothing taken, where there are not so many."""
        if n > self.num_available:
            return None
        if n > self.pool.num_free:
            self.tree.evict(n - self.pool.num_free)
        return self.pool.take(n)

    def match(self, sequence: Sequence, token_ids: TokenArray) -> Match:
        """The longest cached prefix. At least the last token is always left to compute (F31)."""
        usable = (token_ids.size - 1) // self.block_size if self.prefix_cache else 0
        return self.tree.match(sequence.request.namespace, token_ids, usable)

    def share(self, blocks: Int32Array) -> None:
        """One more reference to each."""
        self.pool.share(blocks)
