"""Looks at the keys and values of a text, for the scales of KV in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.models.decoder import Decoder
from pagewire.models.kv_scales import KvScales, from_largest
from pagewire_kernels import reference

_BLOCK = 16


def calibrate(decoder: Decoder, texts: Iterable[npt.NDArray[np.int32]]) -> KvScales:
    """Scales by the largest |k| (turned, as it is stored) and |v| of each layer and KV head.

    Args:
        decoder: on a CPU.
        texts: token ids of each, at most `max_model_len` of them; they are read on their own, each from position 0.
    """
    config = decoder.config
    largest = torch.zeros(2, config.num_layers, config.num_kv_heads)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for i, x in enumerate((k, v)):
            largest[i, layer] = torch.maximum(largest[i, layer], x.abs().amax(dim=(0, 2)).float())
        num_tokens = q.shape[0]
        out = reference.paged_attention(
            q,
            _paged(k),
            _paged(v),
            torch.arange(-(-num_tokens // _BLOCK), dtype=torch.int32)[None],
            torch.tensor([0, num_tokens]),
            torch.tensor([0]),
            scale=config.attn_scale,
            window=config.layers[layer].window,
            soft_cap=config.attn_soft_cap,
        )
        return out.reshape(num_tokens, -1)

    with torch.inference_mode():
        for ids in texts:
            decoder.forward(torch.from_numpy(ids.astype(np.int64)), torch.arange(ids.size), attend)
    return from_largest(largest[0].numpy(), largest[1].numpy())


def _paged(x: Tensor) -> Tensor:
    """[T, heads, D] as blocks in order, [blocks, heads, block, D]."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[0] % _BLOCK))
    return padded.view(-1, _BLOCK, *x.shape[1:]).transpose(1, 2).contiguous()
