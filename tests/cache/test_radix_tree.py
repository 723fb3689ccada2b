"""The radix tree, case by case: exact hits, splits, duplicates, forks, order of eviction, namespaces."""

from __future__ import annotations

import numpy as np
import pytest

from pagewire.cache.block_pool import BlockPool
from pagewire.cache.eviction_order import EvictionOrder
from pagewire.cache.radix_node import RadixNode
from pagewire.cache.radix_tree import RadixTree
from pagewire.errors import InternalError
from pagewire.request.request import Namespace

BLOCK = 4
NS = Namespace()


class Cache:
    """A pool and a tree with the few steps that a scheduler would take."""

    def __init__(self, num_blocks=64, block_size=BLOCK):
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size)
        self.block_size = block_size

    def hits(self, tokens, max_blocks=None, namespace=NS):
        tokens = array(tokens)
        return self.tree.match(namespace, tokens, tokens.size if max_blocks is None else max_blocks).num_blocks

    def start(self, tokens, max_blocks=None, namespace=NS):
        """Acquire what is cached, take the rest: (lease, blocks)."""
        tokens = array(tokens)
        wanted = (tokens.size - 1) // self.block_size if max_blocks is None else max_blocks
        lease, blocks = self.tree.acquire(self.tree.match(namespace, tokens, wanted))
        need = -(-tokens.size // self.block_size) - blocks.size
        return lease, np.concatenate([blocks, self.pool.take(need)])

    def run(self, tokens, namespace=NS, max_blocks=None):
        """A whole sequence, published at its end; its blocks."""
        lease, blocks = self.start(tokens, max_blocks, namespace)
        self.tree.publish_and_release(lease, array(tokens), blocks)
        self.check()
        return blocks

    def check(self):
        self.pool.check_invariants()
        self.tree.check_invariants()

    def counts(self):
        self.check()
        return self.pool.num_free, self.pool.num_owned, self.pool.num_cached


@pytest.fixture
def cache():
    return Cache()


def array(tokens):
    return np.asarray(tokens, np.int32)


def tokens_of(*runs):
    """Tokens of blocks: a letter is a block whose tokens are unlike every other letter's."""
    return array([ord(letter) * 1000 + i for run in runs for letter in run for i in range(BLOCK)])


# ---- exact hits ----------------------------------------------------------------------------------------------------------


def test_what_was_published_is_found_with_the_same_blocks(cache):
    tokens = tokens_of("abc")
    blocks = cache.run(tokens)
    match = cache.tree.match(NS, tokens, 3)
    assert match.num_blocks == 3
    lease, found = cache.tree.acquire(match)
    assert found.tolist() == blocks.tolist()
    assert found.dtype == np.int32
    cache.tree.release(lease, found)
    assert cache.counts() == (60, 0, 3)


@pytest.mark.parametrize("at", range(8 * BLOCK))
def test_one_token_that_differs_at_any_offset_ends_the_hit_before_its_block(cache, at):
    """F28: tokens are compared, all of them."""
    tokens = np.arange(8 * BLOCK, dtype=np.int32)
    cache.run(tokens)
    other = tokens.copy()
    other[at] += 1
    assert cache.hits(other) == at // BLOCK
    assert cache.hits(tokens) == 8


@pytest.mark.parametrize("delta", [1 << bit for bit in range(31)] + [-(1 << 31)])
def test_every_bit_of_a_token_counts(cache, delta):
    """F28: neither truncation of ids nor equal low bits make a hit."""
    tokens = np.full(2 * BLOCK, 5, np.int32)
    cache.run(tokens)
    for at in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1):
        other = tokens.copy()
        other[at] ^= np.int32(delta)
        assert cache.hits(other) == at // BLOCK


def test_the_same_tokens_at_another_place_are_no_hit(cache):
    cache.run(tokens_of("abc"))
    assert cache.hits(tokens_of("bc")) == 0
    assert cache.hits(tokens_of("acb")) == 1
    assert cache.hits(array(tokens_of("abc")[1:])) == 0


