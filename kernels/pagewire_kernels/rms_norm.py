"""Root-mean-square normalisation, alone or after a residual is added.

    out = x / √(mean(x²) + eps) · weight                          without a residual
    residual += x;  out = residual / √(mean(residual²) + eps) · weight        with one

The mean and the product are in fp32 and rounded once. What the norm sees is the rounded residual, the value that the next layer adds to.

Bytes a row of n: 2 n · itemsize without, 4 n · itemsize with a residual; apart, the addition would move 3 n and the norm 2 n.
Follows Zhang & Sennrich (2019).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Normalise each row.

    Args:
        out: [rows, n], may be `x`.
        x: [rows, n].
        weight: [n].
        eps: added to the mean of squares.
        residual: [rows, n], contiguous; `x` is added to it first.
        dependent: launch as a programmatic dependent of the kernel before, and let the one behind come early (Hopper).
    """
    rows, n = x.shape
    if out.shape != x.shape or weight.shape != (n,) or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"out {tuple(out.shape)}, x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if x.stride(1) != 1 or out.stride(1) != 1 or (residual is not None and not residual.is_contiguous()):
        raise ValueError("rows have to be contiguous")
    if rows == 0:
        return
    block = triton.next_power_of_2(n)
    _rms_norm_kernel[(rows,)](
        out,
        x,
        residual if residual is not None else x,
        weight,
        x.stride(0),
        out.stride(0),
        eps,
        N=n,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        DEPENDENT=dependent,
        num_warps=min(max(block // 1024, 1), 16),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def _rms_norm_kernel(
    out_ptr,  # [rows, N]
    x_ptr,  # [rows, N]
    residual_ptr,  # [rows, N]
    weight_ptr,  # [N]
    x_stride,
    out_stride,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < N
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * N + i, mask=mask, other=0.0).to(tl.float32)
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * N + i, stored, mask=mask)
        x = stored.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight
    tl.store(out_ptr + row * out_stride + i, y.to(out_ptr.dtype.element_ty), mask=mask)
