"""Rows in E4M3 with a scale each, made in the same pass as what comes before: a norm, a gate, or nothing.

    s = max |y| / 448,  values = y / s,   y = x                                            `quantise`
                                          y = rms_norm(x), after a residual is added       `rms_norm_quantise`
                                          y = silu(gate) · up                              `silu_mul_quantise`

In fp32, rounded once, to E4M3. Bytes a row of n values: what is read, 2 n (4 n with a gate or a residual, which is written, too),
and n written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(slots=True)
class Fp8Rows:
    """Rows in E4M3: what they stand for is values × scales.

    Attributes:
        values: float8_e4m3fn [rows, n], contiguous.
        scales: float32 [rows].
    """

    values: torch.Tensor
    scales: torch.Tensor


def empty_rows(shape: tuple[int, ...], device: torch.device) -> Fp8Rows:
    """To be written, [rows, n]."""
    return Fp8Rows(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(shape[0], dtype=torch.float32, device=device),
    )


def quantise(out: Fp8Rows, x: torch.Tensor, *, dependent: bool = False) -> None:
    """Round each row.

    Args:
        out: [rows, n].
        x: [rows, n], values of a row contiguous.
        dependent: launch as a programmatic dependent of the kernel before, and let the one behind come early (Hopper).
    """
    _launch(out, x, dependent=dependent)


def rms_norm_quantise(
    out: Fp8Rows,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """`rms_norm` whose output is rounded to E4M3 alone; arguments as there."""
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"the residual has to be contiguous and of shape {tuple(x.shape)}")
    _launch(out, x, norm=weight, eps=eps, residual=residual, dependent=dependent)


def silu_mul_quantise(out: Fp8Rows, gate_up: torch.Tensor, *, dependent: bool = False) -> None:
    """silu(gate) · up of [rows, 2 n], the gates before the ups."""
    _launch(out, gate_up, gated=True, dependent=dependent)


def scale_product(product: torch.Tensor, row_scales: torch.Tensor, column_scales: torch.Tensor) -> None:
    """product[m, n] ·= row_scales[m] · column_scales[n], in place.

    Args:
        product: [M, N] contiguous, sums of what is scaled.
        row_scales: float32 [M].
        column_scales: float32 [N].
    """
    m, n = product.shape
    if row_scales.shape != (m,) or column_scales.shape != (n,) or not product.is_contiguous():
        raise ValueError(f"{tuple(row_scales.shape)} and {tuple(column_scales.shape)} scale no {tuple(product.shape)}")
    block = min(1024, triton.next_power_of_2(n))
    _scale_kernel[(m, triton.cdiv(n, block))](product, row_scales, column_scales, N=n, BLOCK=block)


@triton.jit
def _scale_kernel(
    product_ptr,  # [M, N]
    row_scales_ptr,  # [M]
    column_scales_ptr,  # [N]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = product_ptr + row.to(tl.int64) * N + i
    scale = tl.load(row_scales_ptr + row) * tl.load(column_scales_ptr + i, mask=i < N, other=0.0)
    y = tl.load(at, mask=i < N, other=0.0).to(tl.float32) * scale
    tl.store(at, y.to(product_ptr.dtype.element_ty), mask=i < N)


def _launch(
    out: Fp8Rows,
    x: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    dependent: bool,
) -> None:
    rows, n = out.values.shape
    if x.shape != (rows, 2 * n if gated else n) or x.stride(1) != 1 or not out.values.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} and out {tuple(out.values.shape)} do not fit")
    if out.scales.shape != (rows,) or (norm is not None and norm.shape != (n,)):
        raise ValueError("scales or the weight of the norm do not fit")
    if rows == 0:
        return
    block = triton.next_power_of_2(n)
    _quantise_kernel[(rows,)](
        out.values,
        out.scales,
        x,
        residual if residual is not None else x,
        norm if norm is not None else x,
        x.stride(0),
        eps,
        N=n,
        BLOCK=block,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        DEPENDENT=dependent,
        num_warps=min(max(block // 1024, 1), 16),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def _quantise_kernel(
    values_ptr,  # [rows, N]
    scales_ptr,  # [rows]
    x_ptr,  # [rows, N or 2 N]
    residual_ptr,  # [rows, N]
    norm_ptr,  # [N]
    x_stride,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < N
    x = tl.load(x_ptr + row * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + N + i, mask=mask, other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * N + i, mask=mask, other=0.0).to(tl.float32)
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * N + i, stored, mask=mask)
        x = stored.to(tl.float32)
    if HAS_NORM:
        weight = tl.load(norm_ptr + i, mask=mask, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight
    scale = scale_of(tl.max(tl.abs(x), 0))
    tl.store(values_ptr + row * N + i, (x / scale).to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row, scale)


@triton.jit
def scale_of(largest):  # noqa: ANN201
    """A row's scale by its largest magnitude; also a row of zeros has one."""
    return tl.maximum(largest, 7.888609052210118e-31) / 448.0
