"""Matrix products with weights that oneDNN has laid out for this machine.

On 2 cores with AVX2, against `torch.nn.functional.linear` over the matrices of a 135M-parameter model: one token takes
two thirds of the time (MKL multiplies a single one in a single thread), 2 to 16 tokens, where decoding lives, a third to
two thirds, and more of them no longer than before.

The operators are those that PyTorch's own compiler emits for frozen weights. Where a build lacks them, weights stay as
they are.

The deterministic mode needs one property more: in a product of `TILE` tokens, a token's bits must depend neither on its
place nor on its neighbours. oneDNN's kernels have it, since each output is one sum over the inputs in one order;
`check_place_invariance` makes sure on the machine at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from pagewire.errors import ConfigError
from pagewire.models.decoder import Decoder

TILE: Final = 8
"""Tokens of every product in deterministic mode: a compromise between one stream, which pays for all of them, and
prefill, which reads the weights once for so many."""

_PACK_FOR: Final = 16
"""Tokens that the layout is chosen for. All hints above 1 gave the same layout; 1 gives one that is slow for others."""


_CACHED_SHAPES: Final = "256"
# Both libraries below PyTorch keep what they prepared for a shape, 1,024 shapes each, at about 0.3 MB: steps of many
# different sizes took 700 MB for the smallest of models. A model multiplies 5 shapes a step, and a decode repeats its
# own. PyTorch has no call for it; the libraries read these once, at their first product.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, _CACHED_SHAPES)


def pack_weights(decoder: Decoder) -> None:
    """Replace the decoder's matrices by packed ones, one at a time, and its `project` by what multiplies with them.

    The embedding stays, since rows are looked up in it; tied to the output it then exists twice.
    """
    head = decoder.weights.lm_head
    operators = _operators(head.dtype)
    if operators is None or head.is_mkldnn:  # packed for an earlier worker
        return
    reorder, multiply = operators
    for layer in decoder.weights.layers:
        for name in ("qkv", "attn_out", "gate_up", "down"):
            setattr(layer, name, reorder(getattr(layer, name), _PACK_FOR))
    decoder.weights.lm_head = reorder(decoder.weights.lm_head, _PACK_FOR)
    if head.dtype == torch.float32:
        decoder.project = lambda x, weight, bias: multiply(x, weight, bias, "none", [], "")
        return

    def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = multiply(x.to(head.dtype), weight, None, "none", [], "").float()
        return product if bias is None else product.add_(bias)

    decoder.project = project


def check_place_invariance(decoder: Decoder) -> None:
    """Multiply one token with each kind of weight, at every place of a tile and among different neighbours.

    Raises:
        ConfigError: some bits differ; this build of PyTorch cannot serve deterministically.
    """
    config, layer = decoder.config, decoder.weights.layers[0]
    generator = torch.Generator().manual_seed(0)
    for weight, bias, width in (
        (layer.qkv, layer.qkv_bias, config.hidden_size),
        (layer.attn_out, layer.attn_out_bias, config.q_size),
        (layer.gate_up, layer.gate_up_bias, config.hidden_size),
        (layer.down, layer.down_bias, config.intermediate_size),
        (decoder.weights.lm_head, None, config.hidden_size),
    ):
        token = torch.randn(width, generator=generator)
        seen = []
        for place in range(TILE):
            x = torch.randn(TILE, width, generator=generator)
            x[place] = token
            seen.append(decoder.project(x, weight, bias)[place])
        if not all(torch.equal(seen[0], other) for other in seen):
            raise ConfigError(
                "this build of PyTorch multiplies a token differently at different places of a tile",
                field="engine.deterministic",
            )


def _operators(dtype: torch.dtype = torch.float32) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        reorder, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        weight = torch.arange(6.0).view(3, 2).to(dtype)
        x = torch.ones(2, 2, dtype=dtype)
        works = torch.equal(multiply(x, reorder(weight, _PACK_FOR), None, "none", [], ""), linear(x, weight))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return (reorder, multiply) if works else None
