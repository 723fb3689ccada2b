"""Reads a GGUF file: metadata, and tensors dequantised one by one by the `gguf` package.

llama.cpp's converter reorders the rows of the query and key projections of some architectures, so that rope turns neighbouring
dimensions; here rope turns dimension i with i + head_dim / 2, as in the original checkpoints, and `read_into` undoes the
reordering. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.errors import ModelError
from pagewire.gguf_header import read_header
from pagewire.models.config import DecoderConfig
from pagewire.models.gguf_config import PERMUTED, check_extents, from_gguf, num_bytes
from pagewire.models.weights import DecoderWeights, Kinds, Progress, TensorNames, assemble, bias_of

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
    q_norm="blk.{}.attn_q_norm.weight",
    k_norm="blk.{}.attn_k_norm.weight",
    post_attn_norm="blk.{}.post_attention_norm.weight",
    post_mlp_norm="blk.{}.post_ffw_norm.weight",
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
        self.header = read_header(path)
        self.metadata = self.header.metadata
        self._tensors = self.header.tensors
        check_extents(path, self.header)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._reordered: dict[str, int] = {}  # name → heads

    def read_config(self) -> DecoderConfig:
        """The decoder that the metadata describes."""
        config = from_gguf(self.header)
        if config.architecture in PERMUTED:
            for i in range(config.num_layers):
                for name, heads in ((NAMES.q.format(i), config.num_heads), (NAMES.k.format(i), config.num_kv_heads)):
                    self._reordered[name] = self._reordered[bias_of(name)] = heads
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
            inner = values.shape[1] if values.ndim == 2 else 1
            values = values.view(num_heads, -1, 2, inner).transpose(1, 2).reshape(values.shape)
        out.copy_(values)
        self._forget(name)

    def is_fp8(self, name: str) -> bool:
        """See `TensorSource`: GGUF has no E4M3."""
        del name
        return False

    def row_scales(self, name: str) -> Tensor | None:
        """See `TensorSource`."""
        del name
        return None

    def _forget(self, name: str) -> None:
        """Take a tensor's pages out of the process; those that all tensors were read from would add up to the file."""
        info = self._tensors[name]
        begin = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + num_bytes(self.path, name, info)) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _dequantise(self, name: str) -> npt.NDArray[np.float32]:
        info = self._tensors[name]
        kind = gguf.GGMLQuantizationType(info.kind)
        raw = self._bytes[info.offset : info.offset + num_bytes(self.path, name, info)]
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


def load(
    path: Path, kinds: Kinds, on_progress: Progress | None = None
) -> tuple[DecoderConfig, DecoderWeights, tuple[int, ...]]:
    """Configuration, weights and EOS ids of a GGUF file.

    Raises:
        ModelError: whatever keeps it from being served.
    """
    file = GGUFFile(path)
    config = file.read_config()
    weights = assemble(config, file, NAMES, kinds, on_progress=on_progress)
    if file.shape(_ROPE_FACTORS) == (config.head_dim // 2,):
        weights.rope_factors = torch.empty(config.head_dim // 2)
        file.read_into(_ROPE_FACTORS, weights.rope_factors)
    return config, weights, file.eos_ids()


def _type_size(kind: gguf.GGMLQuantizationType) -> int:
    return int(gguf.GGML_QUANT_SIZES[kind][1])
