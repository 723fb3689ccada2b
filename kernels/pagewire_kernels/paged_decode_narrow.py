"""Decode attention over a cache of 8 bits on Hopper: K and V go from memory straight into the registers of the matrix instruction.

What is computed, and how the work is shared, is `paged_decode`'s; this is its inner loop for E4M3. There, tiles pass through shared
memory, and V, which the second product wants by columns, is read from it byte by byte: 2.5 of 4.3 TB/s. Here nothing passes through shared
memory, since the order in which a product sums over its inner dimension, and the order of its columns, are free:

    scores   s = q · k      the inner dimension is d. Lane c of four takes 16 consecutive bytes of a position's K, twice, and calls them the
                            32 of the 128 values that the instruction wants of it. q is read in the same order.
    values   o = p · v      the columns are d. Lane g of eight takes 16 consecutive bytes of a position's V and calls them columns
                            g, g + 8, …, g + 120. What is written out is put back into order.

So every load has 16 bytes, eight lanes read whole lines, and widening to fp16 is the only work between a load and the product. A warp takes 16
positions of each tile, one tile ahead in its loads: in the loop nothing is shared and nobody waits for anybody.

A program has 1, 2 or 4 warps, each a flash attention of its own over its part of the tiles; at the end of a unit the warps' sums are added
through shared memory. One warp costs no such addition, and is best where a program meets many units. Where units are fewer than programs,
each is split among many, and what it costs to write partials and to merge them counts: four warps leave a quarter of these.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

# Triton 3.9 renamed it.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

HEAD_DIM = 128
"""The layouts below are for it."""
BLOCK_N = 16
"""Positions of a tile, the inner dimension of one instruction."""
MOST_HEADS = 16
"""Query heads of a KV head: rows of one instruction."""


@gluon.jit
def _wait_for_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _let_kernel_behind_come():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _bases_of_warps(num_warps):
    """Each warp has one index of the first of three dimensions."""
    return [[1 << bit, 0, 0] for bit in range(num_warps.bit_length() - 1)]


@gluon.constexpr_function
def _layout_of_sums(num_warps):
    """[warps, 16, 128]: of a single warp as the product leaves them, in order; of several each has a part of the rows of all."""
    in_row = [[0, 0, 1 << bit] for bit in range(7)]
    if num_warps == 1:
        lanes = [*in_row[5:], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
        return gl.DistributedLinearLayout([*in_row[:5], [0, 8, 0]], lanes, [], [], [1, 16, 128])
    rows = [[0, 1 << bit, 0] for bit in range(4)]
    of_warps = _bases_of_warps(num_warps)
    n = len(of_warps)
    return gl.DistributedLinearLayout(
        [*in_row[:2], *of_warps, *rows[n:]], in_row[2:], rows[:n], [], [num_warps, 16, 128]
    )


@gluon.jit(do_not_specialize=["num_rows"])
def paged_decode_narrow_kernel(
    out_ptr,  # [R, H · G, D]
    q_ptr,  # [R, H · G, D]
    k_ptr,  # [num_blocks, H, BLOCK_SIZE, D / 4], four bytes each
    v_ptr,  # like k
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
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_G: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_SOFT_CAP: gl.constexpr,
    HAS_ROWS: gl.constexpr,
    HAS_SCALES: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    OFFSET: gl.constexpr,
    DEPENDENT: gl.constexpr,
    NUM_WARPS: gl.constexpr,
) -> None:
    W: gl.constexpr = NUM_WARPS
    M: gl.constexpr = 16
    N: gl.constexpr = 16
    D: gl.constexpr = 128
    OF_WARPS: gl.constexpr = _bases_of_warps(W)
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    K_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 8, 0]],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        OF_WARPS,
        [],
        [W, 16, 32],
    )
    V_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 4, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        OF_WARPS,
        [],
        [W, 8, 32],
    )
    O_LAYOUT: gl.constexpr = _layout_of_sums(W)
    SUMS: gl.constexpr = gl.SliceLayout(0, O_LAYOUT)
    K_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, K_LAYOUT))
    V_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, V_LAYOUT))
    TILE: gl.constexpr = W * N
    if DEPENDENT:
        _let_kernel_behind_come()
    pid = gl.program_id(0)
    total = gl.load(shares_ptr)
    share = gl.load(shares_ptr + 1)
    num_empty = gl.load(shares_ptr + 2)
    row = gl.load(first_rows_ptr + pid)
    if DEPENDENT:  # the plan was complete before the step's first launch that is no dependent
        _wait_for_kernel_before()
    tile = pid * share
    end = gl.minimum(tile + share, total)

    q_w = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    q_m = gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))[None, :, None]
    q_d = _memory_of_inner(gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, LEFT))))[None, None, :]
    w = gl.arange(0, W, K_WARP)
    k_n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, K_LAYOUT)))[None, :, None]
    k_w = gl.arange(0, D // 4, gl.SliceLayout(0, gl.SliceLayout(1, K_LAYOUT)))[None, None, :]
    v_n = 2 * gl.arange(0, N // 2, gl.SliceLayout(0, gl.SliceLayout(2, V_LAYOUT)))[None, :, None]
    v_w = gl.arange(0, D // 4, gl.SliceLayout(0, gl.SliceLayout(1, V_LAYOUT)))[None, None, :]
    k_within = k_n * (D // 4) + k_w
    v_within = v_n * (D // 4) + v_w
    k_n = k_n + N * gl.arange(0, W, K_WARP)[:, None, None]
    v_n = v_n + N * gl.arange(0, W, V_WARP)[:, None, None]
    s_n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    s_n = s_n + N * gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    o_m = gl.arange(0, M, gl.SliceLayout(1, SUMS))
    o_d = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    while tile < end:
        start = gl.load(tile_starts_ptr + row)
        row_tiles = gl.load(tile_starts_ptr + row + 1) - start
        seq_len = gl.load(lens_ptr + row)
        table_row = row
        if HAS_ROWS:
            table_row = gl.load(table_rows_ptr + row)
        local = tile - start * NUM_KV_HEADS
        head = local // row_tiles
        first = local - head * row_tiles
        last = gl.minimum(row_tiles, first + end - tile)
        lowest = 0
        if WINDOW > 0:
            lowest = gl.maximum(seq_len - WINDOW, 0)
        tile_0 = lowest // TILE

        # ---- attend to the tiles [first, last) of this unit, each warp to its 16 positions of each
        q_at = q_ptr + row.to(gl.int64) * q_stride + (head * GROUP + q_m) * D + q_d + q_w * 0
        q = gl.load(q_at, mask=q_m < GROUP, other=0.0).to(gl.float16)
        s_scale = scale
        if HAS_SCALES:
            s_scale = scale * gl.load(k_scale_ptr + head)
        table_at = tables_ptr + table_row.to(gl.int64) * tables_stride
        stop = gl.minimum(seq_len, (tile_0 + last) * TILE)
        pos = (tile_0 + first) * TILE
        at = _tile_at(table_at, gl.minimum(pos + N * w, stop - 1), head, NUM_KV_HEADS, BLOCK_SIZE, D // 4, OFFSET)
        at_v = gl.convert_layout(at, V_WARP)[:, None, None]
        k = gl.load(k_ptr + at[:, None, None] + k_within, mask=pos + k_n < stop, other=0)
        v_even = gl.load(v_ptr + at_v + v_within, mask=pos + v_n < stop, other=0)
        v_odd = gl.load(v_ptr + at_v + v_within + D // 4, mask=pos + v_n + 1 < stop, other=0)
        # Where the next tile lies is known one tile before its loads, so that these wait for nothing.
        at = _tile_at(
            table_at, gl.minimum(pos + TILE + N * w, stop - 1), head, NUM_KV_HEADS, BLOCK_SIZE, D // 4, OFFSET
        )
        m_i = gl.full([W, M], -1e30, gl.float32, gl.SliceLayout(2, MMA))
        l_i = gl.full([W, M], 0.0, gl.float32, gl.SliceLayout(2, MMA))
        acc = gl.full([W, M, D], 0.0, gl.float32, MMA)
        for _ in range(first, last):
            ahead = pos + TILE
            at_v = gl.convert_layout(at, V_WARP)[:, None, None]
            k_next = gl.load(k_ptr + at[:, None, None] + k_within, mask=ahead + k_n < stop, other=0)
            even_next = gl.load(v_ptr + at_v + v_within, mask=ahead + v_n < stop, other=0)
            odd_next = gl.load(v_ptr + at_v + v_within + D // 4, mask=ahead + v_n + 1 < stop, other=0)
            at = _tile_at(
                table_at, gl.minimum(ahead + TILE + N * w, stop - 1), head, NUM_KV_HEADS, BLOCK_SIZE, D // 4, OFFSET
            )
            s = mma_v2(q, _inner_of(k, W, RIGHT), gl.full([W, M, N], 0.0, gl.float32, MMA)) * s_scale
            if HAS_SOFT_CAP:
                s = soft_cap * 1.4426950408889634 * _tanh(s / soft_cap)
            seen = pos + s_n < seq_len
            if WINDOW > 0:
                seen = seen & (pos + s_n >= lowest)
            s = gl.where(seen, s, -1e30)
            m_new = gl.maximum(m_i, gl.max(s, 2))
            p = gl.exp2(s - m_new[:, :, None])
            alpha = gl.exp2(m_i - m_new)
            l_i = l_i * alpha + gl.sum(p, 2)
            values = _columns_of(v_even, v_odd, W, RIGHT)
            acc = mma_v2(gl.convert_layout(p.to(gl.float16), LEFT), values, acc * alpha[:, :, None])
            m_i = m_new
            k, v_even, v_odd, pos = k_next, even_next, odd_next, ahead
        if HAS_SCALES:
            acc = acc * gl.load(v_scale_ptr + head)

        # ---- write the unit out, or leave a partial
        sums = gl.reshape(gl.permute(gl.reshape(acc, [W, M, D // 8, 8]), [0, 1, 3, 2]), [W, M, D])
        sums = gl.convert_layout(sums, O_LAYOUT)
        m_w = gl.convert_layout(m_i, gl.SliceLayout(2, O_LAYOUT))
        m_o = gl.max(m_w, 0)
        weight = gl.exp2(m_w - gl.expand_dims(m_o, 0))
        l_o = gl.sum(gl.convert_layout(l_i, gl.SliceLayout(2, O_LAYOUT)) * weight, 0)
        sums = gl.sum(sums * weight[:, :, None], 0)
        m_o = gl.convert_layout(m_o, gl.SliceLayout(1, SUMS))
        l_o = gl.convert_layout(l_o, gl.SliceLayout(1, SUMS))
        out_at = out_ptr + row.to(gl.int64) * out_stride + (head * GROUP + o_m)[:, None] * D + o_d[None, :]
        if last - first == row_tiles:
            gl.store(out_at, (sums / l_o[:, None]).to(out_ptr.dtype.element_ty), mask=(o_m < GROUP)[:, None])
        else:
            slot = 2 * pid + (first == 0).to(gl.int32)
            part_at = acc_ptr + slot * (BLOCK_G * D) + o_m[:, None] * D + o_d[None, :]
            gl.store(part_at, sums, mask=(o_m < BLOCK_G)[:, None])
            gl.store(max_sum_ptr + slot * (2 * BLOCK_G) + o_m, m_o, mask=o_m < BLOCK_G)
            gl.store(max_sum_ptr + slot * (2 * BLOCK_G) + BLOCK_G + o_m, l_o, mask=o_m < BLOCK_G)
            unit = row * NUM_KV_HEADS + head
            unit_start = start * NUM_KV_HEADS + head * row_tiles
            p_first = unit_start // share
            p_last = (unit_start + row_tiles - 1) // share
            _barrier()  # all threads' partials before the one thread's release
            arrived = gl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel", scope="gpu")
            if arrived == p_last - p_first:
                rows_at = out_ptr + row.to(gl.int64) * out_stride + head * (GROUP * D)
                _merge(rows_at, acc_ptr, max_sum_ptr, p_first, p_last, GROUP, BLOCK_G, D, W)
                gl.store(arrivals_ptr + unit, 0)
        tile += last - first
        if (head == NUM_KV_HEADS - 1) & (last == row_tiles):
            row += 1
            if (num_empty > 0) & (tile < end):
                while gl.load(lens_ptr + row) == 0:
                    row += 1
    if num_empty > 0:
        zeros = gl.full([M, D], 0.0, gl.float32, SUMS).to(out_ptr.dtype.element_ty)
        for empty in range(pid, num_rows, NUM_PROGRAMS):
            if gl.load(lens_ptr + empty) == 0:
                for of_head in range(NUM_KV_HEADS):
                    at_zeros = (
                        out_ptr + empty.to(gl.int64) * out_stride + (of_head * GROUP + o_m)[:, None] * D + o_d[None, :]  # type: ignore[attr-defined]
                    )
                    gl.store(at_zeros, zeros, mask=(o_m < GROUP)[:, None])


@gluon.jit
def _merge(
    out_ptr,  # [G, D]
    acc_ptr,  # [2 P, BLOCK_G, D] fp32
    max_sum_ptr,  # [2 P, 2, BLOCK_G] fp32
    p_first,
    p_last,
    GROUP: gl.constexpr,
    BLOCK_G: gl.constexpr,
    D: gl.constexpr,
    W: gl.constexpr,
):
    """Merge the partials of the programs p_first … p_last, in their order, as many at once as registers hold."""
    AT_ONCE: gl.constexpr = 32 * W // BLOCK_G
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, W, 1], [2, 1, 0])
    PARTS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    SUMS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    ROWS: gl.constexpr = gl.SliceLayout(1, SUMS)
    i = gl.arange(0, AT_ONCE, gl.SliceLayout(1, PARTS))
    g = gl.arange(0, BLOCK_G, gl.SliceLayout(0, PARTS))
    g_row = gl.arange(0, BLOCK_G, ROWS)
    d = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    within = g_row[:, None] * D + d[None, :]
    m_all = gl.full([BLOCK_G], -1e30, gl.float32, ROWS)
    l_all = gl.full([BLOCK_G], 0.0, gl.float32, ROWS)
    acc_all = gl.full([BLOCK_G, D], 0.0, gl.float32, SUMS)
    for p_0 in range(p_first, p_last + 1, AT_ONCE):
        p = p_0 + i
        there = p <= p_last
        slot = 2 * p + (p == p_first).to(gl.int32)
        # Written by other multiprocessors: read past L1.
        at = max_sum_ptr + slot[:, None] * (2 * BLOCK_G) + g[None, :]
        m_part = gl.load(at, mask=there[:, None], other=-1e30, cache_modifier=".cg")
        l_part = gl.load(at + BLOCK_G, mask=there[:, None], other=0.0, cache_modifier=".cg")
        slots = gl.expand_dims(gl.expand_dims(slot, 1), 2)
        inside = gl.expand_dims(gl.expand_dims(there, 1), 2)
        acc_part = gl.load(
            acc_ptr + slots * (BLOCK_G * D) + gl.expand_dims(within, 0), mask=inside, other=0.0, cache_modifier=".cg"
        )
        m_new = gl.maximum(m_all, gl.convert_layout(gl.max(m_part, 0), ROWS))
        w = gl.exp2(m_part - gl.convert_layout(m_new, gl.SliceLayout(0, PARTS))[None, :])
        alpha = gl.exp2(m_all - m_new)
        l_all = l_all * alpha + gl.convert_layout(gl.sum(l_part * w, 0), ROWS)
        acc_all = acc_all * alpha[:, None] + gl.sum(acc_part * gl.expand_dims(w, 2), 0)
        m_all = m_new
    result = (acc_all / l_all[:, None]).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + within, result, mask=(g_row < GROUP)[:, None])


@gluon.jit
def _memory_of_inner(i):
    """Which of a head's 128 values stands at inner index i = 16 t + 8 h + 2 c + e of the scores' product: the 16 consecutive of lane c first."""
    e, c, h, t = i % 2, (i // 2) % 4, (i // 8) % 2, i // 16
    r = 4 * t + 2 * h + e  # of the 32 that lane c holds
    return 64 * (r // 16) + 16 * c + r % 16


@gluon.jit
def _inner_of(k, W: gl.constexpr, LAYOUT: gl.constexpr):
    """K as loaded, words of 4 bytes [W, N, 32], as the right operands [W, 128, N] in fp16. Nothing moves: names of registers change."""
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            .reg .b32 wide;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 wide, low;
            mov.b32 {$0, $1}, wide;
            cvt.rn.f16x2.e4m3x2 wide, high;
            mov.b32 {$2, $3}, wide;
        }
        """,
        "=h,=h,=h,=h,r",
        [k],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    both = gl.join(gl.join(b0, b1), gl.join(b2, b3))
    parts = gl.reshape(both, [W, 16, 2, 4, 4, 2, 2])  # word = 16 r₄ + 4 c + r₃ r₂; in it e, r₁: d = 4 word + 2 r₁ + e
    ordered = gl.permute(parts, [0, 2, 4, 6, 3, 5, 1])  # inner = 64 r₄ + 16 (r₃ r₂) + 8 r₁ + 2 c + e
    return gl.convert_layout(gl.reshape(ordered, [W, 128, 16]), LAYOUT)


