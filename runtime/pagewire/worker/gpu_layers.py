"""What the layers of a decoder differ in, as kernels take it: ropes, norms of heads, windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer.

    Attributes:
        window: latest positions that a token sees; 0: all, or no sequence is longer.
        cos, sin: float32 [max_model_len, head_dim / 2], of its rope; None: it knows no positions.
        q_norm, k_norm: [head_dim]; None: heads are not normalised.
    """

    window: int
    cos: Tensor | None
    sin: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


def layers_of(decoder: Decoder, device: torch.device) -> list[GpuLayer]:
    """All layers; those of one rope share its tables."""
    config = decoder.config
    ropes = {layer.rope for layer in config.layers} - {None}
    turns = {rope: tuple(half.to(device) for half in decoder.turns(rope)) for rope in ropes if rope is not None}
    layers = []
    for layer, weights, window in zip(config.layers, decoder.weights.layers, decoder.windows(), strict=True):
        cos, sin = (None, None) if layer.rope is None else turns[layer.rope]
        # One weight for all query heads and one for all key heads, each repeated (see `LayerWeights.qk_norm`).
        norms = weights.qk_norm
        q_norm, k_norm = (None, None) if norms is None else (norms[0], norms[config.num_heads])
        layers.append(GpuLayer(window, cos, sin, q_norm, k_norm))
    return layers
