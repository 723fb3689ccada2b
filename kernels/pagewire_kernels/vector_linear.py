"""One token's matrix product, with what stands before and after it: norm and residual on the way in, a gate on the way out.

    x ← x + residual,  residual' ← x           with a residual
    x ← x / √(mean(x²) + eps) · norm           with a norm
    y = W x                                    W [N, K]
    y = silu(W_gate x) · (W_up x)              gated: W holds N gates and N ups

For a single token a matrix unit does nothing that its load units do not wait for: bytes are all, K · N · itemsize. Programs
keep x in registers and go through rows of W; a norm is done by each of them again, which costs reads from L2 and saves a launch.
Launched as a programmatic dependent, a program has its first rows of W under way before it waits for x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_WIDE = 4096
"""So many values of x stay in registers; without a norm, longer ones are read piece by piece."""
_PROGRAMS = 528
_EARLY_BYTES = 64 * 2**20
"""Larger matrices gain nothing from an early start: what it hides is the start alone."""


def vector_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    gated: bool = False,
    dependent: bool = False,
) -> None:
    """The product of one token.

    Args:
        out: [1, N].
        x: [1, K].
        weight: [N, K] contiguous; gated: [2 N, K], the gates before the ups.
        norm: [K], weight of the norm.
        eps: of the norm.
        residual: [1, K], added first; together with `norm` and `residual_out`.
        residual_out: [1, K], written; not `residual`, which other programs still read.
        gated: whether.
        dependent: launch as a programmatic dependent of the kernel before, and let the one behind come early (Hopper). W is
            read before that kernel has ended.
    """
    n, k = out.shape[1], x.shape[1]
    dependent = dependent and weight.numel() * weight.element_size() <= _EARLY_BYTES
    if x.shape[0] != 1 or weight.shape != (2 * n if gated else n, k) or not weight.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)}, x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if (residual is None) != (residual_out is None) or (residual is not None and norm is None):
        raise ValueError("a residual comes with a norm and a place for the sum")
    in_one = norm is not None or k <= _WIDE
    # Measured on an H200 with the matrices of an 8B model. A norm is dear to repeat, unless there are many rows.
    block_n = 1 if norm is None and in_one else 2
    programs = triton.cdiv(n, block_n)
    if norm is not None and not gated:
        programs = min(programs, _PROGRAMS)
    _vector_linear_kernel[(programs,)](
        out,
        x,
        weight,
        norm if norm is not None else x,
        residual if residual is not None else x,
        residual_out if residual_out is not None else out,
        eps,
        N=n,
        K=k,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_N=block_n,
        BLOCK_K=triton.next_power_of_2(k) if in_one else _WIDE // 2,
        PROGRAMS=programs,
        DEPENDENT=dependent,
        num_warps=8 if in_one else 4,
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def _vector_linear_kernel(
    out_ptr,  # [N]
    x_ptr,  # [K]
    weight_ptr,  # [N or 2 N, K]
    norm_ptr,  # [K]
    residual_ptr,  # [K]
    residual_out_ptr,  # [K]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_K)
    row = weight_ptr + n.to(tl.int64)[:, None] * K + j[None, :]
    inside = (n < N)[:, None] & (j < K)[None, :]
    w = tl.load(row, mask=inside, other=0.0)
    up = w
    if GATED:
        up = tl.load(row + N * K, mask=inside, other=0.0)
    if DEPENDENT:
        gdc_wait()
    if BLOCK_K >= K:
        mask = j < K
        x = tl.load(x_ptr + j, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + j, mask=mask, other=0.0).to(tl.float32)
            stored = x.to(residual_out_ptr.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(residual_out_ptr + j, stored, mask=mask)
            x = stored.to(tl.float32)
        if HAS_NORM:
            x *= tl.rsqrt(tl.sum(x * x, 0) / K + eps)
            x = (x * tl.load(norm_ptr + j, mask=mask, other=0.0).to(tl.float32)).to(weight_ptr.dtype.element_ty)
            x = x.to(tl.float32)
        for done in tl.static_range(0, N, PROGRAMS * BLOCK_N):
            y = tl.sum(w.to(tl.float32) * x[None, :], 1)
            if GATED:
                z = tl.sum(up.to(tl.float32) * x[None, :], 1)
                y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
                y = y / (1.0 + tl.exp(-y)) * z.to(out_ptr.dtype.element_ty).to(tl.float32)
            tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
            if done + PROGRAMS * BLOCK_N < N:
                n += PROGRAMS * BLOCK_N
                row += PROGRAMS * BLOCK_N * K
                inside = (n < N)[:, None] & mask[None, :]
                w = tl.load(row, mask=inside, other=0.0)
                if GATED:
                    up = tl.load(row + N * K, mask=inside, other=0.0)
    else:
        tl.static_assert(not GATED)
        for done in tl.static_range(0, N, PROGRAMS * BLOCK_N):
            acc = w.to(tl.float32) * tl.load(x_ptr + j).to(tl.float32)[None, :]
            for k in tl.static_range(BLOCK_K, K, BLOCK_K):
                inside = (n < N)[:, None] & (k + j < K)[None, :]
                x = tl.load(x_ptr + k + j, mask=k + j < K, other=0.0).to(tl.float32)
                acc += tl.load(row + k, mask=inside, other=0.0).to(tl.float32) * x[None, :]
            tl.store(out_ptr + n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=n < N)
            if done + PROGRAMS * BLOCK_N < N:
                n += PROGRAMS * BLOCK_N
                row += PROGRAMS * BLOCK_N * K
                w = tl.load(row, mask=(n < N)[:, None] & (j < K)[None, :], other=0.0)
