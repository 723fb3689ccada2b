"""Looks at the keys and values of a text, for the scales of KV in 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.models.decoder import Decoder
from pagewire.models.kv_scales import KvScales, from_largest


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
        q_, k_, v_ = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q_, k_, v_, is_causal=True, scale=1 / math.sqrt(config.head_dim), enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)

    with torch.inference_mode():
        for ids in texts:
            decoder.forward(torch.from_numpy(ids.astype(np.int64)), torch.arange(ids.size), attend)
    return from_largest(largest[0].numpy(), largest[1].numpy())
