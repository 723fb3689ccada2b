"""Recorded runs of `serve.py`, `goodput.py` and `decode.py` on a card, read back: the loads that they were, and what came out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workload import RAMP_S, chat_lengths

from pagewire.simulator.card import Precision

_MEAN_OUTPUT = sum(output for _, output in chat_lengths(4000)) / 4000
_CASE = r"8b {}, (closed|poisson) ([\d.]+)$"
_RATE = r"8b {}, ([\d.]+)/s, seed (\d+)$"
_DECODE = r"8b {0}/{0} (\d+)x"


@dataclass(frozen=True)
class RealRun:
    """One case of a recorded run.

    Attributes:
        label: what it is called.
        kind, amount: closed, with so many streams; poisson, with so many requests a second.
        step_tokens, max_rows, itl_target, ttft_target: the engine's; ms, 0: nothing was promised.
        window, ramp: seconds; 0: the file does not say how long its window was.
        seed: of lengths, prompts and arrivals.
        precision: of weights and KV.
        values: metric → value.
    """

    label: str
    kind: str
    amount: float
    step_tokens: int
    max_rows: int
    values: dict[str, float]
    itl_target: float = 0.0
    ttft_target: float = 0.0
    window: float = 0.0
    ramp: float = RAMP_S
    seed: int = 0
    precision: Precision = "bf16"

    @property
    def seconds(self) -> float:
        """Length of its window; where the file does not say, from how many requests began in it, and how fast they ended."""
        if self.window:
            return self.window
        rate = self.amount if self.kind == "poisson" else self.values["throughput"] / _MEAN_OUTPUT
        return max(1, round(self.values["requests"] / rate))


def real_runs(path: Path, precision: Precision = "bf16") -> Iterator[RealRun]:
    """Cases of a file in one precision, in its order."""
    of_loop, of_rate = re.compile(_CASE.format(precision)), re.compile(_RATE.format(precision))
    tables: dict[tuple[str, str], dict[str, float]] = {}
    for row in _rows(path):
        tables.setdefault((row.get("options", ""), row["case"]), {})[row["metric"]] = row["value"]
    for (options, case), values in tables.items():
        loop, rate = of_loop.match(case), of_rate.match(case)
        if not loop and not rate:
            continue
        settings = tables.get((options, f"8b {precision}"), {})
        step_tokens = int(_option(options, "--step-tokens", settings.get("step_tokens", 8192)))
        kind, amount = ("poisson", float(rate[1])) if rate else (loop[1], float(loop[2]))
        itl_target = _option(options, "--itl-target", settings.get("itl_target", 0))
        label = "" if precision == "bf16" else f"{precision}, "
        label += f"{kind} {amount:g}, steps of {step_tokens}"
        if itl_target:
            label += f", ITL target {itl_target:g} ms"
        yield RealRun(
            label=label + (f", seed {rate[2]}" if rate else ""),
            kind=kind,
            amount=amount,
            step_tokens=step_tokens,
            max_rows=int(_option(options, "--max-rows", settings.get("max_rows", 512))),
            values=values,
            itl_target=itl_target,
            ttft_target=_option(options, "--ttft-target", settings.get("ttft_target", 0)),
            window=_option(options, "--seconds", settings.get("window", 0)),
            ramp=_option(options, "--ramp", settings.get("ramp", RAMP_S)),
            seed=int(rate[2]) if rate else 0,
            precision=precision,
        )


def decode_steps(path: Path, precision: Precision = "bf16") -> dict[int, float]:
    """Streams → mean step, ms."""
    of_decode = re.compile(_DECODE.format(precision))
    return {
        int(found[1]): row["value"]
        for row in _rows(path)
        if row["metric"] == "step" and (found := of_decode.match(row["case"]))
    }


def _rows(path: Path) -> list[dict]:
    """Of a file in `results/`, or of what a script printed with `--json`."""
    text = path.read_text("utf-8")
    try:
        return json.loads(text)["rows"]
    except (json.JSONDecodeError, TypeError, KeyError):
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _option(options: str, name: str, default: float) -> float:
    found = re.search(rf"{name} ([\d.]+)", options)
    return float(found[1]) if found else float(default)
