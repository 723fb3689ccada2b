"""KV in E4M3 on the card: what is written, read by decode and by prefill, against float64 over the stored values."""

import pytest
import torch
from tests.kernels.oracle import attend, error, paged_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUND = 1e-2
LENS = [0, 1, 15, 16, 17, 63, 64, 65, 0, 700, 5000, 33, 1024, 129, 2047, 0]
SHAPES = [
    {"heads": 32, "kv_heads": 8, "head_dim": 128},
    {"heads": 8, "kv_heads": 1, "head_dim": 128},
    {"heads": 9, "kv_heads": 3, "head_dim": 64},
    {"heads": 8, "kv_heads": 8, "head_dim": 128},
]


def caches(lens, shape, seed=0):
    """Values in E4M3 and NaN where no position is; scales; and what they mean, in float64."""
    generator = torch.Generator().manual_seed(seed)
    made = paged_cache(
        lens, num_kv_heads=shape["kv_heads"], block_size=16, head_dim=shape["head_dim"], dtype=torch.float32,
        generator=generator,
    )  # fmt: skip
    k, v, tables = (x.to("cuda") for x in made)
    k_scale, v_scale = (0.01 + torch.rand(2, shape["kv_heads"], generator=generator)).to("cuda")
    stored = [(x / s[:, None, None]).to(torch.float8_e4m3fn) for x, s in ((k, k_scale), (v, v_scale))]
    meant = [x.double() * s[:, None, None].double() for x, s in zip(stored, (k_scale, v_scale), strict=True)]
    return stored, (k_scale, v_scale), meant, tables, generator


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("straight_for", [None, 1, 200, 10_000])
def test_decode(shape, options, straight_for):
    from pagewire_kernels.decode_plan import DecodePlan, plan_decode, straight_tiling
    from pagewire_kernels.paged_decode import paged_decode

    tiling = None
    if straight_for is not None:
        group = shape["heads"] // shape["kv_heads"]
        tiling = straight_tiling(torch.float8_e4m3fn, shape["head_dim"], group, "cuda", num_units=straight_for)
        if tiling is None:
            pytest.skip("not for this shape or card")

    (k, v), (k_scale, v_scale), meant, tables, generator = caches(LENS, shape)
    heads, head_dim = shape["heads"], shape["head_dim"]
    q = torch.randn(len(LENS), heads, head_dim, generator=generator).bfloat16().to("cuda")
    lens = torch.tensor(LENS, dtype=torch.int32, device="cuda")
    window, soft_cap = options.get("window", 0), options.get("soft_cap", 0.0)
    plan = DecodePlan(
        max_rows=len(LENS), num_heads=heads, num_kv_heads=shape["kv_heads"], head_dim=head_dim, device="cuda",
        window=window, tiling=tiling,
    )  # fmt: skip
    out = torch.full_like(q, float("nan"))
    plan_decode(plan, lens)
    paged_decode(
        out, q, k, v, tables, lens, plan, scale=head_dim**-0.5, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale
    )
    for row, length in enumerate(LENS):
        if length == 0:
            assert not out[row].any()
            continue
        wanted = attend(
            q[row, None], *meant, tables[row], length, scale=head_dim**-0.5, window=window, soft_cap=soft_cap
        )
        assert error(out[row], wanted[0]) < BOUND, (row, length)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tiled_for", [256, 1024, 8192])
def test_prefill(shape, tiled_for):
    from pagewire_kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill, tiling_for

    chunks = [(1, 0), (17, 0), (16, 48), (130, 700), (1, 999), (300, 5)]  # queries, cached before
    lens = [n + cached for n, cached in chunks]
    (k, v), (k_scale, v_scale), meant, tables, generator = caches(lens, shape)
    heads, head_dim = shape["heads"], shape["head_dim"]
    starts = [0]
    for n, _ in chunks:
        starts.append(starts[-1] + n)
    q = torch.randn(starts[-1], heads, head_dim, generator=generator).bfloat16().to("cuda")
    plan = PrefillPlan(
        max_tokens=512, max_rows=len(chunks), num_heads=heads, num_kv_heads=shape["kv_heads"], device="cuda",
        tiling=tiling_for(tiled_for, torch.float8_e4m3fn, head_dim),
    )  # fmt: skip
    out = torch.full_like(q, float("nan"))
    query_starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
    plan_prefill(plan, query_starts)
    paged_prefill(
        out, q, k, v, tables, query_starts, torch.tensor(lens, dtype=torch.int32, device="cuda"), plan,
        scale=head_dim**-0.5, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    for row, length in enumerate(lens):
        part = slice(starts[row], starts[row + 1])
        wanted = attend(q[part], *meant, tables[row], length, scale=head_dim**-0.5, window=0, soft_cap=0.0)
        assert error(out[part], wanted) < BOUND, (row, length)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_written_values_are_divided_turned_rounded_and_clipped(shape):
    from pagewire_kernels import reference
    from pagewire_kernels.kv_write import rope_write_kv

    heads, kv_heads, head_dim, tokens = shape["heads"], shape["kv_heads"], shape["head_dim"], 50
    q, k, v = (torch.randn(tokens, n, head_dim, device="cuda").bfloat16() * 4 for n in (heads, kv_heads, kv_heads))
    k[3] *= 1e4  # beyond what fits
    k_scale, v_scale = 0.01 + torch.rand(2, kv_heads, device="cuda")
    caches = torch.zeros(2, 60, kv_heads, 16, head_dim, device="cuda").to(torch.float8_e4m3fn)
    positions = torch.randint(0, 300, (tokens,), dtype=torch.int32, device="cuda")
    slots = (torch.randperm(59 * 16, device="cuda")[:tokens] + 16).int()
    slots[7] = -1
    cos, sin = torch.randn(2, 300, head_dim // 2, device="cuda")
    rope_write_kv(
        q.clone(), q, k, v, caches[0], caches[1], positions, slots, cos, sin, k_scale=k_scale, v_scale=v_scale
    )
    turned = reference.rope(k.float(), cos[positions.long()], sin[positions.long()])
    for cache, x, scale in ((caches[0], turned, k_scale), (caches[1], v.float(), v_scale)):
        wanted = x / scale[:, None]
        for token in range(tokens):
            if slots[token] < 0:
                continue
            block, offset = divmod(int(slots[token]), 16)
            got, want = cache[block, :, offset].float(), wanted[token].clamp(-448, 448)
            assert torch.isfinite(got).all()
            # Half a step of the last of three bits, or of the smallest step of all; sums were taken in another order.
            assert ((got - want).abs() <= want.abs() / 16 * 1.01 + 2**-10 * 1.01).all(), token
    assert caches[0].float().abs().max() == 448
