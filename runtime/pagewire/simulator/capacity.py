"""How many streams a deployment holds at a context, and which latencies they see: what `pagewire plan` answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pagewire.errors import ConfigError
from pagewire.simulator.card import ModelledCard, StepWork
from pagewire.simulator.deployment import Deployment, simulate
from pagewire.simulator.figures import ITL_TARGET_NS, TTFT_TARGET_NS, Counting, Summary
from pagewire.simulator.traces import ClosedLoop

_SPREAD = 0.5
"""Lengths differ by up to this share, both ways: clients in lockstep would be a load of its own kind."""
_ROUNDS = 2.0


@dataclass(frozen=True, slots=True)
class Level:
    """A number of streams, each sending its next request when one ends. Latencies in ms."""

    streams: int
    decode_ms: float
    """A step in which all of them decode and nobody prefills."""
    summary: Summary
    is_within: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes over all cards.

    Attributes:
        kv_tokens: tokens whose K and V fit.
        in_memory: streams of the whole context whose K and V fit.
        fitting: of these, as many as there are rows.
        prefill_ms: a prompt alone, to its first token.
        levels: ascending in streams.
    """

    weight_bytes: int
    kv_token_bytes: int
    kv_tokens: int
    context: int
    in_memory: int
    fitting: int
    prefill_ms: float
    levels: list[Level]

    @property
    def best(self) -> Level | None:
        """The most streams that keep the promise."""
        return max((level for level in self.levels if level.is_within), key=lambda level: level.streams, default=None)


def prefill_seconds(card: ModelledCard, num_tokens: int, step_tokens: int) -> float:
    """A prompt in chunks, nobody else there."""
    took, start = 0.0, 0
    while start < num_tokens:
        n = min(step_tokens, num_tokens - start)
        took += card.seconds(StepWork(n, 0, n * start + n * (n + 1) // 2, int(start + n == num_tokens)))
        start += n
    return took


def capacity(
    deployment: Deployment,
    *,
    context: int,
    output: int,
    ttft_ns: int = TTFT_TARGET_NS,
    itl_ns: int = ITL_TARGET_NS,
    on_level: Callable[[int, int], None] | None = None,
) -> Capacity:
    """Try 1, 2, 4, … streams up to those that fit.

    Args:
        deployment: what runs where.
        context: prompt and output of a request at its end, on average.
        output: of these, generated.
        ttft_ns: the promise: p95 of first tokens, …
        itl_ns: … and p99 of gaps.
        on_level: told of the streams of each level before it is run, and of how many fit.

    Raises:
        ConfigError: nothing fits, or the numbers contradict each other.
    """
    if not 0 < output < context:
        raise ConfigError(f"{output} generated tokens of a context of {context}", field="output")
    if context * (1 + _SPREAD) > deployment.max_len:
        raise ConfigError(
            f"requests of up to {int(context * (1 + _SPREAD))} tokens exceed the {deployment.max_len} of this model",
            field="context",
        )
    card = deployment.card(prefills=False)
    pool = deployment.make_scheduler(card).memory
    in_memory = pool.num_usable // pool.blocks_for(context)
    fitting = min(in_memory, deployment.scheduler.max_rows)
    if fitting == 0:
        raise ConfigError(f"{pool.num_usable * pool.block_size} tokens of KV memory hold no {context}", field="context")
    prefill = prefill_seconds(deployment.card(), context - output, deployment.scheduler.max_step_tokens)
    levels = []
    for streams in _ladder(fitting):
        if on_level is not None:
            on_level(streams, fitting)
        levels.append(_level(deployment, card, streams, context, output, prefill, ttft_ns, itl_ns))
    return Capacity(
        deployment.model.weight_bytes(deployment.weights),
        deployment.model.kv_token_bytes(deployment.kv),
        pool.num_usable * pool.block_size,
        context,
        in_memory,
        fitting,
        1e3 * prefill,
        levels,
    )


def _ladder(most: int) -> Iterator[int]:
    streams = 1
    while streams < most:
        yield streams
        streams *= 2
    yield most


def _level(
    deployment: Deployment,
    card: ModelledCard,
    streams: int,
    context: int,
    output: int,
    prefill: float,
    ttft_ns: int,
    itl_ns: int,
) -> Level:
    decode = card.seconds(StepWork(streams, streams * (context - output // 2), 0, streams))
    round_ns = int(1e9 * (streams * prefill + output * decode))
    end_ns = int((1 + _ROUNDS) * round_ns)
    lengths = _lengths(context - output, output)
    loop = ClosedLoop(lengths, streams, end_ns, spread_ns=round_ns // 2)
    run = simulate(
        deployment, loop, window_ns=max(1, end_ns // 40), until_ns=end_ns, counting=Counting(round_ns, end_ns)
    )
    found = run.summary
    is_within = found.ttft_p95 * 1e6 < ttft_ns and found.itl_p99 * 1e6 < itl_ns
    return Level(streams, 1e3 * decode, found, is_within)


def _lengths(prompt: int, output: int) -> Iterator[tuple[int, int]]:
    rng = np.random.default_rng(0)
    while True:
        a, b = rng.uniform(1 - _SPREAD, 1 + _SPREAD, 2)
        yield max(1, round(prompt * a)), max(1, round(output * b))
