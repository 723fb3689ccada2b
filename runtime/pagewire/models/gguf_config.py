"""Reads a decoder's description from the header of a GGUF file, and checks that its tensors lie inside the file.

Key names are those of the `gguf` package. What llama.cpp's code knows of a family and its files do not say (which layers
slide, which have no rope) is written here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf

from pagewire.errors import ModelError
from pagewire.gguf_header import GGUFHeader, TensorInfo
from pagewire.models.config import DecoderConfig, LayerConfig, RopeConfig
from pagewire.models.fields import positive, positive_or_none, refuse, shown, whole

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3")
"""As `general.architecture`; Mistral's files say llama."""

PERMUTED: Final = ("llama", "smollm3")
"""Whose rows of queries and keys llama.cpp's converter reorders, so that rope turns neighbouring dimensions."""

_PATTERNS: Final = {"gemma2": 2, "gemma3": 6}
"""Of so many layers, the last one sees everything."""
_LARGEST_LAYERS: Final = {"gemma2": 46, "gemma3": 62}
"""Of the 27B models, which scale scores by √(hidden / heads) instead of √head_dim."""
_NO_ROPE_STEP: Final = 4
_LOCAL_THETA: Final = 10_000.0
_SCALINGS: Final = ("none", "linear", "yarn")


def from_gguf(header: GGUFHeader) -> DecoderConfig:
    """From metadata and names of tensors.

    Raises:
        ModelError: an architecture or a feature that is not supported, or a missing or ill-typed value.
    """
    values, tensors = header.metadata, header.tensors
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(f"architecture {shown(architecture)} is not supported; supported: {', '.join(ARCHITECTURES)}")
    own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{architecture}.")}
    embedding = tensors.get("token_embd.weight")
    hidden_size, num_heads = whole(own, "embedding_length"), whole(own, "attention.head_count")
    num_layers = whole(own, "block_count")
    if not 0 < num_layers <= 4096:
        raise ModelError(f"the model's configuration says num_layers = {num_layers}; it must be between 1 and 4096")
    head_dim = whole(own, "attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        refuse(own, key, head_dim, (head_dim, None))
    refuse(own, "expert_count", 0, (0, None))
    gemma = architecture.startswith("gemma")
    biased = _biases(tensors)
    rope = _rope(own)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0] if embedding is not None and embedding.shape else 1,  # `assemble` will say so
        hidden_size=hidden_size,
        intermediate_size=whole(own, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=whole(own, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=whole(own, "context_length"),
        norm_eps=positive(own, "attention.layer_norm_rms_epsilon"),
        rope=rope,
        tie_embeddings="output.weight" not in tensors,
        layers=_layers(own, architecture, num_layers, rope),
        activation="gelu_tanh" if gemma else "silu",
        qkv_bias="attn_q" in biased,
        attn_out_bias="attn_output" in biased,
        mlp_bias="ffn_down" in biased,
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        embedding_scale=math.sqrt(max(hidden_size, 1)) if gemma else 1.0,
        attn_scale=_scale(architecture, num_layers, hidden_size, num_heads, head_dim),
        attn_soft_cap=positive_or_none(own, "attn_logit_softcapping") if architecture == "gemma2" else 0.0,
        logit_soft_cap=positive_or_none(own, "final_logit_softcapping") if gemma else 0.0,
    )


def check_extents(path: Path, header: GGUFHeader) -> None:
    """Every tensor lies inside the file.

    Raises:
        ModelError: it does not, or is of an unknown type.
    """
    size = path.stat().st_size
    for name, info in header.tensors.items():
        if info.offset + num_bytes(path, name, info) > size:
            raise ModelError(f"{path} is truncated: tensor {name} lies beyond its end; get the file again")


def num_bytes(path: Path, name: str, info: TensorInfo) -> int:
    """What a tensor takes in the file.

    Raises:
        ModelError: a type that is not known, or a shape that is no whole number of its blocks.
    """
    try:
        block_size, type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.kind)]
    except (ValueError, KeyError):
        raise ModelError(f"{path}: tensor {name} is of unknown type {info.kind}") from None
    if not info.shape or info.shape[-1] % block_size:
        raise ModelError(f"{path}: tensor {name} of shape {info.shape} is no whole number of quantised blocks")
    return math.prod(info.shape) // block_size * int(type_size)


def _biases(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Which products have a bias, `attn_q` and the like; a layer without it is found missing later."""
    known = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}
    found = set()
    for name in tensors:
        if name.endswith(".bias"):
            part = name.split(".")[-2]
            if part not in known:
                raise ModelError(f"the model has a bias {name}, which is not supported")
            found.add(part)
    return found


def _scale(architecture: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float:
    if _LARGEST_LAYERS.get(architecture) == num_layers:
        return math.sqrt(num_heads / max(hidden_size, 1)) if num_heads > 0 else 0.0
    return 1 / math.sqrt(max(head_dim, 1))


def _layers(own: Mapping[str, Any], architecture: str, num_layers: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
    window = whole(own, "attention.sliding_window", 0)
    if window < 0:
        raise ModelError(f"the model's attention.sliding_window = {shown(window)} must not be negative")
    if architecture == "llama":  # a Mistral, of which all layers slide
        return (LayerConfig(rope, window),) * num_layers
    if architecture not in _PATTERNS:
        refuse(own, "attention.sliding_window", 0, (0, None))
        steps = _NO_ROPE_STEP if architecture == "smollm3" else num_layers + 1
        return tuple(LayerConfig(rope if (i + 1) % steps else None) for i in range(num_layers))
    if not window:
        raise ModelError("the model's attention.sliding_window is missing, which its layers need")
    local = rope
    if architecture == "gemma3":
        local = RopeConfig(theta=positive(own, "rope.freq_base_swa", _LOCAL_THETA))
    slides = _slides(own, _PATTERNS[architecture], num_layers)
    return tuple(LayerConfig(local, window) if slid else LayerConfig(rope) for slid in slides)


def _slides(own: Mapping[str, Any], default: int, num_layers: int) -> list[bool]:
    pattern = own.get("attention.sliding_window_pattern", default)
    if isinstance(pattern, list):
        if len(pattern) != num_layers or not all(one in (0, 1) for one in pattern):
            raise ModelError("the model's attention.sliding_window_pattern must say yes or no for each layer")
        return [bool(one) for one in pattern]
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise ModelError(f"the model's attention.sliding_window_pattern = {shown(pattern)} is not supported")
    return [(i + 1) % pattern != 0 for i in range(num_layers)]


def _rope(own: Mapping[str, Any]) -> RopeConfig:
    kind = own.get("rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise ModelError(
            f"GGUF: rope scaling {shown(kind)} is not supported; supported: {', '.join(_SCALINGS)}, rope_freqs (llama3)"
        )
    theta = positive(own, "rope.freq_base", 10_000.0)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = positive(own, "rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta=theta, type=kind, factor=factor)
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        refuse(own, key, 1.0, (1.0, None))
    refuse(own, "rope.scaling.yarn_log_multiplier", None, (None, 0.0))
    original = whole(own, "rope.scaling.original_context_length", whole(own, "context_length"))
    if not 0 < original < 2**31:
        raise ModelError(f"the model's rope.scaling.original_context_length = {shown(original)} must be at least 1")
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=factor,
        original_max_positions=original,
        beta_fast=positive(own, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=positive(own, "rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=0.1 * math.log(factor) + 1 if factor > 1 else 1.0,
    )
