"""What 8-bit KV and weights cost in quality: perplexity with all K and V read back from the pool, bf16 beside FP8.

    python perf/quality.py MODEL.gguf --text FILE [--tokens 200000] [--window 2048] [--calibrate 20000] [--device cpu] [--json]

The text is cut into windows of equal length; each is a prompt whose log-probabilities are asked for, so it goes through chunked
prefill, and every key and value that a query sees comes from the pool. Calibrated scales come from the last
`--calibrate` tokens of the text, which are not scored.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from report import Report

from pagewire import Engine
from pagewire.config import from_mapping
from pagewire.models.calibrate import calibrate
from pagewire.models.load import load_model
from pagewire.text.tokenizer import load_text_model
from pagewire.worker.gpu import GpuWorker
from pagewire.worker.gpu_device import CudaDevice


def config_of(model, window, device="cuda", quantization="none", **cache):
    return from_mapping({
        "model": {"path": str(model), "device": device, "max_model_len": window + 16, "quantization": quantization},
        "cache": {"kv_bytes": 8 * 2**30, "prefix_cache": False, **cache},
        "scheduler": {"max_rows": 16, "max_step_tokens": 512},
        "engine": {"stall_timeout_ms": 600_000},
    })  # fmt: skip


def perplexity(config, windows):
    """exp of the mean negative log-probability of every token but each window's first; and how many tokens."""
    worker = None
    if config.model.device == "cuda":
        device = CudaDevice()
        decoder = load_model(config.model, auto_dtype=torch.bfloat16, device=device.device, keeps_fp8=True)
        worker = GpuWorker(config, decoder, device)

    async def work():
        async with Engine(config=config, worker=worker) as engine:
            params = {"max_tokens": 0, "prompt_logprobs": 0, "echo_text": False}
            results = await asyncio.gather(*(engine.generate(ids.tolist(), **params).result() for ids in windows))
        return np.concatenate([[p.logprob for p in r.prompt_logprobs if p is not None] for r in results])

    logprobs = asyncio.run(work())
    assert logprobs.size == sum(ids.size - 1 for ids in windows)
    return math.exp(-logprobs.mean()), logprobs.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200_000, help="scored at most")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--calibrate", type=int, default=20_000, help="tokens for calibration")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what FP8 weights cost, alone")
    Report.arguments(parser)
    args = parser.parse_args()
    report = Report("quality")
    text = load_text_model(args.model)
    ids = np.array(text.encode(args.text.read_text("utf-8"), add_special=False), np.int32)
    windows = np.array_split(
        ids[: min(args.tokens, ids.size - args.calibrate)], range(args.window, args.tokens, args.window)
    )
    windows = [w for w in windows if w.size == args.window]
    (on_card if args.device == "cuda" else weights_on_cpu)(report, args, ids, windows)
    report.finish()


def weights_on_cpu(report, args, ids, windows):
    """Weights and what enters their products in E4M3, all else in float32."""
    del ids
    base, count = perplexity(config_of(args.model, args.window, "cpu", kv_bytes=2**30), windows)
    report.add("float32 weights, CPU", "tokens", count, "tokens")
    report.add("float32 weights, CPU", "perplexity", round(base, 4), "")
    value, _ = perplexity(config_of(args.model, args.window, "cpu", "fp8", kv_bytes=2**30), windows)
    report.add("fp8 weights, CPU", "perplexity", round(value, 4), "")
    report.add("fp8 weights, CPU", "perplexity_increase", round(100 * (value / base - 1), 3), "%")


def on_card(report, args, ids, windows):
    """KV read back from the pool in E4M3; then weights, too."""
    base, count = perplexity(config_of(args.model, args.window), windows)
    report.add("bf16 KV", "tokens", count, "tokens")
    report.add("bf16 KV", "perplexity", round(base, 4), "")
    on_cpu = from_mapping({"model": {"path": str(args.model), "device": "cpu", "max_model_len": args.window}})
    decoder = load_model(on_cpu.model)
    own = ids[ids.size - args.calibrate :]
    scales = calibrate(decoder, [own[at : at + args.window] for at in range(0, own.size, args.window)])
    del decoder
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scales.json"
        scales.save(path)
        for case, options in (
            ("fp8 KV, default scales", {"kv_dtype": "fp8"}),
            ("fp8 KV, calibrated", {"kv_dtype": "fp8", "kv_scales": str(path)}),
            ("fp8 weights", {"quantization": "fp8"}),
            ("fp8 weights and KV, calibrated", {"quantization": "fp8", "kv_dtype": "fp8", "kv_scales": str(path)}),
        ):
            value, _ = perplexity(config_of(args.model, args.window, **options), windows)
            report.add(case, "perplexity", round(value, 4), "")
            report.add(case, "perplexity_increase", round(100 * (value / base - 1), 3), "%")
    report.add("fp8 KV, calibrated", "largest_k_scale", float(scales.k.max()), "")
    report.add("fp8 KV, calibrated", "largest_v_scale", float(scales.v.max()), "")


if __name__ == "__main__":
    main()
