"""What a decoder looks like: its sizes, what its layers differ in, and what a family adds to the plain decoder.

There is one decoder (see `decoder.py`), and a family is a choice of these values: `hf_config` and `gguf_config` read
them. Both refuse by name what the decoder does not compute, since a model served almost right is worse than one refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pagewire.errors import ModelError

ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn", "dynamic")
Activation = Literal["silu", "gelu_tanh"]

_MOST_LAYERS: Final = 4096
_MOST_POSITIONS: Final = 2**24
_MOST: Final = 2**31 - 1
"""Larger sizes are no model's, and what they ask for could not even be allocated."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding (Su et al. 2021) in the half-split layout: dimension i turns with dimension i + head_dim / 2.

    Attributes:
        theta: base of the frequencies, θ^(−2i / head_dim).
        type: default, linear, llama3 or yarn. linear divides all frequencies by `factor` (Chen et al. 2023); llama3
            divides the low ones by `factor`, keeps the high ones and blends between `low_freq_factor` and
            `high_freq_factor`; yarn (Peng et al. 2023) does so between the dimensions that turn `beta_slow` and
            `beta_fast` times over the original context. `dynamic` changes nothing up to the model's own context, which
            is as far as it is served: it is read as default.
        original_max_positions: context of the model before it was extended (llama3, yarn).
        truncate: yarn: the bounds of the blend are whole dimensions.
        attention_factor: cos and sin are multiplied by it (yarn).
    """

    theta: float = 10_000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise ModelError(f"the model's configuration has a rope base of {self.theta}; it must be above 1")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"the model's configuration has a rope with high_freq_factor = {self.high_freq_factor}, which must be "
                f"above low_freq_factor = {self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What layers may differ in.

    Attributes:
        rope: None: the layer knows no positions (NoPE).
        window: latest positions that a token sees, its own included; 0: all.
    """

    rope: RopeConfig | None = RopeConfig()
    window: int = 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A pre-norm decoder: RMSNorm, grouped-query attention, a gated feed-forward; and what a family adds.

    Attributes:
        layers: one a layer; none: all as `LayerConfig()`, with `rope`.
        rope: of layers that are not given.
        activation: of the gate; `gelu_tanh` is GELU by its tanh formula.
        qkv_bias, attn_out_bias, mlp_bias: these products add one.
        qk_norm: every query and key head is normalised before rope.
        post_norms: what attention and feed-forward return is normalised before it is added.
        embedding_scale: multiplies embeddings.
        attn_scale: of the scores; 0: 1 / √head_dim.
        attn_soft_cap, logit_soft_cap: c · tanh(x / c) of scores and logits; 0: none.
    """

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
    layers: tuple[LayerConfig, ...] = ()
    activation: Activation = "silu"
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attn_scale: float = 0.0
    attn_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (
            ("vocab_size", _MOST),
            ("hidden_size", _MOST),
            ("intermediate_size", _MOST),
            ("num_layers", _MOST_LAYERS),
            ("num_heads", _MOST),
            ("num_kv_heads", _MOST),
            ("head_dim", _MOST),
            ("max_positions", _MOST_POSITIONS),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ModelError(
                    f"the model's configuration says {name} = {getattr(self, name)}; it must be between 1 and {most}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model's configuration has {self.num_heads} heads over {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise ModelError(f"the model's configuration has a head size of {self.head_dim}; rope needs an even one")
        # Frozen: what was left open is filled in here, once.
        if not self.layers:
            object.__setattr__(self, "layers", (LayerConfig(self.rope),) * self.num_layers)
        if len(self.layers) != self.num_layers:
            raise ModelError(f"the model's configuration describes {len(self.layers)} of {self.num_layers} layers")
        if not self.attn_scale:
            object.__setattr__(self, "attn_scale", self.head_dim**-0.5)

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
