"""Attention kernels on the card, in bf16 on real shapes: caches full of NaN wherever no position is, outputs poisoned."""

from itertools import pairwise

import pytest
import torch
from tests.kernels.oracle import attend, error, paged_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUND = 1e-2
MIXED = [0, 1, 15, 16, 17, 63, 64, 65, 0, 700, 5000, 33, 1024, 129, 2047, 0]


def cuda(x):
    return x.to("cuda")


def decode_case(
    lens, *, heads, kv_heads, head_dim=128, block_size=16, window=0, soft_cap=0.0, dtype=torch.bfloat16, seed=0
):
    """Returns a function that launches into its first argument with other lengths, if wanted, and the expectation."""
    from pagewire_kernels.decode_plan import DecodePlan, plan_decode
    from pagewire_kernels.paged_decode import paged_decode

    generator = torch.Generator().manual_seed(seed)
    cache = {"num_kv_heads": kv_heads, "block_size": block_size, "head_dim": head_dim, "dtype": dtype}
    k, v, tables = map(cuda, paged_cache(lens, **cache, generator=generator))
    q = cuda(torch.randn(len(lens), heads, head_dim, generator=generator).to(dtype))
    seq_lens = cuda(torch.tensor(lens, dtype=torch.int32))
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "window": window}
    plan = DecodePlan(max_rows=len(lens) + 3, device="cuda", **shape)
    scale = head_dim**-0.5

    def launch(out):
        plan_decode(plan, seq_lens)
        paged_decode(out, q, k, v, tables, seq_lens, plan, scale=scale, soft_cap=soft_cap)

    def expected(lens=lens):
        out = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
        for row, length in enumerate(lens):
            if length:
                out[row] = attend(
                    q[row, None], k, v, tables[row], length, scale=scale, window=window, soft_cap=soft_cap
                )[0]
        return out

    return launch, expected, torch.full_like(q, float("nan")), seq_lens


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 32, "kv_heads": 8},
        {"heads": 8, "kv_heads": 1},
        {"heads": 28, "kv_heads": 4},
        {"heads": 9, "kv_heads": 3, "head_dim": 64},
        {"heads": 8, "kv_heads": 8},
        {"heads": 32, "kv_heads": 8, "block_size": 32},
        {"heads": 32, "kv_heads": 8, "block_size": 64},
        {"heads": 32, "kv_heads": 8, "window": 1024},
        {"heads": 32, "kv_heads": 8, "window": 100, "soft_cap": 2.0},
        {"heads": 16, "kv_heads": 8, "head_dim": 256, "soft_cap": 50.0},
        {"heads": 32, "kv_heads": 8, "dtype": torch.float16},
    ],
    ids=str,
)
@pytest.mark.parametrize("lens", [MIXED, [40_000], [3] * 300], ids=["mixed", "long", "short"])
def test_decode(shape, lens):
    launch, expected, out, _ = decode_case(lens, **shape)
    launch(out)
    assert error(out, expected()) < BOUND
    assert not out[torch.tensor(lens) == 0].any()


def test_one_graph_of_decode_serves_other_lengths():
    launch, expected, out, seq_lens = decode_case(MIXED, heads=32, kv_heads=8)
    launch(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(out)
    for wanted in ([1] * len(MIXED), MIXED[::-1], MIXED):
        lens = [min(a, b) for a, b in zip(wanted, MIXED, strict=True)]
        seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        assert error(out, expected(lens)) < BOUND


def test_decode_repeats_bit_for_bit():
    launch, _, out, _ = decode_case(MIXED + [9000] * 3, heads=32, kv_heads=8)
    launch(out)
    first = out.clone()
    for _ in range(50):
        out.fill_(float("nan"))
        launch(out)
        assert torch.equal(out, first)


CHUNKS = [(1, 0), (0, 9), (17, 0), (300, 0), (128, 128), (1, 1000), (65, 3000), (31, 1), (0, 0), (700, 500)]


def prefill_case(
    chunks, *, heads, kv_heads, tiling, head_dim=128, block_size=16, window=0, soft_cap=0.0, dtype=torch.bfloat16
):
    from pagewire_kernels.paged_prefill import PrefillPlan, paged_prefill, plan_prefill

    generator = torch.Generator().manual_seed(3)
    lens = [queries + cached for queries, cached in chunks]
    cache = {"num_kv_heads": kv_heads, "block_size": block_size, "head_dim": head_dim, "dtype": dtype}
    k, v, tables = map(cuda, paged_cache(lens, **cache, generator=generator))
    starts = [0]
    for queries, _ in chunks:
        starts.append(starts[-1] + queries)
    spare = 13
    q = cuda(torch.randn(starts[-1] + spare, heads, head_dim, generator=generator).to(dtype))
    out = torch.full_like(q, float("nan"))
    query_starts, seq_lens = (cuda(torch.tensor(x, dtype=torch.int32)) for x in (starts, lens))
    plan = PrefillPlan(
        max_tokens=len(q),
        max_rows=len(chunks) + 1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        device="cuda",
        tiling=tiling,
    )
    scale = head_dim**-0.5

    def launch():
        out.fill_(float("nan"))
        plan_prefill(plan, query_starts)
        paged_prefill(out, q, k, v, tables, query_starts, seq_lens, plan, scale=scale, window=window, soft_cap=soft_cap)
        assert out[starts[-1] :].isnan().all()
        return out[: starts[-1]]

    expected = torch.empty(starts[-1], heads, head_dim, dtype=torch.float64, device="cuda")
    for row, (first, last) in enumerate(pairwise(starts)):
        expected[first:last] = attend(
            q[first:last], k, v, tables[row], lens[row], scale=scale, window=window, soft_cap=soft_cap
        )
    return launch, expected


@pytest.mark.parametrize("tiling", ["LONG", "SHORT", "portable", "few"])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 32, "kv_heads": 8},
        {"heads": 8, "kv_heads": 1},
        {"heads": 28, "kv_heads": 4},
        {"heads": 9, "kv_heads": 3, "head_dim": 64},
        {"heads": 8, "kv_heads": 8},
        {"heads": 32, "kv_heads": 8, "block_size": 32},
        {"heads": 32, "kv_heads": 8, "window": 200},
        {"heads": 32, "kv_heads": 8, "window": 1000, "soft_cap": 2.0},
        {"heads": 16, "kv_heads": 8, "head_dim": 256, "soft_cap": 50.0},
        {"heads": 32, "kv_heads": 8, "dtype": torch.float16},
    ],
    ids=str,
)
def test_prefill(shape, tiling, monkeypatch):
    from pagewire_kernels import paged_prefill

    if tiling == "portable":
        monkeypatch.setattr(paged_prefill, "hopper", None)
        tiling = "LONG"
    if tiling == "few":
        tiling = paged_prefill.tiling_for(64, torch.bfloat16, shape.get("head_dim", 128))
    else:
        tiling = getattr(paged_prefill, tiling)
    launch, expected = prefill_case(CHUNKS, tiling=tiling, **shape)
    assert error(launch(), expected) < BOUND


@pytest.mark.parametrize("tiling", ["LONG", "SHORT"])
def test_long_prefill_repeats_bit_for_bit(tiling):
    from pagewire_kernels import paged_prefill

    launch, expected = prefill_case(
        [(2000, 3000), (500, 0)], heads=32, kv_heads=8, tiling=getattr(paged_prefill, tiling)
    )
    first = launch().clone()
    assert error(first, expected) < BOUND
    for _ in range(50):
        assert torch.equal(launch(), first)
