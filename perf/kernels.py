"""Kernels on one NVIDIA card, one layer of each model, inside CUDA graphs; every case is checked before it is timed.

    python perf/kernels.py [--json] [--record FILE --commit HASH --date DATE]

Attention reads a paged cache of 16-token blocks in random order. A graph holds the step's plan once and its kernel for several layers, each
with K and V of its own, so that nothing is found in L2 that a real step would not find there; a figure is the median replay over
the layers. Bytes: K and V of the visible positions, once. Operations: 4 · D for each visible pair (query, key) and query head.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
import triton
from report import Report

from pagewire_kernels.activation import silu_mul
from pagewire_kernels.decode_plan import DecodePlan, plan_decode, straight_tiling
from pagewire_kernels.kv_write import rope_write_kv
from pagewire_kernels.paged_decode import paged_decode
from pagewire_kernels.paged_prefill import LONG, SHORT, PrefillPlan, paged_prefill, plan_prefill, tiling_for
from pagewire_kernels.rms_norm import rms_norm

DEVICE = "cuda"
D = 128
BLOCK = 16
SCALE = D**-0.5
DTYPE = torch.bfloat16
MODELS = {"8b": (32, 8, 4096, 14336), "slice70b": (8, 1, 8192, 3584)}  # query heads, KV heads, hidden, MLP
# name: model, rows, context, layers in the graph
DECODE = {
    "8b decode bf16, 512x1024": ("8b", 512, 1024, 4),
    "8b decode bf16, 64x8192": ("8b", 64, 8192, 4),
    "8b decode bf16, 1x65536": ("8b", 1, 65536, 16),
    "8b decode bf16, 128x640": ("8b", 128, 640, 8),
    "8b decode bf16, 1x640": ("8b", 1, 640, 64),
    "slice70b decode bf16, 512x1024": ("slice70b", 512, 1024, 16),
    "slice70b decode bf16, 64x1100": ("slice70b", 64, 1100, 64),
    "slice70b decode bf16, 1x1100": ("slice70b", 1, 1100, 80),
}
# The same in E4M3 with scales.
DECODE_FP8 = {
    "8b decode fp8, 512x1024": ("8b", 512, 1024, 4),
    "8b decode fp8, 64x8192": ("8b", 64, 8192, 4),
    "8b decode fp8, 1x640": ("8b", 1, 640, 64),
    "slice70b decode fp8, 512x1024": ("slice70b", 512, 1024, 16),
    "slice70b decode fp8, 64x8192": ("slice70b", 64, 8192, 8),
    "slice70b decode fp8, 1x1100": ("slice70b", 1, 1100, 80),
}
# name: model, (queries, cached before) of each row, tiling
PREFILL = {
    "8b prefill bf16, 8192 causal": ("8b", [(8192, 0)], LONG),
    "8b chunk of 512 after 7,680 cached": ("8b", [(512, 7680)], LONG),
    "8b prefill bf16, 4x512": ("8b", [(512, 0)] * 4, SHORT),
    "8b prefill bf16, 4x512, long tiles": ("8b", [(512, 0)] * 4, LONG),
    "slice70b chunk of 512 after 7,680 cached": ("slice70b", [(512, 7680)], LONG),
    "8b prefill bf16, 2x78": ("8b", [(78, 0)] * 2, tiling_for(256, DTYPE, D)),
    "8b prefill bf16, 2x78, long tiles": ("8b", [(78, 0)] * 2, LONG),
}


class Recorder:
    """Hands figures to the report and keeps them for the record."""

    def __init__(self) -> None:
        self.report = Report("kernels")
        self.rows = []

    def add(self, case, metric, value, unit):
        met = self.report.add(case, metric, value, unit)
        self.rows.append({"case": case, "metric": metric, "value": value, "unit": unit, "met": met})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument(
        "--record", type=Path, help="also write the figures, with what they were measured on, to this file"
    )
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    recorder = Recorder()
    ceilings(recorder)
    for case, shape in DECODE.items():
        decode(recorder, case, *shape)
    for case, shape in DECODE_FP8.items():
        decode(recorder, case, *shape, dtype=torch.float8_e4m3fn)
    for case, shape in PREFILL.items():
        prefill(recorder, case, *shape)
    fp8 = torch.float8_e4m3fn
    for model in MODELS:
        case = f"{model} chunk of 512 after 7,680 cached, fp8"
        prefill(recorder, case, model, [(512, 7680)], tiling_for(512, fp8, D), dtype=fp8)
    for model in MODELS:
        for tokens in (1, 512):
            rows(recorder, model, tokens)
    recorder.report.finish()
    if args.record:
        head = {
            "date": args.date,
            "commit": args.commit,
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        }
        args.record.write_text(json.dumps({**head, "rows": recorder.rows}, indent=1) + "\n")


def time_graph(launch, count: int) -> float:
    """Microseconds of one of `count` equal parts of what `launch` launches, in a replayed graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # what is read was made on another stream
    with torch.cuda.stream(stream):
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        times = []
        for turn in range(14):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if turn >= 4:
                times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3 / count


