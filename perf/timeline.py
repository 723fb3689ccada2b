"""Where the time of a step goes: the loop, the card and the clients on one clock, in the real engine with sockets live.

    python perf/timeline.py [--json] [--streams 512] [--steps 100] [--mixed] [--clients 1] [--svg FILE] [--profile]

The engine runs in this process (`steplog.py` notes what it does), clients in others; only what happens while all streams
decode counts. `--mixed` adds a second load in which prompts of about 290 tokens arrive beside them, 20 a second. The ten
longest gaps that clients saw are told with what the engine did in them (on standard error). `--profile` adds a run under
torch's profiler, which knows when kernels ran, not only steps. `--device cpu --tiny` shows that it works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import uvloop
from processes import Clients, Job
from report import Report
from steplog import CudaMarks, HostMarks, StepLog
from timeline_figures import Recording, longest_gaps, tell
from timeline_svg import picture
from workload import LLAMA_8B, TINY_LLAMA

from pagewire import log
from pagewire.clock import MonotonicClock
from pagewire.config import Config, from_mapping
from pagewire.engine.core import EngineCore
from pagewire.engine.load import load_worker
from pagewire.engine.server import WireServer
from pagewire.event_loop import tame_collector

_SPARE_STEPS = 20
_SPARE_ROWS = 64
"""For prompts that arrive beside the decoding streams."""
_SETTLED_STEPS, _PROFILED_STEPS = 5, 20
_BESIDE_S = 30.0
"""For what goes on beside a load, to end after it."""
_STALL_MS = 60_000
"""A profiler may hold the loop for seconds."""
_ASK_S = 0.01


def config_of(folder: Path, given: argparse.Namespace) -> Config:
    """The model of random weights in `folder`; as `decode.py` serves it."""
    on_card = given.device == "cuda"
    return from_mapping({
        "model": {"path": str(folder), "load_format": "dummy", "device": given.device,
                  "max_model_len": 4096 if given.tiny else 8192},
        "cache": {"kv_bytes": 2**26 if given.tiny else 0, "prefix_cache": False},
        "scheduler": {"max_rows": given.streams + (_SPARE_ROWS if given.mixed else 0),
                      "max_step_tokens": given.step_tokens},
        "engine": {"threads": 0 if on_card else 1, "stall_timeout_ms": _STALL_MS},
        "server": {"bind": f"ipc://{folder}/engine.sock"},
    })  # fmt: skip


def job_of(given: argparse.Namespace, endpoint: str, vocab_size: int, *, rate: float = 0.0) -> Job:
    """Streams that decode for `--steps` steps after the last of them began."""
    prefill_steps = math.ceil(given.streams * given.context / max(1, given.step_tokens - given.streams))
    return Job(
        kind="decode",
        endpoint=endpoint,
        vocab_size=vocab_size,
        streams=given.streams,
        context=given.context,
        max_tokens=prefill_steps + _SPARE_STEPS + given.steps,
        rate=rate,
    )


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(_ASK_S)


class Bench:
    """One engine in this process, loaded by clients in others. Made and used on one loop."""

    def __init__(self, worker, config: Config, num_clients: int) -> None:
        self.core = EngineCore(worker, config=config, clock=MonotonicClock())
        self.server = WireServer(self.core, config)
        self._num_clients = num_clients

    async def __aenter__(self) -> Self:
        self.core.start()
        await self.server.start()
        return self

    async def __aexit__(self, *_error) -> None:
        await self.server.close()
        await self.core.stop()

    async def record(self, job: Job, *, during=None) -> Recording:
        """The load and all that was noted; `during(notes)` is run beside it. Clients are waited for in a thread."""
        worker = self.core.worker
        stepper = getattr(worker, "_stepper", None)
        device = getattr(stepper, "device", None)
        marks = None if device is None else CudaMarks(device) if device.device.type == "cuda" else HostMarks()
        notes = StepLog(self.core, self.server, marks)
        clients = await asyncio.to_thread(Clients, job, self._num_clients)
        try:
            notes.attach()
            beside = None if during is None else asyncio.create_task(during(notes))
            await asyncio.to_thread(clients.start)
            answers = await asyncio.to_thread(clients.answers)
            if beside is not None:
                await asyncio.wait_for(beside, _BESIDE_S)
        finally:
            clients.close()
        await _until(lambda: not self.core.num_live)
        await asyncio.sleep(_ASK_S)  # the step behind the last one
        notes.detach()
        errors = {row.error for answer in answers for row in answer.served if row.error}
        if errors:
            raise RuntimeError(f"streams failed: {errors}")
        return Recording.of(notes, answers)


async def kernels_busy(bench: Bench, job: Job) -> float:
    """Share of time in which a kernel or a copy ran, in %, under torch's profiler, in steps in which all streams decode.

    The profiler slows the loop where it begins, so the first and last kernels do not count.
    """
    import torch

    def profiler():
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    with profiler():  # the first one loads libraries
        torch.cuda.synchronize()
    found = []

    async def during(notes: StepLog) -> None:
        def num_full() -> int:
            return sum(not s.num_prefill and s.num_decode == job.streams for s in notes.steps.values())

        await _until(lambda: num_full() >= _SETTLED_STEPS)
        with profiler() as profile:
            until = num_full() + _PROFILED_STEPS
            await _until(lambda: num_full() >= until)
        found.append(profile)

    await bench.record(job, during=during)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found[0].events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    spans = spans[len(spans) * 15 // 100 : len(spans) * 95 // 100]
    busy, last = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return 100 * busy / (last - spans[0][0])


async def measure(given: argparse.Namespace, config: Config, worker, report: Report, label: str) -> list[Recording]:
    """All loads on one engine."""
    recordings = []
    async with Bench(worker, config, given.clients) as bench:
        vocab_size = worker.shape.vocab_size
        loads = [(f"{label}, {given.streams} decoding", 0.0)]
        if given.mixed:
            loads.append((f"{label}, {given.streams} decoding + {given.rate:g} prompts/s", given.rate))
        for case, rate in loads:
            recording = await bench.record(job_of(given, bench.server.endpoint, vocab_size, rate=rate))
            recordings.append(recording)
            tell(report, case, recording)
            print(f"\n{case}\n{longest_gaps(recording)}", file=sys.stderr)
            if given.svg:
                path = Path(given.svg)
                path = path.with_stem(f"{path.stem}-mixed") if rate else path
                path.write_text(picture(recording, case, around="gap" if given.svg_gap else "middle"))
        if given.profile:
            job = job_of(given, bench.server.endpoint, vocab_size)
            report.add(loads[0][0], "kernels_busy", await kernels_busy(bench, job), "%")
    return recordings


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--streams", type=int, default=512, help="that decode")
    parser.add_argument("--steps", type=int, default=100, help="in which all of them decode")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--step-tokens", type=int, default=8192, help="tokens of a step at most")
    parser.add_argument("--mixed", action="store_true", help="then once more with prompts that arrive")
    parser.add_argument("--rate", type=float, default=20.0, help="prompts a second, of --mixed")
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--profile", action="store_true", help="then once more under torch's profiler")
    parser.add_argument("--svg", metavar="FILE", help="a picture of ten steps; of --mixed a second one beside it")
    parser.add_argument(
        "--svg-gap", action="store_true", help="the ten steps around the longest gap, not those in the middle"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that shows that this works")
    given = parser.parse_args(arguments)
    if given.profile and (given.device != "cuda" or given.steps < 2 * _PROFILED_STEPS):
        parser.error(
            f"--profile looks at {_PROFILED_STEPS} steps on a card: it needs one, and --steps of twice as many"
        )
    return given


async def _run(given: argparse.Namespace, config: Config, report: Report, label: str) -> None:
    begun = time.perf_counter()
    worker = await load_worker(config)
    tame_collector()
    report.add(label, "worker_ready", time.perf_counter() - begun, "s")
    await measure(given, config, worker, report, label)


def main() -> None:
    """One engine."""
    given = parse()
    log.configure("engine", level="warning")
    report = Report("timeline", as_json=given.json)
    model, label = (TINY_LLAMA, "tiny") if given.tiny else (LLAMA_8B, "8b bf16" if given.device == "cuda" else "8b")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        uvloop.run(_run(given, config_of(Path(folder), given), report, label))
    report.finish()


if __name__ == "__main__":
    main()