def test_only_full_blocks_are_found(cache):
    tokens = tokens_of("abc")
    cache.run(tokens[:-1])
    assert cache.hits(tokens) == 2
    assert cache.hits(tokens[: BLOCK - 1]) == 0
    assert cache.hits(tokens[: 2 * BLOCK - 1]) == 1
    assert cache.hits([]) == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_prompt_cached_to_its_last_token_still_has_one_to_compute(cache, num_blocks):
    """F31: the caller's cap of (T − 1) // block_size is kept, and what is recomputed stays the caller's."""
    tokens = tokens_of("abcde"[:num_blocks])
    cache.run(tokens)
    lease, blocks = cache.start(tokens)
    assert lease.num_blocks == num_blocks - 1
    cache.tree.publish(lease, tokens, blocks)
    cache.check()
    cache.tree.publish_and_release(lease, tokens, blocks)
    assert cache.counts() == (63 - num_blocks, 0, num_blocks)


def test_a_negative_or_zero_cap_finds_nothing(cache):
    tokens = tokens_of("ab")
    cache.run(tokens)
    assert cache.hits(tokens, max_blocks=0) == 0
    assert cache.hits(tokens, max_blocks=-1) == 0


def test_matching_changes_nothing(cache):
    for text in ("abcd", "abxy", "q"):
        cache.run(tokens_of(text))
    before = [(n.blocks.tolist(), bytes(n.edge)) for n in cache.tree._order]
    version = cache.tree.version
    for text in ("abcd", "abc", "abz", "a", "zz", "abxyz"):
        cache.hits(tokens_of(text))
    cache.hits(tokens_of("ab"), namespace=Namespace(tenant="new"))
    assert [(n.blocks.tolist(), bytes(n.edge)) for n in cache.tree._order] == before
    assert cache.tree.version == version
    assert list(cache.tree._roots) == [NS]


def test_strided_and_wider_token_arrays_are_read_right(cache):
    tokens = tokens_of("ab")
    cache.run(tokens)
    assert cache.tree.match(NS, np.repeat(tokens, 2)[::2], 2).num_blocks == 2
    assert cache.tree.match(NS, tokens.astype(np.int64), 2).num_blocks == 2


# ---- holding -------------------------------------------------------------------------------------------------------------


def test_sharing_half_a_run_splits_it_and_both_halves_stay_right(cache):
    blocks = cache.run(tokens_of("abcdef"))
    lease, held = cache.start(tokens_of("abcxy"), max_blocks=5)
    assert held[:3].tolist() == blocks[:3].tolist()
    assert cache.counts() == (63 - 8, 5, 3)
    cache.tree.publish_and_release(lease, tokens_of("abcxy"), held)
    assert cache.counts() == (63 - 8, 0, 8)
    assert [cache.hits(tokens_of(text)) for text in ("abcdef", "abcxy", "abc", "abcz")] == [6, 5, 3, 3]


def test_a_lease_survives_splits_of_its_path_by_others(cache):
    tokens = tokens_of("abcdef")
    lease, blocks = cache.start(tokens)
    cache.tree.publish(lease, tokens, blocks)
    others = [cache.start(tokens_of(text)) for text in ("abcdx", "abx", "ax", "abcdefgh", "abcx")]
    cache.check()
    longer = tokens_of("abcdefXY")
    blocks = np.concatenate([blocks, cache.pool.take(2)])
    assert cache.tree.publish(lease, longer, blocks) == 2
    cache.check()
    assert cache.hits(longer) == 8
    cache.tree.release(lease, blocks)
    cache.check()
    for other, table in others:
        cache.tree.release(other, table)
        cache.check()
    assert cache.pool.num_owned == 0
    assert cache.pool.num_cached == 8


