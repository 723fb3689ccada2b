"""A decoder's weights as plain tensors, put together tensor by tensor from whatever holds them.

Projections that read the same input are stored as one matrix (query, key and value; gate and up), so that a layer is
four matrix products. Each part is read straight into its rows of the fused matrix: there is never a second copy of the
whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from pagewire.errors import ModelError
from pagewire.models.config import DecoderConfig

_SHOWN: Final = 3


@dataclass(slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], as `torch.nn.functional.linear` takes them; what a family lacks is None."""

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [q_size + 2 × kv_size, hidden]
    attn_out: Tensor  # [hidden, q_size]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 × intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    qkv_bias: Tensor | None = None  # [q_size + 2 × kv_size]
    attn_out_bias: Tensor | None = None  # [hidden]
    gate_up_bias: Tensor | None = None  # [2 × intermediate]
    down_bias: Tensor | None = None  # [hidden]
    qk_norm: Tensor | None = None  # [num_heads + num_kv_heads, head_dim], a row for each head
    post_attn_norm: Tensor | None = None  # [hidden]
    post_mlp_norm: Tensor | None = None  # [hidden]


@dataclass(slots=True)
class DecoderWeights:
    """All of them. With tied embeddings `lm_head` is the very tensor `embedding`."""

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]
    rope_factors: Tensor | None = None  # float32 [head_dim / 2], divides the frequencies (GGUF's rope_freqs)


class TensorSource(Protocol):
    """Something that holds named tensors: a GGUF file, a folder of safetensors, a random generator."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, outermost dimension first; None where there is no such tensor."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Write the tensor into `out`, whose shape is the tensor's, converting to its dtype."""
        ...


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How a format calls the tensors; layer names hold one `{}` for the layer's number.

    All end in `.weight`; a bias is called as its matrix, with `.bias` instead.
    """

    embedding: str
    final_norm: str
    lm_head: str
    attn_norm: str
    q: str
    k: str
    v: str
    attn_out: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    q_norm: str
    k_norm: str
    post_attn_norm: str
    post_mlp_norm: str

    def of_layer(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of what each layer of such a decoder has."""
        hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
        shapes: dict[str, tuple[int, ...]] = {
            self.attn_norm: (hidden,),
            self.q: (q, hidden),
            self.k: (kv, hidden),
            self.v: (kv, hidden),
            self.attn_out: (hidden, q),
            self.mlp_norm: (hidden,),
            self.gate: (inner, hidden),
            self.up: (inner, hidden),
            self.down: (hidden, inner),
        }
        biased = {
            **dict.fromkeys((self.q, self.k, self.v), config.qkv_bias),
            self.attn_out: config.attn_out_bias,
            **dict.fromkeys((self.gate, self.up, self.down), config.mlp_bias),
        }
        shapes.update({bias_of(name): shapes[name][:1] for name, has_one in biased.items() if has_one})
        if config.qk_norm:
            shapes.update(dict.fromkeys((self.q_norm, self.k_norm), (config.head_dim,)))
        if config.post_norms:
            shapes.update(dict.fromkeys((self.post_attn_norm, self.post_mlp_norm), (hidden,)))
        return shapes


def bias_of(name: str) -> str:
    """The name of a matrix's bias."""
    return name.removesuffix(".weight") + ".bias"


def assemble(
    config: DecoderConfig,
    source: TensorSource,
    names: TensorNames,
    dtype: torch.dtype,
    device: torch.device,
    *,
    vector_dtype: torch.dtype | None = None,
    norm_offset: float = 0.0,
) -> DecoderWeights:
    """Read all weights of a decoder, each tensor straight to where it stays.

    Args:
        config: of the decoder.
        source: of the tensors.
        names: in it.
        dtype: of matrices.
        device: where they go.
        vector_dtype: of norms and biases; None: as matrices.
        norm_offset: added to the weights of norms (Gemma's checkpoints store w for 1 + w).

    Raises:
        ModelError: tensors are missing or have another shape than the configuration says; it names them.
    """
    _check_shapes(source, _expected(config, names))
    reader = _Reader(source, dtype, vector_dtype or dtype, device, norm_offset)
    embedding = reader.matrix(names.embedding)
    return DecoderWeights(
        embedding=embedding,
        layers=[_layer(config, reader, names, i) for i in range(config.num_layers)],
        final_norm=reader.norm(names.final_norm),
        lm_head=embedding if config.tie_embeddings else reader.matrix(names.lm_head),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    source: TensorSource
    dtype: torch.dtype
    vector_dtype: torch.dtype
    device: torch.device
    norm_offset: float

    def matrix(self, *parts: str) -> Tensor:
        """Parts below one another."""
        return self._read(parts, self.dtype)

    def bias(self, *parts: str) -> Tensor:
        return self._read(tuple(bias_of(part) for part in parts), self.vector_dtype)

    def norm(self, *parts: str) -> Tensor:
        # The sum is rounded once, to where it stays.
        return self._read(parts, torch.float32).add_(self.norm_offset).to(self.vector_dtype)

    def _read(self, parts: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        shapes = [self.source.shape(part) or () for part in parts]
        out = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=self.device)
        at = 0
        for part, shape in zip(parts, shapes, strict=True):
            self.source.read_into(part, out[at : at + shape[0]])
            at += shape[0]
        return out


def _layer(config: DecoderConfig, reader: _Reader, names: TensorNames, i: int) -> LayerWeights:
    q, k, v, attn_out, gate, up, down = (
        name.format(i) for name in (names.q, names.k, names.v, names.attn_out, names.gate, names.up, names.down)
    )
    return LayerWeights(
        attn_norm=reader.norm(names.attn_norm.format(i)),
        qkv=reader.matrix(q, k, v),
        attn_out=reader.matrix(attn_out),
        mlp_norm=reader.norm(names.mlp_norm.format(i)),
        gate_up=reader.matrix(gate, up),
        down=reader.matrix(down),
        qkv_bias=reader.bias(q, k, v) if config.qkv_bias else None,
        attn_out_bias=reader.bias(attn_out) if config.attn_out_bias else None,
        gate_up_bias=reader.bias(gate, up) if config.mlp_bias else None,
        down_bias=reader.bias(down) if config.mlp_bias else None,
        qk_norm=_qk_norm(config, reader, names, i) if config.qk_norm else None,
        post_attn_norm=reader.norm(names.post_attn_norm.format(i)) if config.post_norms else None,
        post_mlp_norm=reader.norm(names.post_mlp_norm.format(i)) if config.post_norms else None,
    )


def _qk_norm(config: DecoderConfig, reader: _Reader, names: TensorNames, i: int) -> Tensor:
    """Queries and keys are normalised in one call."""
    q, k = (reader.norm(name.format(i)) for name in (names.q_norm, names.k_norm))
    return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))


def _expected(config: DecoderConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        names.embedding: (config.vocab_size, config.hidden_size),
        names.final_norm: (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[names.lm_head] = (config.vocab_size, config.hidden_size)
    layer = names.of_layer(config)
    for i in range(config.num_layers):
        shapes.update({name.format(i): shape for name, shape in layer.items()})
    return shapes


def _check_shapes(source: TensorSource, expected: dict[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if source.shape(name) is None]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ModelError(
            f"the model lacks {', '.join(missing[:_SHOWN])}{more}; its files are incomplete or of another architecture"
        )
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise ModelError(
                f"tensor {name} has shape {source.shape(name)}, but the model's configuration asks for {shape}; "
                "weights and configuration do not belong together"
            )
