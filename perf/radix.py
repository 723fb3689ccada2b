"""What the prefix cache costs the engine loop.

A tree of 1,000 sequences of 2,000 tokens, of which 1,000 are common to all; blocks of 16. Each case is timed once a round,
between it the others, so that a machine whose speed drifts slows all alike; the numpy probe (compare 2,000 tokens, count
125 blocks up and down) says how fast the machine was.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
from report import Report

from pagewire.cache.block_pool import BlockPool
from pagewire.cache.radix_tree import RadixTree
from pagewire.request.request import Namespace

NAMESPACE = Namespace(model="perf")
BLOCK_SIZE = 16
NUM_COMMON = 1000
NUM_TOKENS = 2000
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE
NUM_EVICTED = 10_000 // BLOCK_SIZE
VOCABULARY = 128_000

PROBE = "numpy probe"
MATCH = "match, full hit"
ACQUIRE = "acquire and release, full hit"
ADMIT = "match, acquire, take; half a hit"
PUBLISH = "publish while running, half a hit"
INSERT = "insert new"
EVICT = "evict 10,000 tokens"
TAKE = "take 32 blocks"
RELEASE = "release 32 blocks"


class Cache:
    """Pool, tree and a supply of prompts."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        own = -(-(NUM_TOKENS - NUM_COMMON) // BLOCK_SIZE) + 1
        self.pool = BlockPool((num_sequences + 20) * own + 10 * NUM_BLOCKS)
        self.tree = RadixTree(self.pool, BLOCK_SIZE)
        self.common = self.tokens(NUM_COMMON)
        self.latest = self.prompt()
        for _ in range(num_sequences):
            self.add()
        self.num_cached = self.pool.num_cached

    def tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(0, VOCABULARY, n, dtype=np.int32)

    def prompt(self) -> np.ndarray:
        return np.concatenate([self.common, self.tokens(NUM_TOKENS - NUM_COMMON)])

    def add(self) -> None:
        """One more sequence, from start to end."""
        self.latest = prompt = self.prompt()
        lease, blocks = self.tree.acquire(self.tree.match(NAMESPACE, prompt, NUM_BLOCKS))
        blocks = np.concatenate([blocks, self.pool.take(NUM_BLOCKS - blocks.size)])
        self.tree.publish_and_release(lease, prompt, blocks)


def measure(report: Report, *, rounds: int = 2000, num_sequences: int = 1000, seed: int = 0) -> None:
    """Adds p50 and p99 of every case, and its p50 as a multiple of the probe's."""
    cache = Cache(num_sequences, seed)
    times: dict[str, list[int]] = {
        case: [] for case in (PROBE, MATCH, ACQUIRE, ADMIT, PUBLISH, INSERT, EVICT, TAKE, RELEASE)
    }

    def timed(case: str, operation: Callable[[], object]) -> None:
        start = perf_counter_ns()
        operation()
        times[case].append(perf_counter_ns() - start)

    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            _round(cache, timed)
    finally:
        gc.enable()
    cache.pool.check_invariants()
    cache.tree.check_invariants()

    probe = float(np.median(times[PROBE]))
    for case, samples in times.items():
        p50, p99 = np.percentile(samples, [50, 99])
        report.add(case, "time_p50", p50 / 1000, "µs")
        report.add(case, "time_p99", p99 / 1000, "µs")
        if case != PROBE:
            report.add(case, "time_p50_ratio", p50 / probe, "× probe")


def _round(cache: Cache, timed: Callable[[str, Callable[[], object]], None]) -> None:
    """Each case once; afterwards the tree has as many sequences as before."""
    pool, tree = cache.pool, cache.tree
    ids = np.arange(1, NUM_BLOCKS + 1) * 7
    counts = np.zeros(pool.num_blocks, np.int32)
    known, other = cache.latest, cache.latest.copy()

    def probe() -> None:
        assert (known == other).all()
        counts[ids] += 1
        counts[ids] -= 1

    timed(PROBE, probe)
    timed(MATCH, lambda: tree.match(NAMESPACE, known, (NUM_TOKENS - 1) // BLOCK_SIZE))

    match = tree.match(NAMESPACE, known, NUM_BLOCKS)
    assert match.num_blocks == NUM_BLOCKS

    def acquire() -> None:
        tree.release(*tree.acquire(match))

    timed(ACQUIRE, acquire)
    taken = []
    timed(TAKE, lambda: taken.append(pool.take(32)))
    timed(RELEASE, lambda: pool.release(taken[0]))

    prompt = cache.prompt()
    admitted = []

    def admit() -> None:
        lease, blocks = tree.acquire(tree.match(NAMESPACE, prompt, (NUM_TOKENS - 1) // BLOCK_SIZE))
        admitted.append((lease, np.concatenate((blocks, pool.take(NUM_BLOCKS - blocks.size)))))

    timed(ADMIT, admit)
    lease, table = admitted[0]
    timed(PUBLISH, lambda: tree.publish(lease, prompt, table))
    tree.release(lease, table)

    # The dearest way in: nothing was acquired, so the common half is walked and its duplicates are freed.
    prompt = cache.prompt()
    unshared, _ = tree.acquire(tree.match(NAMESPACE, prompt, 0))
    blocks = pool.take(NUM_BLOCKS)
    timed(INSERT, lambda: tree.publish_and_release(unshared, prompt, blocks))

    before = pool.num_cached
    timed(EVICT, lambda: tree.evict(NUM_EVICTED))
    assert before - pool.num_cached == NUM_EVICTED
    while pool.num_cached < cache.num_cached:
        cache.add()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    Report.arguments(parser)
    args = parser.parse_args()
    report = Report("radix", as_json=args.json)
    measure(report, rounds=args.rounds, seed=args.seed)
    report.finish()


if __name__ == "__main__":
    main()
