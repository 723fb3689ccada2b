"""Chat load: what clients of an engine see, closed loop and Poisson arrivals.

    python perf/serve.py [--json] [--closed 64 512] [--poisson 10 20] [--seconds 15] [--ramp 6] [--step-tokens 8192] [--fp8]
                         [--itl-target 12] [--ttft-target 250]

One engine process with random weights serves all cases, client processes load it over ZeroMQ. The window opens after the
ramp: latencies are those of requests that start in it, tokens those that arrive in it. Prompts and arrivals are drawn as by one
client, whatever the number of clients; each case has its own namespace of the prefix cache. `cpu_*` is what a process takes
of a core: a client near 100 % measures itself. With `--itl-target` or `--ttft-target` the engine plans its steps by time.
`--device cpu --tiny` shows that it works.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
from processes import Answer, Clients, EngineProcess, Job, cpu_seconds, engine_process
from report import Report
from workload import LLAMA_8B, RAMP_S, TINY_LLAMA, Served, summary

from pagewire.config import Config, from_mapping

_UNITS = {"throughput": "tok/s", "requests": "", "short": "", "within_slo": ""}
_VLLM = {
    "8b bf16, closed 64": 7_642,
    "8b bf16, closed 512": 11_341,
    "8b fp8, closed 64": 8_889,
    "8b fp8, closed 512": 14_476,
}
"""vLLM 0.26 on one H200: tokens a second."""


def config_of(folder: Path, given: argparse.Namespace) -> Config:
    """The model of random weights in `folder`."""
    on_card = given.device == "cuda"
    return from_mapping({
        "model": {"path": str(folder), "load_format": "dummy", "device": given.device,
                  "max_model_len": 8192 if on_card and not given.tiny else 4096,
                  "quantization": "fp8" if given.fp8 else "none"},
        "cache": {"kv_bytes": 2**26 if given.tiny else 0, "kv_dtype": "fp8" if given.fp8 and on_card else "auto"},
        "scheduler": {"max_rows": given.max_rows, "max_step_tokens": given.step_tokens,
                      "itl_target_ms": given.itl_target, "ttft_target_ms": given.ttft_target},
        "engine": {"threads": 0 if on_card else 1, "state_dir": str(folder), "record": given.record},
        "server": {"bind": f"ipc://{folder}/engine.sock", "log_level": "warning"},
    })  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What came of one case: the window, and what the engine process and its loop took of a core in it."""

    answers: list[Answer]
    low: float
    high: float
    cpu_engine: float
    cpu_engine_loop: float

    @property
    def rows(self) -> list[Served]:
        """Requests of all clients."""
        return [row for answer in self.answers for row in answer.served]


def load(engine: EngineProcess, job: Job, num_clients: int) -> Found:
    """Load the engine with `job` and wait for the end."""
    clients = Clients(job, num_clients)
    try:
        low = clients.start() + job.ramp
        time.sleep(max(0.0, low - time.perf_counter()))
        cpu = cpu_seconds(engine.pid)
        time.sleep(job.seconds)
        shares = [(b - a) / job.seconds for a, b in zip(cpu, cpu_seconds(engine.pid), strict=True)]
        return Found(clients.answers(), low, low + job.seconds, *shares)
    finally:
        clients.close()


def tell(report: Report, case: str, run: Found) -> None:
    """What the clients found, all taken together, and what each process took of a core."""
    answers, rows, low, high = run.answers, run.rows, run.low, run.high
    found = summary(rows, low, high)
    for metric, value in found.items():
        report.add(case, metric, value, _UNITS.get(metric, "ms"))
    if case in _VLLM:
        report.add(case, "throughput_speedup", found["throughput"] / _VLLM[case])
    pauses = [pause for answer in answers for pause in answer.pauses if low <= pause[0] < high]
    report.add(case, "client_gc_max", 1e3 * max((pause[1] for pause in pauses), default=0.0), "ms")
    stats = answers[0].stats
    if steps := stats.get("steps_total"):
        report.add(case, "step_mean", 1e3 * (high - low) / steps, "ms")
        report.add(case, "prefill_tokens_per_step", stats["prefilled_tokens_total"] / steps)
        report.add(case, "schedule_per_step", 1e6 * stats["schedule_seconds_sum"] / steps, "µs")
        report.add(case, "preemptions", stats["preemptions_total"])
    report.add(case, "cpu_engine", 100 * run.cpu_engine, "%")
    report.add(case, "cpu_engine_loop", 100 * run.cpu_engine_loop, "%")
    for part, answer in enumerate(answers):
        report.add(case, f"cpu_client_{part}", 100 * answer.cpu_share, "%")
    tell_errors(case, rows)


