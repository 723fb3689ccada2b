"""The PyTorch oracle: what every kernel must compute, written to be read. The CPU worker runs on these functions, or on
faster ones that are tested against them.

Pools are `[num_blocks, num_kv_heads, block_size, head_dim]`, one for keys and one for values. slot = block id ×
block_size + offset. Block 0 is the null block: it belongs to nobody, and what is read of it is always masked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: x / √(mean(x²) + eps) × weight over the last dimension (Zhang & Sennrich 2019); the mean in float32.

    Args:
        x: [..., hidden].
        weight: [hidden].
        eps: added to the mean.
    """
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) × up.

    Args:
        gate_up: [..., 2 × n], the gates before the ups.

    Returns:
        [..., n].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) × up, GELU by its tanh formula (Hendrycks & Gimpel 2016); as `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Cap × tanh(x / cap): nearly x near 0, never beyond the cap (Gemma 2)."""
    return torch.tanh(x / cap) * cap


MAX_E4M3 = 448.0
"""The largest number of E4M3."""
_LEAST = 2.0**-100  # a row of zeros has some scale, too


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 with a scale a row: x ≈ values × scales, the largest of each row being ±448.

    Args:
        x: [rows, n].

    Returns:
        values float8_e4m3fn [rows, n], and scales float32 [rows].
    """
    wide = x.float()
    scales = wide.abs().amax(dim=1).clamp(min=_LEAST) / MAX_E4M3
    return (wide / scales[:, None]).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn), scales


def dequantise_rows(values: Tensor, scales: Tensor) -> Tensor:
    """What `quantise_rows` stands for, float32 [rows, n]."""
    return values.float() * scales[:, None]


def linear_fp8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product of two E4M3 matrices, y = (x₈ · W₈ᵀ) · s_x · s_w; the rows of x are rounded here.

    Args:
        x: [M, K].
        weight: float8_e4m3fn [N, K].
        scales: float32 [N].

    Returns:
        float32 [M, N].
    """
    values, x_scales = quantise_rows(x)
    return values.float() @ weight.float().t() * x_scales[:, None] * scales


def rope_tables(inv_freq: Tensor, num_positions: int, begin: int = 0) -> tuple[Tensor, Tensor]:
    """The cos and sin of position × frequency, float32 [num_positions, head_dim / 2].

    Args:
        inv_freq: float32 [head_dim / 2].
        num_positions: how many.
        begin: the first of them.
    """
    angles = torch.arange(begin, begin + num_positions, dtype=torch.float32)[:, None] * inv_freq.float()
    return angles.cos(), angles.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimensions i and i + head_dim / 2 of every head by the token's angle (Su et al. 2021).

    Args:
        x: [T, heads, head_dim].
        cos: [T, head_dim / 2].
        sin: [T, head_dim / 2].
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_kv(pool: Tensor, values: Tensor, slots: Tensor) -> None:
    """pool[slot // block_size, :, slot % block_size] = value, for each token.

    Args:
        pool: [num_blocks, num_kv_heads, block_size, head_dim].
        values: [T, num_kv_heads, head_dim].
        slots: int64 [T].
    """
    block_size = pool.shape[2]
    pool[slots // block_size, :, slots % block_size] = values


def gather_kv(pool: Tensor, block_ids: Tensor) -> Tensor:
    """What the blocks hold, as one run of tokens: [num_kv_heads, len(block_ids) × block_size, head_dim]."""
    _, num_kv_heads, block_size, head_dim = pool.shape
    blocks = pool[block_ids.long()].transpose(0, 1)
    return blocks.reshape(num_kv_heads, block_ids.numel() * block_size, head_dim)


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """pool[dst[i]] = pool[src[i]], all read before any is written."""
    pool[dst.long()] = pool[src.long()]


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    query_offsets: Tensor,
    starts: Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of ragged queries over a paged cache: decode and chunked prefill alike.

    Sequence b has queries query_offsets[b] … query_offsets[b + 1] − 1, at positions starts[b], starts[b] + 1, …; the KV
    of these and of all earlier positions is in its blocks already. One query each is decode; starts[b] > 0 with several
    is a chunk after a cached prefix.

    Args:
        q: [T, num_heads, head_dim].
        k_pool: [num_blocks, num_kv_heads, block_size, head_dim].
        v_pool: likewise.
        block_table: int [B, max_blocks]; entries past a sequence's last block are not read.
        query_offsets: int [B + 1], from 0 to T.
        starts: int [B].
        scale: of the scores; None: 1 / √head_dim.
        window: latest positions that a query sees, its own included; 0: all.
        soft_cap: of the scaled scores; 0: none.

    Returns:
        [T, num_heads, head_dim] of q's dtype; computed in float32 or wider.
    """
    num_kv_heads, block_size = k_pool.shape[1], k_pool.shape[2]
    num_heads, head_dim = q.shape[1], q.shape[2]
    group = num_heads // num_kv_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    for b in range(block_table.shape[0]):
        first, last = int(query_offsets[b]), int(query_offsets[b + 1])
        start, length = int(starts[b]), int(starts[b]) + last - first
        blocks = block_table[b, : -(-length // block_size)]
        k = gather_kv(k_pool, blocks)[:, :length].to(wide).repeat_interleave(group, dim=0)
        v = gather_kv(v_pool, blocks)[:, :length].to(wide).repeat_interleave(group, dim=0)
        scores = torch.einsum("thd,hld->htl", q[first:last].to(wide), k) * scale
        if soft_cap:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        keys, queries = torch.arange(length)[None, :], torch.arange(start, length)[:, None]
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        out[first:last] = torch.einsum("htl,hld->thd", weights, v).to(q.dtype)
    return out
