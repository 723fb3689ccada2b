"""Reads a GGUF file: metadata, and tensors dequantised one by one by the `gguf` package.

llama.cpp's converter reorders the rows of the query and key projections of Llama models, so that rope turns neighbouring
dimensions; here rope turns dimension i with i + head_dim / 2, as in the original checkpoints, and `read_into` undoes the
reordering. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.errors import ModelError
from pagewire.gguf_header import TensorInfo, read_header
from pagewire.models import config as configs
from pagewire.models.config import DecoderConfig
from pagewire.models.weights import DecoderWeights, TensorNames, assemble

NAMES: Final = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
    attn_norm="blk.{}.attn_norm.weight",
    q="blk.{}.attn_q.weight",
    k="blk.{}.attn_k.weight",
    v="blk.{}.attn_v.weight",
    attn_out="blk.{}.attn_output.weight",
    mlp_norm="blk.{}.ffn_norm.weight",
    gate="blk.{}.ffn_gate.weight",
    up="blk.{}.ffn_up.weight",
    down="blk.{}.ffn_down.weight",
)
_ROPE_FACTORS: Final = "rope_freqs.weight"
_EOS_KEYS: Final = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
_PLAIN: Final = (gguf.GGMLQuantizationType.F64, gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
_PIECE: Final = 2**20
"""Elements dequantised at once, about: bounds the temporary arrays and the calls alike."""


class GGUFFile:
    """A memory-mapped GGUF file: `metadata`, and its tensors as a `TensorSource`.

    Raises:
        ModelError: not a GGUF file, truncated or otherwise unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.metadata = header.metadata
        self._tensors = header.tensors
        # A plain view: slices of a `numpy.memmap` cost several times as much.
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self._reordered: dict[str, int] = {}  # name → heads
        for name, info in self._tensors.items():
            if info.offset + self._num_bytes(name, info) > self._bytes.size:
                raise ModelError(f"{path} is truncated: tensor {name} lies beyond its end; get the file again")

    def read_config(self) -> DecoderConfig:
        """The decoder that the metadata describes."""
        embedding = self.shape(NAMES.embedding)
        config = configs.from_gguf(
            self.metadata,
            vocab_size=embedding[0] if embedding else 1,  # without one `assemble` will say so
            tie_embeddings=NAMES.lm_head not in self._tensors,
        )
        for name in self._tensors:
            if name.endswith(".bias"):
                raise ModelError(f"{self.path} has biases ({name}), which are not supported")
        for i in range(config.num_layers):
            self._reordered[NAMES.q.format(i)] = config.num_heads
            self._reordered[NAMES.k.format(i)] = config.num_kv_heads
        return config

    def eos_ids(self) -> tuple[int, ...]:
        """End of sequence and end of turn, those that the file names."""
        ids = [self.metadata[key] for key in _EOS_KEYS if isinstance(self.metadata.get(key), int)]
        return tuple(dict.fromkeys(ids))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource`."""
        info = self._tensors.get(name)
        return None if info is None else info.shape

    def read_into(self, name: str, out: Tensor) -> None:
        """See `TensorSource`."""
        values = torch.from_numpy(self._dequantise(name))
        num_heads = self._reordered.get(name)
        if num_heads:
            # [heads, pair, which of the pair, in] → [heads, which, pair, in]
            values = values.view(num_heads, -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        out.copy_(values)

    def _dequantise(self, name: str) -> npt.NDArray[np.float32]:
        info = self._tensors[name]
        kind = gguf.GGMLQuantizationType(info.kind)
        raw = self._bytes[info.offset : info.offset + self._num_bytes(name, info)]
        if kind in _PLAIN:
            return raw.view({8: "<f8", 4: "<f4", 2: "<f2"}[_type_size(kind)]).astype(np.float32).reshape(info.shape)
        out = np.empty(math.prod(info.shape), np.float32)
        # Quantised blocks follow one another through all rows, so a piece need not end where a row does. The package
        # works in groups of rows; in pieces of one row it is several times as fast.
        block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
        step = _PIECE // block_size
        blocks = raw.reshape(-1, type_size)
        try:
            for at in range(0, blocks.shape[0], step):
                piece = gguf.quants.dequantize(blocks[at : at + step].reshape(1, -1), kind)
                out[at * block_size : at * block_size + piece.size] = piece.ravel()
        except NotImplementedError:
            raise ModelError(f"{self.path}: tensor {name} is quantised as {kind.name}, which cannot be read") from None
        return out.reshape(info.shape)

    def _num_bytes(self, name: str, info: TensorInfo) -> int:
        try:
            block_size, type_size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.kind)]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {name} is of unknown type {info.kind}") from None
        if not info.shape or info.shape[-1] % block_size:
            raise ModelError(f"{self.path}: tensor {name} of shape {info.shape} is no whole number of quantised blocks")
        return math.prod(info.shape) // block_size * type_size


def load(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[DecoderConfig, DecoderWeights, tuple[int, ...]]:
    """Configuration, weights and EOS ids of a GGUF file.

    Raises:
        ModelError: whatever keeps it from being served.
    """
    file = GGUFFile(path)
    config = file.read_config()
    weights = assemble(config, file, NAMES, dtype, device)
    if file.shape(_ROPE_FACTORS) == (config.head_dim // 2,):
        weights.rope_factors = torch.empty(config.head_dim // 2)
        file.read_into(_ROPE_FACTORS, weights.rope_factors)
    return config, weights, file.eos_ids()


def _type_size(kind: gguf.GGMLQuantizationType) -> int:
    return int(gguf.GGML_QUANT_SIZES[kind][1])