@gluon.jit
def _columns_of(even, odd, W: gl.constexpr, LAYOUT: gl.constexpr):
    """V as loaded, words of even and of odd positions [W, N / 2, 32], as the right operands [W, N, 128] with columns 8 t + g of d = 16 g + t.

    The instruction wants values of two positions in a register: bytes are exchanged, then widened.
    """
    e0, o0, e1, o1, e2, o2, e3, o3 = gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            .reg .b32 both;
            prmt.b32 both, $8, $9, 0x5140;
            mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 both, low;
            mov.b32 {$0, $1}, both;
            cvt.rn.f16x2.e4m3x2 both, high;
            mov.b32 {$2, $3}, both;
            prmt.b32 both, $8, $9, 0x7362;
            mov.b32 {low, high}, both;
            cvt.rn.f16x2.e4m3x2 both, low;
            mov.b32 {$4, $5}, both;
            cvt.rn.f16x2.e4m3x2 both, high;
            mov.b32 {$6, $7}, both;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [even, odd],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    low = gl.join(gl.join(e0, o0), gl.join(e1, o1))
    high = gl.join(gl.join(e2, o2), gl.join(e3, o3))
    parts = gl.reshape(gl.join(low, high), [W, 8, 8, 4, 2, 2, 2])  # pair, g, word of its four, odd, d bit 0, d bit 1
    ordered = gl.permute(parts, [0, 1, 4, 3, 6, 5, 2])
    return gl.convert_layout(gl.reshape(ordered, [W, 16, 128]), LAYOUT)


@gluon.jit
def _tile_at(
    table_at, pos, head, NUM_KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, D: gl.constexpr, OFFSET: gl.constexpr
):
    """Where the tile at position `pos` begins in K and in V: it lies within one block."""
    block = gl.load(table_at + pos // BLOCK_SIZE).to(OFFSET)
    inside = 0
    if BLOCK_SIZE > 16:
        inside = pos % BLOCK_SIZE // 16 * (16 * D)
    return block * (NUM_KV_HEADS * BLOCK_SIZE * D) + head * (BLOCK_SIZE * D) + inside


@gluon.jit
def _tanh(x):
    return 1.0 - 2.0 / (gl.exp2(2.8853900817779268 * x) + 1.0)
