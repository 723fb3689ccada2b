"""Reads a decoder's description from Hugging Face's `config.json`.

Files leave out what is the default of their family's class in `transformers`; `_DEFAULTS` holds those that published
checkpoints rely on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from pagewire.errors import ModelError
from pagewire.models import fp8_config
from pagewire.models.config import ROPE_TYPES, Activation, DecoderConfig, LayerConfig, RopeConfig
from pagewire.models.fields import flag, positive, positive_or_none, refuse, shown, table, whole

_GEMMA: Final = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "smollm3": {"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    "gemma2": {
        **_GEMMA,
        "max_position_embeddings": 8192,
        "vocab_size": 256_000,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
}
ARCHITECTURES: Final = tuple(_DEFAULTS)
"""As `model_type`. `gemma3`, which also sees, is read as the `gemma3_text` inside it."""

_ACTIVATIONS: Final[Mapping[object, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """From the content of a `config.json`.

    Raises:
        ModelError: an architecture or a feature that is not supported, or a missing or ill-typed value.
    """
    values = _text_part(values)
    architecture = values.get("model_type")
    if not isinstance(architecture, str) or architecture not in _DEFAULTS:
        raise ModelError(f"architecture {shown(architecture)} is not supported; supported: {', '.join(ARCHITECTURES)}")
    values = {**_DEFAULTS[architecture], **values}
    gemma = architecture.startswith("gemma")
    fp8_config.check(values.get("quantization_config"))
    for key in ("num_local_experts", "num_experts"):
        refuse(values, key, None, (None,))
    refuse(values, "use_bidirectional_attention", False, (False, None))
    hidden_size, num_heads = whole(values, "hidden_size"), whole(values, "num_attention_heads")
    num_layers = whole(values, "num_hidden_layers")
    if not 0 < num_layers <= 4096:
        raise ModelError(f"the model's configuration says num_layers = {num_layers}; it must be between 1 and 4096")
    max_positions = whole(values, "max_position_embeddings")
    rope, local_rope = _ropes(values, max_positions, two=architecture == "gemma3_text")
    if rope.type == "yarn":
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
    biased = flag(values, "attention_bias")
    if gemma:
        refuse(values, "attention_bias", False, (False, None))
    if architecture == "gemma3_text":
        refuse(values, "attn_logit_softcapping", None, (None,))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=whole(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole(values, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=whole(values, "num_key_value_heads", num_heads),
        head_dim=whole(values, "head_dim", hidden_size // max(num_heads, 1)),
        max_positions=max_positions,
        norm_eps=positive(values, "rms_norm_eps", 1e-6),
        rope=rope,
        tie_embeddings=flag(values, "tie_word_embeddings"),
        layers=_layers(values, architecture, num_layers, rope, local_rope),
        activation=_activation(values, "hidden_activation" if gemma else "hidden_act"),
        qkv_bias=architecture == "qwen2" or biased,
        attn_out_bias=architecture != "qwen2" and biased,
        mlp_bias=flag(values, "mlp_bias"),
        qk_norm=architecture in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        embedding_scale=math.sqrt(max(hidden_size, 1)) if gemma else 1.0,
        attn_scale=positive(values, "query_pre_attn_scalar") ** -0.5 if gemma else 0.0,
        attn_soft_cap=positive_or_none(values, "attn_logit_softcapping") if architecture == "gemma2" else 0.0,
        logit_soft_cap=positive_or_none(values, "final_logit_softcapping") if gemma else 0.0,
    )


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a Gemma 3 that also sees, what it speaks with."""
    if values.get("model_type") != "gemma3":
        return values
    refuse(values, "quantization_config", None, (None,))
    text = table(values, "text_config")
    # The outer value is the one that `transformers` ties by.
    outer = {key: values[key] for key in ("tie_word_embeddings",) if values.get(key) is not None}
    return {"model_type": "gemma3_text", **text, **outer}


