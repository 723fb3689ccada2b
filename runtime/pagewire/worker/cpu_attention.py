"""Attention of one step over the paged KV memory, on a CPU.

`Attention` is made once, told of each step by `prepare`, then called once a layer. Everything that is the same in all
layers (slots, gather indices, masks) is laid out in `prepare`.
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
from pagewire.step.step import Int32Array
from pagewire.worker.kv_memory import KVMemory

_GROUP_FILL: Final = 0.7
"""Decoding rows attend together while the shortest fills this share of the longest's blocks."""


@dataclass(slots=True)
class _Decode:
    """Rows that attend together, one query each."""

    queries: Tensor  # int64 [b]
    index: Tensor  # int64 [b × num_kv_heads × n]
    mask: Tensor  # [b, 1, 1, n × block_size]
    num_blocks: int  # n


@dataclass(slots=True)
class _Chunk:
    """Consecutive queries of one sequence."""

    first: int
    last: int
    index: Tensor  # int64 [num_kv_heads × n]
    length: int
    mask: Tensor | None  # bool [queries, length]; None: causal from position 0


class Attention:
    """Writes the keys and values of a step's tokens and lets their queries attend.

    Args:
        config: sizes.
        memory: where keys and values lie.
    """

    def __init__(self, config: DecoderConfig, memory: KVMemory) -> None:
        self._config = config
        self._memory = memory
        size = memory.block_size * memory.head_dim
        self._key_blocks = [pool.view(-1, size) for pool in memory.keys]
        self._value_blocks = [pool.view(-1, size) for pool in memory.values]
        self._key_slots = [pool.view(-1, memory.head_dim) for pool in memory.keys]
        self._value_slots = [pool.view(-1, memory.head_dim) for pool in memory.values]
        self._heads = np.arange(memory.num_kv_heads)
        self._slots = torch.empty(0, dtype=torch.int64)
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
        entry = np.repeat(np.arange(starts.size), num_tokens)
        offset = np.arange(entry.size) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
        positions = starts[entry] + offset
        blocks = tables[entry, positions // self._memory.block_size]
        within = positions % self._memory.block_size
        self._clear_fresh(blocks, within)
        rows = (blocks[:, None] * self._memory.num_kv_heads + self._heads) * self._memory.block_size + within[:, None]
        self._slots = torch.from_numpy(rows.astype(np.int64).ravel())
        lengths = starts + num_tokens
        self._decodes = self._group(tables, lengths[:num_decode])
        self._chunks, first = [], num_decode
        for e in range(num_decode, starts.size):
            last = first + int(num_tokens[e])
            self._chunks.append(self._chunk(tables[e], int(starts[e]), first, last))
            first = last

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `pagewire.models.decoder.Attend`."""
        self._key_slots[layer].index_copy_(0, self._slots, k.reshape(-1, self._memory.head_dim))
        self._value_slots[layer].index_copy_(0, self._slots, v.reshape(-1, self._memory.head_dim))
        out = torch.empty(q.shape, dtype=q.dtype)
        for decode in self._decodes:
            out[decode.queries] = self._decode(layer, q[decode.queries], decode)
        for chunk in self._chunks:
            out[chunk.first : chunk.last] = self._prefill(layer, q[chunk.first : chunk.last], chunk)
        return out.view(q.shape[0], -1)

    def _decode(self, layer: int, q: Tensor, decode: _Decode) -> Tensor:
        b, heads, dim = q.shape[0], self._memory.num_kv_heads, self._memory.head_dim
        k = self._key_blocks[layer].index_select(0, decode.index).view(b, heads, -1, dim)
        v = self._value_blocks[layer].index_select(0, decode.index).view(b, heads, -1, dim)
        # Query heads that share a KV head stand beside one another: they attend as if they were several queries of it.
        grouped = q.reshape(b, heads, -1, dim)
        return scaled_dot_product_attention(grouped, k, v, attn_mask=decode.mask).reshape(q.shape)

    def _prefill(self, layer: int, q: Tensor, chunk: _Chunk) -> Tensor:
        heads, dim = self._memory.num_kv_heads, self._memory.head_dim
        k = self._key_blocks[layer].index_select(0, chunk.index).view(1, heads, -1, dim)[:, :, : chunk.length]
        v = self._value_blocks[layer].index_select(0, chunk.index).view(1, heads, -1, dim)[:, :, : chunk.length]
        return scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
        )[0].transpose(0, 1)

    def _clear_fresh(self, blocks: Int32Array, within: npt.NDArray[np.integer]) -> None:
        """Zero the blocks whose first position is written now; see `kv_memory`."""
        fresh = blocks[within == 0]
        if fresh.size:
            self._memory.clear(fresh)

    def _group(self, tables: Int32Array, lengths: Int32Array) -> list[_Decode]:
        num_blocks = -(-lengths // self._memory.block_size)
        order = np.argsort(-num_blocks, kind="stable")
        groups, at = [], 0
        while at < order.size:
            longest = int(num_blocks[order[at]])
            end = at + int(np.searchsorted(-num_blocks[order[at:]], -_GROUP_FILL * longest, side="right"))
            groups.append(self._decode_group(tables, lengths, order[at:end], longest))
            at = end
        return groups

    def _decode_group(
        self, tables: Int32Array, lengths: Int32Array, members: npt.NDArray[np.intp], longest: int
    ) -> _Decode:
        block_size = self._memory.block_size
        length = lengths[members][:, None]
        # Past a row's end: the null block, which is zero; blocks allocated ahead may hold anything.
        blocks = np.where(np.arange(longest) * block_size < length, tables[members, :longest], 0).astype(np.int64)
        visible = np.arange(longest * block_size) < length
        mask = torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return _Decode(torch.from_numpy(members), self._index(blocks), mask[:, None, None], longest)

    def _chunk(self, table: Int32Array, start: int, first: int, last: int) -> _Chunk:
        length = start + last - first
        blocks = table[None, : -(-length // self._memory.block_size)].astype(np.int64)
        mask = None
        if start:
            mask = torch.from_numpy(np.arange(length) <= np.arange(start, length)[:, None])
        return _Chunk(first, last, self._index(blocks), length, mask)

    def _index(self, blocks: npt.NDArray[np.int64]) -> Tensor:
        """[b, n] blocks → rows of a pool viewed as [num_blocks × num_kv_heads, …], ordered [b, head, n]."""
        heads = self._memory.num_kv_heads
        return torch.from_numpy((blocks[:, None] * heads + self._heads[:, None]).ravel())
