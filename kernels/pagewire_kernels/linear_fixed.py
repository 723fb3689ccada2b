"""Products whose bits do not depend on how many tokens there are: y = x Wᵀ, or silu(W_gate x) · (W_up x).

A sum over K is cut by the shape of the weight alone, and added in one order; tokens go through in tiles of one size, the last
one padded. So a token's outputs are the same alone, in a batch, in a chunk of a prompt.

On Hopper, 16-bit floats and E4M3 take `linear_hopper` with one tiling for each shape, 128 tokens a launch: more tokens read
the weights again, from 128 tokens on at the rate of the matrix units. Everything else takes a plain kernel here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagewire_kernels import linear_hopper
from pagewire_kernels.activation import silu_mul
from pagewire_kernels.linear_hopper import LinearScratch, Tiling
from pagewire_kernels.quantise import Fp8Rows

_TOKENS = 128
_BLOCK_M, _BLOCK_N, _BLOCK_K = 32, 32, 64


def linear_fixed(
    x: torch.Tensor | Fp8Rows,
    weight: torch.Tensor,
    scratch: LinearScratch | None,
    *,
    scales: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product.

    Args:
        x: [M, K].
        weight: [N, K]; gated: [2 N, K], the gates before the ups. Not written by the kernel that was launched last.
        scratch: of one stream; None: this is no card for `linear_hopper`.
        scales: float32 [N] or [2 N], of a weight in E4M3; then x is in E4M3, too.
        gated: whether.
        out: [M, N] contiguous, of x's type or float32; None: a new one of x's type, bf16 for E4M3.

    Raises:
        ValueError: shapes or types do not fit.
    """
    values, x_scales = (x.values, x.scales) if isinstance(x, Fp8Rows) else (x, None)
    m, n, k = values.shape[0], weight.shape[0] // (2 if gated else 1), values.shape[1]
    if weight.shape[1] != k or values.dtype != weight.dtype or (x_scales is None) != (scales is None):
        raise ValueError(f"x {tuple(values.shape)} and weight {tuple(weight.shape)} do not fit")
    if out is None:
        out = torch.empty(m, n, dtype=values.dtype if scales is None else torch.bfloat16, device=values.device)
    if scratch is not None and linear_hopper.is_supported(values[:_TOKENS], weight) and out.is_contiguous():
        tiling = fixed_tiling(n, k, values.itemsize, gated=gated, programs=scratch.flags.numel() // 2)
        for at in range(0, m, _TOKENS):
            part = slice(at, at + _TOKENS)
            pair = None if x_scales is None or scales is None else (x_scales[part], scales)
            linear_hopper.launch(out[part], values[part], weight, scratch, tiling, scales=pair, gated=gated)
        return out
    if not gated:
        _portable(out, values, weight, x_scales, scales)
        return out
    both = torch.empty(m, 2 * n, dtype=out.dtype, device=out.device)
    _portable(both, values, weight, x_scales, scales)
    silu_mul(out, both)
    return out


def fixed_tiling(n: int, k: int, itemsize: int, *, gated: bool, programs: int) -> Tiling:
    """The one that a weight of this shape always has.

    Args:
        n: outputs.
        k: inputs.
        itemsize: bytes of a weight.
        gated: n gates and n ups.
        programs: that run at once.
    """
    block_n, consumers = (128, 2) if gated else (64, 1)
    block_k = 128 // itemsize
    tiles, units = -(-n // block_n), -(-k // block_k)
    stages = linear_hopper.stages_that_fit(block_n, _TOKENS, block_k, gated=gated, staged=True, itemsize=itemsize)
    share = programs if tiles >= programs else tiles * min(programs // tiles, units)
    return Tiling(block_n, _TOKENS, block_k, stages, consumers, share, 0, 1)


def _portable(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> None:
    (m, k), n = x.shape, weight.shape[0]
    if m == 0:
        return
    if x.stride(1) != 1 or weight.stride(1) != 1 or not out.is_contiguous():
        raise ValueError("rows have to be contiguous")
    _fixed_kernel[(triton.cdiv(n, _BLOCK_N), triton.cdiv(m, _BLOCK_M))](
        out,
        x,
        weight,
        x_scales if x_scales is not None else out,
        scales if scales is not None else out,
        x.stride(0),
        weight.stride(0),
        m,
        N=n,
        K=k,
        SCALED=scales is not None,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
        num_stages=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _fixed_kernel(
    out_ptr,  # [M, N]
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    x_scales_ptr,  # [M]
    scales_ptr,  # [N]
    x_stride,
    weight_stride,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + j < K
        x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + (k + j)[None, :]
        w_at = weight_ptr + n.to(tl.int64)[:, None] * weight_stride + (k + j)[None, :]
        x = tl.load(x_at, mask=(m < num_tokens)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at, mask=(n < N)[:, None] & inside[None, :], other=0.0)
        if SCALED:  # exact, and every card multiplies it
            x = x.to(tl.float16)
            w = w.to(tl.float16)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if SCALED:
        acc *= tl.load(x_scales_ptr + m, mask=m < num_tokens, other=0.0)[:, None]
        acc *= tl.load(scales_ptr + n, mask=n < N, other=0.0)[None, :]
    to = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(m < num_tokens)[:, None] & (n < N)[None, :])
