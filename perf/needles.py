"""What rounding KV to FP8 does to attention over long contexts: one needle among many keys, in float64 on a CPU.

    python perf/needles.py [--json] [--lengths 4096 32768] [--trials 64]

Keys have channels of large magnitude, as rotated keys of Llama-style models do; one position's key points along the query, so
that it takes a fifth to nearly all of the weight. K and V are then read back from bf16, or from E4M3 with a scale for each head: the
fixed ones, or those that `pagewire calibrate` would find. `found`: of the needles that have the largest weight in bf16,
those that still do. `output_error`: of attention's output, against unrounded K and V, over all trials. Model and kernels play no part;
for those see `quality.py` and `tests/gpu/test_fp8_kv.py`.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from report import Report
from torch import Tensor

from pagewire.models.kv_scales import DEFAULT_K, DEFAULT_V, from_largest

HEAD_DIM = 128
LOUD_CHANNELS = 4
CASES = ("bf16 KV", "fp8 KV, fixed scales", "fp8 KV, calibrated")


def cache(length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values of one head, float64 [length, HEAD_DIM] each."""
    k, v = torch.randn(2, length, HEAD_DIM, dtype=torch.float64, generator=generator)
    loud = torch.randperm(HEAD_DIM, generator=generator)[:LOUD_CHANNELS]
    k[:, loud] = 8 * k[:, loud].sign() + 2 * k[:, loud]
    return k, v * 0.5


def hide(k: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """A query, and the position of the key that was made to answer it."""
    length = k.shape[0]
    at = int(torch.randint(length, (1,), generator=generator))
    q = torch.randn(HEAD_DIM, dtype=torch.float64, generator=generator) * 2
    scores = k @ q * HEAD_DIM**-0.5
    share = 0.2 + 0.75 * float(torch.rand(1, generator=generator))
    others = torch.cat((scores[:at], scores[at + 1 :])).logsumexp(0)
    wanted = others + np.log(share / (1 - share))
    k[at] += q * (wanted - scores[at]) / (q @ q) * HEAD_DIM**0.5
    return q, at


def rounded(case: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As they are read back from the pool."""
    if case == "bf16 KV":
        return k.bfloat16().double(), v.bfloat16().double()
    scales = (DEFAULT_K, DEFAULT_V)
    if case == "fp8 KV, calibrated":
        found = from_largest(*(x.abs().amax().reshape(1, 1).numpy() for x in (k, v)))
        scales = float(found.k[0, 0]), float(found.v[0, 0])
    k, v = ((x / s).clamp(-448, 448).to(torch.float8_e4m3fn).double() * s for x, s in zip((k, v), scales, strict=True))
    return k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
    """The output, and the position of the largest weight."""
    weights = (k @ q * HEAD_DIM**-0.5).softmax(0)
    return weights @ v, int(weights.argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32_768], help="positions, a case each")
    parser.add_argument("--trials", type=int, default=64, help="needles of a case")
    args = parser.parse_args()
    report, least = Report("quality"), 100.0
    for length in args.lengths:
        generator = torch.Generator().manual_seed(length)
        errors: dict[str, list[Tensor]] = {case: [] for case in CASES}
        hits: dict[str, list[bool]] = {case: [] for case in CASES}
        exact = []
        for _ in range(args.trials):
            k, v = cache(length, generator)
            q, at = hide(k, generator)
            wanted, _ = attend(q, k, v)
            exact.append(wanted)
            for case in CASES:
                out, top = attend(q, *rounded(case, k, v))
                errors[case].append(out - wanted)
                hits[case].append(top == at)
        base = np.array(hits["bf16 KV"])
        for case in CASES:
            name = f"needles of {length:,}, {case}"
            found = 100 * np.array(hits[case])[base].mean()
            report.add(name, "found", float(found), "%")
            least = min(least, float(found)) if case == CASES[-1] else least
            error = torch.stack(errors[case]).norm() / torch.stack(exact).norm()
            report.add(name, "output_error", 100 * float(error), "%")
    report.add("needles, fp8 KV", "found", least, "%")
    report.finish()


if __name__ == "__main__":
    main()
