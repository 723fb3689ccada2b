"""A trace through the very scheduler on a virtual clock: how long an hour takes, and what its prefix cache finds.

    python perf/replay.py --trace FILE [FILE …] [--json] [--model 8b] [--gpus 8] [--fp8] [--step-tokens 2048]

FILE: Azure's CSV or Mooncake's JSON lines (see `pagewire simulate --help`). Each is replayed as it arrived, on modelled cards.
`digest` is of every decision: which step, when, whose tokens, into which blocks; run twice, it is the same.

`hit_rate_ratio` sets the hit rate beside the best that any eviction could do in the same pool with the same admissions, which
takes knowing the future (Belady). The cases with a pool's size are the tree alone, one prompt after the other.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from report import Report

from pagewire.config import SchedulerConfig
from pagewire.simulator.card import CARDS, MODELS
from pagewire.simulator.deployment import Deployment, simulate
from pagewire.simulator.eviction import Use, optimal_hit_tokens, parts_of, tree_hit_tokens, uses_of
from pagewire.simulator.traces import Trace, read_trace

_WINDOW_NS = 10_000_000_000


def replay(report: Report, path: Path, given: argparse.Namespace) -> None:
    """One trace."""
    case = path.stem
    trace = read_trace(path, max_requests=given.requests)
    precision = "fp8" if given.fp8 else "bf16"
    deployment = Deployment(
        MODELS[given.model], CARDS[given.card], gpus=given.gpus, weights=precision, kv=precision,
        kv_tokens=given.kv_tokens,
        scheduler=SchedulerConfig(
            max_rows=min(512, given.step_tokens), max_step_tokens=given.step_tokens, max_waiting=1_000_000,
            itl_target_ms=given.itl_target,
        ),
    )  # fmt: skip
    begun, begun_cpu = time.perf_counter(), time.process_time()
    run = simulate(deployment, trace, window_ns=_WINDOW_NS)
    report.add(case, "time", time.perf_counter() - begun, "s")
    report.add(case, "cpu", time.process_time() - begun_cpu, "s")
    found, scheduler = run.summary, run.scheduler
    report.add(case, "virtual_time", found.seconds, "s")
    for name, unit in (
        ("requests", ""), ("refused", ""), ("unfinished", ""), ("steps", ""), ("throughput", "tok/s"), ("ttft_p50", "ms"),
        ("ttft_p95", "ms"), ("itl_p50", "ms"), ("itl_p99", "ms"), ("longest_wait", "s"), ("preemptions", ""),
    ):  # fmt: skip
        report.add(case, name, getattr(found, name), unit)
    report.add(case, "recomputed_share", 100 * found.recomputed_share, "%")
    report.add(case, "pool", scheduler.memory.num_usable * scheduler.memory.block_size, "tok")
    if any(arrival.prefix_ids for arrival in trace):
        report.add(case, "hit_rate", 100 * found.hit_rate, "%")
        pool = scheduler.memory.num_usable * scheduler.memory.block_size
        best = optimal_hit_tokens(uses_of(run.figures.served, deployment.block_size), pool)
        best_rate = best / scheduler.admission.num_prompt_tokens
        report.add(case, "hit_rate_optimal", 100 * best_rate, "%")
        report.add(case, "hit_rate_ratio", found.hit_rate / best_rate)
        for size in given.pools:
            pools(report, f"{case}, pool of {size / 1e6:g}M tokens", trace, size)
    print(f"{case}: digest {found.digest}", file=sys.stderr if report.as_json else sys.stdout)


def pools(report: Report, case: str, trace: Trace, size: int) -> None:
    """The tree alone beside the optimum."""
    total = sum(arrival.num_prompt for arrival in trace)
    found = tree_hit_tokens(trace, size) / total
    uses = [Use(i, i, parts_of(arrival, 16), arrival.num_prompt) for i, arrival in enumerate(trace)]
    best = optimal_hit_tokens(uses, size) / total
    report.add(case, "hit_rate", 100 * found, "%")
    report.add(case, "hit_rate_optimal", 100 * best, "%")
    report.add(case, "hit_rate_ratio", found / best)


def main() -> None:
    """All traces given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--trace", type=Path, nargs="+", required=True, help="trace files")
    parser.add_argument("--model", choices=sorted(MODELS), default="8b")
    parser.add_argument("--card", choices=sorted(CARDS), default="h200")
    parser.add_argument("--gpus", type=int, default=8, help="cards of the group")
    parser.add_argument("--fp8", action=argparse.BooleanOptionalAction, default=True, help="weights and KV in FP8")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of a step at most")
    parser.add_argument("--itl-target", type=float, default=0.0, help="ms; steps are planned by time; 0: by tokens")
    parser.add_argument("--kv-tokens", type=int, default=0, help="size of the pool; 0: what fits on the cards")
    parser.add_argument("--requests", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--pools", type=int, nargs="*", default=[2_000_000, 8_000_000, 16_000_000, 32_000_000],
                        help="sizes for the tree alone, tokens")  # fmt: skip
    given = parser.parse_args()
    report = Report("replay", as_json=given.json)
    for path in given.trace:
        replay(report, path, given)
    report.finish()


if __name__ == "__main__":
    main()
