"""Attention of the deterministic mode: a query's bits depend on its own sequence alone.

Floating-point sums depend on their order, and libraries choose the order by shape. So all work is cut where absolute
positions say, and every piece has the same shape:

    queries of one sequence:    │ 0 1 2 3 │ 4 5 6 7 │ …          tiles of TILE, at multiples of TILE
    its keys and values:        │ 0 … 127 │ 128 … 255 │ …        splits of SPLIT, at multiples of SPLIT

A query thus always stands at the same place of the same tile and meets the same splits in the same order, whether its
neighbours in the tile are computed with it (prefill), were before (decode, a prefix hit) or never are. Absent
neighbours are zero, keys that lie ahead are masked to a weight of exactly 0. A tile attends to one split after another
and the parts are merged in order, as in flash decoding (Dao et al. 2023).

It is slower than `cpu_attention`: a decoding query does the work of a whole tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagewire.models.config import DecoderConfig
from pagewire.step.step import NULL_BLOCK, Int32Array
from pagewire.worker.kv_memory import KVMemory
from pagewire_kernels import cpu

TILE: Final = 4
SPLIT: Final = 128
"""A multiple of TILE and of every block size, so that a tile's last keys all lie in one split."""
_PAST: Final = -1e30


@dataclass(slots=True)
class _Tile:
    """Queries of one sequence that share a tile."""

    first: int  # among the step's tokens
    last: int
    offset: int  # of the first one in the tile
    splits: list[tuple[Tensor, Tensor | None]]  # see KVMemory.gather_index; in order, with [TILE × group, SPLIT] to add


class SplitAttention:
    """As `cpu_attention.PagedAttention`."""

    def __init__(self, config: DecoderConfig, memory: KVMemory) -> None:
        self._memory = memory
        self._heads, self._group, self._dim = config.num_kv_heads, config.group_size, config.head_dim
        self._scale, self._cap = config.attn_scale, config.attn_soft_cap
        ahead = torch.arange(SPLIT)[None, :] > torch.arange(SPLIT).repeat_interleave(self._group)[:, None]
        diagonal = torch.zeros(ahead.shape).masked_fill_(ahead, -math.inf)
        self._masks = diagonal.split(TILE * self._group)  # by the tile's place in its split
        self._windows = [layer.window for layer in config.layers]
        self._past: dict[tuple[int, int], Tensor] = {}
        self._num_tokens = 0
        self._tiles: dict[int, list[_Tile]] = {}  # by the layer's window

    def prepare(self, tables: Int32Array, starts: Int32Array, num_tokens: Int32Array, num_decode: int) -> None:
        """See `PagedAttention`; decode is a chunk of one."""
        del num_decode
        self._memory.prepare_write(tables, starts, num_tokens)
        self._num_tokens = int(num_tokens.sum())
        self._tiles = {window: [] for window in self._windows}
        first = 0
        for table, start, num in zip(tables, starts.tolist(), num_tokens.tolist(), strict=True):
            splits = self._splits(table, start + num)
            for begin in range(start // TILE * TILE, start + num, TILE):
                position, end = max(begin, start), min(begin + TILE, start + num)
                for window, tiles in self._tiles.items():
                    tiles.append(
                        _Tile(
                            first=first + position - start,
                            last=first + end - start,
                            offset=position - begin,
                            splits=self._seen(splits, begin, window),
                        )
                    )
            first += num

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `pagewire.models.decoder.Attend`. Tokens past the prepared ones are padding: their output is zero."""
        self._memory.write(layer, k[: self._num_tokens], v[: self._num_tokens])
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for tile in self._tiles[self._windows[layer]]:
            out[tile.first : tile.last] = self._attend(layer, q[tile.first : tile.last], tile)
        return out

    def _attend(self, layer: int, q: Tensor, tile: _Tile) -> Tensor:
        """[queries, num_heads × head_dim]."""
        heads, group, dim = self._heads, self._group, self._dim
        end = tile.offset + q.shape[0]
        queries = q.new_zeros(TILE, heads, group, dim)
        queries[tile.offset : end] = q.view(-1, heads, group, dim)
        queries = queries.transpose(0, 1).reshape(heads, TILE * group, dim).mul_(self._scale)
        top = total = acc = None
        for split, mask in tile.splits:
            k, v = self._memory.gather(layer, split, 1)
            scores = torch.bmm(queries, k[0].transpose(1, 2))
            if self._cap:
                scores = cpu.soft_cap_(scores, self._cap)
            if mask is not None:
                scores += mask
            new_top = scores.amax(dim=-1, keepdim=True)
            if top is not None:
                new_top = torch.maximum(top, new_top)
            weights = scores.sub_(new_top).exp_()
            new_total, new_acc = weights.sum(dim=-1, keepdim=True), torch.bmm(weights, v[0])
            if top is not None and total is not None and acc is not None:
                fade = (top - new_top).exp_()
                new_total, new_acc = new_total.add_(total * fade), new_acc.add_(acc * fade)
            top, total, acc = new_top, new_total, new_acc
        assert acc is not None
        assert total is not None
        out = acc.div_(total).view(heads, TILE, group, dim).transpose(0, 1)
        return out[tile.offset : end].reshape(q.shape[0], -1)

    def _seen(self, splits: list[Tensor], begin: int, window: int) -> list[tuple[Tensor, Tensor | None]]:
        """Splits that a tile attends to, with what masks a part of them; `begin` is its first position."""
        last, first = begin // SPLIT, 0
        masks: dict[int, Tensor] = {last: self._masks[begin % SPLIT // TILE]}
        if window:
            first = max(begin + 1 - window, 0) // SPLIT
            # The window's edge moves with the queries of a tile, and may cross into a second split.
            for number in range(first, max(begin + TILE - window, 0) // SPLIT + 1):
                past = self._past_mask(begin - number * SPLIT, window)
                masks[number] = masks[number] + past if number in masks else past
        return [(splits[number], masks.get(number)) for number in range(first, last + 1)]

    def _past_mask(self, offset: int, window: int) -> Tensor:
        """For a tile so far behind a split's begin. Finite: a query may see nothing of a split, but then sees another,
        beside which what this one gave fades to exactly 0.
        """
        mask = self._past.get((offset, window))
        if mask is None:
            queries = torch.arange(offset, offset + TILE).repeat_interleave(self._group)[:, None]
            past = torch.arange(SPLIT)[None, :] <= queries - window
            mask = self._past[offset, window] = torch.zeros(past.shape).masked_fill_(past, _PAST)
        return mask

    def _splits(self, table: Int32Array, length: int) -> list[Tensor]:
        """What to gather for each split."""
        block_size = self._memory.block_size
        num_splits, num_blocks = -(-length // SPLIT), -(-length // block_size)
        # Past the sequence's end stands the null block, which is zero; blocks allocated ahead may hold anything.
        blocks = np.full(num_splits * SPLIT // block_size, NULL_BLOCK, np.int64)
        blocks[:num_blocks] = table[:num_blocks]
        return [self._memory.gather_index(split[None]) for split in blocks.reshape(num_splits, -1)]
