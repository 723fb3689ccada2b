"""`pagewire plan`: this model, these cards, this context: how many streams, which TTFT and ITL, how much KV."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any, Final

from tqdm import tqdm

from pagewire.cli.simulated import NOTHING, check_above_0, deployment_from, describe
from pagewire.simulator.capacity import Capacity, Level, capacity

_MOST: Final = 10**9
"""Tokens, and milliseconds."""


def run(namespace: argparse.Namespace) -> int:
    """Try numbers of streams, say what each brings."""
    for name in ("context", "output", "ttft", "itl"):
        check_above_0(namespace, name, _MOST)
    vars(namespace).setdefault("scheduler.itl_target_ms", namespace.itl)
    deployment = deployment_from(namespace)
    with tqdm(unit="level", disable=not sys.stderr.isatty(), leave=False, file=sys.stderr) as bar:

        def on_level(streams: int, fitting: int) -> None:
            bar.set_description(f"{streams} of {fitting} streams")
            bar.update()

        found = capacity(
            deployment,
            context=namespace.context,
            output=namespace.output,
            ttft_ns=int(namespace.ttft * 1e6),
            itl_ns=int(namespace.itl * 1e6),
            on_level=on_level,
        )
    title = describe(deployment)
    if namespace.json:
        print(json.dumps(_as_json(found, title), allow_nan=False))
    else:
        _print(found, title, namespace, max_rows=deployment.scheduler.max_rows)
    return 0


def _print(found: Capacity, title: str, namespace: argparse.Namespace, *, max_rows: int) -> None:
    print(title)
    print(f"weights            {found.weight_bytes / 1e9:,.1f} GB")
    print(f"KV memory          {found.kv_tokens:,} tokens, {found.kv_tokens * found.kv_token_bytes / 1e9:,.1f} GB")
    print(f"KV of a token      {found.kv_token_bytes:,} bytes; of {found.context:,}: {_kv(found, 1):,.2f} GB")
    bounds = f"memory holds {found.in_memory:,}, --max-rows is {max_rows:,}"
    print(f"streams that fit   {found.fitting:,} of {found.context:,} tokens: {bounds}")
    print(f"a prompt alone     {found.prefill_ms:,.0f} ms for {namespace.context - namespace.output:,} tokens")
    print()
    print("streams  decode ms  TTFT p95 ms  ITL p50 ms  ITL p99 ms  tok/s    KV GB  within the promise")
    for level in found.levels:
        summary = level.summary
        print(
            f"{level.streams:7,}  {level.decode_ms:9.2f}  {_number(summary.ttft_p95, 11, 1)}  "
            f"{_number(summary.itl_p50, 10, 2)}  {_number(summary.itl_p99, 10, 2)}  {summary.throughput:7,.0f}  "
            f"{_kv(found, level.streams):5.1f}  {'yes' if level.is_within else 'no'}"
        )
    if any(math.isnan(level.summary.ttft_p95 + level.summary.itl_p99) for level in found.levels):
        print(f"{NOTHING}: no first token, or none after it, within the measured time")
    print()
    best = found.best
    promise = f"TTFT p95 < {namespace.ttft:g} ms and ITL p99 < {namespace.itl:g} ms"
    print(f"{best.streams if best is not None else 'no number of'} streams: {promise}")
    if found.prefill_ms > namespace.ttft:
        print(f"a prompt alone takes {found.prefill_ms:,.0f} ms: promise more than that by --ttft")


def _number(value: float, width: int, digits: int) -> str:
    return f"{NOTHING:>{width}}" if math.isnan(value) else f"{value:{width}.{digits}f}"


def _kv(found: Capacity, streams: int) -> float:
    return streams * found.context * found.kv_token_bytes / 1e9


def _as_json(found: Capacity, title: str) -> dict[str, Any]:
    best = found.best
    return {
        "deployment": title,
        "weight_bytes": found.weight_bytes,
        "kv_token_bytes": found.kv_token_bytes,
        "kv_tokens": found.kv_tokens,
        "context": found.context,
        "streams_in_memory": found.in_memory,
        "streams_that_fit": found.fitting,
        "prefill_ms": found.prefill_ms,
        "streams_within_promise": best.streams if best is not None else 0,
        "levels": [_level(level) for level in found.levels],
    }


def _level(level: Level) -> dict[str, Any]:
    summary = level.summary
    values = {
        "streams": level.streams,
        "decode_ms": level.decode_ms,
        "ttft_p95_ms": summary.ttft_p95,
        "itl_p50_ms": summary.itl_p50,
        "itl_p99_ms": summary.itl_p99,
        "throughput": summary.throughput,
        "within_promise": level.is_within,
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
