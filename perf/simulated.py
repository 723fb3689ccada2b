"""Simulated beside real: the loads of a recorded run of `serve.py` or `goodput.py`, in the simulator; and the modelled card's fit.

    python perf/simulated.py [--json] [--fp8] [--runs FILE] [--decode FILE] [--hold-out [LABEL …]] [--fit-on FILE FILE] [--fit]

FILE: what `serve.py --json` printed, or a file in `results/` (which says for each row with which options it was run). Lengths,
order, arrivals, ramp and window are those of the real run; so are rows, tokens of a step and promises. `error` is simulated ÷
real − 1; `against the card` has the worst of all runs, and the share of percentiles that are within 10 %. `--decode` names a
recorded run of `decode.py`, whose steps are compared, too.

What the card's rates were fitted to, they cannot be checked with. So, from rates of single kernels on (`fit.UNFITTED`):

`--hold-out`           each run (or those named) is simulated on a card that was fitted to all the others of the file, and to
                       the decode steps;
`--fit-on RUNS DECODE` all of `--runs` on a card that was fitted to other files, and whose decode rates were then fitted to the
                       steps of `--decode`, unless they are the same: for runs of a later commit, whose kernels are others, or
                       for other seeds. Nothing of `--runs` is used.

`--fit` searches the rates of `CardRates` and `Host` that come closest to both files, from the present ones on, and prints them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from fit import DECODE_RATES, METRICS, UNFITTED, Rates, decode_ms, fit, modelled, simulated
from recorded import RealRun, decode_steps, real_runs
from report import Report

from pagewire.simulator.card import H200, ModelledCard, Precision
from pagewire.simulator.simulation import Host

_RESULTS = Path(__file__).with_name("results")
_NEAR = 0.1


class Comparison:
    """Simulated beside real, run by run; the worst errors, and how many percentiles are near."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.worst = {"ttft": 0.0, "itl": 0.0}
        self.num_near = self.num_all = 0

    def add(self, run: RealRun, rates: Rates) -> None:
        """One run, on a card of these rates."""
        found = simulated(run, *rates, run.seconds)
        for metric in METRICS:
            if not run.values.get(metric):  # not in the file, or infinite
                continue
            kind, _, percentile = metric.partition("_")
            unit = "ms" if percentile else "tok/s"
            value, real = getattr(found, metric), run.values[metric]
            error = 100 * (value / real - 1)
            self._report.add(run.label, f"{metric}, real", real, unit)
            self._report.add(run.label, f"{metric}, simulated", value, unit)
            self._report.add(run.label, f"{metric}, error", error, "%")
            if percentile:
                self.worst[kind] = max(self.worst[kind], abs(error))
                self.num_near += abs(error) <= 100 * _NEAR
                self.num_all += 1

    def conclude(self, case: str) -> None:
        """The worst of all runs."""
        self._report.add(case, "percentiles", self.num_all)
        self._report.add(case, "within_10_percent", 100 * self.num_near / max(1, self.num_all), "%")
        self._report.add(case, "ttft_error", self.worst["ttft"], "%")
        self._report.add(case, "itl_error", self.worst["itl"], "%")


def compare_steps(report: Report, steps: dict[int, float], card: ModelledCard) -> None:
    """Steps of `decode.py`."""
    for streams, ms in steps.items():
        report.add(f"decode {streams}", "step, real", ms, "ms")
        report.add(f"decode {streams}", "step, error", 100 * (decode_ms(card, streams) / ms - 1), "%")


def held_out(
    runs: list[RealRun], steps: dict[int, float], labels: list[str], precision: Precision
) -> Iterator[tuple[RealRun, Rates]]:
    """Each run, or those of these labels, and rates fitted to all the others."""
    for out in runs:
        if labels and out.label not in labels:
            continue
        others = [run for run in runs if run is not out]
        rates, host, left = fit(others, steps, (UNFITTED, Host()), precision=precision)
        print(
            f"without {out.label}: root of the mean square {100 * math.sqrt(left):.1f} %", file=sys.stderr, flush=True
        )
        yield out, (rates, host)


def fitted_elsewhere(runs: Path, decode: Path, steps: dict[int, float], precision: Precision) -> Rates:
    """Fitted to `runs` and `decode`; what decode alone tells, then to `steps`."""
    before = list(real_runs(runs, precision)), decode_steps(decode, precision)
    rates, host, left = fit(*before, (UNFITTED, Host()), precision=precision)
    print(f"root of the mean square: {100 * math.sqrt(left):.1f} %", file=sys.stderr)
    if before[1] != steps:
        rates, host, left = fit([], steps, (rates, host), DECODE_RATES, precision)
        print(f"of the decode steps, then: {100 * math.sqrt(left):.1f} %", file=sys.stderr)
    return rates, host


def main() -> None:
    """Compare, hold out, or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument(
        "--runs", type=Path, default=_RESULTS / "2026-11-29-serve-h200.json", help="of serve.py, goodput.py"
    )
    parser.add_argument("--decode", type=Path, default=_RESULTS / "2026-11-29-decode-h200.json", help="of decode.py")
    parser.add_argument("--hold-out", nargs="*", metavar="LABEL", help="fit to all runs but the one that is compared")
    parser.add_argument("--fit-on", type=Path, nargs=2, metavar=("RUNS", "DECODE"), help="fit to other files")
    parser.add_argument("--fit", action="store_true", help="search rates that come closer")
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="runs with weights and KV in FP8 instead of bf16: results/2026-11-30-goodput-4-h200.json, -decode-2-h200.json",
    )
    given = parser.parse_args()
    precision: Precision = "fp8" if given.fp8 else "bf16"
    runs, steps = list(real_runs(given.runs, precision)), decode_steps(given.decode, precision)
    if not runs:
        parser.error(f"{given.runs} has no runs in {precision}")
    if unknown := set(given.hold_out or ()) - {run.label for run in runs}:
        parser.error(f"{given.runs} has no {min(unknown)!r}, but {', '.join(repr(run.label) for run in runs)}")
    if given.fit:
        rates, host, left = fit(runs, steps, precision=precision)
        print(f"{rates}\n{host}\nroot of the mean square: {100 * math.sqrt(left):.1f} %")
        return
    report = Report("simulate", as_json=given.json)
    comparison = Comparison(report)
    if given.hold_out is not None:
        for run, rates in held_out(runs, steps, given.hold_out, precision):
            comparison.add(run, rates)
        comparison.conclude("against the card, held out")
    else:
        rates = fitted_elsewhere(*given.fit_on, steps, precision) if given.fit_on else (H200, Host())
        for run in runs:
            comparison.add(run, rates)
        compare_steps(report, steps, modelled(rates[0], precision))
        comparison.conclude("against the card, held out" if given.fit_on else "against the card")
    report.finish()


if __name__ == "__main__":
    main()
