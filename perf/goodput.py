"""Goodput: how many requests a second an engine serves within its promise, and what it does beyond.

    python perf/goodput.py [--json] [--rates 35 40 45 50 55] [--seconds 60] [--ramp 6] [--seeds 0 1 2] [--fp8] [--within S]

Poisson arrivals of chat requests, one engine process that plans by time (`--itl-target 12 --ttft-target 250`), client
processes over ZeroMQ, as in `serve.py`. A rate is within the promise where the p95 of TTFT and the p99 of the gaps between
tokens are, by the median of the seeds; a seed changes lengths, prompts and arrivals. A request that is refused has no first
token: its TTFT is infinite (in JSON: null), so that a rate of which more than one in twenty is refused is never within.

Every rate is run with the first seed before any with the second, and each case is told when it is done: a run that is ended
early has a curve all the same. `--within` ends it before a case that would not be done in that many seconds, start included.
`--device cpu --tiny` shows that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import EngineProcess, Job, engine_process
from report import Report
from serve import Found, add_engine_arguments, config_of, load, model_of, tell_errors, tell_settings
from workload import percentile, poisson_seconds, summary

_CLIENTS_S = 6.0
"""Beside the arrivals themselves: clients start, draw their prompts, and read the last streams to their ends."""
_UNITS = {
    "offered": "req/s", "served": "req/s", "refused": "req/s", "failed": "req/s", "goodput": "req/s", "within_promise": "%",
    "throughput": "tok/s", "step_mean": "ms", "cpu_engine_loop": "%",
    "ttft_p50": "ms", "ttft_p95": "ms", "ttft_p95_served": "ms", "itl_p50": "ms", "itl_p95": "ms", "itl_p99": "ms",
    "itl_max": "ms",
}  # fmt: skip
_OF_SUMMARY = ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "itl_p99", "itl_max", "throughput")
_OF_MODEL = ("step_prediction_error", "step_prediction_bias", "step_prediction_margin")


@dataclass(frozen=True)
class Promise:
    """What each request is promised, ms."""

    ttft: float
    itl: float

    def is_kept(self, ttft_p95: float, itl_p99: float) -> bool:
        """By a rate with these percentiles."""
        return ttft_p95 < self.ttft and itl_p99 < self.itl


def figures(run: Found, promise: Promise) -> dict[str, float]:
    """Of one case: requests that came in the window, by what became of them, a second; latencies, ms."""
    seconds = run.high - run.low
    mine = [row for row in run.rows if run.low <= row.start < run.high]
    refused = sum(row.code == "overloaded" and not row.times for row in mine)
    served = [row for row in mine if not row.error and sum(row.counts) == row.want]
    found = summary(run.rows, run.low, run.high, ttft_ms=promise.ttft, itl_ms=promise.itl)
    out = {
        "offered": len(mine) / seconds,
        "served": len(served) / seconds,
        "refused": refused / seconds,
        "failed": (len(mine) - len(served) - refused) / seconds,
        "goodput": found["within_slo"] * len(mine) / seconds,
        "within_promise": 100 * found["within_slo"],
        "ttft_p95_served": percentile([1e3 * (row.times[0] - row.start) for row in served], 95),
    }
    out |= {name: found[name] for name in _OF_SUMMARY}
    answer = run.answers[0]
    if steps := answer.stats.get("steps_total"):
        out["step_mean"] = 1e3 * seconds / steps
    out |= {name: answer.state[name] for name in _OF_MODEL if name in answer.state}
    return out | {"cpu_engine_loop": 100 * run.cpu_engine_loop}


@dataclass
class Curve:
    """What was found so far: rate → figures of each seed that was run."""

    promise: Promise
    cases: dict[float, list[dict[str, float]]]

    def median(self, rate: float, metric: str) -> float:
        """Over the seeds; of an even number the worse of the two in the middle."""
        return statistics.median_high([case[metric] for case in self.cases[rate]])

    def highest(self, *, every_seed: bool = False) -> float:
        """The highest rate up to which all that were run are within the promise; 0 where the lowest is not."""
        best = 0.0
        for rate in sorted(self.cases):
            if every_seed:
                kept = all(self.promise.is_kept(case["ttft_p95"], case["itl_p99"]) for case in self.cases[rate])
            else:
                kept = self.promise.is_kept(self.median(rate, "ttft_p95"), self.median(rate, "itl_p99"))
            if not kept:
                break
            best = rate
        return best


def plan_of(rates: list[float], seeds: list[int]) -> Iterator[tuple[int, float]]:
    """Cases in the order in which they are run: the whole curve with each seed."""
    for seed in seeds:
        for rate in sorted(rates):
            yield seed, rate


def run_all(report: Report, label: str, engine: EngineProcess, given: argparse.Namespace, until: float) -> Curve:
    """As many cases as there is time for."""
    curve = Curve(Promise(given.ttft_target, given.itl_target), {})
    needed = poisson_seconds(given.ramp, given.seconds) + _CLIENTS_S
    base = {"kind": "poisson", "endpoint": engine.endpoint, "vocab_size": model_of(given)[0]["vocab_size"]}
    plan = list(plan_of(given.rates, given.seeds))
    for number, (seed, rate) in enumerate(plan):
        begun = time.perf_counter()
        if begun + needed > until:
            print(f"out of time: {len(plan) - number} of {len(plan)} cases are left out", file=sys.stderr, flush=True)
            break
        case = f"{label}, {rate:g}/s, seed {seed}"
        job = Job(**base, rate=rate, seconds=given.seconds, ramp=given.ramp, seed=seed, namespace=case)
        run = load(engine, job, given.clients)
        found = figures(run, curve.promise)
        for metric, value in found.items():
            report.add(case, metric, value, _UNITS.get(metric, ""))
        if not report.as_json:
            short = ("served", "refused", "ttft_p95", "itl_p99", "within_promise")
            print(f"{case}: " + ", ".join(f"{name} {found[name]:.4g} {_UNITS[name]}" for name in short), flush=True)
        tell_errors(case, run.rows)
        curve.cases.setdefault(rate, []).append(found)
        needed = max(needed, time.perf_counter() - begun)
    return curve


def conclude(report: Report, label: str, curve: Curve) -> None:
    """The medians of each rate, and the highest within the promise."""
    shown = ("served", "refused", "goodput", "within_promise", "ttft_p50", "ttft_p95", "itl_p50", "itl_p99")
    for rate in sorted(curve.cases):
        for metric in shown:
            report.add(f"{label}, {rate:g}/s", metric, curve.median(rate, metric), _UNITS[metric])
        report.add(f"{label}, {rate:g}/s", "seeds", len(curve.cases[rate]))
    best = curve.highest()
    report.add(label, "rate", best, "req/s")
    report.add(label, "rate_every_seed", curve.highest(every_seed=True), "req/s")
    if best:
        report.add(label, "ttft_p95", curve.median(best, "ttft_p95"), "ms")
        report.add(label, "itl_p99", curve.median(best, "itl_p99"), "ms")
        report.add(label, "seeds", len(curve.cases[best]))


def main() -> None:
    """All rates with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, step_tokens=1024)
    parser.add_argument("--rates", type=float, nargs="+", default=[35, 40, 45, 50, 55], help="requests a second")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="0: the arrivals of `serve.py`")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a window")
    parser.add_argument("--itl-target", type=float, default=12.0, help="ms between tokens that are promised")
    parser.add_argument("--ttft-target", type=float, default=250.0, help="ms to the first token that are promised")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds for the whole; default: no limit")
    given = parser.parse_args()
    begun = time.perf_counter()
    report = Report("goodput", as_json=given.json)
    model, label = model_of(given)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        with engine_process(config_of(Path(folder), given)) as engine:
            report.add(label, "engine_ready", time.perf_counter() - begun, "s")
            tell_settings(report, label, given)
            curve = run_all(report, label, engine, given, begun + given.within)
    conclude(report, label, curve)
    report.finish()


if __name__ == "__main__":
    main()
