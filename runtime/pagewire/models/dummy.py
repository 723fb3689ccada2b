"""Random weights for a `config.json`: to measure a model's speed, or to test, without its weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from pagewire.models import safetensors
from pagewire.models.config import DecoderConfig
from pagewire.models.weights import DecoderWeights, Kinds, LayerWeights, Progress
from pagewire_kernels import reference

SEED: Final = 0


def load(
    path: Path, kinds: Kinds, on_progress: Progress | None = None
) -> tuple[DecoderConfig, DecoderWeights, tuple[int, ...]]:
    """As `safetensors.load`, with weights drawn at random; `path` is a `config.json` or the folder that holds one.

    Raises:
        ModelError: the configuration is missing or cannot be served.
    """
    del on_progress  # they are made in no time
    folder = path.parent if path.is_file() else path
    config = safetensors.read_config(folder)
    weights = random_weights(config, kinds.dtype, device=kinds.device, vector_dtype=kinds.vector_dtype, kinds=kinds)
    return config, weights, safetensors.eos_ids(folder)


def random_weights(
    config: DecoderConfig,
    dtype: torch.dtype,
    *,
    seed: int = SEED,
    device: torch.device | str = "cpu",
    vector_dtype: torch.dtype | None = None,
    kinds: Kinds | None = None,
) -> DecoderWeights:
    """The same weights for the same seed and kind of device; `kinds` says whether the layers' matrices are of E4M3.

    Scaled by 1 / √in, so that activations neither vanish nor explode.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(
            0, 1 / math.sqrt(columns), generator=generator
        )

    def norm(*shape: int) -> Tensor:
        return torch.ones(shape or (config.hidden_size,), dtype=vector_dtype or dtype, device=device)

    def bias(size: int) -> Tensor:
        return torch.empty(size, dtype=vector_dtype or dtype, device=device).normal_(0, 0.1, generator=generator)

    as_fp8 = kinds is not None and kinds.quantization == "fp8"

    def projection(rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        made = matrix(rows, columns)
        if kinds is None or not as_fp8:
            return made, None
        values, scales = reference.quantise_rows(made)
        return (values, scales) if kinds.keeps_fp8 else (made.copy_(reference.dequantise_rows(values, scales)), None)

    def layer() -> LayerWeights:
        qkv, qkv_scale = projection(config.q_size + 2 * config.kv_size, config.hidden_size)
        attn_out, attn_out_scale = projection(config.hidden_size, config.q_size)
        gate_up, gate_up_scale = projection(2 * config.intermediate_size, config.hidden_size)
        down, down_scale = projection(config.hidden_size, config.intermediate_size)
        return LayerWeights(
            attn_norm=norm(),
            qkv=qkv,
            attn_out=attn_out,
            mlp_norm=norm(),
            gate_up=gate_up,
            down=down,
            qkv_bias=bias(config.q_size + 2 * config.kv_size) if config.qkv_bias else None,
            attn_out_bias=bias(config.hidden_size) if config.attn_out_bias else None,
            gate_up_bias=bias(2 * config.intermediate_size) if config.mlp_bias else None,
            down_bias=bias(config.hidden_size) if config.mlp_bias else None,
            qk_norm=norm(config.num_heads + config.num_kv_heads, config.head_dim) if config.qk_norm else None,
            post_attn_norm=norm() if config.post_norms else None,
            post_mlp_norm=norm() if config.post_norms else None,
            qkv_scale=qkv_scale,
            attn_out_scale=attn_out_scale,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
        )

    embedding = matrix(config.vocab_size, config.hidden_size)
    layers = [layer() for _ in range(config.num_layers)]
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=norm(),
        lm_head=embedding if config.tie_embeddings else matrix(config.vocab_size, config.hidden_size),
        is_fp8=as_fp8,
    )
