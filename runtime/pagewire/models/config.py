"""What a decoder looks like: its sizes and its rope, read from Hugging Face's `config.json` or from GGUF metadata.

Both readers refuse by name what the decoder does not compute (biases, other activations, rope scalings that are not
listed in `ROPE_TYPES`), since a model served almost right is worse than one refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagewire.errors import ModelError

ARCHITECTURES: Final = ("llama",)
"""As `model_type` in a `config.json` and as `general.architecture` in a GGUF file."""

ROPE_TYPES: Final = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021) in the half-split layout: dimension i turns with dimension i + head_dim / 2.

    Attributes:
        theta: base of the frequencies, θ^(−2i / head_dim).
        type: one of `ROPE_TYPES`. linear divides all frequencies by `factor` (Chen et al. 2023); llama3 divides the low
            ones by `factor`, keeps the high ones and blends between `low_freq_factor` and `high_freq_factor`.
        original_max_positions: context of the model before it was extended (llama3 only).
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a Llama-style decoder: pre-norm with RMSNorm, rope, grouped-query attention, gated SiLU."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ModelError(
                    f"the model's configuration says {name} = {getattr(self, name)}; it must be at least 1"
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model's configuration has {self.num_heads} heads over {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ModelError(f"the model's configuration has a head size of {self.head_dim}; rope needs an even one")

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or values) of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Bytes of K and V: 2 × layers × KV heads × head size × tokens × bytes an element."""
        return 2 * self.num_layers * self.kv_size * num_tokens * itemsize


def from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """From the content of a `config.json`.

    Raises:
        ModelError: an architecture or a feature that is not supported, or a missing or ill-typed value.
    """
    architecture = values.get("model_type")
    _check_architecture(architecture)
    _refuse(values, "hidden_act", "silu", ("silu", "swish"))
    for flag in ("attention_bias", "mlp_bias"):
        _refuse(values, flag, False, (False, None))
    for key in ("quantization_config", "sliding_window"):
        _refuse(values, key, None, (None,))
    hidden_size, num_heads = _int(values, "hidden_size"), _int(values, "num_attention_heads")
    max_positions = _int(values, "max_position_embeddings")
    return DecoderConfig(
        architecture=str(architecture),
        vocab_size=_int(values, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(values, "intermediate_size"),
        num_layers=_int(values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_int(values, "num_key_value_heads", num_heads),
        head_dim=_int(values, "head_dim", hidden_size // max(num_heads, 1)),
        max_positions=max_positions,
        norm_eps=_float(values, "rms_norm_eps", 1e-6),
        rope=_rope_from_hf(values, max_positions),
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
    )


def _rope_from_hf(values: Mapping[str, Any], max_positions: int) -> RopeConfig:
    # transformers 5 writes `rope_parameters`; before that it was `rope_theta` beside `rope_scaling`.
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"config.json: the rope parameters must be an object, not {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for where in (values, rope):
        _refuse(where, "partial_rotary_factor", 1.0, (1, 1.0, None))
    theta = _float(rope, "rope_theta", _float(values, "rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type=kind, factor=_float(rope, "factor"))
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=_float(rope, "factor"),
        low_freq_factor=_float(rope, "low_freq_factor"),
        high_freq_factor=_float(rope, "high_freq_factor"),
        original_max_positions=_int(rope, "original_max_position_embeddings", max_positions),
    )


def from_gguf(values: Mapping[str, Any], *, vocab_size: int, tie_embeddings: bool) -> DecoderConfig:
    """From GGUF metadata (`general.architecture`, `llama.…`).

    Args:
        values: key → plain Python value.
        vocab_size: rows of the embedding, which GGUF does not always state.
        tie_embeddings: True where the file has no output matrix of its own.

    Raises:
        ModelError: as `from_hf`.
    """
    architecture = values.get("general.architecture")
    _check_architecture(architecture)
    own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{architecture}.")}
    hidden_size, num_heads = _int(own, "embedding_length"), _int(own, "attention.head_count")
    head_dim = _int(own, "attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        _refuse(own, key, head_dim, (head_dim, None))
    for key in ("expert_count", "attention.sliding_window"):
        _refuse(own, key, 0, (0, None))
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"GGUF: rope scaling {kind!r} is not supported; supported: none, linear, rope_freqs (llama3)")
    linear = kind == "linear"
    return DecoderConfig(
        architecture=str(architecture),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_int(own, "feed_forward_length"),
        num_layers=_int(own, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_int(own, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=_int(own, "context_length"),
        norm_eps=_float(own, "attention.layer_norm_rms_epsilon"),
        rope=RopeConfig(
            theta=_float(own, "rope.freq_base", 10_000.0),
            type="linear" if linear else "default",
            factor=_float(own, "rope.scaling.factor") if linear else 1.0,
        ),
        tie_embeddings=tie_embeddings,
    )


def _check_architecture(architecture: object) -> None:
    if architecture not in ARCHITECTURES:
        raise ModelError(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse(values: Mapping[str, Any], key: str, default: object, allowed: tuple[object, ...]) -> None:
    value = values.get(key, default)
    if value not in allowed:
        raise ModelError(f"the model's {key} = {value!r} is not supported; supported: {default!r}")


def _int(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"the model's configuration needs a whole number for {key!r}, not {value!r}")
    return value


def _float(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(f"the model's configuration needs a positive number for {key!r}, not {value!r}")
    return float(value)
