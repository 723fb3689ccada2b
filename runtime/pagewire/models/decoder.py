"""One decoder, parametrised by its configuration: the part of the forward pass that knows no cache.

    token ids ─▶ embedding ─▶ [ norm ─▶ qkv ─▶ rope ─▶ attend ─▶ attn_out ─▶ + ─▶ norm ─▶ gate_up ─▶ down ─▶ + ] × layers
                                    (norm)    ▲            (norm)                                   (norm)
                                    writes the new keys and values, reads all of the sequence's

Families differ in values and in what they leave out (in parentheses: what some have). Whoever runs it brings `attend`,
which owns the KV memory, and may bring its own `project`, the matrix product of an input with a weight (packed, tiled,
…). Tokens of many sequences come side by side in one [T, hidden] matrix: apart from `attend` every operation works on
each token alone. It computes in float32; matrices may be of another type, and products with them are rounded to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from pagewire.models.config import DecoderConfig, RopeConfig
from pagewire.models.rope import RopeTable
from pagewire.models.weights import DecoderWeights, LayerWeights
from pagewire_kernels import cpu, reference

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, num_heads, head_dim], k [T, num_kv_heads, head_dim], v likewise) → [T, num_heads × head_dim]."""

Project = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x float32 [T, in], weight [out, in], bias float32 [out] or None) → float32 [T, out]."""

_ONE_THREAD: Final = 32_768
"""Elements up to which PyTorch keeps an elementwise operation on one thread (`at::internal::GRAIN_SIZE`)."""


class Decoder:
    """Configuration, weights and what follows from them.

    Attributes:
        name: told to clients.
        eos_ids: token ids that end a sequence.
        max_model_len: longest sequence that it serves.
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
        self.project: Project = project
        self.tile: int | None = None
        self._ropes = {
            layer.rope: RopeTable(layer.rope, config.head_dim, weights.rope_factors)
            for layer in config.layers
            if layer.rope is not None
        }
        self._eps = torch.full((1,), config.norm_eps)
        self._gate = {"silu": cpu.silu_mul, "gelu_tanh": cpu.gelu_mul}[config.activation]

    def turns(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        """Cos and sin of one of its ropes, float32 [max_model_len, head_dim / 2] each; made anew by every call."""
        return self._ropes[rope].halves(self.max_model_len)

    def windows(self) -> list[int]:
        """Of each layer; a window that no sequence reaches is none, 0."""
        reached = (layer.window if layer.window < self.max_model_len else 0 for layer in self.config.layers)
        return list(reached)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the final norm, [T, hidden].

        Args:
            token_ids: int [T].
            positions: int [T], each token's position in its sequence.
            attend: see `Attend`; called once a layer, in order.
        """
        config, weights = self.config, self.weights
        num_positions = int(positions.max()) + 1
        turns = {
            rope: [*zip(*map(self._tiles, table.at(positions, num_positions)), strict=True)]
            for rope, table in self._ropes.items()
        }
        x = weights.embedding.index_select(0, token_ids).float()
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        for number, layer in enumerate(weights.layers):
            rope, tiles = config.layers[number].rope, self._tiles(x)
            own_turns = turns[rope] if rope is not None else [None] * len(tiles)
            parts = [self._before_attention(layer, *tile) for tile in zip(tiles, own_turns, strict=True)]
            attended = attend(number, *map(_joined, zip(*parts, strict=True)))
            pairs = zip(tiles, self._tiles(attended), strict=True)
            x = _joined([self._after_attention(layer, *pair) for pair in pairs])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden states [S, hidden]."""
        return _joined([self._logits(x) for x in self._tiles(hidden)])

    def _logits(self, x: Tensor) -> Tensor:
        weights, cap = self.weights, self.config.logit_soft_cap
        logits = self.project(self._norm(x, weights.final_norm), weights.lm_head, None)
        return self._each(lambda rows: cpu.soft_cap_(rows, cap), logits) if cap else logits

    def _before_attention(
        self, layer: LayerWeights, x: Tensor, turn: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of each token, turned by its position."""
        config = self.config
        heads = self._product(self._norm(x, layer.attn_norm), layer.qkv, layer.qkv_bias)
        heads = heads.view(x.shape[0], -1, config.head_dim)
        turned = heads[:, : config.num_heads + config.num_kv_heads]
        if layer.qk_norm is not None:
            turned = self._norm(turned, layer.qk_norm)
        if turn is not None:
            turned = self._each(cpu.rope, turned, *turn)
        return turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, -config.num_kv_heads :]

    def _after_attention(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: output projection and gated feed-forward, each added to what came in."""
        added = self._product(attended, layer.attn_out, layer.attn_out_bias)
        if layer.post_attn_norm is not None:
            added = self._norm(added, layer.post_attn_norm)
        x = added.add_(x)
        inner = self._product(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        added = self._product(self._each(self._gate, inner), layer.down, layer.down_bias)
        if layer.post_mlp_norm is not None:
            added = self._norm(added, layer.post_mlp_norm)
        return added.add_(x)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A layer's; where matrices are of E4M3, each token is rounded to it first, as on a card."""
        if self.weights.is_fp8:
            x = self._each(_rounded, x)
        return self.project(x, weight, bias)

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


def _rounded(x: Tensor) -> Tensor:
    return reference.dequantise_rows(*reference.quantise_rows(x))


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `Project`."""
    if weight.dtype == x.dtype:
        return linear(x, weight, bias)
    product = linear(x.to(weight.dtype), weight).float()
    return product if bias is None else product.add_(bias)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
