"""One way for every benchmark to report: a table for people, JSON lines for machines, targets beside the figures.

    parser = argparse.ArgumentParser()
    Report.arguments(parser)
    args = parser.parse_args()
    report = Report("radix")
    report.add("match, full hit", "time_p50", 21.4, "µs")
    report.finish()

Targets stand in `targets.toml` under bench, case and metric; what has none there is reported without one. A missed target is
a figure like any other: it does not change the exit code, since machines differ and a benchmark is read, not passed.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

TARGETS = Path(__file__).with_name("targets.toml")


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one figure; `unit` empty where the figure is a ratio or a count."""

    bound: float
    is_max: bool
    unit: str = ""

    def is_met(self, value: float) -> bool:
        """NaN meets nothing."""
        return value <= self.bound if self.is_max else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.is_max else '≥'} {_figure(self.bound)}"


class Report:
    """Collects the figures of one benchmark.

    Args:
        bench: first key into the targets; by custom the script's name.
        as_json: None: as the command line says (`--json`).
        targets: another file of targets.
    """

    def __init__(self, bench: str, *, as_json: bool | None = None, targets: Path = TARGETS) -> None:
        self.bench = bench
        self.as_json = "--json" in sys.argv[1:] if as_json is None else as_json
        self._targets = load_targets(targets).get(bench, {})
        self._rows: list[tuple[str, str, float | None, str, Target | None, bool | None]] = []

    @staticmethod
    def arguments(parser) -> None:
        """Adds `--json` to an `argparse` parser."""
        parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")

    def add(self, case: str, metric: str, value: float | None, unit: str = "") -> bool | None:
        """One figure; True or False: its target is met or not, None: it has none, or there is no value.

        In JSON it is printed at once, so that a run that is cut short keeps what it had.

        Raises:
            ValueError: the target is in another unit.
        """
        target = self._targets.get(case, {}).get(metric)
        if target and target.unit and target.unit != unit:
            raise ValueError(f"{self.bench}.{case}.{metric} is given in {unit!r}, its target in {target.unit!r}")
        value = None if value is None else float(value)
        met = None if target is None or value is None else target.is_met(value)
        self._rows.append((case, metric, value, unit, target, met))
        if self.as_json:
            print(json.dumps(self._row(*self._rows[-1]), ensure_ascii=False, allow_nan=False), flush=True)
        return met

    def finish(self) -> None:
        """Print the table (in JSON, everything is out already)."""
        if self.as_json:
            return
        header = ("case", "metric", "value", "unit", "target", "met")
        lines = [header]
        for case, metric, value, unit, target, met in self._rows:
            verdict = "" if met is None else "yes" if met else "NO"
            shown = "–" if value is None else _figure(value)
            lines.append((case, metric, shown, unit, str(target) if target else "", verdict))
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        print(f"\n{self.bench}")
        previous = ""
        for number, line in enumerate(lines):
            cells = [
                f"{c:>{w}}" if i in (2, 4) else f"{c:<{w}}" for i, (c, w) in enumerate(zip(line, widths, strict=True))
            ]
            if number and line[0] == previous:
                cells[0] = " " * widths[0]
            previous = line[0]
            print("  ".join(cells).rstrip())
            if number == 0:
                print("  ".join("─" * w for w in widths))
        sys.stdout.flush()

    def _row(self, case, metric, value, unit, target, met) -> dict[str, object]:
        finite = value is not None and math.isfinite(value)
        bound = None if target is None else {"max" if target.is_max else "min": target.bound}
        return {
            "bench": self.bench,
            "case": case,
            "metric": metric,
            "value": value if finite else None,
            "unit": unit,
            "target": bound,
            "met": met,
        }


def load_targets(path: Path = TARGETS) -> dict[str, dict[str, dict[str, Target]]]:
    """All targets: bench → case → metric.

    Raises:
        ValueError: an entry is not `{ max | min = number, unit = "…" }`.
    """
    with path.open("rb") as file:
        table = tomllib.load(file)
    return {
        bench: {
            case: {metric: _target(f"{bench}.{case}.{metric}", entry) for metric, entry in metrics.items()}
            for case, metrics in cases.items()
        }
        for bench, cases in table.items()
    }


def _target(where: str, entry: dict[str, object]) -> Target:
    bounds = [key for key in ("max", "min") if key in entry]
    if len(bounds) != 1 or set(entry) - {"max", "min", "unit"}:
        raise ValueError(f"target {where}: needs one of max and min, and at most a unit; has {entry}")
    return Target(float(entry[bounds[0]]), bounds[0] == "max", str(entry.get("unit", "")))


def _figure(value: float) -> str:
    """Four significant digits, thousands separated."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
