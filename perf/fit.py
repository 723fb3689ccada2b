"""The modelled card's rates, searched so that simulated runs come closest to recorded ones."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from recorded import RealRun
from workload import chat_lengths, poisson_requests, poisson_seconds

from pagewire.config import SchedulerConfig
from pagewire.simulator.card import H200, LLAMA_8B, CardRates, ModelledCard, Precision, Products, StepWork
from pagewire.simulator.deployment import Deployment, simulate
from pagewire.simulator.figures import Counting, Summary
from pagewire.simulator.simulation import Host
from pagewire.simulator.traces import Arrival, ClosedLoop, Trace

METRICS = ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "itl_p99", "throughput")
ALL_RATES = ("stream", "compute", "knee", "decode", "elementwise_token_s", "step_s", "sample_s", "seen_ns")
DECODE_RATES = ("single", "stream", "knee", "decode")
"""What steps without prefill tell."""
DECODE_CONTEXT = 612
"""Prompts of 512 tokens and the middle of 200 generated."""

_ROUNDS, _TRIES = 6, 3
_NUDGE = 1.04
_FURTHEST = 0.3
"""What a rate may move in one round, as a logarithm."""
_LEAST_GAIN = 0.02

Rates = tuple[CardRates, Host]

UNFITTED = replace(
    H200,
    products={"bf16": Products(4.1e12, 3.7e12, 783e12, 4.0), "fp8": Products(3.5e12, 3.0e12, 1350e12, 4.0)},
    decode={"bf16": 4.3e12, "fp8": 4.0e12},
    elementwise_token_s=40e-9,
    sample_s=1e-6,
    step_s=30e-6,
)
"""An H200 as single kernels show it (products, attention, bandwidth): where a fit begins that is to know nothing of whole steps."""


def simulated(run: RealRun, rates: CardRates, host: Host, seconds: float) -> Summary:
    """The same load on a modelled card."""
    deployment = Deployment(
        LLAMA_8B, rates, host=host, max_model_len=8192, weights=run.precision, kv=run.precision,
        scheduler=SchedulerConfig(
            max_rows=run.max_rows, max_step_tokens=run.step_tokens, max_waiting=100_000,
            itl_target_ms=run.itl_target, ttft_target_ms=run.ttft_target,
        ),
    )  # fmt: skip
    low, high = int(run.ramp * 1e9), int((run.ramp + seconds) * 1e9)
    workload: ClosedLoop | Trace
    if run.kind == "closed":
        workload = ClosedLoop(itertools.cycle(chat_lengths(4000, run.seed)), int(run.amount), high)
    else:
        workload = Trace(iter(arrivals(run.amount, poisson_seconds(run.ramp, seconds), run.seed)))
    return simulate(deployment, workload, window_ns=10**9, counting=Counting(low, high)).summary


@functools.lru_cache(maxsize=64)
def arrivals(rate: float, seconds: float, seed: int = 0) -> tuple[Arrival, ...]:
    """Those of the clients."""
    requests = poisson_requests(chat_lengths(4000, seed), rate, seconds, LLAMA_8B.vocab_size, seed=2 + seed)
    return tuple(
        Arrival(int(request.after * 1e9), number, len(request.prompt_ids), request.max_tokens)
        for number, request in enumerate(requests)
    )


def modelled(rates: CardRates, precision: Precision = "bf16") -> ModelledCard:
    """One card with the model of the runs."""
    return ModelledCard(LLAMA_8B, rates, weights=precision, kv=precision)


def decode_ms(card: ModelledCard, streams: int) -> float:
    """A step of `decode.py`."""
    return 1e3 * card.seconds(StepWork(streams, streams * DECODE_CONTEXT, 0, streams))


def residuals(
    runs: Sequence[RealRun], steps: dict[int, float], rates: CardRates, host: Host, precision: Precision = "bf16"
) -> npt.NDArray[np.float64]:
    """Logarithms of simulated ÷ real, of each figure of each run and of each step."""
    card = modelled(rates, precision)
    terms = [math.log(decode_ms(card, streams) / ms) for streams, ms in steps.items()]
    for run in runs:
        found = simulated(run, rates, host, run.seconds)
        terms += [math.log(getattr(found, m) / run.values[m]) for m in METRICS if run.values.get(m)]
    return np.array(terms)


def loss(
    runs: Sequence[RealRun], steps: dict[int, float], rates: CardRates, host: Host, precision: Precision = "bf16"
) -> float:
    """Mean of squared logarithms of simulated ÷ real."""
    return float(np.mean(residuals(runs, steps, rates, host, precision) ** 2))


def fit(
    runs: Sequence[RealRun],
    steps: dict[int, float],
    start: Rates | None = None,
    names: Sequence[str] = ALL_RATES,
    precision: Precision = "bf16",
) -> tuple[CardRates, Host, float]:
    """Least squares (Levenberg, Marquardt) over the logarithms of `names`, from `start` on; and the loss that is left.

    Rates of products and of decode attention are those of `precision`, which is that of all runs and steps.

    Percentiles of a simulated run are steps, not slopes, so derivatives are taken over a few percent.
    """
    rates = start or (H200, Host())
    left = residuals(runs, steps, *rates, precision)
    damping = 0.02
    for _ in range(_ROUNDS):
        nudged = [_scaled(*rates, name, _NUDGE, precision) for name in names]
        slopes = np.stack([residuals(runs, steps, *tried, precision) - left for tried in nudged], axis=1)
        slopes /= math.log(_NUDGE)
        normal, pull = slopes.T @ slopes, slopes.T @ left
        better = None
        for _ in range(_TRIES):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-3), -pull).clip(
                -_FURTHEST, _FURTHEST
            )
            tried = rates
            for name, by in zip(names, move, strict=True):
                tried = _scaled(*tried, name, math.exp(by), precision)
            found = residuals(runs, steps, *tried, precision)
            if found @ found < left @ left:
                better = tried, found
                damping /= 3
                break
            damping *= 5
        if better is None:
            break
        gain = 1 - (better[1] @ better[1]) / (left @ left)
        rates, left = better
        if gain < _LEAST_GAIN:
            break
    return *rates, float(np.mean(left**2))


def _scaled(rates: CardRates, host: Host, name: str, factor: float, precision: Precision) -> tuple[CardRates, Host]:
    if name.endswith("_ns"):
        return rates, replace(host, **{name: round(getattr(host, name) * factor)})
    if name in ("single", "stream", "compute", "knee"):
        products = rates.products[precision]
        products = replace(products, **{name: getattr(products, name) * factor})
        return replace(rates, products=rates.products | {precision: products}), host
    if name == "decode":
        return replace(rates, decode=rates.decode | {precision: rates.decode[precision] * factor}), host
    return replace(rates, **{name: getattr(rates, name) * factor}), host
