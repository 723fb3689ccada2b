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
from pagewire.worker.gpu_ops import Ops, Tokens

Attend = Callable[[int, Tensor, Tensor], None]
"""(layer, out [T, num_heads, head_dim] to be written, turned q likewise)."""


class GpuModel:
    """A decoder whose weights are on the card, one that `check_covered` lets pass."""

    def __init__(self, decoder: Decoder, ops: Ops) -> None:
        self.config: Final = decoder.config
        self._weights = decoder.weights
        self._ops = ops

    def hidden(self, tokens: Tokens, attend: Attend) -> tuple[Tensor, Tensor]:
        """What the last layer adds, and what it is added to: [T, hidden] each."""
        config, ops, weights = self.config, self._ops, self._weights
        residual = weights.embedding.index_select(0, tokens.ids)
        num_tokens = residual.shape[0]
        if num_tokens == 1:
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


def check_covered(decoder: Decoder) -> None:
    """Raise for what a CPU computes and a GPU does not.

    Raises:
        ConfigError: it names architecture and features.
    """
    if decoder.weights.is_fp8:
        raise ConfigError("a GPU does not compute with weights in FP8 yet; a CPU does", field="model.quantization")
    missing = decoder.config.beyond_llama(decoder.max_model_len)
    if missing:
        raise ConfigError(
            f"a GPU does not compute {decoder.config.architecture} yet, which has {', '.join(missing)}; a CPU does",
            field="model.device",
        )
