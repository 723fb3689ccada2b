"""Matrix products of few tokens on one NVIDIA card, beside cuBLAS in the same run; every case is checked before it is timed.

    python perf/gemm.py [--json] [--record FILE --commit HASH --date DATE]
    python perf/gemm.py --tune [--table FILE]     try tilings, and write the table of the best ones anew

A graph holds the product of one shape with so many different weights that L2 never holds the next one; a figure is the median
replay over the weights. `mlp` of cuBLAS has the gate's kernel behind it, which ours has inside. `layer` is what stands around
attention: norm, qkv, attn_out, norm, gate_up, down, each reading what the one before wrote.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import triton
from report import Report

from pagewire_kernels import linear_table
from pagewire_kernels.activation import silu_mul
from pagewire_kernels.linear_hopper import LinearScratch, Tiling, compile_ahead, launch, stages_that_fit
from pagewire_kernels.rms_norm import rms_norm

DEVICE = "cuda"
DTYPE = torch.bfloat16
# model: name: (outputs, inputs, kind)
SHAPES = {
    "8b": {
        "qkv": (6144, 4096, ""),
        "attn_out": (4096, 4096, ""),
        "mlp": (14336, 4096, "gated"),
        "down": (4096, 14336, ""),
        "lm_head": (128256, 4096, "wide"),
    },
    "slice70b": {
        "qkv": (1280, 8192, ""),
        "attn_out": (8192, 1024, ""),
        "mlp": (3584, 8192, "gated"),
        "down": (8192, 3584, ""),
        "lm_head": (16032, 8192, "wide"),
    },
}
BUCKETS = (16, 32, 64, 128, 256)
Key = tuple[int, int, str, int]


def candidates(n: int, k: int, kind: str, block_m: int, most_programs: int) -> list[Tiling]:
    """Tilings worth trying."""
    found = []
    sides = 2 if kind == "gated" else 1
    for block_n, block_k, consumers in itertools.product((64, 128, 256), (64, 128), (1, 2)):
        rows = sides * block_n
        sums = rows * block_m // consumers  # float32 of a group of 128 threads
        if block_n // consumers < 64 or rows > 256 or sums > 16_384:
            continue
        if (block_m > 128 and block_k == 128) or (block_m <= 32 and block_k == 64):
            continue
        if (block_m <= 32 and consumers == 2) or (block_m >= 128 and consumers == 1 and rows > 64):
            continue
        tiles = -(-n // block_n)
        # Sharing all units evenly costs more in parts than a last wave, unless there are several waves.
        splits = {(most_programs, 0)} if tiles > most_programs else set()
        if tiles <= most_programs:
            most = most_programs // tiles
            splits.add((tiles * most, 0))
            power = min(8, 1 << (most.bit_length() - 1))
            if most > 1 and block_m // power >= 4:
                splits.add((tiles * power, power))
            if 2 * tiles > most_programs:
                splits.add((tiles, 0))
        for programs, scatter in sorted(splits):
            staged = kind != "wide" and not scatter
            stages = stages_that_fit(block_n, block_m, block_k, gated=kind == "gated", staged=staged)
            if stages < 3:
                continue
            for lag in (0, 1) if block_m > 32 else (0,):
                found.append(Tiling(block_n, block_m, block_k, stages, consumers, programs, scatter, lag))
    return found


class Recorder:
    """Hands figures to the report and keeps them for the record."""

    def __init__(self) -> None:
        self.report = Report("gemm")
        self.rows: list[dict[str, object]] = []

    def add(self, case: str, metric: str, value: float, unit: str) -> None:
        met = self.report.add(case, metric, value, unit)
        self.rows.append({"case": case, "metric": metric, "value": round(value, 3), "unit": unit, "met": met})


def out_type(kind: str) -> torch.dtype:
    return torch.float32 if kind == "wide" else DTYPE


def _compile(work: tuple[Key, Tiling]) -> str:
    """What went wrong."""
    (n, k, kind, _), tiling = work
    try:
        compile_ahead(n, k, tiling, DTYPE, out_type(kind), gated=kind == "gated")
    except (triton.TritonError, RuntimeError) as error:
        return f"{work}: {error!r}"[:300]
    return ""


def compile_all(work: list[tuple[Key, Tiling]]) -> set[tuple[Key, Tiling]]:
    """Those that compile. In processes of their own, one a core, before this one touches the card."""
    begin = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        faults = pool.map(_compile, work, chunksize=2)
    for fault in filter(None, faults):
        print(fault, file=sys.stderr)
    print(f"{len(work)} kernels compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return {item for item, fault in zip(work, faults, strict=True) if not fault}


def time_graph(work, count: int, turns: int = 12) -> float:
    """Microseconds of one of `count` equal parts of what `work` launches, in a replayed graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        work()
        graph.capture_end()
        times = []
        for turn in range(turns):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if turn >= 3:
                times.append(begin.elapsed_time(end))
    return statistics.median(times) * 1e3 / count


