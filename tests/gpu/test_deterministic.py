"""The deterministic mode on the card: the same bits whatever happens around a token.

Products and attention alone, then the whole engine: overlap, neighbours, a warm prefix cache, preemption, other chunks, with KV in
bf16 and in FP8, and with weights in FP8.
"""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from typing import Any

import pytest
import torch
from tests.kernels.oracle import error, paged_cache

from pagewire import Engine
from pagewire.config import from_mapping
from pagewire_kernels import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_REQUESTS = 96
MODEL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 5003,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
PER_BLOCK = 2 * 4 * 2 * 64 * 16  # values


# ---- products and attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", "gated", "wide", "fp8", "fp8 gated"])
@pytest.mark.parametrize(("n", "k"), [(768, 512), (4096, 4096), (5003, 512)])
@pytest.mark.parametrize("on_hopper", [True, False])
def test_a_product_does_not_depend_on_how_many_there_are(kind, n, k, on_hopper):
    from pagewire_kernels.linear import scratch_for
    from pagewire_kernels.linear_fixed import linear_fixed
    from pagewire_kernels.quantise import Fp8Rows

    scratch = scratch_for(torch.device("cuda", 0)) if on_hopper else None
    if on_hopper and scratch is None:
        pytest.skip("needs the card that the other kernel is for")
    gated, m = "gated" in kind, 300
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2 * n if gated else n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    scales = None
    if "fp8" in kind:
        weight, scales = reference.quantise_rows(weight)
        expected = reference.linear_fp8(x, weight, scales)
    else:
        expected = x.float() @ weight.float().T
    torch.cuda.synchronize()
    rows = reference.quantise_rows(x)

    def product(part):
        values = x[part] if scales is None else Fp8Rows(rows[0][part], rows[1][part])
        out = torch.empty(len(x[part]), n, device="cuda") if kind == "wide" else None
        return linear_fixed(values, weight, scratch, scales=scales, gated=gated, out=out)

    whole = product(slice(0, m))
    assert error(whole, reference.silu_mul(expected) if gated else expected) < 1e-2
    for part in (slice(0, 1), slice(299, 300), slice(128, 129), slice(5, 22), slice(100, 260)):
        assert torch.equal(product(part), whole[part]), part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 1, 128), (9, 3, 64)])
def test_attention_does_not_depend_on_the_chunk(dtype, heads, kv_heads, head_dim):
    from pagewire.worker.gpu_fixed_ops import tiling_for
    from pagewire_kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill

    length, queries = 1500, 700
    generator = torch.Generator().manual_seed(0)
    made = paged_cache(
        [length], num_kv_heads=kv_heads, block_size=16, head_dim=head_dim, dtype=torch.float32, generator=generator
    )
    k, v, tables = (t.to("cuda") for t in made)
    narrow = dtype.itemsize == 1
    k, v = (t.to(dtype) for t in (k, v))
    scales = (
        {"k_scale": torch.rand(kv_heads, device="cuda"), "v_scale": torch.rand(kv_heads, device="cuda")}
        if narrow
        else {}
    )
    q = torch.randn(queries, heads, head_dim, generator=generator).bfloat16().to("cuda")

    def attend(rows, chunks):
        """Chunks of (queries, length)."""
        plan = PrefillPlan(
            max_tokens=len(rows), max_rows=len(chunks), num_heads=heads, num_kv_heads=kv_heads, device="cuda",
            tiling=tiling_for(dtype),
        )  # fmt: skip
        starts = torch.tensor(
            [0, *torch.tensor([n for n, _ in chunks]).cumsum(0).tolist()], dtype=torch.int32, device="cuda"
        )
        lens = torch.tensor([n for _, n in chunks], dtype=torch.int32, device="cuda")
        out = torch.full_like(rows, float("nan"))
        plan_prefill(plan, starts)
        paged_prefill(
            out, rows, k, v, tables, starts, lens, plan, scale=head_dim**-0.5,
            table_rows=torch.zeros(len(chunks), dtype=torch.int32, device="cuda"), **scales,
        )  # fmt: skip
        return out

    cached = length - queries
    whole = attend(q, [(queries, length)])
    assert torch.isfinite(whole).all()
    alone = attend(q, [(1, cached + i + 1) for i in range(queries)])
    assert torch.equal(alone, whole)
    sizes = [97, 256, 1, 16, 330]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    assert torch.equal(attend(q, [(n, cached + end) for n, end in zip(sizes, ends, strict=True)]), whole)


# ---- the whole engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


@cache
def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 350 tokens, half of them with a common beginning; all kinds of sampling."""
    rng = random.Random(5)
    shared = [rng.randrange(10, 5000) for _ in range(150)]
    out = []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(10, 5000) for _ in range(rng.choice([1, 15, 16, 17, 40, 200]))]
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "seed": i, "temperature": rng.choice([0, 0.7, 1])}
        params |= rng.choice(
            [{}, {}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3}, {"presence_penalty": 1.0},
             {"logit_bias": {5: 3.0, 6: -100.0}}]
        )  # fmt: skip
        out.append(((shared if i % 2 else []) + own, params))
    return out


def run(folder, kinds, *, together=True, times=1, kv_blocks=2000, **scheduler):
    """Tokens of all requests, the last time they were asked, and the engine's counters."""
    from pagewire.models.load import load_model
    from pagewire.worker.gpu import GpuWorker
    from pagewire.worker.gpu_device import CudaDevice

    quantization, kv_dtype = kinds
    made = from_mapping({
        "model": {"path": str(folder), "load_format": "dummy", "device": "cuda", "quantization": quantization},
        "cache": {"kv_bytes": kv_blocks * PER_BLOCK * (1 if kv_dtype == "fp8" else 2), "kv_dtype": kv_dtype},
        "scheduler": {"max_rows": 40, "max_step_tokens": 256, **scheduler},
        "engine": {"deterministic": True},
    })  # fmt: skip
    device = CudaDevice()
    decoder = load_model(made.model, auto_dtype=torch.bfloat16, device=device.device, keeps_fp8=True)
    worker = GpuWorker(made, decoder, device)

    async def work():
        async with Engine(config=made, worker=worker) as engine:
            for _ in range(times):
                if together:
                    streams = [engine.generate(p, echo_text=False, **params) for p, params in requests()]
                    results = [await stream.result() for stream in streams]
                else:
                    results = [await engine.generate(p, echo_text=False, **params).result() for p, params in requests()]
            return [result.token_ids for result in results], await engine.stats()

    return asyncio.run(work())


@pytest.mark.parametrize("kinds", [("none", "auto"), ("none", "fp8"), ("fp8", "fp8")], ids=str)
def test_the_same_tokens_whatever_happens_around_them(folder, kinds):
    expected, _ = run(folder, kinds)
    assert len({tuple(ids) for ids in expected}) > NUM_REQUESTS // 2
    for name, options in {
        "no overlap": {"overlap": False},
        "alone": {"together": False},
        "prefix hits": {"times": 2},
        "preempted": {"kv_blocks": 60},
        "other chunks": {"max_step_tokens": 41},
    }.items():
        tokens, stats = run(folder, kinds, **options)
        assert (stats["preemptions_total"] > 0) == (name == "preempted"), name
        differing = [i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
        assert not differing, (name, differing)
