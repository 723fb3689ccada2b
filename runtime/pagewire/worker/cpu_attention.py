"""Attention of one step over the paged KV memory, on a CPU.

`PagedAttention` is made once, told of each step by `prepare`, then called once a layer. Everything that is the same in
all layers (gather indices, masks) is laid out in `prepare`.

The blocks of those that attend together are gathered into one run each, and PyTorch's fused attention does the rest.
Query heads that share a KV head attend as several queries of it, so that its keys and values are read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagewire.models.config import DecoderConfig
from pagewire.step.step import NULL_BLOCK, Int32Array
from pagewire.worker.kv_memory import KVMemory

_FREE_PADDING: Final = 16
_MAX_PADDING: Final = 0.2
"""Rows of different lengths attend together, padded to the longest, while the padding is at most so many blocks (which
cost what another call does) or this share of all."""


@dataclass(slots=True)
class _Decode:
    """Sequences that attend together, one query each."""

    queries: Tensor | None  # int64 [b]; None: the first b, in order
    size: int  # b
    index: Tensor  # of its n blocks each, see KVMemory.gather_index
    mask: Tensor | None  # [b, 1, 1, n × block_size]; None: all that is gathered, up to `length`
    length: int


@dataclass(slots=True)
class _Chunk:
    """Consecutive queries of one sequence."""

    first: int
    last: int
    index: Tensor
    length: int
    mask: Tensor | None  # bool [queries, length]; None: causal from position 0


class PagedAttention:
    """Writes the keys and values of a step's tokens and lets their queries attend.

    Args:
        config: sizes.
        memory: where keys and values lie.
    """

    def __init__(self, config: DecoderConfig, memory: KVMemory) -> None:
        self._memory = memory
        self._heads, self._group, self._dim = config.num_kv_heads, config.group_size, config.head_dim
        self._num_tokens = 0
        self._decodes: list[_Decode] = []
        self._chunks: list[_Chunk] = []

    def prepare(self, tables: Int32Array, starts: Int32Array, num_tokens: Int32Array, num_decode: int) -> None:
        """Lay out a step.

        Args:
            tables: int32 [B, max_blocks], each entry's blocks.
            starts: int32 [B], position of its first token.
            num_tokens: int32 [B]; 1 for the first `num_decode`.
            num_decode: entries that decode.
        """
        self._memory.prepare_write(tables, starts, num_tokens)
        self._num_tokens = int(num_tokens.sum())
        self._decodes = self._decode_groups(tables, starts[:num_decode] + 1)
        self._chunks, first = [], num_decode
        for e in range(num_decode, starts.size):
            last = first + int(num_tokens[e])
            self._chunks.append(self._chunk(tables[e], int(starts[e]), first, last))
            first = last

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `pagewire.models.decoder.Attend`. Tokens past the prepared ones are padding: their output is finite."""
        num = self._num_tokens
        self._memory.write(layer, k[:num], v[:num])
        if not self._chunks and len(self._decodes) == 1 and q.shape[0] == num:
            return self._decode(layer, q, self._decodes[0])
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for decode in self._decodes:
            if decode.queries is None:
                out[: decode.size] = self._decode(layer, q[: decode.size], decode)
            else:
                out[decode.queries] = self._decode(layer, q[decode.queries], decode)
        for chunk in self._chunks:
            out[chunk.first : chunk.last] = self._prefill(layer, q[chunk.first : chunk.last], chunk)
        return out

    def _decode(self, layer: int, q: Tensor, decode: _Decode) -> Tensor:
        k, v = self._memory.gather(layer, decode.index, decode.size)
        if decode.mask is None:
            k, v = k[:, :, : decode.length], v[:, :, : decode.length]
        grouped = q.reshape(decode.size, self._heads, self._group, self._dim)
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=decode.mask)
        return out.reshape(decode.size, -1)

    def _prefill(self, layer: int, q: Tensor, chunk: _Chunk) -> Tensor:
        num = q.shape[0]
        k, v = (x[0, :, None, : chunk.length] for x in self._memory.gather(layer, chunk.index, 1))
        grouped = q.view(num, self._heads, self._group, self._dim).permute(1, 2, 0, 3)
        spread = (self._heads, self._group, chunk.length, self._dim)  # strides of 0: nothing is copied
        out = scaled_dot_product_attention(
            grouped, k.expand(spread), v.expand(spread), attn_mask=chunk.mask, is_causal=chunk.mask is None
        )
        return out.permute(2, 0, 1, 3).reshape(num, -1)

    def _decode_groups(self, tables: Int32Array, lengths: Int32Array) -> list[_Decode]:
        """Longest first; a group ends where the next sequence would bring too much padding."""
        num_blocks = -(-lengths // self._memory.block_size)
        order = np.argsort(-num_blocks, kind="stable")
        groups, at = [], 0
        while at < order.size:
            blocks = num_blocks[order[at:]]
            wide = blocks[0] * np.arange(1, blocks.size + 1)
            padding = wide - np.cumsum(blocks)
            fits = (padding <= _FREE_PADDING) | (padding <= _MAX_PADDING * wide)
            size = int(fits.argmin()) or blocks.size  # the first is always fitting: 0 means that all do
            everybody = size == order.size
            members = np.arange(size) if everybody else order[at : at + size]
            groups.append(self._decode_group(tables, lengths, members, int(blocks[0]), in_order=everybody))
            at += size
        return groups

    def _decode_group(
        self, tables: Int32Array, lengths: Int32Array, members: npt.NDArray[np.intp], num_blocks: int, *, in_order: bool
    ) -> _Decode:
        length = lengths[members][:, None]
        mask = None
        if members.size > 1:
            visible = np.arange(num_blocks * self._memory.block_size) < length
            mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))[:, None, None]
        # Past a row's end stands the null block, which is zero; blocks allocated ahead may hold anything.
        own = np.arange(num_blocks) * self._memory.block_size < length
        blocks = np.where(own, tables[members, :num_blocks], NULL_BLOCK)
        return _Decode(
            queries=None if in_order else torch.from_numpy(members),
            size=members.size,
            index=self._memory.gather_index(blocks),
            mask=mask,
            length=int(lengths[members[0]]),
        )

    def _chunk(self, table: Int32Array, start: int, first: int, last: int) -> _Chunk:
        length = start + last - first
        blocks = table[None, : -(-length // self._memory.block_size)]
        mask = None
        if start:
            mask = torch.from_numpy(np.arange(length) <= np.arange(start, length)[:, None])
        return _Chunk(first, last, self._memory.gather_index(blocks), length, mask)