def test_a_match_from_before_a_change_is_refused(cache):
    cache.run(tokens_of("abcd"))
    stale = cache.tree.match(NS, tokens_of("abcd"), 4)
    cache.tree.evict(1)
    with pytest.raises(InternalError, match="changed"):
        cache.tree.acquire(stale)
    empty = cache.tree.match(Namespace("t"), tokens_of("ab"), 2)
    cache.run(tokens_of("ab"), Namespace("t"))
    with pytest.raises(InternalError, match="changed"):
        cache.tree.acquire(empty)


def test_one_match_may_be_acquired_twice_while_nothing_changes(cache):
    cache.run(tokens_of("ab"))
    match = cache.tree.match(NS, tokens_of("ab"), 2)
    first, blocks = cache.tree.acquire(match)
    second, again = cache.tree.acquire(match)
    assert blocks.tolist() == again.tolist()
    assert cache.pool.ref[blocks].tolist() == [2, 2]
    cache.tree.release(first, blocks)
    assert cache.counts() == (61, 2, 0)
    cache.tree.release(second, blocks)
    assert cache.counts() == (61, 0, 2)


def test_a_released_lease_is_refused_everywhere(cache):
    tokens = tokens_of("ab")
    lease, blocks = cache.start(tokens)
    cache.tree.release(lease, blocks)
    for use in (
        lambda: cache.tree.release(lease, blocks),
        lambda: cache.tree.publish(lease, tokens, blocks),
        lambda: cache.tree.publish_and_release(lease, tokens, blocks),
        lambda: cache.tree.fork(lease, blocks, 1),
    ):
        with pytest.raises(InternalError, match="after its release"):
            use()
    assert cache.counts() == (63, 0, 0)


def test_a_table_shorter_than_its_lease_is_refused(cache):
    tokens = tokens_of("abc")
    lease, blocks = cache.start(tokens)
    cache.tree.publish(lease, tokens, blocks)
    with pytest.raises(InternalError, match="does not hold"):
        cache.tree.release(lease, blocks[:2])


def test_sharing_a_published_block_behind_the_trees_back_is_found(cache):
    tokens = tokens_of("ab")
    lease, blocks = cache.start(tokens)
    cache.tree.publish(lease, tokens, blocks)
    cache.pool.share(blocks[1:])
    with pytest.raises(AssertionError, match="holders"):
        cache.tree.check_invariants()
    with pytest.raises(InternalError, match="other holders"):
        cache.tree.release(lease, blocks)


# ---- publishing ----------------------------------------------------------------------------------------------------------


def test_publishing_in_chunks_grows_one_run(cache):
    tokens = tokens_of("abcdef")
    lease, blocks = cache.start(tokens)
    new = [cache.tree.publish(lease, tokens[:n], blocks) for n in (3, 4, 9, 9, 16, 23, 24)]
    assert new == [0, 1, 1, 0, 2, 1, 1]
    assert lease.num_blocks == 6
    assert len(cache.tree._roots[NS].children) == 1
    assert lease.node.num_blocks == 6
    cache.tree.release(lease, blocks)
    assert cache.counts() == (57, 0, 6)
    assert cache.hits(tokens) == 6


def test_published_blocks_do_not_follow_the_callers_array(cache):
    tokens = tokens_of("abc")
    lease, blocks = cache.start(tokens)
    table = blocks.copy()
    cache.tree.publish(lease, tokens, table)
    table[:] = 0
    cache.check()
    other, found = cache.tree.acquire(cache.tree.match(NS, tokens, 3))
    assert found.tolist() == blocks.tolist()
    found[:] = 0
    cache.check()
    assert other.num_blocks == 3


def test_a_second_sequence_with_the_same_tokens_keeps_its_duplicates_to_itself(cache):
    tokens = tokens_of("abcd")
    first, mine = cache.start(tokens)
    second, theirs = cache.start(tokens)
    assert cache.tree.publish(first, tokens[: 2 * BLOCK], mine) == 2
    assert cache.tree.publish(second, tokens, theirs) == 0
    assert second.num_blocks == 0
    cache.check()
    cache.tree.publish_and_release(second, tokens, theirs)  # its c and d hang below the first one's b
    assert cache.counts() == (63 - 6, 4, 2)
    assert cache.hits(tokens) == 4
    cache.tree.publish_and_release(first, tokens, mine)
    assert cache.counts() == (63 - 4, 0, 4)


