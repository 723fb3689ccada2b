"""Pool and tree against a naive model, over random lives of random sequences.

The model is a dict from (namespace, all tokens up to a block's end) to a block id, a list of holders a block, and a tag
that says for which tokens a block was last written. It knows no nodes, runs, splits or links.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagewire.cache.block_pool import BlockPool
from pagewire.cache.radix_tree import Lease, RadixTree
from pagewire.request.request import Namespace

BLOCK = 2
NUM_BLOCKS = 25
NAMESPACES = (Namespace(), Namespace(tenant="t"))

# Few different tokens and short prompts, so that prefixes meet all the time.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
picks = st.integers(0, 1000)


@dataclass(eq=False)
class Life:
    """A sequence as the model sees it."""

    namespace: Namespace
    epoch: int
    tokens: list[int]
    blocks: np.ndarray
    lease: Lease
    num_computed: int
    family: list[Life] = field(default_factory=list)
    num_common: int = 0

    def key(self, i):
        return (self.namespace, self.epoch, tuple(self.tokens[: (i + 1) * BLOCK]))

    @property
    def computed(self):
        return np.array(self.tokens[: self.num_computed], np.int32)


class CacheMachine(RuleBasedStateMachine):
    @initialize()
    def start_empty(self):
        self.pool = BlockPool(NUM_BLOCKS)
        self.tree = RadixTree(self.pool, BLOCK)
        self.lives: list[Life] = []
        self.raw: list[np.ndarray] = []  # blocks held for a copy
        self.findable: dict[tuple, int] = {}
        self.holders: dict[int, list[object]] = {block: [] for block in range(1, NUM_BLOCKS)}
        self.written: dict[int, tuple | None] = {}
        self.epochs = dict.fromkeys(NAMESPACES, 0)

    # ---- the model ----

    def hold(self, blocks, holder):
        for block in blocks.tolist():
            self.holders[block].append(holder)

    def let_go(self, blocks, holder):
        for block in blocks.tolist():
            self.holders[block].remove(holder)

    def model_match(self, namespace, tokens, max_blocks):
        found = []
        for i in range(min(max_blocks, len(tokens) // BLOCK)):
            block = self.findable.get((namespace, self.epochs[namespace], tuple(tokens[: (i + 1) * BLOCK])))
            if block is None:
                break
            found.append(block)
        return found

    def model_publish(self, life):
        """What a sequence that goes on may publish."""
        if life.epoch != self.epochs[life.namespace]:
            return 0
        start, new = life.lease.num_blocks, 0
        for i in range(start, min(life.num_computed // BLOCK, life.blocks.size)):
            block = int(life.blocks[i])
            rightful = life.family if i < life.num_common else [life]
            if life.key(i) in self.findable or len(self.holders[block]) != len(rightful or [life]):
                break
            self.findable[life.key(i)] = block
            new += 1
        return new

    def model_graft(self, life):
        """What is kept in addition when it ends."""
        if life.epoch != self.epochs[life.namespace]:
            return
        is_below_others = True
        for i in range(life.lease.num_blocks, min(life.num_computed // BLOCK, life.blocks.size)):
            is_below_others = is_below_others and life.key(i) in self.findable
            if is_below_others:
                continue
            if self.holders[int(life.blocks[i])] != [life]:
                return
            self.findable[life.key(i)] = int(life.blocks[i])

    # ---- help ----

    def pick(self, n):
        return self.lives[n % len(self.lives)]

    def take(self, n):
        """`n` blocks by eviction if need be, or None."""
        if n > self.pool.num_free + self.pool.num_cached:
            return None
        if n > self.pool.num_free:
            self.evict(n - self.pool.num_free)
        blocks = self.pool.take(n)
        for block in blocks.tolist():
            assert not self.holders[block]
            assert block not in self.findable.values(), "a findable block was handed out"
            self.written[block] = None
        return blocks

    def write(self, life, up_to):
        """Compute positions num_computed … up_to − 1: own blocks are written, published ones must not be."""
        for i in range(life.num_computed // BLOCK, -(-up_to // BLOCK)):
            block = int(life.blocks[i])
            assert block not in self.findable.values(), "a published block is written to"
            if (i + 1) * BLOCK <= up_to:
                self.written[block] = life.key(i)
        life.num_computed = up_to

    def leave(self, life):
        self.lives.remove(life)
        self.let_go(life.blocks, life)
        if life in life.family:
            life.family.remove(life)

    # ---- rules ----

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts, chunk=st.integers(0, 12))
    def admit(self, namespace, tokens, chunk):
        wanted = (len(tokens) - 1) // BLOCK
        match = self.tree.match(namespace, np.array(tokens, np.int32), wanted)
        expected = self.model_match(namespace, tokens, wanted)
        assert match.num_blocks == len(expected)
        lease, blocks = self.tree.acquire(match)
        assert blocks.tolist() == expected
        life = Life(namespace, self.epochs[namespace], tokens, blocks, lease, blocks.size * BLOCK)
        self.hold(blocks, life)
        for i, block in enumerate(blocks.tolist()):
            assert self.written[block] == life.key(i), "a hit on other tokens, or on a reused block"
        own = self.take(-(-len(tokens) // BLOCK) - blocks.size)
        if own is None:
            self.let_go(blocks, life)
            self.tree.release(lease, blocks)
            return
        self.hold(own, life)
        life.blocks = np.concatenate([blocks, own])
        self.lives.append(life)
        self.write(life, max(life.num_computed, min(chunk, len(tokens))))

    @precondition(lambda self: self.lives)
    @rule(n=picks, more=st.integers(1, 6))
    def compute(self, n, more):
        life = self.pick(n)
        if life.num_computed >= life.num_common * BLOCK:
            self.write(life, min(life.num_computed + more, len(life.tokens)))

    @precondition(lambda self: self.lives)
    @rule(n=picks, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def generate(self, n, tokens):
        life = self.pick(n)
        if life.num_computed < len(life.tokens):
            return
        blocks = self.take(-(-(len(life.tokens) + len(tokens)) // BLOCK) - life.blocks.size)
        if blocks is not None:
            self.hold(blocks, life)
            life.blocks = np.concatenate([life.blocks, blocks])
            life.tokens = life.tokens + tokens

    @precondition(lambda self: self.lives)
    @rule(n=picks)
    def publish(self, n):
        life = self.pick(n)
        expected = self.model_publish(life)
        assert self.tree.publish(life.lease, life.computed, life.blocks) == expected

    @precondition(lambda self: self.lives)
    @rule(n=picks)
    def end(self, n):
        life = self.pick(n)
        self.model_publish(life)
        # The lease still says how far its own path goes without that, which is what the graft starts from as well:
        # what it just published is in the model already, under its own blocks.
        self.model_graft(life)
        self.leave(life)
        self.tree.publish_and_release(life.lease, life.computed, life.blocks)

    @precondition(lambda self: self.lives)
    @rule(n=picks)
    def fail(self, n):
        life = self.pick(n)
        self.leave(life)
        self.tree.release(life.lease, life.blocks)

    @precondition(lambda self: self.lives)
    @rule(n=picks, num_forks=st.integers(1, 3))
    def fork(self, n, num_forks):
        """As a scheduler does: full blocks in common, a tail for each, all of the prompt computed."""
        life = self.pick(n)
        if life.num_computed < len(life.tokens) or life.lease.num_blocks < life.num_common:
            return
        full = life.blocks[: len(life.tokens) // BLOCK]
        num_tails = life.blocks.size - full.size
        tails = self.take(num_forks * num_tails)
        if tails is None:
            return
        if life in life.family:
            life.family.remove(life)
        family = [life]
        leases = self.tree.fork(life.lease, full, num_forks)
        life.family, life.num_common = family, int(full.size)
        for i, lease in enumerate(leases):
            own = tails[i * num_tails : (i + 1) * num_tails]
            blocks = np.concatenate([full, own])
            other = Life(life.namespace, life.epoch, life.tokens, blocks, lease, life.num_computed)
            other.family, other.num_common = family, int(full.size)
            family.append(other)
            self.hold(blocks, other)
            self.lives.append(other)

    @precondition(lambda self: self.lives)
    @rule(n=picks)
    def hold_a_tail_for_a_copy(self, n):
        life = self.pick(n)
        tail = life.blocks[-1:]
        if int(tail[0]) not in self.findable.values() and life.blocks.size > max(
            life.lease.num_blocks, life.num_common
        ):
            self.pool.share(tail)
            self.hold(tail, "copy")
            self.raw.append(tail)

    @precondition(lambda self: self.raw)
    @rule(n=picks)
    def finish_a_copy(self, n):
        tail = self.raw.pop(n % len(self.raw))
        self.let_go(tail, "copy")
        self.pool.release(tail)

    @rule(num_blocks=st.integers(0, 8))
    def evict(self, num_blocks):
        cached, free = self.pool.num_cached, set(self.pool.free_blocks().tolist())
        freed = self.tree.evict(num_blocks)
        assert freed == min(num_blocks, cached)
        victims = set(self.pool.free_blocks().tolist()) - free
        assert len(victims) == freed
        for key, block in list(self.findable.items()):
            if block in victims:
                assert not self.holders[block]
                del self.findable[key]
        self.every_findable_block_can_be_reached()

    @rule(namespace=st.sampled_from(NAMESPACES))
    def drop(self, namespace):
        gone = [key for key in self.findable if key[0] == namespace]
        expected = sum(not self.holders[self.findable.pop(key)] for key in gone)
        assert self.tree.drop_namespace(namespace) == expected
        self.epochs[namespace] += 1

    # ---- what always holds ----

    @invariant()
    def structure_is_sound(self):
        self.pool.check_invariants()
        self.tree.check_invariants()

    @invariant()
    def every_block_has_its_holders_and_one_state(self):
        assert self.pool.ref[1:].tolist() == [len(self.holders[block]) for block in range(1, NUM_BLOCKS)]
        cached = {block for block in self.findable.values() if not self.holders[block]}
        assert self.pool.num_cached == len(cached)
        free = set(self.pool.free_blocks().tolist())
        owned = {block for block, holders in self.holders.items() if holders}
        assert free | owned | cached == set(range(1, NUM_BLOCKS))
        assert len(free) + len(owned) + len(cached) == NUM_BLOCKS - 1

    @invariant()
    def every_findable_block_can_be_reached(self):
        """No victim is an ancestor of a block that stays; a block without holders has none below that has."""
        for (namespace, epoch, tokens), block in self.findable.items():
            assert epoch == self.epochs[namespace]
            above = self.findable.get((namespace, epoch, tokens[:-BLOCK])) if len(tokens) > BLOCK else None
            assert len(tokens) == BLOCK or above is not None
            assert above is None or self.holders[above] or not self.holders[block]
            assert self.written[block] == (namespace, epoch, tokens)

    @invariant()
    def leases_say_what_is_in_the_tree(self):
        for life in self.lives:
            in_tree = [self.findable.get(life.key(i)) == int(b) for i, b in enumerate(life.blocks)]
            if life.epoch == self.epochs[life.namespace]:
                assert in_tree == [i < life.lease.num_blocks for i in range(life.blocks.size)]

    def teardown(self):
        """Counts return to the baseline."""
        if not hasattr(self, "pool"):
            return
        while self.raw:
            self.pool.release(self.raw.pop())
        for i, life in enumerate(self.lives):
            if i % 2:
                self.tree.release(life.lease, life.blocks)
            else:
                self.tree.publish_and_release(life.lease, life.computed, life.blocks)
        assert self.pool.num_owned == 0
        self.tree.evict(NUM_BLOCKS)
        self.pool.check_invariants()
        self.tree.check_invariants()
        assert self.pool.num_free == NUM_BLOCKS - 1


TestCacheAgainstModel = CacheMachine.TestCase
TestCacheAgainstModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
