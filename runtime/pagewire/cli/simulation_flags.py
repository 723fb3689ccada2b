"""Flags of `simulate` and `plan`. Apart from what they do, so that `pagewire --help` loads no numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pagewire.cli.flags import add_struct_flags
from pagewire.cli.parser import Parser
from pagewire.config import CacheConfig, SchedulerConfig

MODEL_NAMES: Final = ("8b", "70b")
CARD_NAMES: Final = ("h200", "h100")
"""As in `simulator.card`."""
DEFAULT_ROWS: Final = 512
DEFAULT_STEP_TOKENS: Final = 1024
_PACED: Final = {
    "ttft_target_ms": "what the modelled server promises; 0: none. What a queue makes impossible is refused at once. "
    "--ttft is what is judged",
    "itl_target_ms": "what the modelled server promises and paces prompts by; 0: it does not. --itl is what is judged",
}
"""`plan` has a promise of its own beside those of the server that it models."""
_NOT_SIMULATED: Final = ("kv_bytes", "gpu_memory_fraction", "kv_dtype", "kv_scales")


def add_simulation_flags(command: Parser, name: str) -> None:
    """Those of the command `name`, and what both have in common."""
    if name == "simulate":
        _add_simulate(command)
    else:
        _add_plan(command)
    _add_deployment(command)
    _add_settings(command, name)


def _add_simulate(command: Parser) -> None:
    load = command.add_argument_group("load", "One of the first three.")
    load.add_argument("--trace", type=Path, metavar="FILE", help="Azure's CSV, or Mooncake's JSON lines")
    load.add_argument("--closed", type=int, metavar="N", help="chat requests, N open at any time")
    load.add_argument("--poisson", type=float, metavar="RATE", help="chat requests, so many a second")
    load.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of a drawn load (default: 60)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of a drawn load (default: 0)")
    load.add_argument("--speed", type=float, default=1.0, metavar="X", help="of a trace; 2: twice as fast (default: 1)")
    load.add_argument("--requests", type=int, default=0, metavar="N", help="of a trace, the first N; 0: all")
    out = command.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON object: the summary, and the figures over time")
    out.add_argument(
        "--picture", type=Path, metavar="FILE.svg", help="TTFT, ITL, goodput, hits, KV use and more over time"
    )


def _add_plan(command: Parser) -> None:
    load = command.add_argument_group("load")
    load.add_argument(
        "--context",
        type=int,
        default=4096,
        metavar="N",
        help="prompt and output of a request, on average (default: 4096)",
    )
    load.add_argument("--output", type=int, default=256, metavar="N", help="of these, generated (default: 256)")
    load.add_argument(
        "--ttft",
        type=float,
        default=250.0,
        metavar="MS",
        help="promise that is judged: p95 of first tokens (default: 250)",
    )
    load.add_argument(
        "--itl", type=float, default=12.0, metavar="MS",
        help="promise that is judged: p99 of gaps; the modelled server paces prompts by it (default: 12)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="one JSON object")


def _add_deployment(command: Parser) -> None:
    group = command.add_argument_group("deployment", "A modelled one: no weights are read, no GPU is needed.")
    group.add_argument(
        "--model", default="8b", metavar="MODEL",
        help=f"a shape ({', '.join(MODEL_NAMES)}), a GGUF file, or a folder with a config.json (default: 8b)",
    )  # fmt: skip
    group.add_argument("--card", choices=CARD_NAMES, default="h200", help="kind of card (default: h200)")
    group.add_argument("--gpus", type=int, default=1, metavar="N", help="cards of the group (default: 1)")
    group.add_argument(
        "--prefill-gpus", type=int, default=0, metavar="N",
        help="cards of a second group, which prefills; 0: the first does both (default: 0)",
    )  # fmt: skip
    group.add_argument("--weights", choices=("bf16", "fp8"), default="bf16", help="precision (default: bf16)")
    group.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="precision of KV (default: bf16)")
    group.add_argument(
        "--allocation", choices=("paged", "contiguous"), default="paged",
        help="contiguous reserves the longest sequence for each (default: paged)",
    )  # fmt: skip
    group.add_argument("--max-model-len", type=int, default=0, metavar="N", help="longest sequence; 0: the model's own")
    group.add_argument("--kv-tokens", type=int, default=0, metavar="N", help="size of the pool; 0: what fits")


def _add_settings(command: Parser, name: str) -> None:
    cache = command.add_argument_group("cache")
    add_struct_flags(cache, CacheConfig, prefix="cache", skip=_NOT_SIMULATED)
    scheduler = command.add_argument_group("scheduler", "As of `serve`; defaults that suit a large card.")
    defaults: dict[str, object] = {"max_rows": DEFAULT_ROWS, "max_step_tokens": DEFAULT_STEP_TOKENS}
    if name == "plan":
        defaults["itl_target_ms"] = "--itl"
    add_struct_flags(
        scheduler,
        SchedulerConfig,
        prefix="scheduler",
        helps=_PACED if name == "plan" else {},
        defaults=defaults,
        skip=("seed",),
    )
