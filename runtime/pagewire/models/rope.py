"""Rotary embedding: frequencies of each kind of rope, and tables of cosines and sines."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from pagewire.models.config import RopeConfig
from pagewire_kernels import cpu, reference

_PIECE: Final = 1024
"""Positions computed at once: the same positions always lie at the same place of a piece, and so get the same bits."""


class RopeTable:
    """The tables that `cpu.rope` takes, for as many positions as were asked for until now.

    For the whole context of a model they would take hundreds of megabytes, which few sequences ever need.

    Args:
        rope: which.
        head_dim: of the heads to turn.
        factors: float32 [head_dim / 2] that divide the frequencies; None: none do.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, factors: Tensor | None = None) -> None:
        self._inv_freq = inverse_frequencies(rope, head_dim)
        if factors is not None:
            self._inv_freq = self._inv_freq / factors
        self._scale = rope.attention_factor
        self._size = 0
        self._cos = self._sin = torch.empty(0, 1, head_dim)

    def at(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """The (cos, cos) and (−sin, sin) of each token, [T, 1, head_dim].

        Args:
            positions: int [T].
            num_positions: all are below it.
        """
        if num_positions > self._size:
            self._grow(max(num_positions, 2 * self._size))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def halves(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cos and sin as in `reference.rope_tables`, of all positions: for those who bring kernels of their own."""
        cos, sin = reference.rope_tables(self._inv_freq, num_positions)
        return cos * self._scale, sin * self._scale

    def _grow(self, size: int) -> None:
        cos, sin = [self._cos], [self._sin]
        for begin in range(self._size, size, _PIECE):
            halves = reference.rope_tables(self._inv_freq, _PIECE, begin)
            both = cpu.rope_tables(*(half * self._scale for half in halves))
            cos.append(both[0][:, None])
            sin.append(both[1][:, None])
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)
        self._size = self._cos.shape[0]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, float32 [head_dim / 2]; llama3 as Meta's reference code, yarn as its paper's."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type == "llama3":
        turns = rope.original_max_positions * inv_freq / (2 * math.pi)  # of each pair, over the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return _blend(inv_freq, rope.factor, keep.clamp(0, 1))
    if rope.type == "yarn":
        low, high = (_dimension(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2).float() - low) / (high - low if high != low else 0.001)
        return _blend(inv_freq, rope.factor, 1 - ramp.clamp(0, 1))
    return inv_freq


def _blend(inv_freq: Tensor, factor: float, keep: Tensor) -> Tensor:
    return keep * inv_freq + (1 - keep) * inv_freq / factor


def _dimension(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The pair that turns so many times over the original context."""
    return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
