"""Prefill attention for Hopper: the same sum as `paged_prefill`, on warps of their own for loading and for computing.

One warp fetches K and V block by block with the tensor copy engine (a block and head of the cache is a contiguous box, so a tile is
BLOCK_N / block_size boxes), two warp groups of 4 compute 64 packed queries each. A group issues the products Q·K of the next tile and
P·V of this one together and takes the softmax of the next tile while P·V runs; the two groups drift apart and fill each
other's gaps. Operations and bytes as in `paged_prefill`.

    load     │ K0 · │ K1 V0 │ K2 V1 │ …     group g holds the K of tile g and the V of tile g − 1, in stage g mod STAGES
    compute  │ QK0 softmax0 │ QK1 PV0 softmax1 │ QK2 PV1 softmax2 │ …

Written in Gluon, since Triton's own pipeliner waits for Q·K before anything else. Measured on an H200 at 8,192 causal: Triton with
pointers 450 TFLOP/s, this 500 to 511. Rejected there: cp.async instead of the copy engine (420: address arithmetic and the load-store
unit are the bound), one group of 8 warps (497), tiles of 64 positions (470), gathering the prefix into dense memory and reading that
through Triton's descriptors (486 to 527, less 16 µs for the gather and memory for the longest context).

Follows FlashAttention-3 (Shah et al., 2024).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M = 128
BLOCK_N = 128
_STAGES = 2
_BOX = 64  # columns of a box: 128 bytes, the widest swizzle
# Triton 3.9 renamed it.
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def is_supported(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether `launch` can serve these: 16-bit floats of one type, heads of 64 or 128, on compute capability 9."""
    block_size, head_dim = k_cache.shape[2:]
    return (
        q.dtype in {torch.bfloat16, torch.float16}
        and k_cache.dtype == q.dtype
        and head_dim in {64, 128}
        and block_size % 8 == 0
        and BLOCK_N % block_size == 0
        and q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
    )


