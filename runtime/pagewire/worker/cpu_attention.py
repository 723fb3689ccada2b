"""Attention of one step over the paged KV memory, on a CPU.

`PagedAttention` is made once, told of each step by `prepare`, then called once a layer. Everything that is the same in
all layers of one window (gather indices, masks) is laid out in `prepare`; blocks that lie before a window are not read.

The blocks of those that attend together are gathered into one run each, and PyTorch's fused attention does the rest; for
scores with a soft cap, which it does not know, the same step by step.
Query heads that share a KV head attend as several queries of it, so that its keys and values are read once.
"""

from __future__ import annotations

import math
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
from pagewire_kernels import cpu

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
    mask: Tensor | None  # [b, 1, 1, n × block_size]; None: what is gathered from `begin` up to `length`
    begin: int
    length: int


@dataclass(slots=True)
class _Chunk:
    """Consecutive queries of one sequence."""

    first: int
    last: int
    index: Tensor
    length: int
    mask: Tensor | None  # bool [queries, length]; None: causal from position 0


@dataclass(slots=True)
class _Layout:
    """A step, for layers of one window."""

    decodes: list[_Decode]
    chunks: list[_Chunk]


class PagedAttention:
    """Writes the keys and values of a step's tokens and lets their queries attend.

    Args:
        config: sizes.
        memory: where keys and values lie.
    """

    def __init__(self, config: DecoderConfig, memory: KVMemory) -> None:
        self._memory = memory
        self._heads, self._group, self._dim = config.num_kv_heads, config.group_size, config.head_dim
        self._scale, self._cap = config.attn_scale, config.attn_soft_cap
        self._windows = [layer.window for layer in config.layers]
        self._num_tokens = 0
        self._layouts: dict[int, _Layout] = {}  # by window

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
        windows = set(self._windows)
        longest = int((starts + num_tokens).max()) if windows != {0} else 0
        # A window that nobody has outgrown is none, and shares the layout of layers without.
        reached = {window: window if window < longest else 0 for window in windows}
        layouts = {
            window: self._layout(tables, starts, num_tokens, num_decode, window) for window in set(reached.values())
        }
        self._layouts = {window: layouts[of] for window, of in reached.items()}

    def _layout(
        self, tables: Int32Array, starts: Int32Array, num_tokens: Int32Array, num_decode: int, window: int
    ) -> _Layout:
        chunks, first = [], num_decode
        for e in range(num_decode, starts.size):
            last = first + int(num_tokens[e])
            chunks.append(self._chunk(tables[e], int(starts[e]), first, last, window))
            first = last
        return _Layout(self._decode_groups(tables[:num_decode], starts[:num_decode] + 1, window), chunks)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `pagewire.models.decoder.Attend`. Tokens past the prepared ones are padding: their output is finite."""
        num = self._num_tokens
        self._memory.write(layer, k[:num], v[:num])
        layout = self._layouts[self._windows[layer]]
        if not layout.chunks and len(layout.decodes) == 1 and q.shape[0] == num:
            return self._decode(layer, q, layout.decodes[0])
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for decode in layout.decodes:
            if decode.queries is None:
                out[: decode.size] = self._decode(layer, q[: decode.size], decode)
            else:
                out[decode.queries] = self._decode(layer, q[decode.queries], decode)
        for chunk in layout.chunks:
            out[chunk.first : chunk.last] = self._prefill(layer, q[chunk.first : chunk.last], chunk)
        return out

    def _decode(self, layer: int, q: Tensor, decode: _Decode) -> Tensor:
        k, v = self._memory.gather(layer, decode.index, decode.size)
        if decode.mask is None:
            k, v = k[:, :, decode.begin : decode.length], v[:, :, decode.begin : decode.length]
        grouped = q.reshape(decode.size, self._heads, self._group, self._dim)
        if self._cap:
            scores = self._capped(grouped, k)
            out = torch.matmul((scores if decode.mask is None else scores.add_(decode.mask)).softmax(dim=-1), v)
        else:
            out = scaled_dot_product_attention(grouped, k, v, attn_mask=decode.mask, scale=self._scale)
        return out.reshape(decode.size, -1)

    def _prefill(self, layer: int, q: Tensor, chunk: _Chunk) -> Tensor:
        num = q.shape[0]
        k, v = (x[0, :, None, : chunk.length] for x in self._memory.gather(layer, chunk.index, 1))
        grouped = q.view(num, self._heads, self._group, self._dim).permute(1, 2, 0, 3)
        if self._cap:
            assert chunk.mask is not None
            scores = self._capped(grouped, k).masked_fill_(~chunk.mask, -math.inf)
            return torch.matmul(scores.softmax(dim=-1), v).permute(2, 0, 1, 3).reshape(num, -1)
        spread = (self._heads, self._group, chunk.length, self._dim)  # strides of 0: nothing is copied
        out = scaled_dot_product_attention(
            grouped,
            k.expand(spread),
            v.expand(spread),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._scale,
        )
        return out.permute(2, 0, 1, 3).reshape(num, -1)

    def _capped(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores of each query with all keys, capped: [..., queries, keys]."""
        return cpu.soft_cap_(torch.matmul(q, k.transpose(-1, -2)).mul_(self._scale), self._cap)

    def _decode_groups(self, tables: Int32Array, lengths: Int32Array, window: int) -> list[_Decode]:
        """Longest first; a group ends where the next sequence would bring too much padding.

        With a window, blocks before it are cut from the tables, and lengths and begins count from what is left.
        """
        begins = np.zeros_like(lengths)
        if window and lengths.size:
            begins = np.maximum(lengths - window, 0).astype(np.int32)
            cut = begins // self._memory.block_size
            begins, lengths = begins - cut * self._memory.block_size, lengths - cut * self._memory.block_size
            columns = cut[:, None] + np.arange(-(-int(lengths.max()) // self._memory.block_size))
            tables = np.take_along_axis(tables, np.minimum(columns, tables.shape[1] - 1), axis=1)
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
            groups.append(self._decode_group(tables, begins, lengths, members, int(blocks[0]), in_order=everybody))
            at += size
        return groups

    def _decode_group(
        self,
        tables: Int32Array,
        begins: Int32Array,
        lengths: Int32Array,
        members: npt.NDArray[np.intp],
        num_blocks: int,
        *,
        in_order: bool,
    ) -> _Decode:
        length = lengths[members][:, None]
        mask = None
        if members.size > 1:
            positions = np.arange(num_blocks * self._memory.block_size)
            visible = (positions < length) & (positions >= begins[members][:, None])
            mask = torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))[:, None, None]
        # Past a row's end stands the null block, which is zero; blocks allocated ahead may hold anything.
        own = np.arange(num_blocks) * self._memory.block_size < length
        blocks = np.where(own, tables[members, :num_blocks], NULL_BLOCK)
        return _Decode(
            queries=None if in_order else torch.from_numpy(members),
            size=members.size,
            index=self._memory.gather_index(blocks),
            mask=mask,
            begin=int(begins[members[0]]),
            length=int(lengths[members[0]]),
        )

    def _chunk(self, table: Int32Array, start: int, first: int, last: int, window: int) -> _Chunk:
        length, block_size = start + last - first, self._memory.block_size
        cut = max(start + 1 - window, 0) // block_size if window else 0
        blocks = table[None, cut : -(-length // block_size)]
        mask, begin = None, cut * block_size
        if start or self._cap or 0 < window < length:
            keys, queries = np.arange(begin, length), np.arange(start, length)[:, None]
            visible = keys <= queries
            if window:
                visible &= keys > queries - window
            mask = torch.from_numpy(visible)
        return _Chunk(first, last, self._memory.gather_index(blocks), length - begin, mask)
