"""Workloads that are measured, the same for every engine, and the shapes of the models that they are measured on."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence

Generate = Callable[[list[int], int], AsyncIterator[int]]
"""(prompt ids, max tokens) → how many tokens each chunk brought."""

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least q percent do not exceed; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q / 100 * len(ordered)) - 1))]


async def decode_only(
    generate: Generate, streams: int, context: int, steps: int, vocab_size: int, seed: int = 3
) -> dict[str, float]:
    """Streams of `context` prompt tokens; only the gaps while all of them are decoding count, no prefill in the way.

    Returns:
        itl_p50, itl_p99, itl_max, step (streams ÷ throughput): ms; throughput: tok/s; gaps, wall (s).
    """
    rng = random.Random(seed)
    marks: list[list[tuple[float, int]]] = [[] for _ in range(streams)]
    prompts = [[rng.randrange(10, vocab_size - 10) for _ in range(context)] for _ in range(streams)]

    async def one(i: int) -> None:
        async for count in generate(prompts[i], steps):
            marks[i].append((time.perf_counter(), count))

    begun = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(streams)))
    wall = time.perf_counter() - begun
    low, high = max(own[0][0] for own in marks), min(own[-1][0] for own in marks)
    gaps = [1e3 * (b[0] - a[0]) for own in marks for a, b in itertools.pairwise(own) if a[0] > low and b[0] < high]
    tokens = sum(count for own in marks for at, count in own if low < at < high)
    return {
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "itl_max": max(gaps, default=math.nan),
        "step": 1e3 * streams * (high - low) / max(tokens, 1),
        "throughput": tokens / max(high - low, 1e-9),
        "gaps": len(gaps),
        "wall": wall,
    }
