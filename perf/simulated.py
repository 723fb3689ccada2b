"""Simulated beside real: the loads of a recorded run of `serve.py`, in the simulator; and the modelled card's fit to them.

    python perf/simulated.py [--json] [--runs FILE] [--decode FILE] [--fit]

FILE: what `serve.py --json` printed, or a file in `results/` (which says for each row with which options it was run). Lengths,
order, arrivals, ramp and window are those of the real run; so are rows and tokens of a step. `error` is simulated ÷ real − 1;
`against the card` has the worst of all runs, and the share of percentiles that are within 10 %.
`--decode` names a recorded run of `decode.py`, whose steps are compared, too. `--fit` searches the rates of `CardRates` and `Host`
that come closest to both files, and prints them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from report import Report
from workload import RAMP_S, chat_lengths, poisson_requests, poisson_seconds

from pagewire.config import SchedulerConfig
from pagewire.simulator.card import H200, LLAMA_8B, CardRates, ModelledCard, StepWork
from pagewire.simulator.deployment import Deployment, simulate
from pagewire.simulator.figures import Counting, Summary
from pagewire.simulator.simulation import Host
from pagewire.simulator.traces import Arrival, ClosedLoop, Trace

_RESULTS = Path(__file__).with_name("results")
_METRICS = {
    "ttft_p50": "ttft",
    "ttft_p95": "ttft",
    "itl_p50": "itl",
    "itl_p95": "itl",
    "itl_p99": "itl",
    "throughput": "",
}
_MEAN_OUTPUT = sum(output for _, output in chat_lengths(4000)) / 4000
_CASE = re.compile(r"8b bf16, (closed|poisson) ([\d.]+)$")
_DECODE = re.compile(r"8b bf16/bf16 (\d+)x")
_NEAR = 0.1
_DECODE_CONTEXT = 612
"""Prompts of 512 tokens and the middle of 200 generated."""


@dataclass(frozen=True)
class RealRun:
    """One case of a recorded run."""

    label: str
    kind: str
    amount: float
    step_tokens: int
    max_rows: int
    values: dict[str, float]

    @property
    def seconds(self) -> float:
        """Length of its window, which files do not say: from how many requests began in it, and how fast they ended."""
        rate = self.amount if self.kind == "poisson" else self.values["throughput"] / _MEAN_OUTPUT
        return max(1, round(self.values["requests"] / rate))


def real_runs(path: Path) -> Iterator[RealRun]:
    """Cases of a file, in its order."""
    text = path.read_text("utf-8")
    try:
        rows = json.loads(text)["rows"]
    except (json.JSONDecodeError, TypeError):
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    tables: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        tables.setdefault((row.get("options", ""), row["case"]), {})[row["metric"]] = row["value"]
    for (options, case), values in tables.items():
        if found := _CASE.match(case):
            settings = tables.get((options, "8b bf16"), {})
            step_tokens = int(_option(options, "--step-tokens", settings.get("step_tokens", 8192)))
            max_rows = int(_option(options, "--max-rows", 512))
            label = f"{found[1]} {found[2]}, steps of {step_tokens}"
            yield RealRun(label, found[1], float(found[2]), step_tokens, max_rows, values)


def _option(options: str, name: str, default: float) -> float:
    found = re.search(rf"{name} ([\d.]+)", options)
    return float(found[1]) if found else default


def decode_steps(path: Path) -> dict[int, float]:
    """Streams → mean step, ms."""
    rows = json.loads(path.read_text("utf-8"))["rows"]
    return {
        int(found[1]): row["value"] for row in rows if row["metric"] == "step" and (found := _DECODE.match(row["case"]))
    }


def simulated(run: RealRun, rates: CardRates, host: Host, seconds: float) -> Summary:
    """The same load on a modelled card."""
    deployment = Deployment(
        LLAMA_8B, rates, host=host, max_model_len=8192,
        scheduler=SchedulerConfig(max_rows=run.max_rows, max_step_tokens=run.step_tokens, max_waiting=100_000),
    )  # fmt: skip
    low, high = int(RAMP_S * 1e9), int((RAMP_S + seconds) * 1e9)
    lengths = itertools.cycle(chat_lengths(4000))
    workload: ClosedLoop | Trace
    if run.kind == "closed":
        workload = ClosedLoop(lengths, int(run.amount), high)
    else:
        workload = Trace(_poisson(run.amount, poisson_seconds(RAMP_S, seconds)))
    return simulate(deployment, workload, window_ns=10**9, counting=Counting(low, high)).summary


def _poisson(rate: float, seconds: float) -> Iterator[Arrival]:
    for number, request in enumerate(poisson_requests(chat_lengths(4000), rate, seconds, LLAMA_8B.vocab_size)):
        yield Arrival(int(request.after * 1e9), number, len(request.prompt_ids), request.max_tokens)


# ---- fit -----------------------------------------------------------------------------------------------------------------


def loss(runs: list[RealRun], steps: dict[int, float], rates: CardRates, host: Host) -> float:
    """Mean of squared logarithms of simulated ÷ real."""
    terms = []
    card = ModelledCard(LLAMA_8B, rates)
    for streams, ms in steps.items():
        work = StepWork(streams, streams * _DECODE_CONTEXT, 0, streams)
        terms.append(math.log(1e3 * card.seconds(work) / ms) ** 2)
    for run in runs:
        found = simulated(run, rates, host, run.seconds)
        terms += [math.log(getattr(found, metric) / run.values[metric]) ** 2 for metric in _METRICS]
    return sum(terms) / len(terms)


def fit(runs: list[RealRun], steps: dict[int, float]) -> tuple[CardRates, Host, float]:
    """Coordinate search: each rate a few percent up and down, as long as that helps."""
    rates, host = H200, Host()
    best = loss(runs, steps, rates, host)
    for change in (1.15, 1.06, 1.02):
        for _ in range(2):
            for name in ("stream", "compute", "knee", "decode", "elementwise_token_s", "step_s", "sample_s", "seen_ns"):
                for factor in (change, 1 / change):
                    tried = _scaled(rates, host, name, factor)
                    found = loss(runs, steps, *tried)
                    if found < best:
                        best, (rates, host) = found, tried
                        break
    return rates, host, best


def _scaled(rates: CardRates, host: Host, name: str, factor: float) -> tuple[CardRates, Host]:
    if name.endswith("_ns"):
        return rates, replace(host, **{name: round(getattr(host, name) * factor)})
    if name in ("stream", "compute", "knee"):
        products = rates.products["bf16"]
        products = replace(products, **{name: getattr(products, name) * factor})
        return replace(rates, products=rates.products | {"bf16": products}), host
    if name == "decode":
        return replace(rates, decode=rates.decode | {"bf16": rates.decode["bf16"] * factor}), host
    return replace(rates, **{name: getattr(rates, name) * factor}), host


# ---- report --------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Compare, or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--runs", type=Path, default=_RESULTS / "2026-11-29-serve-h200.json", help="of serve.py")
    parser.add_argument("--decode", type=Path, default=_RESULTS / "2026-11-29-decode-h200.json", help="of decode.py")
    parser.add_argument("--fit", action="store_true", help="search rates that come closer")
    given = parser.parse_args()
    runs, steps = list(real_runs(given.runs)), decode_steps(given.decode)
    if given.fit:
        rates, host, left = fit(runs, steps)
        print(f"{rates}\n{host}\nroot of the mean square: {100 * math.sqrt(left):.1f} %")
        return
    report = Report("simulate", as_json=given.json)
    worst = {"ttft": 0.0, "itl": 0.0}
    num_near = num_all = 0
    for run in runs:
        found = simulated(run, H200, Host(), run.seconds)
        for metric, kind in _METRICS.items():
            unit = "ms" if kind else "tok/s"
            value, real = getattr(found, metric), run.values[metric]
            report.add(run.label, f"{metric}, real", real, unit)
            report.add(run.label, f"{metric}, simulated", value, unit)
            report.add(run.label, f"{metric}, error", 100 * (value / real - 1), "%")
            if kind:
                worst[kind] = max(worst[kind], abs(100 * (value / real - 1)))
                num_near += abs(value / real - 1) <= _NEAR
                num_all += 1
    card = ModelledCard(LLAMA_8B, H200)
    for streams, ms in steps.items():
        step = 1e3 * card.seconds(StepWork(streams, streams * _DECODE_CONTEXT, 0, streams))
        report.add(f"decode {streams}", "step, real", ms, "ms")
        report.add(f"decode {streams}", "step, error", 100 * (step / ms - 1), "%")
    report.add("against the card", "within_10_percent", 100 * num_near / num_all, "%")
    report.add("against the card", "ttft_error", worst["ttft"], "%")
    report.add("against the card", "itl_error", worst["itl"], "%")
    report.finish()


if __name__ == "__main__":
    main()
