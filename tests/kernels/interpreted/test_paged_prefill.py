"""Prefill attention against the oracle: ragged chunks, cached prefixes, windows, caps, scales."""

from itertools import pairwise

import pytest
import torch
from tests.kernels.oracle import attend, error, paged_cache

from pagewire_kernels.paged_prefill import PrefillPlan, PrefillTiling, paged_prefill, plan_prefill

BLOCK = 8
# (queries, cached before)
CHUNKS = [(1, 0), (BLOCK - 1, 0), (0, 9), (BLOCK, 0), (BLOCK + 1, 0), (0, 0), (33, 30), (1, 40), (16, 16)]


def run(chunks, *, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, window=0, soft_cap=0.0, scales=None, rows=None,
        spare_tokens=9):  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    lens = [queries + cached for queries, cached in chunks]
    cache = {"num_kv_heads": kv_heads, "block_size": BLOCK, "head_dim": head_dim, "dtype": dtype}
    k, v, tables = paged_cache(lens, **cache, generator=generator)
    starts = [0]
    for queries, _ in chunks:
        starts.append(starts[-1] + queries)
    tokens = starts[-1] + spare_tokens
    q = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    out = torch.full_like(q, float("nan"))
    plan = PrefillPlan(
        max_tokens=tokens, max_rows=len(chunks) + 1, num_heads=heads, num_kv_heads=kv_heads, device="cpu",
        tiling=PrefillTiling(block_m=32, block_n=16),
    )  # fmt: skip
    query_starts = torch.tensor(starts, dtype=torch.int32)
    kernel_tables, table_rows = tables, None
    if rows is not None:
        table_rows = torch.tensor(rows, dtype=torch.int32)
        kernel_tables = torch.zeros(max(rows) + 1, tables.shape[1], dtype=torch.int32)
        kernel_tables[table_rows.long()] = tables
    more = {"k_scale": scales, "v_scale": scales} if scales is not None else {}
    scale = head_dim**-0.5
    plan_prefill(plan, query_starts)
    paged_prefill(
        out, q, k, v, kernel_tables, query_starts, torch.tensor(lens, dtype=torch.int32), plan, scale=scale, window=window,
        soft_cap=soft_cap, table_rows=table_rows, **more,
    )  # fmt: skip
    expected = torch.empty(starts[-1], heads, head_dim, dtype=torch.float64)
    for row, (first, last) in enumerate(pairwise(starts)):
        expected[first:last] = attend(
            q[first:last], k, v, tables[row], lens[row], scale=scale, window=window, soft_cap=soft_cap, **more
        )
    assert out[starts[-1] :].isnan().all()  # tokens of no row
    return out[: starts[-1]], expected


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2), (6, 2), (8, 1)])
def test_ragged_chunks(heads, kv_heads):
    out, expected = run(CHUNKS, heads=heads, kv_heads=kv_heads)
    assert error(out, expected) < 1e-5


@pytest.mark.parametrize("window", [1, 7, 16, 17, 1000])
def test_sliding_window(window):
    out, expected = run([(5, 0), (33, 30), (1, 40), (40, 3)], window=window)
    assert error(out, expected) < 1e-5


def test_soft_cap():
    out, expected = run(CHUNKS, soft_cap=0.7)
    assert error(out, expected) < 1e-5


def test_scales_of_stored_values():
    out, expected = run(CHUNKS, scales=torch.tensor([0.5, 2.5]))
    assert error(out, expected) < 1e-5


def test_half_precision():
    out, expected = run(CHUNKS, dtype=torch.float16)
    assert error(out, expected) < 2e-3


def test_rows_of_a_larger_table():
    out, expected = run([(9, 3), (3, 20), (30, 0)], rows=[4, 0, 2])
    assert error(out, expected) < 1e-5


def test_where_a_chunk_is_cut_does_not_matter():
    whole, _ = run([(40, 0)], spare_tokens=0)
    part, expected = run([(25, 15)], spare_tokens=0)
    assert part.shape == expected.shape
    assert error(part, expected) < 1e-5
    assert whole.shape[0] == 40


@pytest.mark.parametrize("scales", [None, torch.tensor([0.5, 2.0])])
def test_a_query_alone_gives_the_bits_that_it_gives_in_a_chunk(scales):
    """What the deterministic mode rests on: tiles of positions that a query does not see change nothing of it."""
    generator = torch.Generator().manual_seed(4)
    queries, cached, heads, kv_heads, head_dim = 21, 30, 4, 2, 16
    length = queries + cached
    cache = {"num_kv_heads": kv_heads, "block_size": BLOCK, "head_dim": head_dim, "dtype": torch.float32}
    k, v, tables = paged_cache([length], **cache, generator=generator)
    q = torch.randn(queries, heads, head_dim, generator=generator)

    def attend_to(rows, starts, lens):
        out = torch.full_like(q[: starts[-1]], float("nan"))
        plan = PrefillPlan(
            max_tokens=queries, max_rows=queries, num_heads=heads, num_kv_heads=kv_heads, device="cpu",
            tiling=PrefillTiling(block_m=32, block_n=16),
        )  # fmt: skip
        query_starts = torch.tensor(starts, dtype=torch.int32)
        plan_prefill(plan, query_starts)
        paged_prefill(
            out, rows, k, v, tables, query_starts, torch.tensor(lens, dtype=torch.int32), plan, scale=0.25,
            table_rows=torch.zeros(len(lens), dtype=torch.int32), k_scale=scales, v_scale=scales,
        )  # fmt: skip
        return out

    whole = attend_to(q, [0, queries], [length])
    alone = attend_to(q, list(range(queries + 1)), list(range(cached + 1, length + 1)))
    assert torch.equal(whole, alone)
    assert torch.equal(attend_to(q[:9], [0, 9], [cached + 9]), whole[:9])


def test_a_query_of_a_row_without_length_gets_zeros():
    out = torch.full((1, 2, 16), float("nan"))
    plan = PrefillPlan(
        max_tokens=1, max_rows=1, num_heads=2, num_kv_heads=2, device="cpu", tiling=PrefillTiling(32, 16)
    )
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    plan_prefill(plan, starts)
    k = v = torch.zeros(1, 2, BLOCK, 16)
    paged_prefill(out, torch.ones(1, 2, 16), k, v, torch.zeros(1, 1, dtype=torch.int32), starts, lens, plan, scale=1.0)
    assert not out.any()
