"""Decode on a card: what a client in another process sees, and what the card itself takes for a step.

    python perf/decode.py [--json] [--model 8b] [--streams 1 32 128 256 512] [--kernels] [--no-engine] [--no-card]
                          [--deterministic]

First the card alone: the worker's CUDA graphs replayed back to back over a pool of random KV (`card_step`; with `--kernels`
also where that time goes). Then the whole way: an engine process, a client in this one over ZeroMQ, random weights,
prompts of 512 tokens and 200 more each; only gaps while all streams decode count. Beside each figure stands its target, and how
much faster it is than vLLM 0.26 on the same card.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from processes import engine_process
from report import Report
from workload import LLAMA_8B, SLICE_70B, decode_only

from pagewire.config import Config, from_mapping
from pagewire_client import connect

STEPS = 200


@dataclass(frozen=True)
class Subject:
    """A model, and the types of its KV and weights.

    Attributes:
        name: of its cases in `targets.toml`, the streams left out.
        context: tokens of each prompt.
        vllm: vLLM 0.26 on one H200: streams → ITL p50 in ms, tokens a second.
        quantization: of the layers' matrices.
    """

    name: str
    model: dict[str, object]
    kv_dtype: str
    context: int
    vllm: dict[int, tuple[float, int]]
    quantization: str = "none"

    def case(self, streams: int) -> str:
        """As in `targets.toml`."""
        return f"{self.name} {streams}x{(self.context + STEPS // 2) / 1000:.1f}k"

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(str(self.model["vocab_size"]))

    @property
    def kv_bytes_per_token(self) -> int:
        """Of K and V in all layers."""
        layers, heads, head_dim = (
            int(str(self.model[key])) for key in ("num_hidden_layers", "num_key_value_heads", "head_dim")
        )
        return 2 * layers * heads * head_dim * (1 if self.kv_dtype == "fp8" else 2)


SUBJECTS = {
    "8b": Subject(
        "8b bf16/bf16", LLAMA_8B, "auto", 512,
        {1: (4.86, 205), 32: (5.74, 5_552), 128: (8.44, 14_984), 256: (13.2, 18_580), 512: (25.2, 20_191)},
    ),
    "8b-fp8-kv": Subject("8b bf16/fp8", LLAMA_8B, "fp8", 512, {}),
    "slice70b": Subject(
        "slice70b bf16/fp8", SLICE_70B, "fp8", 1024, {1: (7.71, 129), 512: (22.7, 22_431)}
    ),
    "8b-fp8": Subject(
        "8b fp8/fp8", LLAMA_8B, "fp8", 512, {1: (3.51, 284), 128: (6.79, 18_781), 512: (18.1, 28_200)}, "fp8"
    ),
    "slice70b-fp8": Subject(
        "slice70b fp8/fp8", SLICE_70B, "fp8", 1024,
        {1: (6.28, 158), 64: (7.07, 9_004), 256: (12.5, 20_492), 512: (19.1, 22_606)}, "fp8",
    ),
}  # fmt: skip


def config_of(
    folder: Path, subject: Subject, *, max_rows: int, kv_bytes: int = 0, deterministic: bool = False
) -> Config:
    """The model of random weights in `folder`, served on the card."""
    return from_mapping({
        "model": {"path": str(folder), "load_format": "dummy", "device": "cuda", "max_model_len": 8192,
                  "quantization": subject.quantization},
        "cache": {"kv_bytes": kv_bytes, "kv_dtype": subject.kv_dtype, "prefix_cache": False},
        "engine": {"deterministic": deterministic},
        "scheduler": {"max_rows": max_rows, "max_step_tokens": 8192},
        "server": {"bind": f"ipc://{folder}/engine.sock"},
    })  # fmt: skip


# ---- the card alone ------------------------------------------------------------------------------------------------------


def measure_card(
    report: Report, subject: Subject, folder: Path, streams: list[int], *, with_kernels: bool, deterministic: bool
) -> None:
    """Step times without scheduler and sockets, and what loading takes."""
    import torch

    from pagewire.models.load import load_model
    from pagewire.worker.gpu_device import CudaDevice
    from pagewire.worker.gpu_stepper import Stepper, triton_ops

    length = subject.context + STEPS // 2
    tokens = max(streams) * (length + 16) + 16
    config = config_of(
        folder,
        subject,
        max_rows=max(streams),
        kv_bytes=tokens * subject.kv_bytes_per_token,
        deterministic=deterministic,
    )
    device = CudaDevice()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    with torch.inference_mode():
        decoder = load_model(config.model, auto_dtype=torch.bfloat16, device=device.device, keeps_fp8=True)
        torch.cuda.synchronize()
        name = subject.name + " deterministic" * deterministic
        report.add(name, "weights_ready", time.perf_counter() - begun, "s")
        stepper = Stepper(config, decoder, device, partial(triton_ops, deterministic=deterministic), with_graphs=True)
        report.add(name, "graphs_ready", time.perf_counter() - begun, "s")
        for pool in (*stepper.memory.keys, *stepper.memory.values):  # zeros would be faster than what is real
            pool.copy_(torch.randn(pool.shape, dtype=torch.bfloat16, device=pool.device))
        torch.cuda.synchronize()
        for count in streams:
            case = subject.case(count) + ", deterministic" * deterministic
            _measure_steps(report, stepper, case, count, length, with_kernels=with_kernels)
    report.add(name, "memory_peak", torch.cuda.max_memory_reserved() / 2**30, "GiB")
    del stepper, decoder
    torch.cuda.empty_cache()


def _measure_steps(report: Report, stepper: Any, case: str, count: int, length: int, *, with_kernels: bool) -> None:
    import torch

    from pagewire.step.step import RowJoin, StepPlan
    from pagewire_transport.params import SamplingParams

    rows = np.arange(count, dtype=np.int32)
    blocks = -(-(length + 1) // 16)
    ids = 1 + np.random.default_rng(0).permutation(count * blocks).astype(np.int32)
    params = SamplingParams(ignore_eos=True)
    prompt = np.zeros(length, np.int32)
    first = StepPlan(
        0, rows, np.full(count, length, np.int32), np.ones(count, np.int32), np.zeros(count, np.int32), count
    )
    first.sample_entries = first.sample_rows = rows
    first.sample_epochs = first.epochs
    first.joins = [RowJoin(row, 0, params, row, prompt, prompt[:0], ()) for row in range(count)]
    first.block_rows, first.block_cols, first.block_ids = (
        np.repeat(rows, blocks),
        np.tile(np.arange(blocks, dtype=np.int32), count),
        ids,
    )
    stepper.forward(first)
    stepper.sample(first, None)
    first.joins, first.block_rows = [], first.block_rows[:0]
    first.block_cols, first.block_ids = first.block_cols[:0], first.block_ids[:0]

    in_flight: deque[Any] = deque()

    def step() -> float:
        """As the engine does: two in flight. What the launch took."""
        while len(in_flight) == 2:
            if in_flight[0].done.query():
                in_flight.popleft()
        begun = time.perf_counter()
        stepper.forward(first)
        in_flight.append(stepper.sample(first, None))
        return time.perf_counter() - begun

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    begun, num = time.perf_counter(), 100
    host = [step() for _ in range(num)]
    torch.cuda.synchronize()
    report.add(case, "card_step", 1e3 * (time.perf_counter() - begun) / num, "ms")
    report.add(case, "launch_p50", 1e6 * float(np.median(host)), "µs")
    if with_kernels:
        _show_kernels(count, step)
    empty = StepPlan(1, rows[:0], rows[:0], rows[:0], rows[:0], 0, leaves=rows)
    stepper.forward(empty)
    stepper.sample(empty, None)
    torch.cuda.synchronize()


def _show_kernels(count: int, step: Callable[[], float]) -> None:
    """Where a step's time goes, by kernel; and how busy the card is between the first and the last of them."""
    import torch

    num = 20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num):
            step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, last = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    wall = last - spans[0][0]
    print(f"\nkernels of a step, {count} streams; {wall / num:.0f} µs, busy {100 * busy / wall:.1f} %", file=sys.stderr)
    for kernel in sorted(profile.key_averages(), key=lambda k: -k.self_device_time_total)[:16]:
        print(
            f"{kernel.self_device_time_total / num:10.1f} µs {kernel.count / num:6.1f} × {kernel.key[:110]}",
            file=sys.stderr,
        )