def tell_errors(case: str, rows: list[Served]) -> None:
    """The kinds of errors, on standard error."""
    kinds = Counter(row.code or row.error for row in rows if row.error)
    for kind, count in kinds.most_common(5):
        example = next(row.error for row in rows if kind in (row.code, row.error))
        print(f"{case}: {count} requests failed: {example}", file=sys.stderr)


def tell_settings(report: Report, label: str, given: argparse.Namespace) -> None:
    """What the cases were run with, for whoever runs them again."""
    report.add(label, "step_tokens", given.step_tokens, "tok")
    report.add(label, "max_rows", given.max_rows)
    report.add(label, "ramp", given.ramp, "s")
    report.add(label, "window", given.seconds, "s")
    report.add(label, "itl_target", given.itl_target, "ms")
    report.add(label, "ttft_target", given.ttft_target, "ms")


def add_engine_arguments(parser: argparse.ArgumentParser, *, step_tokens: int) -> None:
    """What the engine and its clients are, for `config_of` and `model_of`."""
    Report.arguments(parser)
    parser.add_argument("--ramp", type=float, default=RAMP_S, help="seconds before the window")
    parser.add_argument("--step-tokens", type=int, default=step_tokens, help="tokens of a step at most")
    parser.add_argument("--max-rows", type=int, default=512, help="sequences running at once")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--fp8", action="store_true", help="weights, and on a card KV, in FP8")
    parser.add_argument("--tiny", action="store_true", help="a model that shows that this works")
    parser.add_argument(
        "--record", default="", metavar="FILE", help="all that the engine decides; see `pagewire replay`"
    )


def model_of(given: argparse.Namespace) -> tuple[dict[str, object], str]:
    """The model's shape, and what its cases are called."""
    precision = " fp8" if given.fp8 else " bf16" if given.device == "cuda" else ""
    return (TINY_LLAMA, "tiny") if given.tiny else (LLAMA_8B, "8b" + precision)


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, step_tokens=8192)
    parser.add_argument("--closed", type=int, nargs="*", default=[64, 512], help="streams, a case each")
    parser.add_argument("--poisson", type=float, nargs="*", default=[], help="requests a second, a case each")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the window")
    parser.add_argument("--itl-target", type=float, default=0.0, help="ms between tokens that are promised; 0: none")
    parser.add_argument(
        "--ttft-target", type=float, default=0.0, help="ms to the first token that are promised; 0: none"
    )
    given = parser.parse_args()
    report = Report("serve", as_json=given.json)
    model, label = model_of(given)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        begun = time.perf_counter()
        with engine_process(config_of(Path(folder), given)) as engine:
            report.add(label, "engine_ready", time.perf_counter() - begun, "s")
            tell_settings(report, label, given)
            base = Job(
                kind="closed",
                endpoint=engine.endpoint,
                vocab_size=model["vocab_size"],
                seconds=given.seconds,
                ramp=given.ramp,
            )
            loads = [(f"closed {n}", {"kind": "closed", "streams": n}) for n in given.closed]
            loads += [(f"poisson {rate:g}", {"kind": "poisson", "rate": rate}) for rate in given.poisson]
            for name, kind in loads:
                job = msgspec.structs.replace(base, namespace=name, **kind)
                tell(report, f"{label}, {name}", load(engine, job, given.clients))
    report.finish()


if __name__ == "__main__":
    main()
