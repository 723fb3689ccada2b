"""Prefill attention over the paged cache: ragged chunks of queries, each after what its row has cached, causal.

    out[t, h] = Σ_n softmax_n(cap(scale · q[t, h] · k[n])) v[n],   n ≤ pos(t), and n > pos(t) − w with a window w

where a row's queries are its last positions: pos(t) = len − q_len + t. Their K and V are in the cache already, so the cached prefix and
the chunk itself are read in one way, and the result does not depend on where a chunk was cut.

Operations: 4 · D · H · G for each visible pair (query, key). Bytes: q and out once; each KV tile once for every BLOCK_M packed
queries, mostly from L2. The matrix units are the bound from some hundred queries up.

The G query heads of a KV head are packed into a tile's rows (row m = query m // G, head m % G): short chunks fill a tile, and K and V
are read once for the group. `plan_prefill` lists the tiles on the device, so the grid, hence a CUDA graph, depends on the
number of tokens and rows there is room for and not on their lengths. Tiles of a row run from its end, the longest first.

On Hopper, 16-bit K and V in tiles of 128 packed queries go to `paged_prefill_hopper`; the kernel here serves everything else: other cards,
scaled K and V, heads of other sizes, short chunks, Triton's interpreter.

Follows FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

try:
    from pagewire_kernels import paged_prefill_hopper as hopper
except ImportError:  # Gluon is experimental: where it is missing or has changed, the portable kernel serves
    hopper = None  # type: ignore[assignment]

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Sizes of the portable kernel."""

    block_m: int = 128
    """Queries × heads of a group in a tile."""
    block_n: int = 64
    """Positions in a tile; a multiple of the KV block size."""
    num_warps: int = 8
    num_stages: int = 3


# Measured on an H200 with heads of 128: small tiles start sooner and are more, large ones read K and V less often.
LONG = PrefillTiling()
SHORT = PrefillTiling(block_m=64, block_n=32, num_warps=4)
_FEW = PrefillTiling(block_m=64, num_warps=4)
_NARROW = PrefillTiling(block_m=64, block_n=128, num_warps=4, num_stages=2)


def tiling_for(max_tokens: int, kv_dtype: torch.dtype, head_dim: int) -> PrefillTiling:
    """What is fastest for steps of up to `max_tokens`, whatever their contexts are, which a graph does not know.

    `SHORT` is a microsecond faster yet than what few tokens get, where nothing is cached, and slower by a quarter after 8,000 positions.
    """
    if head_dim > 128:  # not measured, and shared memory is small for more
        return LONG
    if kv_dtype.itemsize == 1:
        return _FEW if max_tokens <= 384 else _NARROW if max_tokens <= 1024 else LONG
    return _FEW if max_tokens <= 384 else LONG