# ---- the whole way -------------------------------------------------------------------------------------------------------


async def measure_engine(report: Report, subject: Subject, endpoint: str, streams: list[int]) -> None:
    """ITL and throughput as a client sees them."""
    async with connect(endpoint) as client:

        async def generate(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
            stream = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, temperature=1.0, echo_text=False)
            async for chunk in stream:
                if chunk.token_ids:
                    yield len(chunk.token_ids)

        context, vocab_size = subject.context, subject.vocab_size
        await decode_only(generate, max(streams), context, 8, vocab_size)  # kernels and pools are warm from here on
        for count in streams:
            before = await client.stats()
            found = await decode_only(generate, count, context, STEPS, vocab_size)
            after = await client.stats()
            case, (itl, rate) = subject.case(count), subject.vllm.get(count, (None, None))
            for metric in ("itl_p50", "itl_p99", "itl_max", "step"):
                report.add(case, metric, found[metric], "ms")
            report.add(case, "throughput", found["throughput"], "tok/s")
            if itl is not None and rate is not None:
                report.add(case, "itl_p50_speedup", itl / found["itl_p50"])
                report.add(case, "step_speedup", 1e3 * count / rate / found["step"])
            for name in sorted(after):
                if name.endswith(("_seconds_sum", "_sum")):
                    steps = after.get("steps_total", 0) - before.get("steps_total", 0)
                    if steps:
                        each = 1e6 * (after[name] - before.get(name, 0)) / steps
                        print(f"{case}: {name} {each:.0f} µs a step", file=sys.stderr)


def main() -> None:
    """Both halves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--model", choices=list(SUBJECTS), default="8b", help="shape, and type of the KV")
    parser.add_argument("--streams", type=int, nargs="+", help="how many, a case each")
    parser.add_argument("--kernels", action="store_true", help="say where the card's time goes")
    parser.add_argument("--deterministic", action="store_true", help="the card alone once more in that mode: its price")
    parser.add_argument("--no-card", action="store_true", help="the engine alone")
    parser.add_argument("--no-engine", action="store_true", help="the card alone")
    arguments = parser.parse_args()
    subject = SUBJECTS[arguments.model]
    streams = arguments.streams or list(subject.vllm) or [1, 128, 512]
    report = Report("decode")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(subject.model))
        if not arguments.no_card:
            for deterministic in (False, True) if arguments.deterministic else (False,):
                measure_card(
                    report, subject, path, streams, with_kernels=arguments.kernels, deterministic=deterministic
                )
        if not arguments.no_engine:
            begun = time.perf_counter()
            config = config_of(path, subject, max_rows=max(streams))
            with engine_process(config) as ready:
                report.add(subject.name, "engine_ready", time.perf_counter() - begun, "s")
                import uvloop

                uvloop.run(measure_engine(report, subject, ready.endpoint, streams))
    report.finish()


if __name__ == "__main__":
    main()