def _activation(values: Mapping[str, Any], key: str) -> Activation:
    name = values.get(key, "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"the model's {key} = {shown(name)} is not supported; supported: {', '.join(_ACTIVATIONS)}")  # type: ignore[arg-type]
    return _ACTIVATIONS[name]


def _layers(
    values: Mapping[str, Any], architecture: str, num_layers: int, rope: RopeConfig, local_rope: RopeConfig
) -> tuple[LayerConfig, ...]:
    """Windows and ropes, layer by layer."""
    turned = [True] * num_layers
    if architecture == "smollm3":
        turned = _turned(values, num_layers)
    slides = _slides(values, architecture, num_layers, turned)
    window = whole(values, "sliding_window", 0)
    if window < 0 or (window == 0 and any(slides) and values.get("sliding_window") is not None):
        raise ModelError(f"the model's configuration says sliding_window = {shown(window)}; it must be at least 1")
    return tuple(
        LayerConfig((local_rope if slid else rope) if turn else None, window if slid else 0)
        for slid, turn in zip(slides, turned, strict=True)
    )


def _turned(values: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Layers of a SmolLM3 that have rope: `no_rope_layers` has a 1 for these, whatever its name says."""
    listed = values.get("no_rope_layers")
    if listed is None:
        interval = whole(values, "no_rope_layer_interval", 4)
        if interval < 1:
            raise ModelError(f"the model's no_rope_layer_interval = {shown(interval)} must be at least 1")
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or not all(one in (0, 1) for one in listed):
        raise ModelError(f"the model's no_rope_layers must be a 0 or a 1 for each layer, not {shown(listed)}")
    return [bool(one) for one in listed[:num_layers]]


def _slides(values: Mapping[str, Any], architecture: str, num_layers: int, turned: list[bool]) -> list[bool]:
    """Layers whose attention has a window."""
    if values.get("sliding_window") is None or architecture == "llama":
        return [False] * num_layers
    if architecture == "mistral":
        refuse(values, "layer_types", None, (None,))
        return [True] * num_layers
    if not architecture.startswith("gemma") and not flag(values, "use_sliding_window"):
        return [False] * num_layers
    kinds = values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in _LAYER_TYPES for kind in kinds):
            raise ModelError(
                f"the model's layer_types must name one of {', '.join(_LAYER_TYPES)} for each layer, not {shown(kinds)}"
            )
        return [kind == "sliding_attention" for kind in kinds]
    if architecture == "smollm3":
        return [not turn for turn in turned]
    if architecture.startswith("gemma"):
        pattern = whole(values, "sliding_window_pattern")
        if pattern < 1:
            raise ModelError(f"the model's sliding_window_pattern = {shown(pattern)} must be at least 1")
        return [(i + 1) % pattern != 0 for i in range(num_layers)]
    first = whole(values, "max_window_layers", 28)
    return [i >= first for i in range(num_layers)]


def _ropes(values: Mapping[str, Any], max_positions: int, *, two: bool) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those with a window."""
    # transformers 5 writes `rope_parameters`; before that it was `rope_theta` beside `rope_scaling`.
    given = table(values, "rope_parameters")
    if two:
        if given and not any(key in given for key in _LAYER_TYPES):
            raise ModelError(f"the model's rope_parameters must be given for {' and '.join(_LAYER_TYPES)}")
        full = table(given, "full_attention") or table(values, "rope_scaling")
        theta = positive(values, "rope_theta", 1_000_000.0)
        local_theta = positive(values, "rope_local_base_freq", 10_000.0)
        local = table(given, "sliding_attention")
        return _rope(values, full, theta, max_positions), _rope(values, local, local_theta, max_positions)
    rope = _rope(
        values, given or table(values, "rope_scaling"), positive(values, "rope_theta", 10_000.0), max_positions
    )
    return rope, rope


def _rope(values: Mapping[str, Any], rope: Mapping[str, Any], theta: float, max_positions: int) -> RopeConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ModelError(f"config.json: rope type {shown(kind)} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for where in (values, rope):
        refuse(where, "partial_rotary_factor", 1.0, (1, 1.0, None))
    theta = positive(rope, "rope_theta", theta)
    if kind in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    factor = positive(rope, "factor")
    if kind == "linear":
        return RopeConfig(theta=theta, type=kind, factor=factor)
    original = whole(rope, "original_max_position_embeddings", max_positions)
    if not 0 < original < 2**31:
        raise ModelError(f"the model's original_max_position_embeddings = {shown(original)} must be at least 1")
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            type=kind,
            factor=factor,
            low_freq_factor=positive(rope, "low_freq_factor"),
            high_freq_factor=positive(rope, "high_freq_factor"),
            original_max_positions=original,
        )
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=factor,
        original_max_positions=original,
        beta_fast=positive(rope, "beta_fast", 32.0),
        beta_slow=positive(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", default=True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return positive(rope, "attention_factor")
    above, below = positive_or_none(rope, "mscale"), positive_or_none(rope, "mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)
