"""Random weights for a `config.json`: to measure a model's speed, or to test, without its weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pagewire.models import safetensors
from pagewire.models.config import DecoderConfig
from pagewire.models.weights import DecoderWeights, LayerWeights

SEED: Final = 0


def load(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[DecoderConfig, DecoderWeights, tuple[int, ...]]:
    """As `safetensors.load`, with weights drawn at random; `path` is a `config.json` or the folder that holds one.

    Raises:
        ModelError: the configuration is missing or cannot be served.
    """
    folder = path.parent if path.is_file() else path
    config = safetensors.read_config(folder)
    return config, random_weights(config, dtype, device=device), safetensors.eos_ids(folder)


def random_weights(
    config: DecoderConfig, dtype: torch.dtype, *, seed: int = SEED, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """The same weights for the same seed and kind of device.

    Scaled by 1 / √in, so that activations neither vanish nor explode.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(
            0, 1 / math.sqrt(columns), generator=generator
        )

    def norm() -> Tensor:
        return torch.ones(config.hidden_size, dtype=dtype, device=device)

    embedding = matrix(config.vocab_size, config.hidden_size)
    layers = [
        LayerWeights(
            attn_norm=norm(),
            qkv=matrix(config.q_size + 2 * config.kv_size, config.hidden_size),
            attn_out=matrix(config.hidden_size, config.q_size),
            mlp_norm=norm(),
            gate_up=matrix(2 * config.intermediate_size, config.hidden_size),
            down=matrix(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    ]
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=norm(),
        lm_head=embedding if config.tie_embeddings else matrix(config.vocab_size, config.hidden_size),
    )
