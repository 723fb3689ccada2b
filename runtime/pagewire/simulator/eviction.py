"""Which hits the prefix cache could have had, had it known the future: Belady's rule, the bound of every eviction policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pagewire.cache.block_pool import BlockPool
from pagewire.cache.radix_tree import RadixTree
from pagewire.request.request import Namespace
from pagewire.simulator.figures import Served
from pagewire.simulator.traces import HASH_BLOCK, Arrival

_NEVER: Final = 2**62
_HOME: Final = Namespace()


@dataclass(frozen=True, slots=True)
class Use:
    """A prompt that was served: from when until when it held its blocks.

    Attributes:
        parts: (id, tokens) of its prefix, as far as it may be found in a cache.
        num_tokens: that it held in all at its end.
    """

    begin_ns: int
    end_ns: int
    parts: tuple[tuple[int, int], ...]
    num_tokens: int


def parts_of(arrival: Arrival, block_size: int) -> tuple[tuple[int, int], ...]:
    """Its shared parts; of the last only whole blocks, and never the last token."""
    usable = (arrival.num_prompt - 1) // block_size * block_size
    whole = [(part, min(HASH_BLOCK, usable - i * HASH_BLOCK)) for i, part in enumerate(arrival.prefix_ids)]
    return tuple(part for part in whole if part[1] > 0)


def uses_of(served: Iterable[Served], block_size: int) -> list[Use]:
    """Of a run: each from its admission to its end."""
    return [
        Use(
            one.admitted_ns,
            one.ended_ns,
            parts_of(one.arrival, block_size),
            one.arrival.num_prompt + one.arrival.num_output,
        )
        for one in served
        if one.ended_ns >= 0
    ]


def optimal_hit_tokens(uses: Sequence[Use], pool_tokens: int) -> int:
    """Prompt tokens found if whatever is needed latest leaves first; what running sequences hold stays.

    Parts are admitted and evicted whole. Blocks are findable from the admission of the sequence that computes them,
    which no real cache can do, so this is a bound from above.
    """
    order = sorted(range(len(uses)), key=lambda i: (uses[i].begin_ns, i))
    next_use = _next_uses(uses, order)
    held: dict[int, int] = {}  # part → how many running sequences hold it
    kept: dict[int, tuple[int, int, int]] = {}  # cached part → (next use, depth, tokens)
    latest: list[tuple[int, int, int]] = []  # heap of (−next use, −depth, part), stale entries included
    ends: list[tuple[int, int]] = []
    size = {part: tokens for use in uses for part, tokens in use.parts}
    free, hits = pool_tokens, 0

    def release(i: int) -> None:
        nonlocal free
        use = uses[i]
        free += use.num_tokens - sum(tokens for _, tokens in use.parts)
        for depth, (part, _) in enumerate(use.parts):
            held[part] -= 1
            if held[part]:
                continue
            del held[part]
            upcoming = next_use[part][-1] if next_use[part] else _NEVER
            if upcoming == _NEVER:
                free += size[part]
            else:
                kept[part] = upcoming, depth, size[part]
                heapq.heappush(latest, (-upcoming, -depth, part))

    for i in order:
        use = uses[i]
        while ends and ends[0][0] <= use.begin_ns:
            release(heapq.heappop(ends)[1])
        found = True
        for part, tokens in use.parts:
            next_use[part].pop()
            if part in kept:
                del kept[part]
            elif part not in held:
                found = False
                free -= size[part]
            if found:
                hits += tokens
            held[part] = held.get(part, 0) + 1
        free -= use.num_tokens - sum(tokens for _, tokens in use.parts)
        while free < 0 and latest:
            upcoming, depth, part = heapq.heappop(latest)
            if part in kept and kept[part][:2] == (-upcoming, -depth):
                free += kept.pop(part)[2]
        heapq.heappush(ends, (max(use.end_ns, use.begin_ns), i))
    return hits


def _next_uses(uses: Sequence[Use], order: Sequence[int]) -> dict[int, list[int]]:
    """Part → when it is needed, the next at the end of the list."""
    out: dict[int, list[int]] = {}
    for turn in range(len(order) - 1, -1, -1):
        for part, _ in uses[order[turn]].parts:
            out.setdefault(part, []).append(turn)
    return out


def tree_hit_tokens(arrivals: Iterable[Arrival], pool_tokens: int, block_size: int = 16) -> int:
    """Prompt tokens that the very pool and tree find, one prompt after the other, nobody holding anything meanwhile."""
    pool = BlockPool(pool_tokens // block_size + 1)
    tree = RadixTree(pool, block_size)
    hits = 0
    for arrival in arrivals:
        token_ids = arrival.prompt_ids()
        lease, blocks = tree.acquire(tree.match(_HOME, token_ids, (token_ids.size - 1) // block_size))
        hits += int(blocks.size) * block_size
        need = -(-token_ids.size // block_size) - int(blocks.size)
        if need > pool.num_free:
            tree.evict(need - pool.num_free)
        fresh = pool.try_take(need)
        if fresh is None:  # longer than the pool
            tree.release(lease, blocks)
            continue
        tree.publish_and_release(lease, token_ids, np.concatenate((blocks, fresh)))
    return hits