class PrefillPlan:
    """The list of one step's tiles on the device. Allocated once for a token bucket, refilled by `plan_prefill`."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        device: torch.device | str,
        tiling: PrefillTiling = LONG,
    ) -> None:
        """Allocate.

        Args:
            max_tokens: of a step.
            max_rows: of a step.
            num_heads: query heads.
            num_kv_heads: KV heads.
            device: of the lists.
            tiling: `LONG`, or `SHORT` where chunks and contexts are a few hundred tokens.
        """
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
        self.tiling = tiling
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.num_kv_heads = num_kv_heads
        self.group = num_heads // num_kv_heads
        # Each row's last tile may be partly empty.
        self.num_tiles = min(max_tokens, max_tokens * self.group // self.tiling.block_m + max_rows)
        self.tile_rows = torch.zeros(self.num_tiles, dtype=torch.int32, device=device)  # [T] row of a tile, −1: none
        self.tile_starts = torch.zeros(self.num_tiles, dtype=torch.int32, device=device)  # [T] its first packed query


def plan_prefill(plan: PrefillPlan, query_starts: torch.Tensor) -> None:
    """List the tiles.

    Args:
        plan: is filled.
        query_starts: int32 [R + 1], where each row's queries start in the flat batch, which may begin with other tokens; rows
            without queries are allowed.
    """
    num_rows = query_starts.shape[0] - 1
    if num_rows > plan.max_rows:
        raise ValueError(f"{num_rows} rows, the plan has room for {plan.max_rows}")
    _plan_prefill_kernel[(triton.cdiv(plan.num_tiles, 32),)](
        plan.tile_rows,
        plan.tile_starts,
        query_starts,
        num_rows,
        plan.num_tiles,
        GROUP=plan.group,
        BLOCK_M=plan.tiling.block_m,
        BLOCK_R=triton.next_power_of_2(plan.max_rows),
        BLOCK_T=32,
        num_warps=8,
    )


def paged_prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    table_rows: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attention of each row's chunk of queries to everything up to it.

    Args:
        out: [tokens, num_heads, D], heads and D contiguous; tokens of no row stay as they are.
        q: [tokens, num_heads, D], heads and D contiguous.
        k_cache: [num_blocks, num_kv_heads, block_size, D], contiguous, the queries' own K included.
        v_cache: like `k_cache`.
        block_tables: int32 [rows, max_blocks]; entries past a row's length are not read.
        query_starts: what `plan_prefill` was given.
        seq_lens: int32 [R], positions in the cache, those of the chunk included: at least the row's queries.
        plan: filled by `plan_prefill`.
        scale: of the scores, 1/√D by custom.
        window: positions that a query sees, its own included; 0: all.
        soft_cap: 0: none.
        table_rows: int32 [R], row r's row in `block_tables`; None: r.
        k_scale: fp32 [num_kv_heads], what a stored K is multiplied by; None: 1. Given together with `v_scale`.
        v_scale: the same for V.
    """
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    del num_blocks
    t = plan.tiling
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale are given together or not at all")
    if t.block_n % block_size:
        raise ValueError(f"tiles of {t.block_n} positions are no multiple of the block size {block_size}")
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim has to be a power of two from 16 up, not {head_dim}")
    if (
        q.shape[1:] != (num_kv_heads * plan.group, head_dim)
        or out.shape != q.shape
        or num_kv_heads != plan.num_kv_heads
    ):
        raise ValueError(f"q of {tuple(q.shape)} and out of {tuple(out.shape)} do not fit cache and plan")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.shape == v_cache.shape):
        raise ValueError("K and V have to be contiguous and of one shape")
    if q.stride()[1:] != (head_dim, 1) or out.stride()[1:] != (head_dim, 1):
        raise ValueError("heads of q and out have to be contiguous")
    if hopper is not None and k_scale is None and t.block_m == hopper.BLOCK_M and hopper.is_supported(q, k_cache):
        log2_scale = scale * (1.0 if soft_cap else _LOG2_E)
        hopper.launch(
            out, q, k_cache, v_cache, block_tables, table_rows, query_starts, seq_lens, plan.tile_rows, plan.tile_starts,
            scale=log2_scale, window=window, soft_cap=soft_cap,
        )  # fmt: skip
        return
    _paged_prefill_kernel[(plan.num_tiles * num_kv_heads,)](
        out,
        q,
        k_cache,
        v_cache,
        block_tables,
        table_rows if table_rows is not None else seq_lens,
        query_starts,
        seq_lens,
        plan.tile_rows,
        plan.tile_starts,
        k_scale if k_scale is not None else seq_lens,
        v_scale if v_scale is not None else seq_lens,
        scale * (1.0 if soft_cap else _LOG2_E),
        soft_cap,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=plan.group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=t.block_m,
        BLOCK_N=t.block_n,
        WINDOW=window,
        HAS_SOFT_CAP=soft_cap > 0,
        HAS_ROWS=table_rows is not None,
        HAS_SCALES=k_scale is not None,
        OFFSET=tl.int64 if k_cache.numel() >= 2**31 else tl.int32,
        num_warps=t.num_warps,
        num_stages=t.num_stages if head_dim <= 128 else 2,  # what fits into shared memory
    )


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _plan_prefill_kernel(
    tile_rows_ptr,  # [T]
    tile_starts_ptr,  # [T]
    query_starts_ptr,  # [R + 1]
    num_rows,
    num_tiles,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    r = tl.arange(0, BLOCK_R)
    starts = tl.load(query_starts_ptr + r, mask=r < num_rows, other=0)
    ends = tl.load(query_starts_ptr + r + 1, mask=r < num_rows, other=0)
    tiles = ((ends - starts) * GROUP + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    before = (tile_ends[None, :] <= t[:, None]) & (r < num_rows)[None, :]
    row = tl.sum(before.to(tl.int32), 1)
    # The row's tiles backwards: its end minus one is tile 0.
    end = tl.max(tl.where(before, tile_ends[None, :], 0), 1)
    this = (r[None, :] == row[:, None]) & (r < num_rows)[None, :]
    end += tl.sum(tl.where(this, tiles[None, :], 0), 1)
    tl.store(tile_rows_ptr + t, tl.where(row < num_rows, row, -1), mask=t < num_tiles)
    tl.store(tile_starts_ptr + t, (end - 1 - t) * BLOCK_M, mask=t < num_tiles)


@triton.jit
def _paged_prefill_kernel(
    out_ptr,  # [tokens, H · G, D]
    q_ptr,  # [tokens, H · G, D]
    k_ptr,  # [num_blocks, H, BLOCK_SIZE, D]
    v_ptr,  # [num_blocks, H, BLOCK_SIZE, D]
    tables_ptr,  # [rows, max_blocks]
    table_rows_ptr,  # [R]
    query_starts_ptr,  # [R + 1]
    lens_ptr,  # [R]
    tile_rows_ptr,  # [T]
    tile_starts_ptr,  # [T]
    k_scale_ptr,  # [H]
    v_scale_ptr,  # [H]
    scale,
    soft_cap,
    q_stride,
    out_stride,
    tables_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    OFFSET: tl.constexpr,
):
    pid = tl.program_id(0)
    tile = pid // NUM_KV_HEADS
    head = pid % NUM_KV_HEADS
    row = tl.load(tile_rows_ptr + tile)
    if row < 0:
        return
    m_start = tl.load(tile_starts_ptr + tile)
    q_start = tl.load(query_starts_ptr + row)
    q_len = tl.load(query_starts_ptr + row + 1) - q_start
    seq_len = tl.load(lens_ptr + row)
    table_row = row
    if HAS_ROWS:
        table_row = tl.load(table_rows_ptr + row)
    m = m_start + tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    query = m // GROUP
    q_pos = seq_len - q_len + query
    flat = (q_start + query).to(tl.int64)
    within = (head * GROUP + m % GROUP) * HEAD_DIM
    q_at = q_ptr + (flat * q_stride + within)[:, None] + d[None, :]
    q = tl.load(q_at, mask=(query < q_len)[:, None], other=0.0)
    if k_ptr.dtype.element_ty.primitive_bitwidth == 8:
        q = q.to(tl.float16)  # there is an instruction from E4M3 to fp16, none to bf16
    if HAS_SCALES:
        scale *= tl.load(k_scale_ptr + head)

    # Keys seen by some query [low, high), by all [all_low, all_high).
    first_pos = seq_len - q_len + m_start // GROUP
    high = tl.minimum(first_pos + (BLOCK_M + GROUP - 1) // GROUP + (GROUP & (GROUP - 1) != 0), seq_len)
    all_high = (first_pos + 1) // BLOCK_N * BLOCK_N
    low = 0
    all_low = 0
    if WINDOW > 0:
        low = tl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        all_low = tl.maximum(high - WINDOW, 0)
        all_low = tl.minimum((all_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N, tl.maximum(all_high, low))
    table_at = tables_ptr + table_row.to(tl.int64) * tables_stride
    head_offset = head * (BLOCK_SIZE * HEAD_DIM)
    m_i = tl.full([BLOCK_M], -1e30, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    if WINDOW > 0:
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k_ptr, v_ptr, table_at, head_offset, q_pos, low, all_low, scale, soft_cap,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFT_CAP, True, OFFSET,
        )  # fmt: skip
        low = all_low
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, k_ptr, v_ptr, table_at, head_offset, q_pos, low, all_high, scale, soft_cap,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFT_CAP, False, OFFSET,
    )  # fmt: skip
    low = tl.maximum(low, all_high)
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, k_ptr, v_ptr, table_at, head_offset, q_pos, low, high, scale, soft_cap,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFT_CAP, True, OFFSET,
    )  # fmt: skip
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # a row of length 0 gets zeros
    if HAS_SCALES:
        acc *= tl.load(v_scale_ptr + head)
    out_at = out_ptr + (flat * out_stride + within)[:, None] + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(query < q_len)[:, None])


@triton.jit
def _attend(
    acc,  # [BLOCK_M, D]
    l_i,  # [BLOCK_M]
    m_i,  # [BLOCK_M]
    q,  # [BLOCK_M, D]
    k_ptr,
    v_ptr,
    table_at,
    head_offset,
    q_pos,  # [BLOCK_M]
    low,
    high,
    scale,
    soft_cap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Attend to the keys [low, high); unless MASKED, all of them are seen by all queries and `high` is a multiple of BLOCK_N."""
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, BLOCK_N)
    pos = low + n
    within = head_offset + (n % BLOCK_SIZE) * HEAD_DIM
    # Block ids are fetched one tile ahead into registers: K and V need not wait for them within the pipeline.
    blocks = tl.load(table_at + pos // BLOCK_SIZE, mask=pos < high, other=0)
    for _ in range(low, high, BLOCK_N):
        at = blocks.to(OFFSET) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + within
        k = tl.load(k_ptr + at[:, None] + d[None, :]).to(q.dtype)
        if MASKED:  # what a block holds past the end may be NaN, and 0 · NaN is NaN
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=(pos < high)[:, None], other=0.0).to(q.dtype)
        else:
            v = tl.load(v_ptr + at[:, None] + d[None, :]).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # float32 is served as such, not as TF32
        if HAS_SOFT_CAP:
            s = soft_cap * 1.4426950408889634 * _tanh(s * scale / soft_cap)
        if MASKED:
            seen = pos[None, :] <= q_pos[:, None]
            if WINDOW > 0:
                seen &= pos[None, :] > q_pos[:, None] - WINDOW
            s = tl.where(seen, s, -1e30)
        blocks = tl.load(table_at + (pos + BLOCK_N) // BLOCK_SIZE, mask=pos + BLOCK_N < high, other=0)
        pos += BLOCK_N
        if HAS_SOFT_CAP:
            m_new = tl.maximum(m_i, tl.max(s, 1))
            p = tl.exp2(s - m_new[:, None])
        else:
            m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)
