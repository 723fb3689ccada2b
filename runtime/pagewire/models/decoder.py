"""One Llama-style decoder, parametrised by its configuration: the part of the forward pass that knows no cache.

    token ids ─▶ embedding ─▶ [ norm ─▶ qkv ─▶ rope ─▶ attend ─▶ attn_out ─▶ + ─▶ norm ─▶ gate_up ─▶ down ─▶ + ] × layers
                                                         ▲
                                    writes the new keys and values, reads all of the sequence's

Whoever runs it brings `attend`, which owns the KV memory, and may bring its own `project`, the matrix product of an
input with a weight (packed, tiled, …). Tokens of many sequences come side by side in one [T, hidden] matrix: apart from
`attend` every operation works on each token alone. It computes in float32; weights in other types are there for those
who bring kernels of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from pagewire.models.config import DecoderConfig, RopeConfig
from pagewire.models.weights import DecoderWeights, LayerWeights
from pagewire_kernels import cpu, reference

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, num_heads, head_dim], k [T, num_kv_heads, head_dim], v likewise) → [T, num_heads × head_dim]."""

Project = Callable[[Tensor, Tensor], Tensor]
"""(x [T, in], weight [out, in]) → [T, out]."""

_ONE_THREAD: Final = 32_768
"""Elements up to which PyTorch keeps an elementwise operation on one thread (`at::internal::GRAIN_SIZE`)."""


class Decoder:
    """Configuration, weights and what follows from them.

    Attributes:
        name: told to clients.
        eos_ids: token ids that end a sequence.
        max_model_len: longest sequence that it serves.
        cos, sin: float32 [max_model_len, head_dim / 2].
        project: the matrix product that `forward` and `logits` use.
        tile: with a number, every operation but `attend` works on exactly so many tokens at a time (or on one, where
            so many would be split over threads within a token), so that a token's bits cannot depend on how many others
            there are. `forward` and `logits` then take multiples of it only.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        *,
        name: str = "",
        eos_ids: tuple[int, ...] = (),
        max_model_len: int | None = None,
    ) -> None:
        self.config: Final = config
        self.weights: Final = weights
        self.name: Final = name
        self.eos_ids: Final = eos_ids
        self.max_model_len: Final = max_model_len or config.max_positions
        inv_freq = inverse_frequencies(config.rope, config.head_dim)
        if weights.rope_factors is not None:
            inv_freq = inv_freq / weights.rope_factors
        self.cos, self.sin = reference.rope_tables(inv_freq, self.max_model_len)
        self.project: Project = torch.nn.functional.linear
        self.tile: int | None = None
        self._rope = cpu.rope_tables(self.cos, self.sin)
        self._eps = torch.full((1,), config.norm_eps)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the final norm, [T, hidden].

        Args:
            token_ids: int [T].
            positions: int [T], each token's position in its sequence.
            attend: see `Attend`; called once a layer, in order.
        """
        weights = self.weights
        turns = [self._tiles(table.index_select(0, positions)[:, None]) for table in self._rope]
        x = weights.embedding.index_select(0, token_ids)
        for number, layer in enumerate(weights.layers):
            parts = [self._before_attention(layer, *tile) for tile in zip(self._tiles(x), *turns, strict=True)]
            attended = attend(number, *map(_joined, zip(*parts, strict=True)))
            pairs = zip(self._tiles(x), self._tiles(attended), strict=True)
            x = _joined([self._after_attention(layer, *pair) for pair in pairs])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden states [S, hidden]."""
        weights = self.weights
        return _joined([self.project(self._norm(x, weights.final_norm), weights.lm_head) for x in self._tiles(hidden)])

    def _before_attention(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of each token, turned by its position."""
        config = self.config
        heads = self.project(self._norm(x, layer.attn_norm), layer.qkv).view(x.shape[0], -1, config.head_dim)
        turned = self._each(cpu.rope, heads[:, : config.num_heads + config.num_kv_heads], cos, sin)
        return turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, -config.num_kv_heads :]

    def _after_attention(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: output projection and gated feed-forward, each added to what came in."""
        x = self.project(attended, layer.attn_out).add_(x)
        inner = self.project(self._norm(x, layer.mlp_norm), layer.gate_up)
        return self.project(self._each(cpu.silu_mul, inner), layer.down).add_(x)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._each(lambda rows: cpu.rms_norm(rows, weight, self._eps), x)

    def _each(self, operation: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
        """An operation on each token, with `tile` in such a way that no token's place matters.

        PyTorch spreads large operations over threads at equal numbers of elements; the ends of such ranges are computed
        without vector instructions, and round differently. In a single token they always fall on the same elements.
        """
        if self.tile is None or x.numel() <= _ONE_THREAD:
            return operation(x, *others)
        return torch.cat([operation(*rows) for rows in zip(*(tensor.split(1) for tensor in (x, *others)), strict=True)])

    def _tiles(self, x: Tensor) -> Sequence[Tensor]:
        if self.tile is None:
            return (x,)
        assert x.shape[0] % self.tile == 0, (x.shape, self.tile)
        tiles: Sequence[Tensor] = x.split(self.tile)
        return tiles


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, float32 [head_dim / 2]; the llama3 blend is that of Meta's reference code."""
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type != "llama3":
        return inv_freq
    turns = rope.original_max_positions * inv_freq / (2 * math.pi)  # of each pair, over the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / rope.factor
