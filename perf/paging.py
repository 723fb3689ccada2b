"""What paging brings: contiguous KV, paged bf16, paged FP8, and prompts on cards of their own, in the simulator.

    python perf/paging.py [--json] [--seconds 30]

The same scheduler, pool and step model for all. Contiguous allocation reserves the longest sequence for each (one block a
sequence). `streams`, `kv_use` (live tokens ÷ pool), `live_tokens_share` (÷ owned slots) and `owned_blocks_share` (owned ÷ pool)
are of a load that never lets up: more clients than fit, prompts of 400 tokens and answers of 1,350 on average. TTFT and ITL
are of chat requests (290 and 230 tokens), so many open at any time, in steps of three times as many tokens, 384 at least.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from report import Report

from pagewire.config import SchedulerConfig
from pagewire.simulator.card import H100, H200, LLAMA_8B, LLAMA_70B
from pagewire.simulator.deployment import Deployment, simulate
from pagewire.simulator.figures import Counting, Summary
from pagewire.simulator.traces import ClosedLoop, chat_lengths

_MEAN_LENGTH = 800
"""Of a sequence that runs, a little less than it is: there are to be more clients than fit."""
_STREAMS = (64, 256, 512)


def deployments() -> Iterator[tuple[str, Deployment]]:
    """Cases: one card with an 8B, eight cards with a 70B."""
    for rates, model, gpus, longest in (
        (H200, LLAMA_8B, 1, 8192),
        (H200, LLAMA_70B, 8, 16384),
        (H100, LLAMA_70B, 8, 16384),
    ):
        where = f"{model.name} on {gpus} {rates.name}"
        paged = Deployment(model, rates, gpus=gpus, max_model_len=longest)
        fp8 = replace(paged, weights="fp8", kv="fp8")
        yield f"{where}: contiguous bf16", replace(paged, allocation="contiguous")
        yield f"{where}: paged bf16", paged
        yield f"{where}: paged fp8", fp8
        apart, others = (gpus // 2, gpus // 2) if gpus > 1 else (1, 1)
        note = "" if gpus > 1 else " (a second card)"
        yield f"{where}: paged fp8, {others} prefill{note}", replace(fp8, gpus=apart, prefill_gpus=others)


def long_lengths(rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """(prompt, output) tokens, 400 and 1,350 on average, log-normal."""
    while True:
        prompt, output = rng.lognormal(np.log(300), 0.75), rng.lognormal(np.log(1200), 0.5)
        yield int(min(3000, max(16, prompt))), int(min(4096, max(16, output)))


def saturated(deployment: Deployment, seconds: float) -> Summary:
    """Memory under a load that never lets up."""
    card = deployment.card(prefills=False)
    fitting = max(1, (deployment.kv_tokens or card.kv_tokens) // _MEAN_LENGTH)
    # As many rows as could be: memory is to be what bounds, not their number.
    rows = min(8192, fitting)
    scheduler = SchedulerConfig(max_rows=rows, max_step_tokens=max(rows, 2048), max_waiting=1_000_000)
    end_ns = int(seconds * 1e9)
    loop = ClosedLoop(long_lengths(np.random.default_rng(1)), fitting, end_ns)
    counting = Counting(end_ns // 2, end_ns)
    # Windows of the second half alone: until then the pool fills.
    run = simulate(
        replace(deployment, scheduler=scheduler), loop, window_ns=end_ns // 60, until_ns=end_ns, counting=counting
    )
    del run.figures.windows[: len(run.figures.windows) // 2]
    return run.summary


def chatting(deployment: Deployment, streams: int, seconds: float) -> Summary:
    """Latencies of chat requests."""
    end_ns = int(seconds * 1e9)
    loop = ClosedLoop(chat_lengths(np.random.default_rng(0)), streams, end_ns)
    config = SchedulerConfig(max_rows=streams, max_step_tokens=max(384, 3 * streams), max_waiting=1_000_000)
    deployment = replace(deployment, scheduler=config)
    counting = Counting(end_ns // 3, end_ns)
    return simulate(deployment, loop, window_ns=end_ns // 60, until_ns=end_ns, counting=counting).summary


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--seconds", type=float, default=30.0, help="virtual time of a chat load")
    parser.add_argument("--saturated", type=float, default=400.0, help="virtual time of the load that fills memory")
    given = parser.parse_args()
    report = Report("simulate", as_json=given.json)
    for case, deployment in deployments():
        full = saturated(deployment, given.saturated)
        report.add(case, "streams", full.streams_p50)
        report.add(case, "throughput", full.throughput, "tok/s")
        report.add(case, "kv_use", 100 * full.kv_use, "%")
        memory = "memory at saturation" if case == "8b on 1 h200: paged bf16" else case
        report.add(memory, "live_tokens_share", 100 * full.live_share, "%")
        report.add(memory, "owned_blocks_share", 100 * full.owned_share, "%")
        report.add(case, "recomputed_share", 100 * full.recomputed_share, "%")
        for streams in _STREAMS:
            found = chatting(deployment, streams, given.seconds)
            report.add(f"{case}, {streams} chats", "throughput", found.throughput, "tok/s")
            report.add(f"{case}, {streams} chats", "ttft_p95", found.ttft_p95, "ms")
            report.add(f"{case}, {streams} chats", "itl_p99", found.itl_p99, "ms")
    report.finish()


if __name__ == "__main__":
    main()