def test_duplicates_can_be_published_once_the_other_copy_is_gone(cache):
    tokens = tokens_of("abcd")
    lease, blocks = cache.start(tokens)
    cache.run(tokens[: 2 * BLOCK])
    assert cache.tree.publish(lease, tokens, blocks) == 0
    cache.tree.evict(2)
    assert cache.tree.publish(lease, tokens, blocks) == 4
    cache.check()


def test_nothing_of_a_failed_sequence_stays(cache):
    """F32: what is not published is free at once, and never found."""
    tokens = tokens_of("abcd")
    lease, blocks = cache.start(tokens)
    cache.tree.release(lease, blocks)
    assert cache.counts() == (63, 0, 0)
    assert cache.hits(tokens) == 0


def test_a_tail_that_somebody_copies_from_is_not_published(cache):
    tokens = tokens_of("abc")
    lease, blocks = cache.start(tokens)
    cache.pool.share(blocks[2:])
    cache.tree.publish_and_release(lease, tokens, blocks)
    assert cache.counts() == (60, 1, 2)
    assert cache.hits(tokens) == 2
    cache.pool.release(blocks[2:])
    assert cache.counts() == (61, 0, 2)


def test_grafting_below_the_middle_of_a_foreign_run_splits_it(cache):
    cache.run(tokens_of("abcdef"))
    lease, blocks = cache.start(tokens_of("abcxyz"), max_blocks=0)
    cache.tree.publish_and_release(lease, tokens_of("abcxyz"), blocks)
    assert cache.counts() == (63 - 9, 0, 9)
    assert cache.hits(tokens_of("abcxyz")) == 6
    assert cache.hits(tokens_of("abcdef")) == 6


def test_hits_and_misses_are_counted_when_acquired(cache):
    cache.run(tokens_of("abc"))
    assert (cache.tree.num_hit_blocks, cache.tree.num_missed_blocks) == (0, 2)
    cache.run(tokens_of("abcde"))
    assert (cache.tree.num_hit_blocks, cache.tree.num_missed_blocks) == (3, 3)
    cache.tree.evict(2)
    assert cache.tree.num_evicted_blocks == 2


# ---- forks ---------------------------------------------------------------------------------------------------------------


def test_forks_hold_what_their_leader_holds(cache):
    tokens = tokens_of("abcd")
    cache.run(tokens[: 2 * BLOCK])
    lease, blocks = cache.start(tokens)
    forks = cache.tree.fork(lease, blocks, 3)
    cache.check()
    assert cache.pool.ref[blocks].tolist() == [4, 4, 4, 4]
    for fork in forks:
        cache.tree.release(fork, blocks)
        cache.check()
    assert cache.pool.ref[blocks].tolist() == [1, 1, 1, 1]
    cache.tree.publish_and_release(lease, tokens, blocks)
    assert cache.counts() == (59, 0, 4)


def test_common_blocks_of_a_fork_are_published_for_all_and_own_ones_for_one(cache):
    tokens = tokens_of("abc")
    lease, blocks = cache.start(tokens)
    second, third = cache.tree.fork(lease, blocks, 2)
    tables = [np.concatenate([blocks, cache.pool.take(2)]) for _ in range(3)]
    assert cache.tree.publish(second, tokens_of("a"), tables[1]) == 1
    assert [x.num_blocks for x in (lease, second, third)] == [1, 1, 1]
    cache.check()
    cache.tree.release(third, tables[2])
    cache.check()
    assert cache.tree.publish(lease, tokens_of("abcPQ"), tables[0]) == 4
    assert [x.num_blocks for x in (lease, second)] == [5, 3]
    cache.check()
    cache.tree.publish_and_release(second, tokens_of("abcRS"), tables[1])
    cache.tree.publish_and_release(lease, tokens_of("abcPQ"), tables[0])
    assert cache.counts() == (63 - 7, 0, 7)
    assert cache.hits(tokens_of("abcPQ")) == cache.hits(tokens_of("abcRS")) == 5