class Product:
    """One shape: weights, inputs, what is expected."""

    def __init__(self, n: int, k: int, kind: str) -> None:
        self.n, self.k, self.kind = n, k, kind
        rows = 2 * n if kind == "gated" else n
        count = max(3, min(24, math.ceil(5e8 / (rows * k * 2))))
        self.weights = [torch.randn(rows, k, device=DEVICE, dtype=DTYPE) * k**-0.5 for _ in range(count)]
        self.bytes = rows * k * 2

    def tokens(self, m: int) -> None:
        self.x = torch.randn(m, self.k, device=DEVICE, dtype=DTYPE)
        wide = self.x.float() @ self.weights[-1].float().t()
        if self.kind == "gated":
            gate, up = wide.chunk(2, -1)
            wide = torch.nn.functional.silu(gate) * up
        self.expected = wide
        self.out = torch.full((m, self.n), math.nan, device=DEVICE, dtype=out_type(self.kind))

    def check(self, what: str) -> float:
        error = float((self.out.float() - self.expected).norm() / self.expected.norm())
        if not error < 1e-2:  # NaN fails
            print(f"WRONG {what}: relative error {error}", file=sys.stderr)
        return error

    def ours(self, scratch: LinearScratch, tiling: Tiling) -> float:
        self.out.fill_(math.nan)

        def work():
            for weight in self.weights:
                launch(self.out, self.x, weight, scratch, tiling, gated=self.kind == "gated")

        time = time_graph(work, len(self.weights))
        return time if self.check(f"{self.n}x{self.k} {self.kind} {tiling}") < 1e-2 else math.inf

    def cublas(self) -> float:
        self.out.fill_(math.nan)
        gated = torch.empty(len(self.x), 2 * self.n, device=DEVICE, dtype=DTYPE) if self.kind == "gated" else None

        def work():
            for weight in self.weights:
                if gated is not None:
                    torch.mm(self.x, weight.t(), out=gated)
                    silu_mul(self.out, gated)
                elif self.kind == "wide":
                    torch.mm(self.x, weight.t(), out_dtype=torch.float32, out=self.out)
                else:
                    torch.mm(self.x, weight.t(), out=self.out)

        time = time_graph(work, len(self.weights))
        self.check("cuBLAS")
        return time


def tune(models: list[str], buckets: list[int]) -> dict[Key, list[Tiling]]:
    """All candidates, compiled."""
    programs = linear_table.PROGRAMS
    work = {
        (*shape, m): candidates(*shape, m, programs)
        for model in models
        for shape in SHAPES[model].values()
        for m in buckets
    }
    good = compile_all([(key, tiling) for key, tilings in work.items() for tiling in tilings])
    return {key: [tiling for tiling in tilings if (key, tiling) in good] for key, tilings in work.items()}


def from_table(models: list[str], buckets: list[int]) -> dict[Key, list[Tiling]]:
    """What the table holds, for each case one tiling or none."""
    work = {}
    for model in models:
        for shape in SHAPES[model].values():
            for m in buckets:
                row = linear_table.TABLE.get((*shape, m))
                work[*shape, m] = [Tiling(*row)] if row else []
    return work


def products(
    recorder: Recorder, models: list[str], buckets: list[int], work: dict[Key, list[Tiling]], *, verbose: bool
) -> dict[Key, Tiling]:
    """Time each shape by cuBLAS and by ours; the best tiling of each that is faster than cuBLAS."""
    scratch = LinearScratch(DEVICE)
    best: dict[Key, Tiling] = {}
    for model in models:
        for name, shape in SHAPES[model].items():
            product = Product(*shape)
            for m in buckets:
                product.tokens(m)
                case = f"{model} {name} M={m}"
                base = product.cublas()
                recorder.add(case, "cuBLAS", base, "µs")
                times = [(product.ours(scratch, tiling), tiling) for tiling in work[*shape, m]]
                times.sort(key=lambda pair: pair[0])
                if times and times[0][0] < base:
                    best[*shape, m] = times[0][1]
                if times:
                    recorder.add(case, "ours", times[0][0], "µs")
                recorder.add(case, "rate", product.bytes / 1e6 / min(base, *(t for t, _ in times), base), "TB/s")
                if verbose:
                    for t, c in times[:6]:
                        print(f"    {t:.1f} {c}", file=sys.stderr)
            del product
            torch.cuda.empty_cache()
    return best


