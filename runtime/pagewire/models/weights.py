"""A decoder's weights as plain tensors, put together tensor by tensor from whatever holds them.

Projections that read the same input are stored as one matrix (query, key and value; gate and up), so that a layer is
four matrix products. Each part is read straight into its rows of the fused matrix: there is never a second copy of the
whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from pagewire.errors import ModelError
from pagewire.models.config import DecoderConfig
from pagewire_kernels import reference

Quantization = Literal["auto", "none", "fp8"]
"""Of the layers' matrices: auto as the source has them."""
Progress = Callable[[float], None]
"""Told which part of the weights is read, from 0 to 1; in the thread that reads, now and then."""
_SHOWN: Final = 3


@dataclass(slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], as `torch.nn.functional.linear` takes them; what a family lacks is None.

    A matrix in E4M3 has a scale for each output beside it: what it stands for is matrix × scale.
    """

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
    qkv_scale: Tensor | None = None  # float32 [q_size + 2 × kv_size]
    attn_out_scale: Tensor | None = None  # float32 [hidden]
    gate_up_scale: Tensor | None = None  # float32 [2 × intermediate]
    down_scale: Tensor | None = None  # float32 [hidden]


@dataclass(slots=True)
class DecoderWeights:
    """All of them. With tied embeddings `lm_head` is the very tensor `embedding`.

    Attributes:
        is_fp8: the layers' matrices are, or stand for, E4M3 × scale; their inputs are rounded likewise, token by token.
    """

    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    lm_head: Tensor  # [vocab, hidden]
    rope_factors: Tensor | None = None  # float32 [head_dim / 2], divides the frequencies (GGUF's rope_freqs)
    is_fp8: bool = False


@dataclass(frozen=True, slots=True)
class Kinds:
    """Of what type weights are made, and where.

    Attributes:
        dtype: of matrices.
        device: where they go.
        vector_dtype: of norms and biases; None: as matrices, but norms of decoders with `post_norms` are float32.
        quantization: of the layers' matrices. Embedding and output product are of `dtype` always.
        keeps_fp8: E4M3 stays E4M3, with scales; otherwise its values are widened to `dtype` once they are rounded.
    """

    dtype: torch.dtype
    device: torch.device
    vector_dtype: torch.dtype | None = None
    quantization: Quantization = "auto"
    keeps_fp8: bool = False


class TensorSource(Protocol):
    """Something that holds named tensors: a GGUF file, a folder of safetensors, a random generator."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, outermost dimension first; None where there is no such tensor."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Write the tensor into `out`, whose shape is the tensor's, converting to its dtype.

        Into one of E4M3, as it is stored, where `row_scales` has scales for it.
        """
        ...

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor is stored in E4M3."""
        ...

    def row_scales(self, name: str) -> Tensor | None:
        """float32 [out], the scale of each row of a tensor that is stored in E4M3; None: it has none, or scaled blocks."""
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
    kinds: Kinds,
    *,
    norm_offset: float = 0.0,
    on_progress: Progress | None = None,
) -> DecoderWeights:
    """Read all weights of a decoder, each tensor straight to where it stays.

    Args:
        config: of the decoder.
        source: of the tensors.
        names: in it.
        kinds: of weights.
        norm_offset: added to the weights of norms (Gemma's checkpoints store w for 1 + w).
        on_progress: told after every layer.

    Raises:
        ModelError: tensors are missing or have another shape than the configuration says; it names them.
    """
    _check_shapes(source, _expected(config, names))
    as_fp8 = kinds.quantization == "fp8" or (kinds.quantization == "auto" and source.is_fp8(names.down.format(0)))
    reader = _Reader(source, kinds, norm_offset, as_fp8, wide_norms=config.post_norms)
    embedding = reader.matrix(names.embedding)
    layers: list[LayerWeights] = []
    for i in range(config.num_layers):
        layers.append(_layer(config, reader, names, i))
        if on_progress is not None:
            on_progress((i + 1) / config.num_layers)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=reader.norm(names.final_norm),
        lm_head=embedding if config.tie_embeddings else reader.matrix(names.lm_head),
        is_fp8=as_fp8,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    source: TensorSource
    kinds: Kinds
    norm_offset: float
    as_fp8: bool
    wide_norms: bool

    def matrix(self, *parts: str) -> Tensor:
        """Parts below one another."""
        return self._read(parts, self.kinds.dtype)

    def projection(self, *parts: str) -> tuple[Tensor, Tensor | None]:
        """As `matrix`, of a layer: in E4M3 with scales where the configuration says so."""
        if not self.as_fp8:
            return self.matrix(*parts), None
        shapes = [self.source.shape(part) or () for part in parts]
        num_rows, device = sum(shape[0] for shape in shapes), self.kinds.device
        dtype = torch.float8_e4m3fn if self.kinds.keeps_fp8 else self.kinds.dtype
        out = torch.empty(num_rows, shapes[0][1], dtype=dtype, device=device)
        scales = torch.empty(num_rows, dtype=torch.float32, device=device)
        at = 0
        for part, shape in zip(parts, shapes, strict=True):
            rows = slice(at, at + shape[0])
            at += shape[0]
            values = self._read_fp8(part, shape, scales[rows])
            out[rows].copy_(values if self.kinds.keeps_fp8 else reference.dequantise_rows(values, scales[rows]))
        return out, scales if self.kinds.keeps_fp8 else None

    def _read_fp8(self, name: str, shape: tuple[int, ...], scales: Tensor) -> Tensor:
        """One tensor in E4M3: as it is stored, or else rounded here."""
        stored = self.source.row_scales(name)
        if stored is not None:
            scales.copy_(stored)
            values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.kinds.device)
            self.source.read_into(name, values)
            return values
        wide = torch.empty(shape, dtype=torch.float32, device=self.kinds.device)
        self.source.read_into(name, wide)
        values, made = reference.quantise_rows(wide)
        scales.copy_(made)
        return values

    def bias(self, *parts: str) -> Tensor:
        return self._read(tuple(bias_of(part) for part in parts), self._vector_dtype)

    def norm(self, *parts: str) -> Tensor:
        # The sum is rounded once, to where it stays. Gemma's weights are 1 and a little: 16 bits would leave little of it.
        weight = self._read(parts, torch.float32).add_(self.norm_offset)
        return weight if self.wide_norms else weight.to(self._vector_dtype)

    @property
    def _vector_dtype(self) -> torch.dtype:
        return self.kinds.vector_dtype or self.kinds.dtype

    def _read(self, parts: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        shapes = [self.source.shape(part) or () for part in parts]
        out = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=self.kinds.device)
        at = 0
        for part, shape in zip(parts, shapes, strict=True):
            self.source.read_into(part, out[at : at + shape[0]])
            at += shape[0]
        return out