def test_the_last_member_of_a_fork_publishes_own_blocks_in_one_go(cache):
    lease, blocks = cache.start(tokens_of("ab"))
    (other,) = cache.tree.fork(lease, blocks, 1)
    cache.tree.release(other, blocks)
    table = np.concatenate([blocks, cache.pool.take(2)])
    assert cache.tree.publish(lease, tokens_of("abcd"), table) == 4
    cache.check()


def test_a_fork_whose_common_blocks_are_duplicates_ends_well(cache):
    tokens = tokens_of("abcd")
    lease, blocks = cache.start(tokens)
    (fork,) = cache.tree.fork(lease, blocks, 1)
    cache.run(tokens[: 2 * BLOCK], max_blocks=0)
    cache.tree.publish_and_release(lease, tokens, blocks)  # c and d have two holders: not its to give
    assert cache.counts() == (63 - 6, 4, 2)
    cache.tree.publish_and_release(fork, tokens, blocks)
    assert cache.counts() == (63 - 4, 0, 4)
    assert cache.hits(tokens) == 4


def test_a_tail_shared_for_a_copy_is_not_taken_for_a_common_block(cache):
    tokens = tokens_of("abc")
    lease, blocks = cache.start(tokens)
    (fork,) = cache.tree.fork(lease, blocks[:2], 1)
    cache.pool.share(blocks[2:])  # two holders, as the common blocks have
    assert cache.tree.publish(lease, tokens, blocks) == 2
    assert fork.num_blocks == 2
    cache.check()


def test_forking_again_needs_the_first_forks_blocks_published(cache):
    tokens = tokens_of("abc")
    lease, blocks = cache.start(tokens)
    cache.tree.fork(lease, blocks, 1)
    with pytest.raises(InternalError, match="forked again"):
        cache.tree.fork(lease, blocks, 1)
    cache.tree.publish(lease, tokens, blocks)
    cache.tree.fork(lease, blocks, 1)
    cache.check()
    assert cache.pool.ref[blocks].tolist() == [3, 3, 3]


# ---- eviction ------------------------------------------------------------------------------------------------------------


def test_evicted_blocks_are_never_found_again(cache):
    """F29: not before the block is reused, nor after."""
    tokens = tokens_of("abcdef")
    blocks = cache.run(tokens)
    for left in range(5, -1, -1):
        assert cache.tree.evict(1) == 1
        assert cache.hits(tokens) == left
        cache.check()
    assert cache.counts() == (63, 0, 0)
    reused = cache.run(tokens_of("uvwxyz"))
    assert set(reused.tolist()) == set(blocks.tolist())
    assert cache.hits(tokens) == 0


def test_a_long_leaf_is_trimmed_from_its_tail(cache):
    blocks = cache.run(tokens_of("abcdefgh"))
    assert cache.tree.evict(3) == 3
    assert cache.hits(tokens_of("abcdefgh")) == 5
    assert set(cache.pool.take(3).tolist()) == set(blocks[5:].tolist())


def test_least_recently_used_leaves_go_first(cache):
    for text in ("abA", "abB", "abC"):
        cache.run(tokens_of(text))
    cache.run(tokens_of("abA", "x")[: 3 * BLOCK + 1])  # touches A by using it
    gone = []
    while cache.pool.num_cached:
        before = {text for text in ("abA", "abB", "abC", "ab", "a") if cache.hits(tokens_of(text)) == len(text)}
        cache.tree.evict(1)
        cache.check()
        gone += sorted(t for t in before if cache.hits(tokens_of(t)) < len(t))
    assert gone == ["abB", "abC", "abA", "ab", "a"]


