"""Gated activations of the MLP, out = act(gate) · up, and the soft cap of logits.

    silu(x) = x / (1 + e^(−x))
    gelu(x) = x / (1 + e^(−2 u)),  u = √(2/π) (x + 0.044715 x³)      the tanh form: ½ x (1 + tanh u)
    cap(x) = c · tanh(x / c)

In fp32, rounded once. Bytes a row of n gates: 3 n · itemsize (gate and up read, out written); of n logits, 2 n · itemsize.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def silu_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """silu(gate) · up.

    Args:
        out: [rows, n], contiguous.
        gate_up: [rows, 2 n], contiguous, the gates before the ups.
    """
    _act_mul(out, gate_up, gelu=False)


def gelu_mul(out: torch.Tensor, gate_up: torch.Tensor) -> None:
    """gelu(gate) · up in the tanh form; arguments as in `silu_mul`."""
    _act_mul(out, gate_up, gelu=True)


def soft_cap(x: torch.Tensor, cap: float) -> None:
    """C · tanh(x / c), in place.

    Args:
        x: contiguous.
        cap: c, above 0.
    """
    if not x.is_contiguous():
        raise ValueError("what is capped has to be contiguous")
    if x.numel():
        _soft_cap_kernel[(triton.cdiv(x.numel(), 1024),)](x, x.numel(), cap, BLOCK=1024, num_warps=4)


def _act_mul(out: torch.Tensor, gate_up: torch.Tensor, *, gelu: bool) -> None:
    rows, n = out.shape
    if gate_up.shape != (rows, 2 * n):
        raise ValueError(f"out {tuple(out.shape)} and gate_up {tuple(gate_up.shape)} do not fit")
    if not (out.is_contiguous() and gate_up.is_contiguous()):
        raise ValueError("out and gate_up have to be contiguous")
    if rows == 0:
        return
    block = min(1024, triton.next_power_of_2(n))
    _act_mul_kernel[(rows, triton.cdiv(n, block))](out, gate_up, N=n, BLOCK=block, GELU=gelu, num_warps=4)


@triton.jit
def _act_mul_kernel(
    out_ptr,  # [rows, N]
    gate_up_ptr,  # [rows, 2 N]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < N
    gate = tl.load(gate_up_ptr + row * (2 * N) + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * N) + N + i, mask=mask, other=0.0).to(tl.float32)
    u = gate
    if GELU:
        u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    act = gate / (1.0 + tl.exp(-u))
    tl.store(out_ptr + row * N + i, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _soft_cap_kernel(
    x_ptr,  # [size]
    size,
    cap,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    y = cap - 2.0 * cap / (tl.exp2(2.8853900817779268 * (x / cap)) + 1.0)
    tl.store(x_ptr + i, y.to(x_ptr.dtype.element_ty), mask=i < size)
