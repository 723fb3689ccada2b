"""Tiny random checkpoints of every family, made by `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.models.conftest import LLAMA3, TINY
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

SIZES = {**TINY, "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA = {**SIZES, "head_dim": 24, "sliding_window": 40, "query_pre_attn_scalar": 30}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
FAMILIES = {
    "llama": (LlamaConfig, SIZES),
    "llama, llama3 rope": (LlamaConfig, {**SIZES, "rope_parameters": LLAMA3}),
    "llama, yarn": (LlamaConfig, {**SIZES, "rope_parameters": YARN}),
    "llama, yarn, all options": (
        LlamaConfig,
        {
            **SIZES,
            "rope_parameters": {**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.2},
        },
    ),
    "llama, yarn, not truncated": (
        LlamaConfig,
        {**SIZES, "rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.1}},
    ),
    "llama, dynamic": (
        LlamaConfig,
        {**SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "llama, biases": (LlamaConfig, {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {**SIZES, "sliding_window": 40}),
    "mistral, no window": (MistralConfig, {**SIZES, "sliding_window": None, "head_dim": 24}),
    "qwen2": (Qwen2Config, SIZES),
    "qwen2, window": (
        Qwen2Config,
        {**SIZES, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3Config, {**SIZES, "head_dim": 24}),
    "qwen3, biases": (Qwen3Config, {**SIZES, "head_dim": 24, "attention_bias": True}),
    "smollm3": (SmolLM3Config, SIZES),
    "smollm3, window": (
        SmolLM3Config,
        {**SIZES, "use_sliding_window": True, "sliding_window": 40, "no_rope_layers": [0, 1, 0, 1]},
    ),
    "gemma2": (Gemma2Config, {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": (
        Gemma3TextConfig,
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def save_family(family: str, folder: Path, **changes):
    """A random model of a family, saved to `folder`; norms and biases are no defaults, so that leaving one out shows."""
    kind, values = FAMILIES[family]
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(kind(**{**values, **changes}), attn_implementation="eager").eval()
    offset = 1.0 if "gemma" in family else 0.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5 - offset, 1.5 - offset)
            elif name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
    return model
