"""Workloads that are measured, the same for every engine, and the shapes of the models that they are measured on."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec

Generate = Callable[[Sequence[int], int], AsyncIterator[int]]
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

TINY_LLAMA = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Shows that a benchmark runs, on any machine; its figures mean nothing."""


SLICE_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 3584,
    "num_hidden_layers": 80,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 16032,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What one of eight cards does of a 70B model under tensor parallelism, without the reductions between them."""


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
    # Numbers and arrays: a hundred thousand tuples made the reader's collector stop it for tens of milliseconds.
    times: list[list[float]] = [[] for _ in range(streams)]
    counts: list[list[int]] = [[] for _ in range(streams)]
    prompts = [array("I", [rng.randrange(10, vocab_size - 10) for _ in range(context)]) for _ in range(streams)]

    async def one(i: int) -> None:
        async for count in generate(prompts[i], steps):
            times[i].append(time.perf_counter())
            counts[i].append(count)

    begun = time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(streams)))
    wall = time.perf_counter() - begun
    low, high = max(own[0] for own in times), min(own[-1] for own in times)
    gaps = [1e3 * (b - a) for own in times for a, b in itertools.pairwise(own) if a > low and b < high]
    marks = itertools.chain.from_iterable(zip(*both, strict=True) for both in zip(times, counts, strict=True))
    tokens = sum(count for at, count in marks if low < at < high)
    return {
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "itl_max": max(gaps, default=math.nan),
        "step": 1e3 * streams * (high - low) / max(tokens, 1),
        "throughput": tokens / max(high - low, 1e-9),
        "gaps": len(gaps),
        "wall": wall,
    }


# ---- chat ----------------------------------------------------------------------------------------------------------------

RAMP_S = 6.0
_DRAIN_S = 2.0
"""Poisson arrivals go on for so long after the window, so that its last requests run under load as well."""
_SLO_TTFT_MS, _SLO_ITL_MS = 250.0, 12.0


class Request(msgspec.Struct, array_like=True):
    """What is asked for."""

    prompt_ids: array[int]
    max_tokens: int
    after: float = 0.0
    """Seconds after the beginning, where arrivals have their own times."""


class Served(msgspec.Struct, array_like=True):
    """What became of a request; times of `time.perf_counter`, which all processes of a Linux machine share."""

    start: float
    """When it was sent; where arrivals have their own times, when it should have been."""
    want: int
    times: list[float] = []
    counts: list[int] = []
    """Tokens that came at each of `times`."""
    error: str = ""
    code: str = ""
    """Of the error, where it is an answer of the server: `overloaded` is a refusal."""


def chat_lengths(num: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) tokens of chat turns: log-normal, about 290 and 230 on average."""
    rng = random.Random(seed)
    lengths = []
    for _ in range(num):
        prompt = rng.lognormvariate(math.log(220), 0.75)
        output = rng.lognormvariate(math.log(200), 0.55)
        lengths.append((int(min(2048, max(16, prompt))), int(min(1024, max(16, output)))))
    return lengths


def _prompt(rng: random.Random, length: int, vocab_size: int) -> array[int]:
    return array("I", [rng.randrange(10, vocab_size - 10) for _ in range(length)])


def chat_requests(lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int = 1) -> Iterator[Request]:
    """Without end, in the order in which a closed loop sends them."""
    rng = random.Random(seed)
    for prompt, output in itertools.cycle(lengths):
        yield Request(_prompt(rng, prompt, vocab_size), output)


def poisson_requests(
    lengths: Sequence[tuple[int, int]], rate: float, seconds: float, vocab_size: int, seed: int = 2
) -> Iterator[Request]:
    """`rate` arrivals a second for `seconds`, and the one that follows."""
    rng = random.Random(seed)
    after = 0.0
    for prompt, output in itertools.cycle(lengths):
        if after >= seconds:
            return
        after += rng.expovariate(rate)
        yield Request(_prompt(rng, prompt, vocab_size), output, after)


async def serve_one(generate: Generate, request: Request, start: float | None = None) -> Served:
    """Send it and read it to its end. A refusal is a result: one request must not end a benchmark."""
    served = Served(time.perf_counter() if start is None else start, request.max_tokens)
    try:
        async for count in generate(request.prompt_ids, request.max_tokens):
            served.times.append(time.perf_counter())
            served.counts.append(count)
    except Exception as error:  # noqa: BLE001  (whatever it was, the others go on)
        served.error, served.code = repr(error), getattr(error, "code", "")
    return served


async def closed(generate: Generate, requests: Iterator[Request], streams: int, until: float) -> list[Served]:
    """`streams` requests open at any time; none is sent after `until`, the last are read to their ends."""
    rows: list[Served] = []

    async def worker() -> None:
        while time.perf_counter() < until:
            rows.append(await serve_one(generate, next(requests)))
            if rows[-1].error:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(worker() for _ in range(streams)))
    return rows


async def opened(generate: Generate, requests: Iterator[Request], begun: float) -> list[Served]:
    """Each request at its time, whatever became of those before."""
    tasks = []
    for request in requests:
        due = begun + request.after
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(serve_one(generate, request, due)))
    return list(await asyncio.gather(*tasks))


def poisson_seconds(ramp: float, seconds: float) -> float:
    """How long arrivals go on."""
    return ramp + seconds + _DRAIN_S


def summary(
    rows: Sequence[Served], low: float, high: float, *, ttft_ms: float = _SLO_TTFT_MS, itl_ms: float = _SLO_ITL_MS
) -> dict[str, float]:
    """Latencies of the requests that started in the window [low, high), tokens that arrived in it.

    Returns:
        requests, short (not all tokens came; of the whole run), throughput: tok/s; ttft_*, itl_*, tpot_*: ms;
        within_slo: share that ended without an error, with a first token within `ttft_ms` and a p99 of gaps below `itl_ms`.
    """
    mine = [row for row in rows if low <= row.start < high]
    answered = [row for row in mine if row.times]
    ttft = [1e3 * (row.times[0] - row.start) if row.times else math.inf for row in mine]
    gaps = [[1e3 * (b - a) for a, b in itertools.pairwise(row.times)] for row in mine]
    itl = [gap for own in gaps for gap in own]
    tpot = [1e3 * (row.times[-1] - row.times[0]) / max(1, sum(row.counts) - 1) for row in answered]
    tokens = sum(k for row in rows for at, k in zip(row.times, row.counts, strict=True) if low <= at < high)
    good = sum(
        not row.error and first < ttft_ms and not percentile(own, 99) >= itl_ms
        for row, first, own in zip(mine, ttft, gaps, strict=True)
    )
    return {
        "throughput": tokens / (high - low),
        "ttft_p50": percentile(ttft, 50),
        "ttft_p95": percentile(ttft, 95),
        "itl_p50": percentile(itl, 50),
        "itl_p95": percentile(itl, 95),
        "itl_p99": percentile(itl, 99),
        "itl_max": max(itl, default=math.nan),
        "tpot_p95": percentile(tpot, 95),
        "requests": len(mine),
        "short": sum(sum(row.counts) != row.want for row in rows),
        "within_slo": good / max(1, len(mine)),
    }
