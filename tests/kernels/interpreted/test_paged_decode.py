"""Decode attention against the oracle: lengths around a block's end, empty rows, splits, windows, caps, scales."""

import pytest
import torch
from tests.kernels.oracle import attend, error, paged_cache

from pagewire_kernels.decode_plan import DecodePlan, DecodeTiling, plan_decode
from pagewire_kernels.paged_decode import paged_decode

BLOCK = 8
LENS = [1, BLOCK - 1, 0, BLOCK, BLOCK + 1, 0, 67, 16, 0]


def run(
    lens, *, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, programs=5, window=0, soft_cap=0.0, rows=None,
    scales=None, merge=4, min_share=1, repeat=1,
):  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    cache = {"num_kv_heads": kv_heads, "block_size": BLOCK, "head_dim": head_dim, "dtype": dtype}
    k, v, tables = paged_cache(lens, **cache, generator=generator)
    q = torch.randn(len(lens), heads, head_dim, generator=generator).to(dtype)
    out = torch.full_like(q, float("nan"))
    tiling = DecodeTiling(block_n=16, num_programs=programs, merge=merge, min_share=min_share)
    plan = DecodePlan(
        max_rows=len(lens) + 2, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, device="cpu", window=window,
        tiling=tiling,
    )  # fmt: skip
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    table_rows = None
    if rows is not None:
        table_rows = torch.tensor(rows, dtype=torch.int32)
        spread = torch.zeros(max(rows) + 1, tables.shape[1], dtype=torch.int32)
        spread[table_rows.long()] = tables
        kernel_tables = spread
    else:
        kernel_tables = tables
    more = {"k_scale": scales, "v_scale": scales} if scales is not None else {}
    scale = head_dim**-0.5
    plan_decode(plan, seq_lens)
    for _ in range(repeat):
        out.fill_(float("nan"))
        paged_decode(
            out, q, k, v, kernel_tables, seq_lens, plan, scale=scale, soft_cap=soft_cap, table_rows=table_rows, **more
        )
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for row, length in enumerate(lens):
        if length:
            expected[row] = attend(
                q[row, None], k, v, tables[row], length, scale=scale, window=window, soft_cap=soft_cap, **more
            )[0]
    assert not plan.arrivals.any()
    return out, expected


@pytest.mark.parametrize("programs", [1, 2, 5, 16, 40])
def test_any_number_of_programs_gives_the_same_attention(programs):
    out, expected = run(LENS, programs=programs)
    assert error(out, expected) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (8, 1), (20, 1)])
def test_groups_of_heads(heads, kv_heads):
    out, expected = run([5, 33, 18], heads=heads, kv_heads=kv_heads)
    assert error(out, expected) < 1e-5


@pytest.mark.parametrize("window", [1, 7, 16, 17, 1000])
def test_sliding_window(window):
    out, expected = run([1, 16, 17, 67, 0, 40], window=window)
    assert error(out, expected) < 1e-5


def test_soft_cap():
    out, expected = run(LENS, soft_cap=0.7)
    plain, _ = run(LENS)
    assert error(out, expected) < 1e-5
    assert error(out, plain) > 1e-3


def test_scales_of_stored_values():
    out, expected = run(LENS, scales=torch.tensor([0.5, 2.5]))
    assert error(out, expected) < 1e-5


def test_half_precision():
    out, expected = run(LENS, dtype=torch.float16)
    assert error(out, expected) < 2e-3


def test_rows_of_a_larger_table():
    out, expected = run([9, 3, 30], rows=[4, 0, 2])
    assert error(out, expected) < 1e-5


def test_a_plan_serves_many_layers():
    out, expected = run([67, 50], repeat=3, programs=7)
    assert error(out, expected) < 1e-5


def test_all_rows_empty():
    out, _ = run([0, 0])
    assert not out.any()


def test_a_share_has_a_least_size():
    out, expected = run(LENS, min_share=3)
    assert error(out, expected) < 1e-5