def _layer(config: DecoderConfig, reader: _Reader, names: TensorNames, i: int) -> LayerWeights:
    q, k, v, attn_out, gate, up, down = (
        name.format(i) for name in (names.q, names.k, names.v, names.attn_out, names.gate, names.up, names.down)
    )
    products = [reader.projection(*parts) for parts in ((q, k, v), (attn_out,), (gate, up), (down,))]
    (qkv, qkv_scale), (out, out_scale), (gate_up, gate_up_scale), (down_, down_scale) = products
    return LayerWeights(
        attn_norm=reader.norm(names.attn_norm.format(i)),
        qkv=qkv,
        attn_out=out,
        mlp_norm=reader.norm(names.mlp_norm.format(i)),
        gate_up=gate_up,
        down=down_,
        qkv_bias=reader.bias(q, k, v) if config.qkv_bias else None,
        attn_out_bias=reader.bias(attn_out) if config.attn_out_bias else None,
        gate_up_bias=reader.bias(gate, up) if config.mlp_bias else None,
        down_bias=reader.bias(down) if config.mlp_bias else None,
        qk_norm=_qk_norm(config, reader, names, i) if config.qk_norm else None,
        post_attn_norm=reader.norm(names.post_attn_norm.format(i)) if config.post_norms else None,
        post_mlp_norm=reader.norm(names.post_mlp_norm.format(i)) if config.post_norms else None,
        qkv_scale=qkv_scale,
        attn_out_scale=out_scale,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
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