def layer(recorder: Recorder, model: str, m: int, best: dict[Key, Tiling]) -> None:
    """Everything of a layer beside attention and rotation, by cuBLAS and with ours."""
    scratch = LinearScratch(DEVICE)
    shapes = [SHAPES[model][name] for name in ("qkv", "attn_out", "mlp", "down")]
    hidden = shapes[0][1]
    layers = [
        [torch.randn(n * (2 if kind else 1), k, device=DEVICE, dtype=DTYPE) * k**-0.5 for n, k, kind in shapes]
        for _ in range(6)
    ]
    norm = torch.ones(hidden, device=DEVICE, dtype=DTYPE)
    x, residual, normed = (torch.randn(m, hidden, device=DEVICE, dtype=DTYPE) for _ in range(3))
    attended = torch.randn(m, shapes[1][1], device=DEVICE, dtype=DTYPE)
    qkv, inner = (torch.empty(m, shapes[i][0], device=DEVICE, dtype=DTYPE) for i in (0, 2))
    wide = torch.empty(m, 2 * shapes[2][0], device=DEVICE, dtype=DTYPE)

    def product(out, given, weight, shape, ours):
        tiling = best.get((*shape, m)) if ours else None
        if tiling is not None:
            launch(out, given, weight, scratch, tiling, gated=bool(shape[2]))
        elif shape[2]:
            torch.mm(given, weight.t(), out=wide)
            silu_mul(out, wide)
        else:
            torch.mm(given, weight.t(), out=out)

    def work(ours):
        for weights in layers:
            rms_norm(normed, x, norm, 1e-5, residual, dependent=ours)
            product(qkv, normed, weights[0], shapes[0], ours)
            product(x, attended, weights[1], shapes[1], ours)
            rms_norm(normed, x, norm, 1e-5, residual, dependent=ours)
            product(inner, normed, weights[2], shapes[2], ours)
            product(x, inner, weights[3], shapes[3], ours)

    case = f"{model} layer M={m}"
    recorder.add(case, "cuBLAS", time_graph(lambda: work(False), len(layers)), "µs")
    recorder.add(case, "ours", time_graph(lambda: work(True), len(layers)), "µs")


def write_table(path: Path, measured: set[Key], best: dict[Key, Tiling]) -> None:
    """The table's module with these rows; those of shapes that were not measured stay."""
    head = Path(linear_table.__file__).read_text().split("TABLE: Final")[0]
    table: dict[Key, tuple[int, ...]] = {key: row for key, row in linear_table.TABLE.items() if key not in measured}
    table |= {key: tuple(getattr(t, f) for f in t.__slots__) for key, t in best.items()}
    rows = [f"    {key!r}: {row!r}," for key, row in sorted(table.items())]
    path.write_text(head + "TABLE: Final[dict[Key, Row]] = {\n" + "\n".join(rows).replace("'", '"') + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--tune", action="store_true", help="try all tilings, and write the table of the best ones")
    parser.add_argument("--table", type=Path, default=Path(linear_table.__file__), help="where --tune writes")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, BUCKETS)))
    parser.add_argument("--record", type=Path, help="also write the figures to this file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    models, buckets = args.models.split(","), [int(m) for m in args.tokens.split(",")]
    work = (tune if args.tune else from_table)(models, buckets)
    torch.manual_seed(0)
    recorder = Recorder()
    best = products(recorder, models, buckets, work, verbose=args.tune)
    if args.tune:
        write_table(args.table, set(work), best)
    for model in models:
        for m in buckets:
            layer(recorder, model, m, best)
    recorder.report.finish()
    if args.record:
        head = {"date": args.date, "commit": args.commit, "card": torch.cuda.get_device_name()}
        head |= {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
        args.record.write_text(json.dumps({**head, "rows": recorder.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
