"""The forward pass on a card: matrix products by cuBLAS or by own kernels, everything between them by fused kernels.

    embedding ─▶ [ norm ─▶ qkv ─▶ rope + KV write ─▶ attend ─▶ attn_out ─▶ + norm ─▶ gate_up, gate ─▶ down ─▶ + ] × layers

The residual is added where it is next normalised, so a layer is four products and four other launches, five where the gate is not
part of the product. For a single token the products take norms in too, and two other launches remain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from pagewire.errors import ConfigError
from pagewire.models.decoder import Decoder
from pagewire.models.weights import LayerWeights
from pagewire.worker.gpu_ops import Ops, Tokens

Attend = Callable[[int, Tensor, Tensor], None]
"""(layer, out [T, num_heads, head_dim] to be written, turned q likewise)."""

_FP8_MULTIPLE: Final = 16


class GpuModel:
    """A decoder whose weights are on the card, one that `check_covered` lets pass.

    Args:
        decoder: the decoder.
        ops: of the card.
        deterministic: a single token goes the way of many.
    """

    def __init__(self, decoder: Decoder, ops: Ops, *, deterministic: bool = False) -> None:
        self.config: Final = decoder.config
        self._weights = decoder.weights
        self._ops = ops
        self._one_apart = not deterministic

    def hidden(self, tokens: Tokens, attend: Attend) -> tuple[Tensor, Tensor]:
        """What the last layer adds, and what it is added to: [T, hidden] each."""
        config, ops, weights = self.config, self._ops, self._weights
        residual = weights.embedding.index_select(0, tokens.ids)
        num_tokens = residual.shape[0]
        if weights.is_fp8:  # also a single token: the matrix units are faster than widening each weight
            return self._hidden_fp8(residual, tokens, attend)
        if num_tokens == 1 and self._one_apart:
            return self._hidden_of_one(residual, tokens, attend)
        added: Tensor | None = None
        for number, layer in enumerate(weights.layers):
            x = ops.norm(residual, layer.attn_norm) if added is None else ops.norm(added, layer.attn_norm, residual)
            heads = ops.linear(x, layer.qkv).view(num_tokens, -1, config.head_dim)
            q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
            ops.rope_and_write(number, q, k, v, tokens)
            attended = q.new_empty(q.shape)
            attend(number, attended, q)
            x = ops.norm(ops.linear(attended.view(num_tokens, -1), layer.attn_out), layer.mlp_norm, residual)
            added = ops.linear(ops.linear(x, layer.gate_up, gated=True), layer.down)
        assert added is not None
        return added, residual

    def _hidden_fp8(self, residual: Tensor, tokens: Tokens, attend: Attend) -> tuple[Tensor, Tensor]:
        """As `hidden`, from the embeddings on: whatever enters a product is rounded by the kernel that makes it."""
        config, ops = self.config, self._ops
        num_tokens = residual.shape[0]
        added: Tensor | None = None
        for number, layer in enumerate(self._weights.layers):
            qkv_scale, out_scale, gate_up_scale, down_scale = scales_of(layer)
            x = (
                ops.norm_fp8(residual, layer.attn_norm)
                if added is None
                else ops.norm_fp8(added, layer.attn_norm, residual)
            )
            heads = ops.linear_fp8(x, layer.qkv, qkv_scale).view(num_tokens, -1, config.head_dim)
            q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
            ops.rope_and_write(number, q, k, v, tokens)
            attended = q.new_empty(q.shape)
            attend(number, attended, q)
            projected = ops.linear_fp8(ops.quantise(attended.view(num_tokens, -1)), layer.attn_out, out_scale)
            x = ops.norm_fp8(projected, layer.mlp_norm, residual)
            added = ops.linear_fp8(ops.gated_fp8(x, layer.gate_up, gate_up_scale), layer.down, down_scale)
        assert added is not None
        return added, residual

    def _hidden_of_one(self, x: Tensor, tokens: Tokens, attend: Attend) -> tuple[Tensor, Tensor]:
        """As `hidden`, from the embedding of a single token on: norms and gate are part of the products."""
        config, ops = self.config, self._ops
        added, residual = x, None
        for number, layer in enumerate(self._weights.layers):
            qkv, total = ops.linear_of_one(added, layer.qkv, norm=layer.attn_norm, residual=residual)
            heads = qkv.view(1, -1, config.head_dim)
            q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
            ops.rope_and_write(number, q, k, v, tokens)
            attended = q.new_empty(q.shape)
            attend(number, attended, q)
            projected, _ = ops.linear_of_one(attended.view(1, -1), layer.attn_out)
            inner, residual = ops.linear_of_one(
                projected, layer.gate_up, norm=layer.mlp_norm, residual=x if total is None else total, gated=True
            )
            added, _ = ops.linear_of_one(inner, layer.down)
        assert residual is not None
        return added, residual

    def logits(self, added: Tensor, residual: Tensor, out: Tensor) -> None:
        """Write float32 logits of S hidden states.

        Args:
            added: [S, hidden], from `hidden`.
            residual: [S, hidden]; changed.
            out: float32 [S, vocab].
        """
        x = self._ops.norm(added, self._weights.final_norm, residual)
        # Sums are float32 inside; rounding them to 8 bits would make ties of tokens that differ.
        self._ops.linear(x, self._weights.lm_head, out=out)


def scales_of(layer: LayerWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a layer in E4M3: qkv, attn_out, gate_up, down."""
    scales = layer.qkv_scale, layer.attn_out_scale, layer.gate_up_scale, layer.down_scale
    qkv, attn_out, gate_up, down = scales
    assert qkv is not None
    assert attn_out is not None
    assert gate_up is not None
    assert down is not None
    return qkv, attn_out, gate_up, down


def check_covered(decoder: Decoder) -> None:
    """Raise for what a CPU computes and no GPU does; what its kernels lack is theirs to say.

    Raises:
        ConfigError: it says what.
    """
    layer = decoder.weights.layers[0]
    if decoder.weights.is_fp8 and any(
        n % _FP8_MULTIPLE for w in (layer.qkv, layer.gate_up, layer.down) for n in w.shape
    ):
        raise ConfigError(
            f"a GPU multiplies FP8 matrices whose sides are multiples of {_FP8_MULTIPLE}; this model's are not",
            field="model.quantization",
        )