def launch(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    table_rows: torch.Tensor | None,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_starts: torch.Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """Attend; arguments as checked by `paged_prefill`. tile_rows and tile_starts: int32 [T], tiles of BLOCK_M packed queries."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_desc, v_desc = (
        TensorDescriptor.from_tensor(cache.view(-1, head_dim), [block_size, _BOX], layout)
        for cache in (k_cache, v_cache)
    )
    num_tiles = tile_rows.shape[0]
    _paged_prefill_hopper_kernel[(num_tiles * num_kv_heads,)](
        out,
        q,
        k_desc,
        v_desc,
        block_tables,
        table_rows if table_rows is not None else seq_lens,
        query_starts,
        seq_lens,
        tile_rows,
        tile_starts,
        scale,
        soft_cap,
        q.stride(0),
        out.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        STAGES=_STAGES,
        WINDOW=window,
        HAS_SOFT_CAP=soft_cap > 0,
        HAS_ROWS=table_rows is not None,
        num_warps=4,
    )


@gluon.jit
def _paged_prefill_hopper_kernel(
    out_ptr,  # [tokens, H · G, D]
    q_ptr,  # [tokens, H · G, D]
    k_desc,  # [num_blocks · H · BLOCK_SIZE, D] in boxes of [BLOCK_SIZE, 64]
    v_desc,  # likewise
    tables_ptr,  # [rows, max_blocks]
    table_rows_ptr,  # [R]
    query_starts_ptr,  # [R + 1]
    lens_ptr,  # [R]
    tile_rows_ptr,  # [T]
    tile_starts_ptr,  # [T]
    scale,
    soft_cap,
    q_stride,
    out_stride,
    tables_stride,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    HAS_ROWS: gl.constexpr,
):
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    HALF_M: gl.constexpr = BLOCK_M // 2
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])
    KV_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], DTYPE)
    Q_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_M, HEAD_DIM], DTYPE)
    pid = gl.program_id(0)
    tile = pid // NUM_KV_HEADS
    head = pid % NUM_KV_HEADS
    row = gl.load(tile_rows_ptr + tile)
    if row < 0:
        return
    m_start = gl.load(tile_starts_ptr + tile)
    q_start = gl.load(query_starts_ptr + row)
    q_len = gl.load(query_starts_ptr + row + 1) - q_start
    seq_len = gl.load(lens_ptr + row)
    table_row = row
    if HAS_ROWS:
        table_row = gl.load(table_rows_ptr + row)
    table_at = tables_ptr + table_row.to(gl.int64) * tables_stride

    # Keys seen by some query [low, high), by all of them [0, all_high).
    first_pos = seq_len - q_len + m_start // GROUP
    high = gl.minimum(first_pos + (BLOCK_M + GROUP - 1) // GROUP + (GROUP & (GROUP - 1) != 0), seq_len)
    all_high = (first_pos + 1) // BLOCK_N * BLOCK_N
    low = 0
    if WINDOW > 0:
        low = gl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        all_high = 0
    num = (high - low + BLOCK_N - 1) // BLOCK_N

    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, HEAD_DIM], KV_SMEM)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, HEAD_DIM], KV_SMEM)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, HALF_M, HEAD_DIM], Q_SMEM)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mended = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(mended, count=1)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ROWS))
    for part in gl.static_range(2):
        m = m_start + part * HALF_M + gl.arange(0, HALF_M, gl.SliceLayout(1, ROWS))
        q_at = (q_start + m // GROUP).to(gl.int64) * q_stride + (head * GROUP + m % GROUP) * HEAD_DIM
        q_ptrs, q_mask = gl.broadcast(q_ptr + q_at[:, None] + d[None, :], (m // GROUP < q_len)[:, None])
        q_smem.index(part).store(gl.load(q_ptrs, mask=q_mask, other=0.0))
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, out_ptr, q_smem, k_smem, v_smem, full, empty, mended, q_start, q_len, seq_len, m_start, head, low,
                    high, all_high, num, scale, soft_cap, out_stride, GROUP, HEAD_DIM, HALF_M, BLOCK_N, STAGES, WINDOW,
                    HAS_SOFT_CAP,
                ),
            ),
            (
                _attend,
                (
                    1, out_ptr, q_smem, k_smem, v_smem, full, empty, mended, q_start, q_len, seq_len, m_start, head, low,
                    high, all_high, num, scale, soft_cap, out_stride, GROUP, HEAD_DIM, HALF_M, BLOCK_N, STAGES, WINDOW,
                    HAS_SOFT_CAP,
                ),
            ),
            (
                _load_tiles,
                (
                    k_desc, v_desc, k_smem, v_smem, full, empty, table_at, low, high, num, head, NUM_KV_HEADS,
                    BLOCK_SIZE, BLOCK_N, HEAD_DIM, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _load_tiles(
    k_desc,
    v_desc,
    k_smem,  # [STAGES, BLOCK_N, D]
    v_smem,  # [STAGES, BLOCK_N, D]
    full,  # [STAGES] barriers
    empty,  # [STAGES] barriers
    table_at,  # [max_blocks]
    low,
    high,
    num,
    head,
    NUM_KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp. Blocks past the end, and the V of tile −1, are read from the null block: their scores are masked."""
    PER_TILE: gl.constexpr = BLOCK_N // BLOCK_SIZE
    first_block = low // BLOCK_SIZE
    num_blocks = (high + BLOCK_SIZE - 1) // BLOCK_SIZE
    for g in range(num + 1):
        stage = g % STAGES
        rows_k = ()
        rows_v = ()
        for i in gl.static_range(PER_TILE):  # before the wait, which hides their latency
            at_k = first_block + g * PER_TILE + i
            at_v = at_k - PER_TILE
            block_k = gl.load(table_at + at_k, mask=at_k < num_blocks, other=0)
            block_v = gl.load(table_at + at_v, mask=(at_v < num_blocks) & (g > 0), other=0)
            rows_k = rows_k + ((block_k * NUM_KV_HEADS + head) * BLOCK_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
            rows_v = rows_v + ((block_v * NUM_KV_HEADS + head) * BLOCK_SIZE,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(empty.index(stage), ((g // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 2 * BLOCK_N * HEAD_DIM * 2)
        for i in gl.static_range(PER_TILE):
            for h in gl.static_range(HEAD_DIM // 64):
                k_to = k_smem.index(stage).slice(i * BLOCK_SIZE, BLOCK_SIZE, 0).slice(h * 64, 64, 1)
                _tma_load(k_desc, [rows_k[i], h * 64], bar, k_to)
                v_to = v_smem.index(stage).slice(i * BLOCK_SIZE, BLOCK_SIZE, 0).slice(h * 64, 64, 1)
                _tma_load(v_desc, [rows_v[i], h * 64], bar, v_to)


@gluon.jit
def _attend(
    PART: gl.constexpr,
    out_ptr,
    q_smem,  # [2, BLOCK_M, D]
    k_smem,  # [STAGES, BLOCK_N, D]
    v_smem,  # [STAGES, BLOCK_N, D]
    full,
    empty,
    mended,
    q_start,
    q_len,
    seq_len,
    m_start,
    head,
    low,
    high,
    all_high,
    num,
    scale,
    soft_cap,
    out_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
):
    """One computing warp group: the packed queries m_start + PART · BLOCK_M …"""
    DTYPE: gl.constexpr = q_smem.dtype
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0])
    MMA_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    MMA_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    P_DOT: gl.constexpr = gl.DotOperandLayout(0, MMA_O, 2)
    m_start += PART * BLOCK_M
    # Q in registers: reading it from shared memory for every tile costs as much of its bandwidth as K does.
    q = q_smem.index(PART).load(gl.DotOperandLayout(0, MMA_S, 2))
    q_pos = seq_len - q_len + (m_start + gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA_S))) // GROUP
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, MMA_S))
    m_i = gl.full([BLOCK_M], -1e30, gl.float32, gl.SliceLayout(1, MMA_S))
    l_i = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, MMA_S))
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, MMA_S)

    mbarrier.wait(full.index(0), 0)
    s_token = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s_token])
    p, m_i, l_i, alpha = _softmax(
        s, m_i, l_i, q_pos, low + n, scale, soft_cap, True, WINDOW, HAS_SOFT_CAP, P_DOT, DTYPE
    )
    acc_token = warpgroup_mma_init(gl.full([BLOCK_M, HEAD_DIM], 0.0, gl.float32, MMA_O))
    p_busy = p
    split = gl.maximum(gl.minimum((all_high - low) // BLOCK_N, num) - 1, 0)
    acc_token, p_busy, alpha, p, m_i, l_i = _attend_tiles(
        acc_token, p_busy, alpha, p, m_i, l_i, 0, split, q, k_smem, v_smem, full, empty, q_pos, low + n, scale, soft_cap,
        False, WINDOW, HAS_SOFT_CAP, BLOCK_M, BLOCK_N, STAGES, MMA_S, MMA_O, P_DOT, DTYPE,
    )  # fmt: skip
    acc_token, p_busy, alpha, p, m_i, l_i = _attend_tiles(
        acc_token, p_busy, alpha, p, m_i, l_i, split, num - 1, q, k_smem, v_smem, full, empty, q_pos, low + n, scale,
        soft_cap, True, WINDOW, HAS_SOFT_CAP, BLOCK_M, BLOCK_N, STAGES, MMA_S, MMA_O, P_DOT, DTYPE,
    )  # fmt: skip

    acc, _ = warpgroup_mma_wait(0, deps=[acc_token, p_busy])
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, MMA_O))[:, None]
    mbarrier.wait(full.index(num % STAGES), (num // STAGES) & 1)
    last_v = v_smem.index(num % STAGES)
    if PART == 0:  # what a block holds past the end may be NaN, and 0 · NaN is NaN
        pos = low + (num - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ROWS))
        v = gl.where((pos < high)[:, None], last_v.load(ROWS), 0.0)
        last_v.store(v.to(DTYPE))
        fence_async_shared()
        mbarrier.arrive(mended)
    else:
        mbarrier.wait(mended, 0)
    acc_token = warpgroup_mma(p, last_v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])

    acc = acc / gl.convert_layout(l_i, gl.SliceLayout(1, MMA_O))[:, None]
    result = gl.convert_layout(acc.to(DTYPE), ROWS)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, ROWS))
    m = m_start + gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROWS))
    out_at = (q_start + m // GROUP).to(gl.int64) * out_stride + (head * GROUP + m % GROUP) * HEAD_DIM
    out_ptrs, mask = gl.broadcast(out_ptr + out_at[:, None] + d[None, :], (m // GROUP < q_len)[:, None])
    gl.store(out_ptrs, result, mask=mask)


@gluon.jit
def _attend_tiles(
    acc_token,
    p_busy,
    alpha,
    p,
    m_i,
    l_i,
    j_first,
    j_last,
    q,
    k_smem,
    v_smem,
    full,
    empty,
    q_pos,
    n,
    scale,
    soft_cap,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    MMA_S: gl.constexpr,
    MMA_O: gl.constexpr,
    P_DOT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """P·V of the tiles j in [j_first, j_last) and scores and softmax of j + 1.

    P·V is waited for at the head of the next turn: within one basic block the assembler moves that wait up before the softmax.
    """
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, MMA_S)
    for j in range(j_first, j_last):
        stage = (j + 1) % STAGES
        mbarrier.wait(full.index(stage), ((j + 1) // STAGES) & 1)
        acc, _ = warpgroup_mma_wait(0, deps=[acc_token, p_busy])
        mbarrier.arrive(empty.index(j % STAGES))
        s_token = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, MMA_O))[:, None]
        acc_token = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
        p_busy = p
        s = warpgroup_mma_wait(1, deps=[s_token])
        p, m_i, l_i, alpha = _softmax(
            s, m_i, l_i, q_pos, n + (j + 1) * BLOCK_N, scale, soft_cap, MASKED, WINDOW, HAS_SOFT_CAP, P_DOT, DTYPE
        )
    return acc_token, p_busy, alpha, p, m_i, l_i


@gluon.jit
def _softmax(
    s,  # [BLOCK_M, BLOCK_N]
    m_i,  # [BLOCK_M]
    l_i,  # [BLOCK_M]
    q_pos,  # [BLOCK_M]
    k_pos,  # [BLOCK_N]
    scale,
    soft_cap,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    P_DOT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    if HAS_SOFT_CAP:
        tanh = 1.0 - 2.0 / (gl.exp2(2.8853900817779268 * (s * scale / soft_cap)) + 1.0)
        s = soft_cap * 1.4426950408889634 * tanh
        scale = 1.0
    if MASKED:
        seen = k_pos[None, :] <= q_pos[:, None]
        if WINDOW > 0:
            seen &= k_pos[None, :] > q_pos[:, None] - WINDOW
        s = gl.where(seen, s, -1e30)
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    l_i = l_i * alpha + gl.sum(p, 1)
    return gl.convert_layout(p.to(DTYPE), P_DOT), m_new, l_i, alpha
