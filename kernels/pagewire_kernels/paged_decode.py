"""Decode attention over the paged cache: one query token a row, KV work shared evenly among a fixed set of programs.

    out[r, h] = Σ_n softmax_n(cap(scale · q[r, h] · k[n])) v[n],   n over the row's visible positions

where `cap(s) = c · tanh(s / c)` with a soft cap c, and a sliding window w leaves the positions n ≥ len − w.

Bytes: each visible K and V once, 2 · len · H · D · itemsize a row; q, out and the block table are small beside it. A token and
KV head costs 4 · G · D operations for 4 · D bytes (bf16), so for G ≤ 16 memory is the bound and the matrix units' padding
of G to 16 is free.

How the work is laid out. A *unit* is one (row, KV head) with its G query heads, a *tile* BLOCK_N positions of one unit. All
tiles of all units stand in one line, rows first, and program p takes the tiles [p · share, (p + 1) · share). So one grid,
hence one CUDA graph, is balanced for every mix of lengths: the grid never depends on a length, only `plan_decode` (once a
step, for all layers) reads them.

    unit      │    0    │  1  │         2         │ 3 │
    tiles     │■ ■ ■ ■ ■│■ ■ ■│■ ■ ■ ■ ■ ■ ■ ■ ■ ■│■ ■│
    program   │0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4│

A unit that lies within one program is written out at once. Otherwise each of its programs leaves a partial (max, sum and
accumulator) and whoever arrives last merges them in the programs' order, so the result does not depend on who that is. Rejected:
a fixed number of splits a row (idle programs at mixed lengths, and two launches a layer), and a separate merging launch (2 µs a
layer also where no unit is split).

Follows flash decoding (Dao et al., 2023) and stream-K (Osama et al., 2023).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagewire_kernels.decode_plan import DecodePlan
from pagewire_kernels.paged_decode_narrow import paged_decode_narrow_kernel

_LOG2_E = math.log2(math.e)


def paged_decode(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    soft_cap: float = 0.0,
    table_rows: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Attention of one new token a row; rows of length 0 get zeros.

    Args:
        out: [R, num_heads, D], heads and D contiguous.
        q: [R, num_heads, D], heads and D contiguous.
        k_cache: [num_blocks, num_kv_heads, block_size, D], contiguous.
        v_cache: like `k_cache`.
        block_tables: int32 [rows, max_blocks]; entries past a row's length are not read.
        seq_lens: the lengths that `plan_decode` was given.
        plan: filled by `plan_decode`; its window applies.
        scale: of the scores, 1/√D by custom.
        soft_cap: 0: none.
        table_rows: int32 [R], row r's row in `block_tables`; None: r.
        k_scale: fp32 [num_kv_heads], what a stored K is multiplied by; None: 1. Given together with `v_scale`. K and V
            of 8 bits are E4M3, and then q has to fit into fp16.
        v_scale: the same for V.
        dependent: launch as a programmatic dependent of the kernel before, and let the one behind come early (Hopper).
    """
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    del num_blocks
    t = plan.tiling
    _check(q, out, k_cache, v_cache, plan)
    if t.block_n % block_size:
        raise ValueError(f"tiles of {t.block_n} positions are no multiple of the block size {block_size}")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale are given together or not at all")
    arguments = (
        out,
        q,
        k_cache.view(torch.int32) if t.straight else k_cache,
        v_cache.view(torch.int32) if t.straight else v_cache,
        block_tables,
        table_rows if table_rows is not None else seq_lens,
        seq_lens,
        plan.shares,
        plan.tile_starts,
        plan.first_rows,
        plan.partial_acc,
        plan.partial_max_sum,
        plan.arrivals,
        k_scale if k_scale is not None else plan.partial_acc,
        v_scale if v_scale is not None else plan.partial_acc,
        scale * (1.0 if soft_cap else _LOG2_E),
        soft_cap,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        q.shape[0],
    )
    options: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": plan.group,
        "BLOCK_G": triton.next_power_of_2(plan.group),
        "BLOCK_SIZE": block_size,
        "WINDOW": plan.window,
        "HAS_SOFT_CAP": soft_cap > 0,
        "HAS_ROWS": table_rows is not None,
        "HAS_SCALES": k_scale is not None,
        "NUM_PROGRAMS": plan.num_programs,
        "OFFSET": tl.int64 if k_cache.numel() >= 2**31 else tl.int32,
        "DEPENDENT": dependent,
        "num_warps": t.num_warps,
    }
    if dependent:
        options["launch_pdl"] = True
    if t.straight:
        if t.max_registers:
            options["maxnreg"] = t.max_registers
        paged_decode_narrow_kernel[(plan.num_programs,)](*arguments, **options, NUM_WARPS=t.num_warps)
        return
    _paged_decode_kernel[(plan.num_programs,)](
        *arguments,
        **options,
        HEAD_DIM=head_dim,
        BLOCK_M=max(16, triton.next_power_of_2(plan.group)),
        BLOCK_N=t.block_n,
        MERGE=min(32, max(1, t.merge // triton.next_power_of_2(plan.group))),
        num_stages=t.num_stages,
    )


def _check(q: torch.Tensor, out: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: DecodePlan) -> None:
    _, num_kv_heads, _, head_dim = k_cache.shape
    if (num_kv_heads, head_dim) != (plan.num_kv_heads, plan.head_dim):
        raise ValueError(f"cache of {num_kv_heads} × {head_dim}, plan for {plan.num_kv_heads} × {plan.head_dim}")
    if q.shape[1:] != (num_kv_heads * plan.group, head_dim) or out.shape != q.shape or q.shape[0] > plan.max_rows:
        raise ValueError(f"q of {tuple(q.shape)} and out of {tuple(out.shape)} do not fit the plan")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape):
        raise ValueError("K and V have to be contiguous and of one shape")
    if q.stride()[1:] != (head_dim, 1) or out.stride()[1:] != (head_dim, 1):
        raise ValueError("heads of q and out have to be contiguous")


@triton.jit(do_not_specialize=["num_rows"])
def _paged_decode_kernel(
    out_ptr,  # [R, H · G, D]
    q_ptr,  # [R, H · G, D]
    k_ptr,  # [num_blocks, H, BLOCK_SIZE, D]
    v_ptr,  # [num_blocks, H, BLOCK_SIZE, D]
    tables_ptr,  # [rows, max_blocks]
    table_rows_ptr,  # [R]
    lens_ptr,  # [R]
    shares_ptr,  # [3]
    tile_starts_ptr,  # [R + 1]
    first_rows_ptr,  # [P]
    acc_ptr,  # [2 P, BLOCK_G, D] fp32
    max_sum_ptr,  # [2 P, 2, BLOCK_G] fp32
    arrivals_ptr,  # [R · H]
    k_scale_ptr,  # [H]
    v_scale_ptr,  # [H]
    scale,
    soft_cap,
    q_stride,
    out_stride,
    tables_stride,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    MERGE: tl.constexpr,
    OFFSET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    NARROW: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    pid = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, BLOCK_N)
    total = tl.load(shares_ptr)
    share = tl.load(shares_ptr + 1)
    num_empty = tl.load(shares_ptr + 2)
    row = tl.load(first_rows_ptr + pid)
    if DEPENDENT:  # the plan was complete before the step's first launch that is no dependent
        gdc_wait()
    tile = pid * share
    end = tl.minimum(tile + share, total)
    while tile < end:
        start = tl.load(tile_starts_ptr + row)
        row_tiles = tl.load(tile_starts_ptr + row + 1) - start
        seq_len = tl.load(lens_ptr + row)
        table_row = row
        if HAS_ROWS:
            table_row = tl.load(table_rows_ptr + row)
        local = tile - start * NUM_KV_HEADS
        head = local // row_tiles
        first = local - head * row_tiles
        last = tl.minimum(row_tiles, first + end - tile)
        lowest = 0
        if WINDOW > 0:
            lowest = tl.maximum(seq_len - WINDOW, 0)
        tile_0 = lowest // BLOCK_N

        # ---- attend to the tiles [first, last) of this unit
        q_at = q_ptr + row.to(tl.int64) * q_stride + (head * GROUP + m)[:, None] * HEAD_DIM + d[None, :]
        q = tl.load(q_at, mask=(m < GROUP)[:, None], other=0.0)
        if NARROW:
            q = q.to(tl.float16)
        s_scale = scale
        if HAS_SCALES:
            s_scale = scale * tl.load(k_scale_ptr + head)
        table_at = tables_ptr + table_row.to(tl.int64) * tables_stride
        within = head * (BLOCK_SIZE * HEAD_DIM) + (n % BLOCK_SIZE) * HEAD_DIM
        pos = (tile_0 + first) * BLOCK_N + n
        # Block ids are fetched one tile ahead into registers: K and V need not wait for them within the pipeline.
        blocks = tl.load(table_at + pos // BLOCK_SIZE, mask=pos < seq_len, other=0)
        # Transposed: positions are the M of the first product and head dimensions that of the second, so both run on
        # wgmma from shared memory, where the G heads alone would fill no tile of it (+1 % in bandwidth over mma.sync).
        # Not for 8 bits: wgmma would have them widened and put back into shared memory (1.7 TB/s), mma.sync takes them from
        # registers (2.5); widened to fp16, for which there is an instruction, unlike bf16.
        m_i = tl.full([BLOCK_M], -1e30, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        if NARROW:
            acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
            for _ in range(first, last):
                at = blocks.to(OFFSET) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + within
                k = tl.load(k_ptr + at[:, None] + d[None, :]).to(q.dtype)
                v = tl.load(v_ptr + at[:, None] + d[None, :], mask=(pos < seq_len)[:, None], other=0.0).to(q.dtype)
                s = tl.dot(q, tl.trans(k)) * s_scale
                if HAS_SOFT_CAP:
                    s = soft_cap * 1.4426950408889634 * _tanh(s / soft_cap)
                s = tl.where(((pos < seq_len) & (pos >= lowest))[None, :], s, -1e30)
                pos += BLOCK_N
                blocks = tl.load(table_at + pos // BLOCK_SIZE, mask=pos < seq_len, other=0)
                m_new = tl.maximum(m_i, tl.max(s, 1))
                p = tl.exp2(s - m_new[:, None])
                alpha = tl.exp2(m_i - m_new)
                l_i = l_i * alpha + tl.sum(p, 1)
                acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None])
                m_i = m_new
        else:
            acc_t = tl.zeros([HEAD_DIM, BLOCK_M], tl.float32)
            q_t = tl.trans(q)
            for _ in range(first, last):
                at = blocks.to(OFFSET) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + within
                k = tl.load(k_ptr + at[:, None] + d[None, :]).to(q.dtype)
                # What a block holds past the end may be NaN, and 0 · NaN is NaN.
                v = tl.load(v_ptr + at[:, None] + d[None, :], mask=(pos < seq_len)[:, None], other=0.0).to(q.dtype)
                s_t = tl.dot(k, q_t, input_precision="ieee") * s_scale
                if HAS_SOFT_CAP:
                    s_t = soft_cap * 1.4426950408889634 * _tanh(s_t / soft_cap)
                s_t = tl.where(((pos < seq_len) & (pos >= lowest))[:, None], s_t, -1e30)
                pos += BLOCK_N
                blocks = tl.load(table_at + pos // BLOCK_SIZE, mask=pos < seq_len, other=0)
                m_new = tl.maximum(m_i, tl.max(s_t, 0))
                p_t = tl.exp2(s_t - m_new[None, :])
                alpha = tl.exp2(m_i - m_new)
                l_i = l_i * alpha + tl.sum(p_t, 0)
                acc_t = tl.dot(tl.trans(v), p_t.to(q.dtype), acc_t * alpha[None, :], input_precision="ieee")
                m_i = m_new
            acc = tl.trans(acc_t)
        if HAS_SCALES:
            acc = acc * tl.load(v_scale_ptr + head)

        # ---- write the unit out, or leave a partial
        if last - first == row_tiles:
            out_at = out_ptr + row.to(tl.int64) * out_stride + (head * GROUP + m)[:, None] * HEAD_DIM + d[None, :]
            tl.store(out_at, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=(m < GROUP)[:, None])
        else:
            slot = 2 * pid + (first == 0).to(tl.int32)
            part_at = acc_ptr + slot * (BLOCK_G * HEAD_DIM) + m[:, None] * HEAD_DIM + d[None, :]
            tl.store(part_at, acc, mask=(m < BLOCK_G)[:, None])
            tl.store(max_sum_ptr + slot * (2 * BLOCK_G) + m, m_i, mask=m < BLOCK_G)
            tl.store(max_sum_ptr + slot * (2 * BLOCK_G) + BLOCK_G + m, l_i, mask=m < BLOCK_G)
            unit = row * NUM_KV_HEADS + head
            unit_start = start * NUM_KV_HEADS + head * row_tiles
            p_first = unit_start // share
            p_last = (unit_start + row_tiles - 1) // share
            tl.debug_barrier()  # all threads' partials before the one thread's release
            arrived = tl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel", scope="gpu")
            if arrived == p_last - p_first:
                out_at = out_ptr + row.to(tl.int64) * out_stride + head * GROUP * HEAD_DIM
                _merge(out_at, acc_ptr, max_sum_ptr, p_first, p_last, GROUP, BLOCK_G, HEAD_DIM, MERGE)
                tl.store(arrivals_ptr + unit, 0)
        tile += last - first
        if (head == NUM_KV_HEADS - 1) & (last == row_tiles):
            row += 1
            if (num_empty > 0) & (tile < end):
                while tl.load(lens_ptr + row) == 0:
                    row += 1
    if num_empty > 0:
        for row in range(pid, num_rows, NUM_PROGRAMS):
            if tl.load(lens_ptr + row) == 0:
                for head in range(NUM_KV_HEADS):
                    at = row * out_stride + (head * GROUP + m)[:, None] * HEAD_DIM + d[None, :]
                    zeros = tl.zeros([BLOCK_M, HEAD_DIM], out_ptr.dtype.element_ty)
                    tl.store(out_ptr + at, zeros, mask=(m < GROUP)[:, None])


@triton.jit
def _merge(
    out_ptr,  # [G, D]
    acc_ptr,  # [2 P, BLOCK_G, D] fp32
    max_sum_ptr,  # [2 P, 2, BLOCK_G] fp32
    p_first,
    p_last,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Merge the partials of the programs p_first … p_last. They were written by other processors: read past L1 (.cg)."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, HEAD_DIM)
    i = tl.arange(0, MERGE)
    m_all = tl.full([BLOCK_G], -1e30, tl.float32)
    l_all = tl.zeros([BLOCK_G], tl.float32)
    acc_all = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    for p_0 in range(p_first, p_last + 1, MERGE):
        p = p_0 + i
        there = p <= p_last
        slot = 2 * p + (p == p_first).to(tl.int32)
        at = max_sum_ptr + slot[:, None] * (2 * BLOCK_G) + g[None, :]
        m_part = tl.load(at, mask=there[:, None], other=-1e30, cache_modifier=".cg")
        l_part = tl.load(at + BLOCK_G, mask=there[:, None], other=0.0, cache_modifier=".cg")
        at = acc_ptr + slot[:, None, None] * (BLOCK_G * HEAD_DIM) + g[None, :, None] * HEAD_DIM + d[None, None, :]
        acc_part = tl.load(at, mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m_all, tl.max(m_part, 0))
        w = tl.exp2(m_part - m_new[None, :])
        alpha = tl.exp2(m_all - m_new)
        l_all = l_all * alpha + tl.sum(l_part * w, 0)
        acc_all = acc_all * alpha[:, None] + tl.sum(acc_part * w[:, :, None], 0)
        m_all = m_new
    result = (acc_all / l_all[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g[:, None] * HEAD_DIM + d[None, :], result, mask=(g < GROUP)[:, None])


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
