"""Matrix products in FP8 on one NVIDIA card, beside the library's `_scaled_mm` in the same run; each is checked before it is timed.

    python perf/gemm_fp8.py [--json] [--record FILE --commit HASH --date DATE]
    python perf/gemm_fp8.py --tune [--table FILE]    try tilings, and write the table of the best ones anew

As `gemm.py`, with E4M3 weights and tokens. A single token takes what 16 do. `mlp` of the library
has the gate's kernel behind it. `layer` is what stands around attention: norm and rounding, qkv, rounding, attn_out, norm and
rounding, mlp, rounding, down, each reading what the one before wrote.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
import triton
from gemm import SHAPES, Key, Recorder, time_graph, write_table
from report import Report

from pagewire_kernels import linear_table, reference
from pagewire_kernels.activation import silu_mul
from pagewire_kernels.linear import gated_fp8, linear_fp8, scaled_apart
from pagewire_kernels.linear_hopper import (
    MOST_TOKENS,
    LinearScratch,
    Tiling,
    compile_ahead,
    launch,
    stages_that_fit,
)
from pagewire_kernels.quantise import Fp8Rows, empty_rows, quantise, rms_norm_quantise

DEVICE = torch.device("cuda")
NARROW = torch.float8_e4m3fn
TUNED = (16, 32, 64, 128, 256, 512)
TOKENS = (1, 16, 64, 128, 256, 512)
BOUND = 1e-2
APART = Tiling(*linear_table.APART)


def shapes(model: str) -> dict[str, tuple[int, int, str]]:
    """Those of the layers; the output product stays in bf16."""
    return {
        name: (n, k, "fp8 gated" if kind else "fp8")
        for name, (n, k, kind) in SHAPES[model].items()
        if name != "lm_head"
    }


def candidates(n: int, k: int, kind: str, block_m: int) -> list[Tiling]:
    """Tilings worth trying: those that were good in 16 bits, with twice the columns in as many bytes."""
    gated, most_programs, found = kind == "fp8 gated", linear_table.PROGRAMS, []
    if block_m > MOST_TOKENS:
        return found
    sides = 2 if gated else 1
    for block_n, block_k, consumers in itertools.product((64, 128), (128, 256), (1, 2)):
        rows, tiles = sides * block_n, -(-n // block_n)
        if block_n // consumers < 64 or rows > 256 or rows * block_m // consumers > 16_384 or k % block_k:
            continue
        if (block_m <= 32 and (consumers == 2 or block_k == 128)) or (block_m >= 128 and consumers == 1 and rows > 64):
            continue
        splits = {(most_programs, 0)} if tiles > most_programs else {(tiles * (most_programs // tiles), 0)}
        power = 1 << ((most_programs // tiles).bit_length() - 1) if tiles <= most_programs else 1
        if 1 < min(8, power) <= block_m // 4:
            splits.add((tiles * min(8, power), min(8, power)))
        if most_programs >= tiles > most_programs // 2:
            splits.add((tiles, 0))
        for programs, scatter in sorted(splits):
            stages = stages_that_fit(block_n, block_m, block_k, gated=gated, staged=not scatter, itemsize=1)
            if stages >= 3:
                lag = 1 if block_m > 32 else 0
                found.append(Tiling(block_n, block_m, block_k, stages, consumers, programs, scatter, lag))
    return found


def _compile(work: tuple[Key, Tiling]) -> str:
    (n, k, kind, _), tiling = work
    try:
        compile_ahead(n, k, tiling, NARROW, torch.bfloat16, gated=kind == "fp8 gated")
    except (triton.TritonError, RuntimeError) as error:
        return f"{work}: {error!r}"[:300]
    return ""


def compile_all(work: dict[Key, list[Tiling]]) -> dict[Key, list[Tiling]]:
    """Those that compile. In processes of their own, one a core, before this one touches the card."""
    begin, flat = time.perf_counter(), [(key, tiling) for key, tilings in work.items() for tiling in tilings]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        faults = pool.map(_compile, flat, chunksize=2)
    for fault in filter(None, faults):
        print(fault, file=sys.stderr)
    print(f"{len(flat)} kernels compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    good = {item for item, fault in zip(flat, faults, strict=True) if not fault}
    return {key: [tiling for tiling in tilings if (key, tiling) in good] for key, tilings in work.items()}


class Product:
    """One shape: weights, inputs, what is expected."""

    def __init__(self, n: int, k: int, kind: str) -> None:
        self.n, self.k, self.gated = n, k, kind == "fp8 gated"
        rows = 2 * n if self.gated else n
        self.bytes = rows * k
        count = max(3, min(32, math.ceil(5e8 / self.bytes)))
        made = (torch.randn(rows, k, device=DEVICE) * k**-0.5 for _ in range(count))
        self.weights = [reference.quantise_rows(weight) for weight in made]

    def tokens(self, m: int) -> None:
        self.x = torch.randn(m, self.k, device=DEVICE, dtype=torch.bfloat16)
        self.rows = Fp8Rows(*reference.quantise_rows(self.x))
        expected = reference.linear_fp8(self.x, *self.weights[-1])
        self.expected = reference.silu_mul(expected) if self.gated else expected
        self.out = torch.full((m, self.n), math.nan, device=DEVICE, dtype=torch.bfloat16)

    def timed(self, what: str, one) -> float:
        """Microseconds of a launch; infinite where it is wrong."""
        self.out.fill_(math.nan)

        def work():
            for weight, scales in self.weights:
                one(weight, scales)

        taken = time_graph(work, len(self.weights))
        error = float((self.out.float() - self.expected).norm() / self.expected.norm())
        if not error < BOUND:  # NaN fails
            print(f"WRONG {what} {self.n}x{self.k} M={len(self.x)}: relative error {error}", file=sys.stderr)
            return math.inf
        return taken

    def ours(self, scratch: LinearScratch, tiling: Tiling) -> float:
        return self.timed(
            str(tiling),
            lambda weight, scales: launch(
                self.out, self.rows.values, weight, scratch, tiling, scales=(self.rows.scales, scales), gated=self.gated
            ),
        )

    def apart(self, scratch: LinearScratch) -> float:
        return self.timed(
            "apart", lambda weight, scales: self.out.copy_(scaled_apart(self.rows, weight, scales, scratch))
        )

    def library(self) -> float:
        wide = torch.empty(len(self.x), 2 * self.n, device=DEVICE, dtype=torch.bfloat16) if self.gated else self.out

        def one(weight, scales):
            torch._scaled_mm(
                self.rows.values, weight.t(), scale_a=self.rows.scales[:, None], scale_b=scales[None, :],
                out_dtype=torch.bfloat16, use_fast_accum=True, out=wide,
            )  # fmt: skip
            if self.gated:
                silu_mul(self.out, wide)

        return self.timed("_scaled_mm", one)


def products(
    recorder: Recorder, models: list[str], tokens: list[int], work: dict[Key, list[Tiling]], *, verbose: bool
) -> dict[Key, Tiling]:
    """Time each shape by the library and by ours; the best tiling of each that is faster."""
    scratch, best = LinearScratch(DEVICE), {}
    for model in models:
        for name, shape in shapes(model).items():
            product = Product(*shape)
            for m in tokens:
                product.tokens(m)
                case, base = f"{model} {name} fp8 M={m}", product.library()
                recorder.add(case, "_scaled_mm", base, "µs")
                tilings = work.get((*shape, max(16, m)), [])
                times = [(product.ours(scratch, t) if t != APART else product.apart(scratch), t) for t in tilings]
                times.sort(key=lambda pair: pair[0])
                own = times[0][0] if times else math.inf
                if times and m > 1 and own < base:
                    best[*shape, m] = times[0][1]
                if own < math.inf:
                    recorder.add(case, "ours", own, "µs")
                recorder.add(case, "rate", product.bytes / 1e6 / min(base, own), "TB/s")
                if verbose:
                    for taken, tiling in times[:4]:
                        print(f"    {taken:.1f} {tiling}", file=sys.stderr)
            del product
            torch.cuda.empty_cache()
    return best


def layer(recorder: Recorder, model: str, m: int) -> None:
    """Everything of a layer beside attention and rotation, by the library and with the table."""
    scratch, sizes = LinearScratch(DEVICE), list(shapes(model).values())
    hidden = sizes[0][1]
    layers = [
        [
            reference.quantise_rows(torch.randn(n * (2 if "gated" in kind else 1), k, device=DEVICE))
            for n, k, kind in sizes
        ]
        for _ in range(6)
    ]
    norm = torch.ones(hidden, device=DEVICE, dtype=torch.bfloat16)
    x, residual = (torch.randn(m, hidden, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    attended = torch.randn(m, sizes[1][1], device=DEVICE, dtype=torch.bfloat16)
    rows, heads, inner = (empty_rows((m, n), DEVICE) for n in (hidden, sizes[1][1], sizes[2][0]))

    def work(own):
        table = scratch if own else None
        added = x
        for qkv, attn_out, mlp, down in layers:
            rms_norm_quantise(rows, added, norm, 1e-5, residual, dependent=own)
            linear_fp8(rows, *qkv, table, dtype=torch.bfloat16)
            quantise(heads, attended, dependent=own)
            projected = linear_fp8(heads, *attn_out, table, dtype=torch.bfloat16)
            rms_norm_quantise(rows, projected, norm, 1e-5, residual, dependent=own)
            gated_fp8(inner, rows, *mlp, table, dependent=own)
            added = linear_fp8(inner, *down, table, dtype=torch.bfloat16)

    case = f"{model} layer fp8 M={m}"
    recorder.add(case, "_scaled_mm", time_graph(lambda: work(False), len(layers)), "µs")
    recorder.add(case, "ours", time_graph(lambda: work(True), len(layers)), "µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--tune", action="store_true", help="try all tilings, and write the table of the best ones")
    parser.add_argument("--table", type=Path, default=Path(linear_table.__file__), help="where --tune writes")
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--tokens", help="default: 1,16,64,128,256,512; with --tune also 32")
    parser.add_argument("--record", type=Path, help="also write the figures to this file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--date", default="")
    args = parser.parse_args()
    models = args.models.split(",")
    tokens = [int(m) for m in (args.tokens or ",".join(map(str, TUNED if args.tune else TOKENS))).split(",")]
    keys = [(*shape, max(16, m)) for model in models for shape in shapes(model).values() for m in tokens]
    if args.tune:
        work = compile_all({key: candidates(*key) for key in keys})
        for key, tilings in work.items():
            if key[2] == "fp8":
                tilings.append(APART)
    else:
        work = {key: [Tiling(*linear_table.TABLE[key])] for key in keys if key in linear_table.TABLE}
    torch.manual_seed(0)
    recorder = Recorder()
    best = products(recorder, models, tokens, work, verbose=args.tune)
    if args.tune:
        write_table(args.table, set(work), best)
        linear_table.TABLE.update({key: tuple(getattr(t, f) for f in t.__slots__) for key, t in best.items()})
    for model in models:
        for m in tokens:
            layer(recorder, model, m)
    recorder.report.finish()
    if args.record:
        head = {"date": args.date, "commit": args.commit, "card": torch.cuda.get_device_name()}
        head |= {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
        args.record.write_text(json.dumps({**head, "rows": recorder.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
