"""Products of up to 256 tokens: y = x Wᵀ, or silu(W_gate x) · (W_up x), by whatever measured fastest.

At so few tokens a product is bound by its weights, 2 · N · K bytes. The library leaves a part of the card idle there, writes sums of a
split K apart and needs a kernel more for the gate; `linear_hopper` does both inside. Which of the two, and how it is cut, stands in
`linear_table`, a row for each shape and number of tokens; what is not there goes to the library.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as library_linear

from pagewire_kernels import linear_hopper, linear_table
from pagewire_kernels.activation import silu_mul
from pagewire_kernels.linear_hopper import LinearScratch, Tiling
from pagewire_kernels.quantise import Fp8Rows, quantise, scale_product, silu_mul_quantise


def scratch_for(device: torch.device) -> LinearScratch | None:
    """Scratch memory for products on this device; None where the table is not for it."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    if card.major != 9 or card.multi_processor_count != linear_table.PROGRAMS:
        return None
    return LinearScratch(device)


def choose(
    n: int, k: int, num_tokens: int, *, gated: bool = False, wide: bool = False, fp8: bool = False
) -> Tiling | None:
    """The kernel's tiling; None: the library is faster, or nobody measured.

    Args:
        n: outputs.
        k: inputs.
        num_tokens: at least 1.
        gated: n gates and n ups.
        wide: float32 outputs.
        fp8: x and weights in E4M3.
    """
    kind = ("fp8 gated" if gated else "fp8") if fp8 else "gated" if gated else "wide" if wide else ""
    row = linear_table.TABLE.get((n, k, kind, _bucket(num_tokens)))
    return None if row is None or row == linear_table.APART else Tiling(*row)


def _bucket(num_tokens: int) -> int:
    return max(16, 1 << (num_tokens - 1).bit_length())


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scratch: LinearScratch | None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product.

    Args:
        x: [M, K].
        weight: [N, K]; gated: [2 N, K], the gates before the ups. Not written by the kernel that was launched last.
        scratch: from `scratch_for`, of one stream; None: by the library.
        gated: whether.
        out: [M, N] contiguous, of x's type or float32; None: a new one of x's type.

    Raises:
        ValueError: shapes do not fit.
    """
    m, n, k = x.shape[0], weight.shape[0] // (2 if gated else 1), x.shape[1]
    if weight.shape[1] != k or (gated and weight.shape[0] % 2) or (out is not None and out.shape != (m, n)):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and out do not fit")
    wide = out is not None and out.dtype != x.dtype
    tiling = None
    if scratch is not None and linear_hopper.is_supported(x, weight) and (out is None or out.is_contiguous()):
        tiling = choose(n, k, m, gated=gated, wide=wide)
    if tiling is None or scratch is None:
        return _by_library(x, weight, gated, out)
    out = x.new_empty(m, n) if out is None else out
    linear_hopper.launch(out, x, weight, scratch, tiling, gated=gated)
    return out


def linear_fp8(
    x: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor, scratch: LinearScratch | None, *, dtype: torch.dtype
) -> torch.Tensor:
    """Y = (x₈ · W₈ᵀ) · s_x · s_w.

    Args:
        x: [M, K].
        weight: float8_e4m3fn [N, K], N and K multiples of 16. Not written by the kernel that was launched last.
        scales: float32 [N].
        scratch: as for `linear`.
        dtype: of y.
    """
    m, n, k = x.values.shape[0], *weight.shape
    tiling = choose(n, k, m, fp8=True) if scratch is not None else None
    if tiling is None or scratch is None or not linear_hopper.is_supported(x.values, weight):
        if scratch is not None and linear_table.TABLE.get((n, k, "fp8", _bucket(m))) == linear_table.APART:
            return scaled_apart(x, weight, scales, scratch).to(dtype)
        return _scaled_mm(x, weight, scales).to(dtype)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=weight.device)
    linear_hopper.launch(out, x.values, weight, scratch, tiling, scales=(x.scales, scales))
    return out.to(dtype)


def gated_fp8(
    out: Fp8Rows,
    x: Fp8Rows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    scratch: LinearScratch | None,
    *,
    dependent: bool = False,
) -> None:
    """silu(gate) · up of the product of `linear_fp8`, rounded again.

    Args:
        out: [M, N].
        x: [M, K].
        weight: float8_e4m3fn [2 N, K], the gates before the ups.
        scales: float32 [2 N].
        scratch: as for `linear`.
        dependent: see `quantise`.
    """
    m, n, k = x.values.shape[0], weight.shape[0] // 2, weight.shape[1]
    tiling = choose(n, k, m, gated=True, fp8=True) if scratch is not None else None
    if tiling is None or scratch is None or not linear_hopper.is_supported(x.values, weight):
        silu_mul_quantise(out, _scaled_mm(x, weight, scales), dependent=dependent)
        return
    inner = torch.empty(m, n, dtype=torch.bfloat16, device=weight.device)
    linear_hopper.launch(inner, x.values, weight, scratch, tiling, scales=(x.scales, scales), gated=True)
    quantise(out, inner, dependent=dependent)


def scaled_apart(x: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor, scratch: LinearScratch) -> torch.Tensor:
    """As `linear_fp8` in bf16: cuBLAS splits a long sum over few outputs, which the library's product with scales inside does not.

    Sums of unscaled values are at most 448² K, far inside bf16's range.
    """
    one = scratch.one
    y = torch._scaled_mm(x.values, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    scale_product(y, x.scales, scales)
    return y


def _scaled_mm(x: Fp8Rows, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(
        x.values,
        weight.t(),
        scale_a=x.scales[:, None],
        scale_b=scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _by_library(x: torch.Tensor, weight: torch.Tensor, gated: bool, out: torch.Tensor | None) -> torch.Tensor:
    if gated:
        both = library_linear(x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0] // 2) if out is None else out
        silu_mul(out, both)
        return out
    if out is None:
        return library_linear(x, weight)
    if out.dtype == x.dtype:
        return torch.mm(x, weight.t(), out=out)
    # Sums are float32 inside; rounding them to 8 bits would make ties of tokens that differ.
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