def ceilings(recorder):
    source = torch.randn(2**30, device=DEVICE, dtype=DTYPE)
    target = torch.empty_like(source)
    # By a kernel: as a copy node of a graph it ran at two thirds of the rate.
    time = time_graph(lambda: torch.mul(source, 1, out=target), 1)
    recorder.add("card", "copy", 2 * source.nbytes / time / 1e6, "TB/s")
    recorder.add("card", "read", source.nbytes / time_graph(lambda: source.sum(dtype=torch.float32), 1) / 1e6, "TB/s")
    a = torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE)
    recorder.add("card", "matmul", 2 * 8192**3 / time_graph(lambda: a @ a, 1) / 1e6, "TFLOP/s")


def paged(lens, num_kv_heads, layers, dtype=DTYPE):
    """K and V of each layer and the common block tables: random blocks in random order."""
    counts = [-(-n // BLOCK) for n in lens]
    order = (torch.randperm(sum(counts), device=DEVICE) + 1).int()
    tables = torch.zeros(len(lens), -(-max(counts) // 16) * 16, dtype=torch.int32, device=DEVICE)
    taken = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    shape = (1 + sum(counts), num_kv_heads, BLOCK, D)
    kv = [[torch.randn(shape, device=DEVICE, dtype=DTYPE).to(dtype) for _ in range(2)] for _ in range(layers)]
    return kv, tables


def scales_of(num_kv_heads, dtype):
    """What `paged_decode` and `paged_prefill` take for a cache of `dtype`."""
    if dtype.itemsize > 1:
        return {}
    return {name: torch.ones(num_kv_heads, device=DEVICE) for name in ("k_scale", "v_scale")}


def expect(q, k, v, blocks, length):
    """Attention of one row's last queries in float32: [queries, heads, D]."""
    heads = q.shape[1]
    num_kv_heads = k.shape[1]
    used = blocks[: -(-length // BLOCK)].long()
    k, v = (x[used].transpose(0, 1).reshape(num_kv_heads, -1, D)[:, :length].float() for x in (k, v))
    grouped = q.float().view(q.shape[0], num_kv_heads, -1, D)
    scores = torch.einsum("qhgd,htd->hgqt", grouped, k) * SCALE
    ahead = (
        torch.arange(length, device=DEVICE)[None] > torch.arange(length - q.shape[0], length, device=DEVICE)[:, None]
    )
    weights = scores.masked_fill(ahead, -math.inf).softmax(-1)
    return torch.einsum("hgqt,htd->qhgd", weights, v).reshape(-1, heads, D)


def check(case, out, expected):
    error = float((out.float() - expected).norm() / expected.norm())
    if not error < 1e-2:  # NaN fails
        raise SystemExit(f"{case}: relative error {error}")


def decode(recorder, case, model, batch, context, layers, dtype=DTYPE):
    heads, kv_heads, _, _ = MODELS[model]
    kv, tables = paged([context] * batch, kv_heads, layers, dtype)
    scales = scales_of(kv_heads, dtype)
    q = torch.randn(batch, heads, D, device=DEVICE, dtype=DTYPE)
    lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
    straight = straight_tiling(dtype, D, heads // kv_heads, DEVICE, num_units=batch * kv_heads)
    plan = DecodePlan(
        max_rows=batch, num_heads=heads, num_kv_heads=kv_heads, head_dim=D, device=DEVICE, tiling=straight
    )
    out = torch.full_like(q, math.nan)

    def launch():
        plan_decode(plan, lens)
        for k, v in kv:
            paged_decode(out, q, k, v, tables, lens, plan, scale=SCALE, **scales)

    time = time_graph(launch, layers)
    for row in {0, batch // 2, batch - 1}:
        check(case, out[row], expect(q[row, None], *kv[-1], tables[row], context)[0])
    if not bool(torch.isfinite(out).all()):
        raise SystemExit(f"{case}: not finite")
    recorder.add(case, "time", time, "µs")
    recorder.add(case, "rate", batch * context * kv_heads * D * 2 * dtype.itemsize / time / 1e6, "TB/s")


def prefill(recorder, case, model, chunks, tiling, dtype=DTYPE):
    heads, kv_heads, _, _ = MODELS[model]
    lens = [queries + cached for queries, cached in chunks]
    kv, tables = paged(lens, kv_heads, 8, dtype)
    scales = scales_of(kv_heads, dtype)
    starts = [0]
    for queries, _ in chunks:
        starts.append(starts[-1] + queries)
    q = torch.randn(starts[-1], heads, D, device=DEVICE, dtype=DTYPE)
    query_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    plan = PrefillPlan(
        max_tokens=starts[-1],
        max_rows=len(chunks),
        num_heads=heads,
        num_kv_heads=kv_heads,
        device=DEVICE,
        tiling=tiling,
    )
    out = torch.full_like(q, math.nan)

    def launch():
        plan_prefill(plan, query_starts)
        for k, v in kv:
            paged_prefill(out, q, k, v, tables, query_starts, seq_lens, plan, scale=SCALE, **scales)

    time = time_graph(launch, len(kv))
    for row in {0, len(chunks) - 1}:
        last = slice(starts[row + 1] - min(256, chunks[row][0]), starts[row + 1])
        check(case, out[last], expect(q[last], *kv[-1], tables[row], lens[row]))
    if not bool(torch.isfinite(out).all()):
        raise SystemExit(f"{case}: not finite")
    operations = sum(4 * heads * D * (n * cached + n * (n + 1) / 2) for n, cached in chunks)
    recorder.add(case, "time", time, "µs")
    recorder.add(case, "rate", operations / time / 1e6, "TFLOP/s")


def rows(recorder, model, tokens):
    """Norm with residual, activation, rotation with KV write: inputs warm in L2, as the kernel before leaves them."""
    heads, kv_heads, hidden, mlp = MODELS[model]
    x, residual, out = (torch.randn(tokens, hidden, device=DEVICE, dtype=DTYPE) for _ in range(3))
    weight = torch.randn(hidden, device=DEVICE, dtype=DTYPE)
    case = f"{model} {tokens} tokens"
    time = time_graph(lambda: [rms_norm(out, x, weight, 1e-5, residual) for _ in range(32)], 32)
    recorder.add(case, "rms_norm", time, "µs")
    gate_up = torch.randn(tokens, 2 * mlp, device=DEVICE, dtype=DTYPE)
    gated = torch.empty(tokens, mlp, device=DEVICE, dtype=DTYPE)
    recorder.add(case, "silu_mul", time_graph(lambda: [silu_mul(gated, gate_up) for _ in range(32)], 32), "µs")
    qkv = torch.randn(tokens, heads + 2 * kv_heads, D, device=DEVICE, dtype=DTYPE)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    cache = torch.zeros(2, tokens + 1, kv_heads, BLOCK, D, device=DEVICE, dtype=DTYPE)
    positions = torch.randint(0, 4096, (tokens,), dtype=torch.int32, device=DEVICE)
    slots = (BLOCK * (1 + torch.randperm(tokens, device=DEVICE))).int()
    cos, sin = torch.randn(2, 4096, D // 2, device=DEVICE)
    time = time_graph(
        lambda: [rope_write_kv(q, q, k, v, cache[0], cache[1], positions, slots, cos, sin) for _ in range(32)], 32
    )
    recorder.add(case, "rope_write_kv", time, "µs")


if __name__ == "__main__":
    main()
