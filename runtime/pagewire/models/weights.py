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
    """One layer. Matrices are [out, in], as `torch.nn.functional.linear` takes them."""

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [q_size + 2 × kv_size, hidden]
    attn_out: Tensor  # [hidden, q_size]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 × intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


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
    """How a format calls the tensors; layer names hold one `{}` for the layer's number."""

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


def assemble(
    config: DecoderConfig,
    source: TensorSource,
    names: TensorNames,
    dtype: torch.dtype,
    device: torch.device,
) -> DecoderWeights:
    """Read all weights of a decoder, each tensor straight to where it stays.

    Raises:
        ModelError: tensors are missing or have another shape than the configuration says; it names them.
    """
    _check_shapes(source, _expected(config, names))

    def read(*parts: str) -> Tensor:
        shapes = [source.shape(part) or () for part in parts]
        out = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=device)
        at = 0
        for part, shape in zip(parts, shapes, strict=True):
            source.read_into(part, out[at : at + shape[0]])
            at += shape[0]
        return out

    embedding = read(names.embedding)
    layers = [
        LayerWeights(
            attn_norm=read(names.attn_norm.format(i)),
            qkv=read(names.q.format(i), names.k.format(i), names.v.format(i)),
            attn_out=read(names.attn_out.format(i)),
            mlp_norm=read(names.mlp_norm.format(i)),
            gate_up=read(names.gate.format(i), names.up.format(i)),
            down=read(names.down.format(i)),
        )
        for i in range(config.num_layers)
    ]
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=read(names.final_norm),
        lm_head=embedding if config.tie_embeddings else read(names.lm_head),
    )


def _expected(config: DecoderConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        names.embedding: (config.vocab_size, hidden),
        names.final_norm: (hidden,),
    }
    if not config.tie_embeddings:
        shapes[names.lm_head] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        names.attn_norm: (hidden,),
        names.q: (config.q_size, hidden),
        names.k: (config.kv_size, hidden),
        names.v: (config.kv_size, hidden),
        names.attn_out: (hidden, config.q_size),
        names.mlp_norm: (hidden,),
        names.gate: (inner, hidden),
        names.up: (inner, hidden),
        names.down: (hidden, inner),
    }
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
