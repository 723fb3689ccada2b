"""One Llama-style decoder, parametrised by its configuration: the part of the forward pass that knows no cache.

    token ids ─▶ embedding ─▶ [ norm ─▶ qkv ─▶ rope ─▶ attend ─▶ attn_out ─▶ + ─▶ norm ─▶ gate_up ─▶ down ─▶ + ] × layers
                                                         ▲
                                    writes the new keys and values, reads all of the sequence's

Whoever runs it brings `attend`, which owns the KV memory, and may bring its own `project`, the matrix product of an
input with a weight (packed, tiled, …). Tokens of many sequences come side by side in one [T, hidden] matrix: apart from
`attend` every operation works on each token alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from pagewire.models.config import DecoderConfig, RopeConfig
from pagewire.models.weights import DecoderWeights, LayerWeights
from pagewire_kernels import reference

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, num_heads, head_dim], k [T, num_kv_heads, head_dim], v likewise) → [T, num_heads × head_dim]."""

Project = Callable[[Tensor, Tensor], Tensor]
"""(x [T, in], weight [out, in]) → [T, out]."""


class Decoder:
    """Configuration, weights and what follows from them.

    Attributes:
        name: told to clients.
        eos_ids: token ids that end a sequence.
        max_model_len: longest sequence that it serves.
        cos, sin: float32 [max_model_len, head_dim / 2].
        project: the matrix product that `forward` and `logits` use.
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

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the final norm, [T, hidden].

        Args:
            token_ids: int [T].
            positions: int [T], each token's position in its sequence.
            attend: see `Attend`; called once a layer, in order.
        """
        weights = self.weights
        cos, sin = self.cos[positions], self.sin[positions]
        x = weights.embedding[token_ids]
        for number, layer in enumerate(weights.layers):
            q, k, v = self.before_attention(layer, x, cos, sin)
            x = self.after_attention(layer, x, attend(number, q, k, v))
        return x

    def before_attention(
        self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each token, turned by its position."""
        config = self.config
        qkv = self.project(reference.rms_norm(x, layer.attn_norm, config.norm_eps), layer.qkv)
        heads = qkv.view(x.shape[0], -1, config.head_dim)
        turned = reference.rope(heads[:, : config.num_heads + config.num_kv_heads], cos, sin)
        return turned[:, : config.num_heads], turned[:, config.num_heads :], heads[:, -config.num_kv_heads :]

    def after_attention(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: output projection and gated feed-forward, each added to what came in."""
        x = x + self.project(attended, layer.attn_out)
        inner = self.project(reference.rms_norm(x, layer.mlp_norm, self.config.norm_eps), layer.gate_up)
        return x + self.project(reference.silu_mul(inner), layer.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden states [S, hidden]."""
        normed = reference.rms_norm(hidden, self.weights.final_norm, self.config.norm_eps)
        return self.project(normed, self.weights.lm_head).float()


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
