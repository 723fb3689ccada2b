"""The forward pass of families that add operations to a plain Llama's: biases, GELU, norms behind products, scales and caps.

    embedding · s ─▶ [ norm ─▶ qkv + b ─▶ rope + KV write ─▶ attend ─▶ attn_out + b ─▶ (norm) ─▶ + norm ─▶ gate_up + b ─▶ gate
                                                                                       ─▶ down + b ─▶ (norm) ─▶ + ] × layers

What layers differ in (ropes, windows, norms of heads) is the kernels' affair: models that add nothing else, as Mistral, Qwen 3
and SmolLM 3, go the way of a Llama. Here the residual is added where it is next normalised, too; a single token takes no
other way than many.
"""

from __future__ import annotations

from torch import Tensor

from pagewire.models.config import DecoderConfig
from pagewire.models.decoder import Decoder
from pagewire.models.weights import LayerWeights
from pagewire.worker.gpu_model import Attend, GpuModel
from pagewire.worker.gpu_ops import Ops, Tokens
from pagewire_kernels.quantise import Fp8Rows

Rows = Tensor | Fp8Rows
"""What enters a product."""


def model_for(decoder: Decoder, ops: Ops, *, deterministic: bool) -> GpuModel:
    """The forward pass that computes this decoder; see `GpuModel` for the arguments."""
    kind = FamilyModel if adds_operations(decoder.config) else GpuModel
    return kind(decoder, ops, deterministic=deterministic)


def adds_operations(config: DecoderConfig) -> bool:
    """Whether a plain Llama's launches do not compute it."""
    has_biases = config.qkv_bias or config.attn_out_bias or config.mlp_bias
    is_scaled = config.embedding_scale != 1 or config.logit_soft_cap > 0
    return has_biases or is_scaled or config.post_norms or config.activation != "silu"


class FamilyModel(GpuModel):
    """See above, and `GpuModel`."""

    def hidden(self, tokens: Tokens, attend: Attend) -> tuple[Tensor, Tensor]:
        """See `GpuModel`."""
        config, ops, weights = self.config, self._ops, self._weights
        residual = weights.embedding.index_select(0, tokens.ids)
        if config.embedding_scale != 1:
            residual.mul_(config.embedding_scale)
        num_tokens = residual.shape[0]
        added: Tensor | None = None
        for number, layer in enumerate(weights.layers):
            x = (
                self._enter(residual, layer.attn_norm)
                if added is None
                else self._enter(added, layer.attn_norm, residual)
            )
            heads = self._product(x, layer.qkv, layer.qkv_scale, layer.qkv_bias).view(num_tokens, -1, config.head_dim)
            q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
            ops.rope_and_write(number, q, k, v, tokens)
            attended = q.new_empty(q.shape)
            attend(number, attended, q)
            x = self._rounded(attended.view(num_tokens, -1))
            projected = self._product(x, layer.attn_out, layer.attn_out_scale, layer.attn_out_bias)
            if layer.post_attn_norm is not None:
                projected = ops.norm(projected, layer.post_attn_norm)
            inner = self._gated(self._enter(projected, layer.mlp_norm, residual), layer)
            added = self._product(inner, layer.down, layer.down_scale, layer.down_bias)
            if layer.post_mlp_norm is not None:
                added = ops.norm(added, layer.post_mlp_norm)
        assert added is not None
        return added, residual

    def logits(self, added: Tensor, residual: Tensor, out: Tensor) -> None:
        """See `GpuModel`."""
        super().logits(added, residual, out)
        if self.config.logit_soft_cap:
            self._ops.soft_cap(out, self.config.logit_soft_cap)

    def _enter(self, x: Tensor, norm: Tensor, residual: Tensor | None = None) -> Rows:
        ops = self._ops
        return ops.norm_fp8(x, norm, residual) if self._weights.is_fp8 else ops.norm(x, norm, residual)

    def _rounded(self, x: Tensor) -> Rows:
        return self._ops.quantise(x) if self._weights.is_fp8 else x

    def _product(self, x: Rows, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
        if isinstance(x, Fp8Rows):
            assert scales is not None
            product = self._ops.linear_fp8(x, weight, scales)
        else:
            product = self._ops.linear(x, weight)
        return product if bias is None else product.add_(bias)

    def _gated(self, x: Rows, layer: LayerWeights) -> Rows:
        if self.config.activation == "silu" and layer.gate_up_bias is None:  # the gate is part of the product
            if not isinstance(x, Fp8Rows):
                return self._ops.linear(x, layer.gate_up, gated=True)
            assert layer.gate_up_scale is not None
            return self._ops.gated_fp8(x, layer.gate_up, layer.gate_up_scale)
        return self._rounded(self._ops.gate(self._product(x, layer.gate_up, layer.gate_up_scale, layer.gate_up_bias)))
