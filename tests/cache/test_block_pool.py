"""The block pool: every block in one state, counts that add up, misuse that is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.cache.block_pool import BlockPool
from pagewire.errors import InternalError


def ids(*blocks):
    return np.array(blocks, np.int32)


def counts(pool):
    pool.check_invariants()
    return pool.num_free, pool.num_owned, pool.num_cached


def test_a_fresh_pool_gives_ascending_blocks_but_never_the_null_block():
    pool = BlockPool(6)
    assert counts(pool) == (5, 0, 0)
    assert pool.take(2).tolist() == [1, 2]
    assert pool.take(3).tolist() == [3, 4, 5]
    assert pool.try_take(1) is None
    assert counts(pool) == (0, 5, 0)


def test_taking_too_many_takes_nothing():
    pool = BlockPool(4)
    assert pool.try_take(4) is None
    with pytest.raises(InternalError, match="4 blocks"):
        pool.take(4)
    assert counts(pool) == (3, 0, 0)


def test_a_pool_of_the_null_block_alone_is_empty():
    pool = BlockPool(1)
    assert pool.try_take(1) is None
    assert pool.take(0).size == 0
    assert counts(pool) == (0, 0, 0)
    with pytest.raises(InternalError):
        BlockPool(0)


def test_released_blocks_are_taken_again_first_and_in_order():
    pool = BlockPool(9)
    first = pool.take(4)
    pool.take(2)
    assert pool.release(first).tolist() == [1, 2, 3, 4]
    assert pool.take(4).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("blocks", [ids(1), ids(1, 2)])
def test_a_shared_block_outlives_its_first_holder(blocks):
    pool = BlockPool(4)
    pool.take(2)
    pool.share(blocks)
    assert pool.release(blocks).size == 0
    assert counts(pool) == (1, 2, 0)
    assert sorted(pool.release(blocks).tolist()) == blocks.tolist()
    assert counts(pool) == (1 + blocks.size, 2 - blocks.size, 0)


def test_ids_that_repeat_in_one_call_count_each_time():
    pool = BlockPool(8)
    pool.take(4)
    pool.share(ids(1, 1, 3))
    assert pool.ref[[1, 2, 3, 4]].tolist() == [3, 1, 2, 1]
    freed = pool.release(ids(1, 2, 1, 3, 1))
    assert sorted(freed.tolist()) == [1, 2]
    assert counts(pool) == (5, 2, 0)
    assert pool.ref[[1, 2, 3, 4]].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("blocks", [ids(1), ids(1, 2), ids(2, 2)])
def test_releasing_more_often_than_taken_raises(blocks):
    pool = BlockPool(4)
    pool.take(2)
    pool.release(ids(1))
    with pytest.raises(InternalError, match="more often"):
        pool.release(blocks)


@pytest.mark.parametrize("blocks", [ids(2), ids(1, 2)])
def test_sharing_what_nobody_owns_raises_and_changes_nothing(blocks):
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(InternalError, match=r"shared: \[2\]"):
        pool.share(blocks)
    assert counts(pool) == (2, 1, 0)
    assert pool.ref.tolist() == [0, 1, 0, 0]


def test_cached_blocks_can_come_back_or_leave():
    pool = BlockPool(5)
    blocks = pool.take(3)
    pool.retire(blocks)
    assert counts(pool) == (1, 0, 3)
    pool.revive(blocks[:1])
    assert counts(pool) == (1, 1, 2)
    pool.reclaim(blocks[1:])
    assert counts(pool) == (3, 1, 0)


def test_retiring_a_block_that_somebody_else_holds_raises():
    pool = BlockPool(4)
    blocks = pool.take(2)
    pool.share(blocks[1:])
    with pytest.raises(InternalError, match=r"other holders: \[2\]"):
        pool.retire(blocks)


def test_the_check_finds_each_kind_of_damage():
    def damaged(damage):
        pool = BlockPool(6)
        pool.take(2)
        damage(pool)
        with pytest.raises(AssertionError):
            pool.check_invariants()

    def set_ref(pool, block, value):
        pool.ref[block] = value

    damaged(lambda pool: set_ref(pool, 1, 0))
    damaged(lambda pool: set_ref(pool, 1, -1))
    damaged(lambda pool: set_ref(pool, 0, 1))
    damaged(lambda pool: set_ref(pool, 5, 1))
    damaged(lambda pool: pool._free.__setitem__(0, 4))
    damaged(lambda pool: pool._free.__setitem__(0, 0))
    damaged(lambda pool: setattr(pool, "num_free", 2))
    damaged(lambda pool: setattr(pool, "num_cached", 1))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 6), st.integers(0, 2**32))))
def test_any_order_of_operations_agrees_with_a_multiset(steps):
    pool = BlockPool(12)
    held: list[int] = []  # one entry a holder
    for kind, n, seed in steps:
        rng = np.random.default_rng(seed)
        if kind == "take":
            blocks = pool.try_take(n)
            assert (blocks is None) == (n > 11 - len(set(held)))
            if blocks is not None:
                assert not set(held) & set(blocks.tolist())
                held += blocks.tolist()
        elif held:
            chosen = [held[i] for i in rng.permutation(len(held))[:n]]
            if kind == "share":
                pool.share(ids(*chosen))
                held += chosen
            else:
                freed = pool.release(ids(*chosen))
                for block in chosen:
                    held.remove(block)
                assert sorted(freed.tolist()) == sorted(set(chosen) - set(held))
        assert pool.ref.tolist() == np.bincount(held, minlength=12).tolist() if held else not pool.ref.any()
        assert counts(pool) == (11 - len(set(held)), len(set(held)), 0)
