"""Matrix products with weights that oneDNN has laid out for this machine.

On 2 cores with AVX2, against `torch.nn.functional.linear` over the matrices of a 135M-parameter model: one token takes
two thirds of the time (MKL multiplies a single one in a single thread), 2 to 16 tokens, where decoding lives, a third to
two thirds, and more of them no longer than before.

The operators are those that PyTorch's own compiler emits for frozen weights. Where a build lacks them, weights stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.functional import linear

from pagewire.models.decoder import Decoder

_PACK_FOR: Final = 16
"""Tokens that the layout is chosen for. All hints above 1 gave the same layout; 1 gives one that is slow for others."""


def pack_weights(decoder: Decoder) -> None:
    """Replace the decoder's matrices by packed ones, one at a time, and its `project` by what multiplies with them.

    The embedding stays, since rows are looked up in it; tied to the output it then exists twice.
    """
    operators = _operators()
    if operators is None or decoder.weights.lm_head.is_mkldnn:  # packed for an earlier worker
        return
    reorder, multiply = operators
    for layer in decoder.weights.layers:
        for name in ("qkv", "attn_out", "gate_up", "down"):
            setattr(layer, name, reorder(getattr(layer, name), _PACK_FOR))
    decoder.weights.lm_head = reorder(decoder.weights.lm_head, _PACK_FOR)
    decoder.project = lambda x, weight: multiply(x, weight, None, "none", [], "")


def _operators() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        reorder, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
        weight = torch.arange(6.0).view(3, 2)
        x = torch.ones(2, 2)
        works = torch.equal(multiply(x, reorder(weight, _PACK_FOR), None, "none", [], ""), linear(x, weight))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return (reorder, multiply) if works else None