def test_what_was_found_again_is_kept_longer(cache):
    cache.run(tokens_of("ab"))
    cache.run(tokens_of("ab", "x")[: 2 * BLOCK + 1])  # finds it
    cache.run(tokens_of("q"))
    cache.run(tokens_of("r"))
    gone = []
    for _ in range(4):
        before = {text for text in ("ab", "a", "q", "r") if cache.hits(tokens_of(text)) == len(text)}
        cache.tree.evict(1)
        cache.check()
        gone += sorted(text for text in before if cache.hits(tokens_of(text)) < len(text))
    assert gone == ["q", "r", "ab", "a"]


@pytest.mark.parametrize(("num_blocks", "first"), [(16, "once"), (17, "found")])
def test_but_only_by_a_quarter_of_the_pool(num_blocks, first):
    order = EvictionOrder(64)
    nodes = {name: RadixNode(None, bytearray(), np.arange(1), 0) for name in ("found", "once")}
    nodes["found"].is_found = True
    order.append(nodes["found"])
    order.pass_blocks(num_blocks)
    order.append(nodes["once"])
    assert order.oldest is nodes[first]
    assert next(iter(order)) is nodes[first]
    order.remove(nodes[first])
    (left,) = order
    order.remove(left)
    assert order.oldest is None


def test_a_fork_has_found_nothing(cache):
    lease, blocks = cache.start(tokens_of("ab"))
    cache.tree.publish(lease, tokens_of("ab"), blocks)
    (other,) = cache.tree.fork(lease, blocks, 1)
    assert not lease.node.is_found
    for one in (lease, other):
        cache.tree.release(one, blocks)
    cache.run(tokens_of("abc"))
    assert lease.node.is_found


def test_the_unused_rest_of_a_split_run_stays_as_cold_as_it_was(cache):
    cache.run(tokens_of("abcd"))
    cache.run(tokens_of("q"))
    cache.run(tokens_of("abXY"))  # once by acquiring ab …
    cache.run(tokens_of("abXZ"), max_blocks=0)  # … and once by grafting below X
    cache.tree.evict(2)
    assert cache.hits(tokens_of("abcd")) == 2
    cache.tree.evict(1)
    assert cache.hits(tokens_of("q")) == 0
    cache.tree.evict(1)
    assert cache.hits(tokens_of("abXY")) == 3
    assert cache.hits(tokens_of("abXZ")) == 4


def test_what_is_held_is_never_evicted_nor_are_its_ancestors(cache):
    cache.run(tokens_of("abcX"))
    cache.run(tokens_of("abY"))
    lease, blocks = cache.start(tokens_of("abc", "z")[: 3 * BLOCK + 1])
    assert cache.tree.evict(100) == 2
    assert cache.hits(tokens_of("abc")) == 3
    cache.tree.release(lease, blocks)
    assert cache.tree.evict(100) == 3
    assert cache.tree.evict(1) == 0
    assert cache.counts() == (63, 0, 0)


def test_a_graft_counts_as_a_use_of_the_path_to_it(cache):
    cache.run(tokens_of("ab"))
    cache.run(tokens_of("q"))
    cache.run(tokens_of("abcd"), max_blocks=0)
    cache.tree.evict(1)
    assert cache.hits(tokens_of("q")) == 0
    assert cache.hits(tokens_of("abcd")) == 4


def test_as_many_blocks_as_are_cached_can_be_had(cache):
    rng = np.random.default_rng(3)
    for _ in range(40):
        text = rng.integers(0, 2, rng.integers(1, 6))
        tokens = np.repeat(text, BLOCK)
        if cache.pool.num_free < 6:
            wanted = min(6, cache.pool.num_cached)
            assert cache.tree.evict(wanted) == wanted
        cache.run(tokens)
    assert cache.tree.evict(1000) == 63 - cache.pool.num_free or cache.pool.num_free == 63
    assert cache.counts() == (63, 0, 0)


