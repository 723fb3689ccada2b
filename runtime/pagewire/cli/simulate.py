"""`pagewire simulate`: a trace or a drawn load through the scheduler, on a virtual clock and modelled cards."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from pagewire.cli.simulated import NOTHING, check_above_0, deployment_from, describe
from pagewire.errors import ConfigError
from pagewire.simulator.deployment import Run, simulate
from pagewire.simulator.figures import Counting, Summary
from pagewire.simulator.picture import picture
from pagewire.simulator.traces import ClosedLoop, Trace, Workload, chat_lengths, poisson, read_trace

_WINDOWS: Final = 200
_RAMP: Final = 0.25
"""Of a drawn load: the first part of its time does not count."""

_MOST: Final = {"seconds": 1e8, "speed": 1e6, "closed": 100_000, "poisson": 1e6}
"""Three years, and what fits into a virtual clock of 64 bits."""

_ROWS: Final = (
    ("requests", "requests", ""), ("refused", "refused", ""), ("unfinished", "not finished at the end", ""),
    ("seconds", "virtual time counted", "s"), ("steps", "steps", ""), ("throughput", "generated", "tok/s"),
    ("ttft_p50", "TTFT p50", "ms"), ("ttft_p95", "TTFT p95", "ms"), ("ttft_p99", "TTFT p99", "ms"),
    ("itl_p50", "ITL p50", "ms"), ("itl_p95", "ITL p95", "ms"), ("itl_p99", "ITL p99", "ms"), ("itl_max", "ITL max", "ms"),
    ("goodput", "within 250 ms and 12 ms", "req/s"), ("good_share", "of all requests", "%"),
    ("longest_wait", "longest wait for a first token", "s"), ("hit_rate", "prompt tokens found in the cache", "%"),
    ("preemptions", "preemptions", ""), ("recomputed_share", "tokens computed again", "%"),
    ("streams_p50", "running sequences, median", ""), ("streams_max", "running sequences, most", ""),
    ("kv_use", "live tokens ÷ pool, mean", "%"), ("live_share", "live tokens ÷ owned slots", "%"),
    ("owned_share", "owned ÷ pool, most", "%"), ("digest", "digest of all decisions", ""),
)  # fmt: skip


def run(namespace: argparse.Namespace) -> int:
    """Run it, tell it."""
    workload, end_ns, counting = _load(namespace)
    deployment = deployment_from(namespace)
    show = sys.stderr.isatty()
    with tqdm(
        total=round(end_ns / 1e9), unit="s", desc="virtual time", disable=not show, leave=False, file=sys.stderr
    ) as bar:

        def on_progress(now_ns: int) -> None:
            bar.update(min(bar.total, now_ns // 1_000_000_000) - bar.n)

        done = simulate(
            deployment,
            workload,
            window_ns=max(1_000_000, end_ns // _WINDOWS),
            counting=counting,
            on_progress=on_progress,
        )
    title = describe(deployment)
    if namespace.picture is not None:
        _write(namespace.picture, picture(done.figures.windows, title, deployment.block_size))
        print(f"the picture is {namespace.picture}", file=sys.stderr)
    if namespace.json:
        print(json.dumps(_as_json(done, title), allow_nan=False))
    else:
        print(title)
        _print_table(done.summary)
    return 0


def _load(namespace: argparse.Namespace) -> tuple[Workload, int, Counting]:
    """The workload, about when it ends, and what of it counts."""
    given = [name for name in ("trace", "closed", "poisson") if getattr(namespace, name) is not None]
    if len(given) != 1:
        raise ConfigError("name one load: --trace FILE, --closed N or --poisson RATE", field="trace")
    for name in ("seconds", "speed", *(given if given[0] != "trace" else ())):
        check_above_0(namespace, name, _MOST[name])
    if namespace.speed < 1 / _MOST["speed"]:
        raise ConfigError(f"must be at least {1 / _MOST['speed']:g}", field="speed")
    if namespace.requests < 0:
        raise ConfigError("must be at least 0", field="requests")
    if namespace.trace is not None:
        trace = read_trace(namespace.trace, speed=namespace.speed, max_requests=namespace.requests)
        return trace, max(1, trace.end_ns), Counting()
    if namespace.seed < 0:
        raise ConfigError("must be at least 0", field="seed")
    rng = np.random.default_rng(namespace.seed)
    end_ns = int(namespace.seconds * 1e9)
    counting = Counting(int(_RAMP * end_ns), end_ns)
    if namespace.closed is not None:
        return ClosedLoop(chat_lengths(rng), namespace.closed, end_ns), end_ns, counting
    loaded: Trace = poisson(chat_lengths(rng), namespace.poisson, namespace.seconds, rng)
    return loaded, end_ns, counting


def _as_json(done: Run, title: str) -> dict[str, Any]:
    """Numbers that do not exist (a percentile of nothing) are null."""
    return {
        "deployment": title,
        "summary": _finite(dataclasses.asdict(done.summary)),
        "windows": [_finite(dataclasses.asdict(window)) for window in done.figures.windows],
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _print_table(summary: Summary) -> None:
    width = max(len(label) for _, label, _ in _ROWS)
    for name, label, unit in _ROWS:
        value = getattr(summary, name)
        if unit == "%":
            value *= 100
        print(f"{label:{width}}  {_shown(value):>14} {unit}".rstrip())


def _shown(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return NOTHING if math.isnan(value) else f"{value:,.2f}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="picture") from None
