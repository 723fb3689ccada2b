"""Attention over a paged cache, written to be read: float64, one sequence, one head at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    blocks: Tensor,
    seq_len: int,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Causal attention of one sequence's last queries.

    Args:
        q: [queries, num_heads, D], at positions seq_len − queries …
        k_cache: [num_blocks, num_kv_heads, block_size, D].
        v_cache: likewise.
        blocks: int [≥ seq_len / block_size].
        seq_len: positions in the cache.
        scale: of the scores.
        window: positions seen, the own one included; 0: all.
        soft_cap: c of c · tanh(s / c); 0: none.
        k_scale: [num_kv_heads].
        v_scale: [num_kv_heads].

    Returns:
        float64 [queries, num_heads, D].
    """
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    queries, num_heads, _ = q.shape
    if queries == 0:
        return q.double()
    used = blocks[: -(-seq_len // block_size)].long()
    k = k_cache[used].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len].double()
    v = v_cache[used].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len].double()
    if k_scale is not None:
        k = k * k_scale.double()[:, None, None]
    if v_scale is not None:
        v = v * v_scale.double()[:, None, None]
    group = num_heads // num_kv_heads
    key_pos = torch.arange(seq_len, device=q.device)[None, :]
    query_pos = torch.arange(seq_len - queries, seq_len, device=q.device)[:, None]
    hidden = key_pos > query_pos
    if window:
        hidden |= key_pos <= query_pos - window
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head in range(num_heads):
        scores = q[:, head].double() @ k[head // group].T * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out[:, head] = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[head // group]
    return out


def error(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; infinite if anything is not finite."""
    if not bool(torch.isfinite(out).all()):
        return math.inf
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def paged_cache(
    lens: list[int], *, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, device: str = "cpu",
    generator: torch.Generator | None = None, spare: int = 3,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """K, V and block tables with random blocks in random order. What belongs to no position holds NaN, the null block too."""
    blocks = [-(-n // block_size) for n in lens]
    num_blocks = 1 + sum(blocks) + spare
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    tables = torch.full(
        (len(lens), max([1, *blocks]) + 1), 2**30, dtype=torch.int32
    )  # past the end: an address that faults
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k = torch.full(shape, float("nan"), dtype=dtype)
    v = torch.full(shape, float("nan"), dtype=dtype)
    taken = 0
    for row, (length, count) in enumerate(zip(lens, blocks, strict=True)):
        ids = order[taken : taken + count]
        taken += count
        tables[row, :count] = ids.int()
        for index, block in enumerate(ids.tolist()):
            filled = min(block_size, length - index * block_size)
            size = (num_kv_heads, filled, head_dim)
            k[block, :, :filled] = torch.randn(size, generator=generator).to(dtype)
            v[block, :, :filled] = torch.randn(size, generator=generator).to(dtype)
    return k.to(device), v.to(device), tables.to(device)