# ---- namespaces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["tenant", "adapter", "model", "kv_format"])
def test_no_hit_crosses_a_namespace(cache, field):
    """F33: each field keeps apart."""
    tokens = tokens_of("abc")
    other = Namespace(**{field: "x"})
    cache.run(tokens)
    assert cache.hits(tokens, namespace=other) == 0
    cache.run(tokens, other)
    assert cache.counts() == (57, 0, 6)
    assert cache.hits(tokens, namespace=other) == cache.hits(tokens) == 3


def test_a_dropped_namespace_is_forgotten_though_in_use(cache):
    tenant = Namespace(tenant="t")
    tokens = tokens_of("abcd")
    cache.run(tokens, tenant)
    cache.run(tokens)
    lease, blocks = cache.start(tokens_of("abxy"), namespace=tenant)
    cache.tree.publish(lease, tokens_of("abx"), blocks)
    assert cache.tree.drop_namespace(tenant) == 2
    assert cache.tree.drop_namespace(tenant) == 0
    assert cache.hits(tokens, namespace=tenant) == 0
    assert cache.counts() == (63 - 8, 4, 4)
    assert cache.tree.publish(lease, tokens_of("abxy"), blocks) == 0
    cache.run(tokens, tenant)  # the new namespace of that name and the old lease do not meet
    cache.tree.publish_and_release(lease, tokens_of("abxy"), blocks)
    assert cache.counts() == (63 - 8, 0, 8)
    assert cache.hits(tokens_of("abxy"), namespace=tenant) == 2
    assert cache.hits(tokens) == 4


def test_a_lease_on_nothing_does_not_publish_into_a_namespace_dropped_since(cache):
    tokens = tokens_of("ab")
    lease, blocks = cache.start(tokens)
    cache.tree.drop_namespace(NS)
    cache.tree.publish_and_release(lease, tokens, blocks)
    assert cache.hits(tokens) == 0
    assert cache.counts() == (63, 0, 0)


def test_forks_in_a_dropped_namespace_give_everything_back(cache):
    tokens = tokens_of("abc")
    lease, blocks = cache.start(tokens)
    cache.tree.publish(lease, tokens_of("ab"), blocks)
    forks = cache.tree.fork(lease, blocks, 2)
    cache.tree.clear()
    for each in (*forks, lease):
        cache.tree.release(each, blocks)
        cache.pool.check_invariants()
    assert cache.counts() == (63, 0, 0)


def test_namespaces_leave_no_residue(cache):
    """F17: a thousand tenants come and go."""
    for i in range(1000):
        cache.run(tokens_of("ab"), Namespace(tenant=str(i)))
        cache.tree.evict(2)
    lease, blocks = cache.tree.acquire(cache.tree.match(Namespace("x"), tokens_of("a"), 1))
    cache.tree.release(lease, blocks)
    assert not cache.tree._roots


def test_clear_forgets_everything(cache):
    for i in range(3):
        cache.run(tokens_of("abc"), Namespace(tenant=str(i)))
    assert cache.tree.clear() == 9
    assert cache.counts() == (63, 0, 0)


# ---- the checks themselves -----------------------------------------------------------------------------------------------


def damage_edge(tree, node):
    node.edge[0] ^= 1


def damage_blocks(tree, node):
    node.blocks = node.blocks[:-1]


def damage_users(tree, node):
    node.num_users += 1


def damage_order(tree, node):
    tree._order.remove(node)


def damage_order_of_leaves(tree, node):
    node.is_found = node.parent.is_found
    tree._order.touch(node)


def damage_state(tree, node):
    tree.pool.release(tree.pool.take(1))
    tree.pool._free[0] = node.blocks[0]


@pytest.mark.parametrize(
    "damage", [damage_edge, damage_blocks, damage_users, damage_order, damage_order_of_leaves, damage_state]
)
def test_the_check_finds_each_kind_of_damage(cache, damage):
    cache.run(tokens_of("abc"))
    cache.run(tokens_of("abd"))
    leaf = cache.tree._order.oldest
    assert leaf is not None
    damage(cache.tree, leaf)
    with pytest.raises((AssertionError, KeyError)):
        cache.tree.check_invariants()
