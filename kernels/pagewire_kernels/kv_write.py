"""Between the QKV projection and attention: q/k norm, rotary embedding, K and V into their slots, in one launch.

    x ← x / √(mean(x²) + eps) · weight                                 for q and k, where the model has these norms
    x[i], x[i + ρ/2] ← x[i] c − x[i + ρ/2] s, x[i + ρ/2] c + x[i] s    for i < ρ/2, c and s at the token's position
    cache[slot // block_size, h, slot % block_size] ← k[h] / k_scale[h], v[h] / v_scale[h]

ρ ≤ D dimensions are turned, the rest stays. In fp32, rounded once. Without scales K and V are stored as they are; with them
the cache is E4M3, and what lies beyond ±448 after the division becomes that (NaN stays NaN).

Bytes a token: (num_heads + 2 · num_kv_heads) · D · itemsize read, as many written; apart, the norms and the rotation would each move q
and k once more. Follows Su et al. (2021) in the half-split form.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def rope_write_kv(
    q_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Turn q, and write turned K and V to their slots.

    Args:
        q_out: [tokens, num_heads, D], heads and D contiguous; may be `q`.
        q: [tokens, num_heads, D], heads and D contiguous; q, k and v may be views of one projection's output.
        k: [tokens, num_kv_heads, D], likewise.
        v: [tokens, num_kv_heads, D], likewise.
        k_cache: [num_blocks, num_kv_heads, block_size, D], contiguous.
        v_cache: like `k_cache`.
        positions: int [tokens].
        slots: int [tokens], block id × block size + offset; a padding token's lies in the null block, or is negative: not written.
        cos: fp32 [positions, ρ/2], contiguous; None: nothing is turned, for layers that know no positions.
        sin: like `cos`.
        q_norm: [D] weight of q's norm; given together with `k_norm`.
        k_norm: [D].
        eps: of the norms.
        k_scale: fp32 [num_kv_heads], for a cache of 8 bits; given together with `v_scale`.
        v_scale: the same for V.
        dependent: launch as a programmatic dependent of the kernel before, and let the one behind come early (Hopper).
    """
    tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    half = head_dim // 2 if cos is None else cos.shape[1]
    rest = head_dim - 2 * half
    if k.shape != (tokens, num_kv_heads, head_dim) or v.shape != k.shape or q_out.shape != q.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit each other and the cache"
        )
    for x in (q_out, q, k, v):
        if x.stride()[1:] != (head_dim, 1):
            raise ValueError("heads have to be contiguous")
    if half & (half - 1) or rest < 0 or rest & (rest - 1):
        raise ValueError(f"turned dimensions {2 * half} and the rest {rest} of a head have to be powers of two")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm are given together or not at all")
    if (k_scale is None) != (v_scale is None) or (k_scale is None) == (k_cache.itemsize == 1):
        raise ValueError("a cache of 8 bits takes k_scale and v_scale, no other does")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin are given together or not at all")
    if tokens == 0:
        return
    block_h = min(16, triton.next_power_of_2(num_heads))
    sections = triton.cdiv(num_heads, block_h) + 2 * triton.cdiv(num_kv_heads, block_h)
    _rope_write_kv_kernel[(tokens, sections)](
        q_out,
        q,
        k,
        v,
        k_cache,
        v_cache,
        positions,
        slots,
        cos if cos is not None else q,
        sin if sin is not None else q,
        q_norm if q_norm is not None else q,
        k_norm if k_norm is not None else q,
        k_scale if k_scale is not None else q,
        v_scale if v_scale is not None else q,
        q_out.stride(0),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        REST=rest,
        BLOCK_SIZE=block_size,
        BLOCK_H=block_h,
        TURNED=cos is not None,
        HAS_NORM=q_norm is not None,
        HAS_SCALES=k_scale is not None,
        DEPENDENT=dependent,
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def _rope_write_kv_kernel(
    q_out_ptr,  # [T, NUM_HEADS, D]
    q_ptr,  # [T, NUM_HEADS, D]
    k_ptr,  # [T, NUM_KV_HEADS, D]
    v_ptr,  # [T, NUM_KV_HEADS, D]
    k_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, D]
    v_cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, D]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    cos_ptr,  # [positions, HALF]
    sin_ptr,  # [positions, HALF]
    q_norm_ptr,  # [D]
    k_norm_ptr,  # [D]
    k_scale_ptr,  # [NUM_KV_HEADS]
    v_scale_ptr,  # [NUM_KV_HEADS]
    q_out_stride,
    q_stride,
    k_stride,
    v_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TURNED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    Q_SECTIONS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_SECTIONS: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    if section < Q_SECTIONS:
        h += section * BLOCK_H
        position = tl.load(positions_ptr + token).to(tl.int64)
        _turn(
            q_out_ptr + token * q_out_stride, HEAD_DIM, q_ptr + token * q_stride, h, NUM_HEADS, cos_ptr + position * HALF,
            sin_ptr + position * HALF, q_norm_ptr, k_scale_ptr, eps, HEAD_DIM, HALF, REST, TURNED, HAS_NORM, False,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            at = (slot // BLOCK_SIZE) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + (slot % BLOCK_SIZE) * HEAD_DIM
            if section < Q_SECTIONS + KV_SECTIONS:
                h += (section - Q_SECTIONS) * BLOCK_H
                position = tl.load(positions_ptr + token).to(tl.int64)
                _turn(
                    k_cache_ptr + at, BLOCK_SIZE * HEAD_DIM, k_ptr + token * k_stride, h, NUM_KV_HEADS,
                    cos_ptr + position * HALF, sin_ptr + position * HALF, k_norm_ptr, k_scale_ptr, eps, HEAD_DIM, HALF, REST,
                    TURNED, HAS_NORM, HAS_SCALES,
                )  # fmt: skip
            else:
                h += (section - Q_SECTIONS - KV_SECTIONS) * BLOCK_H
                d = tl.arange(0, HEAD_DIM)
                mask = (h < NUM_KV_HEADS)[:, None]
                v = tl.load(v_ptr + token * v_stride + h[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
                if HAS_SCALES:
                    v = v.to(tl.float32) / tl.load(v_scale_ptr + h, mask=h < NUM_KV_HEADS, other=1.0)[:, None]
                v_at = v_cache_ptr + at + h[:, None] * (BLOCK_SIZE * HEAD_DIM) + d[None, :]
                tl.store(v_at, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _turn(
    out_ptr,  # head h at h · out_head_stride
    out_head_stride: tl.constexpr,
    x_ptr,  # [heads, D]
    h,  # [BLOCK_H]
    num_heads: tl.constexpr,
    cos_ptr,  # [HALF]
    sin_ptr,  # [HALF]
    weight_ptr,  # [D]
    scale_ptr,  # [heads]
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    TURNED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Normalise, turn and scale the heads h of one token."""
    i = tl.arange(0, HALF)
    mask = (h < num_heads)[:, None]
    x_at = x_ptr + h[:, None] * HEAD_DIM + i[None, :]
    out_at = out_ptr + h[:, None] * out_head_stride + i[None, :]
    first = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_at + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            j = 2 * HALF + tl.arange(0, REST)
            rest = tl.load(x_ptr + h[:, None] * HEAD_DIM + j[None, :], mask=mask, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = first * factor * tl.load(weight_ptr + i).to(tl.float32)[None, :]
        second = second * factor * tl.load(weight_ptr + HALF + i).to(tl.float32)[None, :]
    if HAS_SCALES:
        scale = tl.load(scale_ptr + h, mask=h < num_heads, other=1.0)[:, None]
        first = first / scale
        second = second / scale
    if TURNED:
        cos = tl.load(cos_ptr + i)[None, :]
        sin = tl.load(sin_ptr + i)[None, :]
        tl.store(out_at, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_at + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(out_at, first.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_at + HALF, second.to(out_ptr.dtype.element_ty), mask=mask)
    if REST > 0:
        j = 2 * HALF + tl.arange(0, REST)
        rest = tl.load(x_ptr + h[:, None] * HEAD_DIM + j[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            rest = rest * factor * tl.load(weight_ptr + j).to(tl.float32)[None, :]
        if HAS_SCALES:
            rest = rest / scale
        rest_at = out_ptr + h[:, None] * out_head_stride + j[None, :]
        tl.store(rest_at, rest.to(out_ptr.dtype.element_ty), mask=mask)
