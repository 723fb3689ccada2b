"""The prefix cache: a compressed radix tree over blocks, keyed by the tokens themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagewire.cache.block_pool import BlockPool
from pagewire.cache.eviction_order import EvictionOrder
from pagewire.cache.lease import Family, Lease, Match
from pagewire.cache.radix_node import RadixNode, RadixRoot
from pagewire.errors import InternalError
from pagewire.request.request import Namespace, TokenArray
from pagewire.step.step import NULL_BLOCK, Int32Array

__all__ = ["Lease", "Match", "RadixTree"]

_NO_BLOCKS: Int32Array = np.empty(0, np.int32)
_TOKEN = np.dtype("<i4")


class RadixTree:
    """Finds, shares, keeps and evicts the KV blocks of token prefixes.

    Why: a prompt that starts like an earlier one need not be computed again. Only full blocks take part, and once
    published they are never written to.

    Exact: an edge is compared with the prompt token by token (F28); there is no hash to collide but the one of a dict,
    which compares too. One root a `Namespace` (F33). Blocks enter by `publish` and leave by `evict`, which takes them out
    of the tree before the pool may hand them on (F29).

    Who holds what: a lease holds a path from the root, so along a path the number of holders never grows. Blocks without
    any are cached; they leave from the least recently used end, the deepest first, a long leaf from its tail on; those that
    were found again are kept a little longer (see `EvictionOrder`). Hence
    every cached block can be evicted, and `pool.num_free + pool.num_cached` is what can be had.

    Cost, for p nodes on a path and b blocks: `match` O(p + b) by memory comparison, `acquire`, `release`, `publish`
    O(p + b) in a few numpy calls, `evict` O(1) a block. Nothing depends on the size of tree or pool.

    Args:
        pool: whose blocks these are. Holders of blocks in the tree are counted by the tree: never `share` or `release`
            those in the pool directly.
        block_size: tokens in a block.

    Attributes:
        version: changes whenever something becomes findable or stops being so.
        num_hit_blocks, num_missed_blocks: of the blocks looked for by acquired matches.
        num_evicted_blocks: by `evict`.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.version = 0
        self.num_hit_blocks = 0
        self.num_missed_blocks = 0
        self.num_evicted_blocks = 0
        self._block_bytes = block_size * _TOKEN.itemsize
        self._roots: dict[Namespace, RadixRoot] = {}
        self._order = EvictionOrder(pool.num_blocks)

    # ---- find and hold -----------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, token_ids: TokenArray, max_blocks: int) -> Match:
        """The longest cached prefix of `token_ids`, int32 [T], of at most `max_blocks` blocks. Changes nothing.

        A prompt must keep a token to compute, so the caller asks for (T − 1) // block_size blocks (F31).
        """
        max_blocks = max(0, min(max_blocks, token_ids.size // self.block_size))
        root = self._roots.get(namespace)
        if root is None or max_blocks == 0:
            return Match(namespace, 0, max_blocks, self.version, root, 0)
        node, within, matched = self._walk(root, self._key(token_ids, 0, max_blocks))
        return Match(namespace, matched, max_blocks, self.version, node, within)

    def acquire(self, match: Match) -> tuple[Lease, Int32Array]:
        """Hold what `match` found: a lease, and its blocks, int32 [match.num_blocks]. An empty match gives a lease too.

        Raises:
            InternalError: the tree changed since.
        """
        if match.version != self.version:
            raise InternalError("a prefix match was used after the tree had changed")
        root = self._roots.get(match.namespace)
        if root is None:
            root = self._roots[match.namespace] = RadixRoot(match.namespace)
        node = match.node or root
        if match.num_in_node < node.num_blocks:
            node = self._split(node, match.num_in_node)
        self.num_hit_blocks += match.num_blocks
        self.num_missed_blocks += match.num_wanted - match.num_blocks
        if node is root:
            root.num_users += 1
            return Lease(root, root, 0), _NO_BLOCKS
        return Lease(root, node, match.num_blocks), self._hold_path(node, is_found=True)

    def fork(self, lease: Lease, blocks: Int32Array, n: int) -> list[Lease]:
        """`n` more leases on all that `lease` holds, and `n` more holders of the rest of `blocks`, its full blocks.

        All then have these blocks in common: whoever publishes them, publishes for all.

        Raises:
            InternalError: the lease was released, or its last fork's blocks are not published yet.
        """
        self._check_open(lease, blocks)
        if lease.family is not None and lease.num_blocks < lease.family.num_blocks:
            raise InternalError("a sequence was forked again before its common blocks were published")
        if lease.family is not None:
            lease.family.members.remove(lease)
        lease.family = family = Family(int(blocks.size), [lease])
        own = blocks[lease.num_blocks :]
        for _ in range(n):
            self._hold_path(lease.node)
            self.pool.share(own)
            family.members.append(Lease(lease.root, lease.node, lease.num_blocks, family))
        return family.members[1:]

    # ---- publish and let go ------------------------------------------------------------------------------------------

    def publish(self, lease: Lease, token_ids: TokenArray, blocks: Int32Array) -> int:
        """Make the full blocks of a sequence that goes on findable; how many are new.

        `token_ids`, int32 [T], are those whose KV is written; `blocks` is the sequence's table. Only what lies behind
        `lease.num_blocks` is looked at: O(new blocks).

        Stops where the tree has the same tokens under another block: the sequence does not hold that block, and what
        hangs below a block without holders must have none either. It is tried again at the end, by
        `publish_and_release`. Also stops at a block that somebody outside of the tree holds too.
        """
        self._check_open(lease, blocks)
        start, full = lease.num_blocks, self._num_full(token_ids, blocks)
        if full <= start or lease.root.is_dropped:
            return 0
        members, stop = [lease], full
        if lease.family is not None and start < lease.family.num_blocks:
            members, stop = lease.family.members, min(full, lease.family.num_blocks)
        key = self._key(token_ids, start, stop)
        if key[: self._block_bytes] in lease.node.children:
            return 0
        new = self._append(members, key, blocks[start:stop])
        if lease.num_blocks == stop < full:  # the common blocks of a fork are done: on with its own
            new += self.publish(lease, token_ids, blocks)
        return new

    def release(self, lease: Lease, blocks: Int32Array) -> None:
        """End of a sequence whose KV is not to be kept, or is published already: all of `blocks`, its table.

        What it held of the tree becomes cached unless others hold it, the rest becomes free likewise.

        Raises:
            InternalError: the lease was released before.
        """
        self._check_open(lease, blocks)
        own = blocks[lease.num_blocks :]
        self._let_go(lease)
        self.pool.release(own)

    def publish_and_release(self, lease: Lease, token_ids: TokenArray, blocks: Int32Array) -> None:
        """End of a sequence: what it computed stays findable, the rest becomes free.

        `token_ids`, int32 [T], are those whose KV is written and good; `blocks` is the whole table. Where the tree has
        the same tokens under other blocks, the sequence's duplicates become free, and what it has beyond is hung below.

        Raises:
            InternalError: the lease was released before.
        """
        self.publish(lease, token_ids, blocks)
        start, stop = lease.num_blocks, self._num_full(token_ids, blocks)
        kept = slice(start, start)
        if stop > start and not lease.root.is_dropped:
            kept = self._graft(lease.node, self._key(token_ids, start, stop), blocks, start, stop)
        self._let_go(lease)
        if kept.start > start:
            self.pool.release(blocks[start : kept.start])
        if kept.stop < blocks.size:
            self.pool.release(blocks[kept.stop :])

    # ---- evict -------------------------------------------------------------------------------------------------------

    def evict(self, num_blocks: int) -> int:
        """Free `num_blocks` cached blocks, or all there are; how many. Least recently used first, leaves first. O(1) each."""
        freed: list[Int32Array] = []
        left = num_blocks
        while left > 0 and (node := self._order.oldest) is not None:
            assert not node.children, "a node older than its descendants"
            n = node.num_blocks
            if n > left:
                freed.append(node.trim(left, self._block_bytes))
                left = 0
            else:
                freed.append(node.blocks)
                left -= n
                self._order.remove(node)
                self._forget_if_empty(node.detach(self._block_bytes))
        if not freed:
            return 0
        blocks = np.concatenate(freed)
        self.pool.reclaim(blocks)
        self.num_evicted_blocks += blocks.size
        self.version += 1
        return int(blocks.size)

    def drop_namespace(self, namespace: Namespace) -> int:
        """Forget a namespace: its cached blocks become free at once (how many), those in use when they are released.

        For an adapter that was unloaded, a tenant that left. Leases that are out can publish nothing any more.
        """
        root = self._roots.pop(namespace, None)
        if root is None:
            return 0
        root.is_dropped = True
        cached = [node for node in _nodes(root) if node.num_users == 0]
        for node in cached:
            self._order.remove(node)
            node.detach(self._block_bytes)
        self.version += 1
        if not cached:
            return 0
        blocks = np.concatenate([node.blocks for node in cached])
        self.pool.reclaim(blocks)
        return int(blocks.size)

    def clear(self) -> int:
        """Forget all namespaces; how many blocks became free at once."""
        return sum(self.drop_namespace(namespace) for namespace in list(self._roots))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _key(self, token_ids: TokenArray, start: int, stop: int) -> bytes:
        """The tokens of blocks start … stop − 1."""
        return token_ids[start * self.block_size : stop * self.block_size].astype(_TOKEN, copy=False).tobytes()

    def _num_full(self, token_ids: TokenArray, blocks: Int32Array) -> int:
        return int(min(token_ids.size // self.block_size, blocks.size))

    def _walk(self, node: RadixNode, key: bytes) -> tuple[RadixNode, int, int]:
        """Follow `key` down from below `node`: the last node reached, matching blocks in it, matching blocks in all."""
        block_bytes = self._block_bytes
        within, at = node.num_blocks, 0
        while at < len(key):
            child = node.children.get(key[at : at + block_bytes])
            if child is None:
                break
            node = child
            if key.startswith(child.edge, at):
                within = child.num_blocks
                at += len(child.edge)
            else:
                within = child.num_common_blocks(key, at, block_bytes)
                at += within * block_bytes
                break
        return node, within, at // block_bytes

    def _hold_path(self, node: RadixNode, *, is_found: bool = False) -> Int32Array:
        """One more user for `node` and all above it, which a prompt found or a fork shares; their blocks in order."""
        shared: list[Int32Array] = []
        revived: list[Int32Array] = []
        above: RadixNode | None = node
        while above is not None:
            if above.num_users or above.parent is None:
                shared.append(above.blocks)
            else:
                self._order.remove(above)
                revived.append(above.blocks)
            above.is_found |= is_found
            above.num_users += 1
            above = above.parent
        blocks = np.concatenate((revived + shared)[::-1])
        num_shared = sum(run.size for run in shared)
        if num_shared:
            self.pool.share(blocks[:num_shared])
        if num_shared < blocks.size:
            self.pool.revive(blocks[num_shared:])
        return blocks

    def _let_go(self, lease: Lease) -> None:
        """One user less for the lease's path; what has none left is cached, the deepest as the first to leave."""
        shared: list[Int32Array] = []
        retired: list[Int32Array] = []
        node, root = lease.node, lease.root
        while (parent := node.parent) is not None:
            node.num_users -= 1
            if node.num_users or root.is_dropped:
                shared.append(node.blocks)
                if not node.num_users:
                    node.detach(self._block_bytes)
            else:
                retired.append(node.blocks)
                self._order.append(node)
            node = parent
        root.num_users -= 1
        if retired:
            self.pool.retire(_together(retired))
        if shared:
            self.pool.release(_together(shared))
        self._forget_if_empty(root)
        if lease.family is not None:
            lease.family.members.remove(lease)
        lease.is_open = False

    def _append(self, leases: list[Lease], key: bytes, blocks: Int32Array) -> int:
        """Put `blocks` below the node of `leases`, for all of them; how many, up to the first with other holders."""
        num_users, node = len(leases), leases[0].node
        n = self._num_held_by(blocks, num_users)
        if n == 0:
            return 0
        if n < blocks.size:
            key, blocks = key[: n * self._block_bytes], blocks[:n]
        blocks = blocks.copy()
        if node.num_users == num_users and not node.children and node.parent is not None:
            node.extend(key, blocks)
        else:
            node = node.attach(key, blocks, num_users, self._block_bytes)
        for lease in leases:
            lease.node = node
            lease.num_blocks += n
        self._order.pass_blocks(n)
        self.version += 1
        return n

    def _graft(self, top: RadixNode, key: bytes, blocks: Int32Array, start: int, stop: int) -> slice:
        """Hang blocks start … stop − 1 of a sequence that ends below what the tree has of the same tokens; which it took.

        They become cached at once, and the path to them, not held by the sequence, counts as used.
        """
        node, within, matched = self._walk(top, key)
        first = start + matched
        n = self._num_held_by(blocks[first:stop], 1)
        if n:
            if within < node.num_blocks:
                node = self._split(node, within)
            edge = key[matched * self._block_bytes : (matched + n) * self._block_bytes]
            leaf = node.attach(edge, blocks[first : first + n].copy(), 0, self._block_bytes)
            self.pool.retire(leaf.blocks)
            self._order.pass_blocks(n)
            self._order.append(leaf)
            self.version += 1
        while node is not top:
            if node.num_users == 0:
                self._order.touch(node)
            assert node.parent is not None
            node = node.parent
        return slice(first, first + n)

    def _num_held_by(self, blocks: Int32Array, num_holders: int) -> int:
        """How many leading blocks have exactly so many holders."""
        if blocks.size == 0:
            return 0
        other = (self.pool.ref.take(blocks) != num_holders).tobytes()
        first = other.find(1)
        return blocks.size if first < 0 else first

    def _split(self, node: RadixNode, k: int) -> RadixNode:
        """Cut `node` behind its first `k` blocks; the upper part, which is about to be used, so newest in the order."""
        upper = node.split(k, self._block_bytes)
        if node.num_users == 0:
            self._order.append(upper)
        self.version += 1
        return upper

    def _forget_if_empty(self, node: RadixNode) -> None:
        """Drop the root of a namespace that holds nothing, so that namespaces leave no residue (F17)."""
        if isinstance(node, RadixRoot) and not node.children and not node.num_users and not node.is_dropped:
            del self._roots[node.namespace]
            self.version += 1

    @staticmethod
    def _check_open(lease: Lease, blocks: Int32Array) -> None:
        if not lease.is_open:
            raise InternalError("a prefix lease was used after its release")
        if blocks.size < lease.num_blocks:
            raise InternalError(f"a table of {blocks.size} blocks does not hold the {lease.num_blocks} of its lease")

    def check_invariants(self) -> None:
        """Structure, holders, eviction order and the pool's view agree. O(tree).

        Trees of dropped namespaces are out of reach; the pool counts their blocks as owned.
        """
        seen: list[Int32Array] = [_NO_BLOCKS]
        place = {id(node): i for i, node in enumerate(self._order)}
        num_cached = num_linked = 0
        for namespace, root in self._roots.items():
            assert root.namespace == namespace
            assert not root.is_dropped
            assert root.children or root.num_users, f"{namespace} is empty"
            for node in _nodes(root):
                parent = node.parent
                assert parent is not None
                assert parent.children[bytes(node.edge[: self._block_bytes])] is node
                assert node.num_blocks > 0
                assert len(node.edge) == node.num_blocks * self._block_bytes
                assert node.num_users <= parent.num_users, "a path is held from the root"
                assert parent is root or parent.is_found or not node.is_found, "who finds a node has found all above it"
                refs = self.pool.ref[node.blocks]
                assert (refs == node.num_users).all(), f"{node.num_users} leases, holders {refs}"
                assert (node.num_users == 0) == (id(node) in place)
                if node.num_users == 0:
                    num_linked += 1
                    num_cached += node.num_blocks
                    assert parent is root or parent.num_users or place[id(node)] < place[id(parent)], "leaves go first"
                seen.append(node.blocks)
        blocks = np.concatenate(seen)
        assert num_linked == len(place), (num_linked, len(place))
        assert num_cached == self.pool.num_cached, (num_cached, self.pool.num_cached)
        assert np.unique(blocks).size == blocks.size, "a block is in the tree twice"
        assert NULL_BLOCK not in blocks
        assert not np.isin(blocks, self.pool.free_blocks()).any(), "a findable block is free"


def _together(runs: list[Int32Array]) -> Int32Array:
    return runs[0] if len(runs) == 1 else np.concatenate(runs)


def _nodes(root: RadixRoot) -> Iterator[RadixNode]:
    """All nodes below `root`, parents first."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
