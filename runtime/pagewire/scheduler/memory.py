"""KV blocks as the scheduler needs them: pool and radix tree behind one face, eviction included."""

from __future__ import annotations

from pagewire.cache.block_pool import BlockPool
from pagewire.cache.lease import Lease, Match
from pagewire.cache.radix_tree import RadixTree
from pagewire.request.request import Namespace, TokenArray
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
        blocks = self.pool.try_take(n)
        if blocks is not None or n > self.num_available:
            return blocks
        self.tree.evict(n - self.pool.num_free)
        return self.pool.take(n)

    def match(self, sequence: Sequence, token_ids: TokenArray) -> Match:
        """The longest cached prefix. At least the last token is always left to compute (F31)."""
        usable = (token_ids.size - 1) // self.block_size if self.prefix_cache else 0
        return self.tree.match(sequence.request.namespace, token_ids, usable)

    def num_cached(self, namespace: Namespace, token_ids: TokenArray) -> int:
        """How many leading tokens a sequence that comes now would not have to compute."""
        usable = (token_ids.size - 1) // self.block_size if self.prefix_cache else 0
        return self.tree.match(namespace, token_ids, usable).num_blocks * self.block_size

    def share(self, blocks: Int32Array) -> None:
        """One more reference to each."""
        self.pool.share(blocks)

    def acquire(self, sequence: Sequence, match: Match) -> Int32Array:
        """Hold a match for `sequence`, which from now on has a lease; the blocks."""
        sequence.lease, blocks = self.tree.acquire(match)
        return blocks

    def publish(self, sequence: Sequence, valid_ids: TokenArray, blocks: Int32Array) -> None:
        """Make the full blocks of a running sequence findable, where prefixes are cached."""
        if self.prefix_cache:
            self.tree.publish(_open(sequence), valid_ids, blocks)

    def fork(self, leader: Sequence, full_blocks: Int32Array, followers: list[Sequence]) -> None:
        """`followers` hold all `full_blocks` of `leader` too."""
        for follower, lease in zip(followers, self.tree.fork(_open(leader), full_blocks, len(followers)), strict=True):
            follower.lease = lease

    def release(self, sequence: Sequence, valid_ids: TokenArray, blocks: Int32Array) -> None:
        """End the lease of `sequence` and give back all its blocks; those of `valid_ids` stay findable."""
        lease, sequence.lease = _open(sequence), None
        if self.prefix_cache and valid_ids.size:
            self.tree.publish_and_release(lease, valid_ids, blocks)
        else:
            self.tree.release(lease, blocks)

    def release_plain(self, blocks: Int32Array) -> None:
        """Give back one reference each to blocks outside of any lease."""
        self.pool.release(blocks)


def _open(sequence: Sequence) -> Lease:
    assert sequence.lease is not None, sequence.request.request_id
    return sequence.lease
