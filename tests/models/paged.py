"""Drives a decoder over paged KV memory without scheduler, worker or sampler: chunks in, logits of every position out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagewire.models.decoder import Decoder
from pagewire.worker.cpu_attention import PagedAttention
from pagewire.worker.cpu_linear import TILE
from pagewire.worker.cpu_split_attention import SplitAttention
from pagewire.worker.kv_memory import KVMemory


@dataclass
class Row:
    """One sequence: its blocks and how many of its positions are computed."""

    blocks: np.ndarray
    computed: int = 0


class Paged:
    """A decoder and its memory. Blocks are handed out in random order (F39), and hold rubbish before (F32)."""

    def __init__(
        self, decoder: Decoder, *, num_blocks: int = 64, block_size: int = 16, seed: int = 0, exact: bool = False
    ) -> None:
        self.decoder, self.block_size, self.exact = decoder, block_size, exact
        self.memory = KVMemory(decoder.config, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32)
        for pool in (*self.memory.keys, *self.memory.values):
            pool[1:] = float("nan")
        self.attention = (SplitAttention if exact else PagedAttention)(decoder.config, self.memory)
        self.rng = np.random.default_rng(seed)
        self.free = list(self.rng.permutation(np.arange(1, num_blocks)))

    def row(self, max_tokens: int, *, prefix: Row | None = None, shared: int = 0) -> Row:
        """A new sequence with room for so many tokens, of which `prefix` has computed the first `shared`."""
        count = -(-max_tokens // self.block_size)
        head = prefix.blocks[: shared // self.block_size].tolist() if prefix else []
        assert shared % self.block_size == 0
        return Row(np.array(head + [self.free.pop() for _ in range(count - len(head))], np.int32), shared)

    def drop(self, row: Row) -> None:
        """Give back the blocks of a row that shares none."""
        self.free.extend(row.blocks.tolist())
        self.rng.shuffle(self.free)

    def step(
        self, decode: Sequence[tuple[Row, int]] = (), chunks: Sequence[tuple[Row, Sequence[int]]] = ()
    ) -> list[torch.Tensor]:
        """One forward pass; [tokens, V] logits of each entry."""
        entries = [(row, [token]) for row, token in decode] + [(row, list(ids)) for row, ids in chunks]
        tables = np.zeros((len(entries), max(row.blocks.size for row, _ in entries)), np.int32)
        for e, (row, _) in enumerate(entries):
            tables[e, : row.blocks.size] = row.blocks
        starts = np.array([row.computed for row, _ in entries], np.int32)
        sizes = np.array([len(ids) for _, ids in entries], np.int32)
        positions = [row.computed + i for row, ids in entries for i in range(len(ids))]
        token_ids = [token for _, ids in entries for token in ids]
        padding = -len(token_ids) % TILE if self.exact else 0
        self.decoder.tile = TILE if self.exact else None
        with torch.inference_mode():
            self.attention.prepare(tables, starts, sizes, len(decode))
            hidden = self.decoder.forward(
                torch.tensor(token_ids + token_ids[-1:] * padding),
                torch.tensor(positions + positions[-1:] * padding),
                self.attention,
            )
            logits = self.decoder.logits(hidden)[: len(token_ids)]
        for row, ids in entries:
            row.computed += len(ids)
        return list(logits.split(sizes.tolist()))

    def prefill(self, row: Row, token_ids: Sequence[int], sizes: Sequence[int] = ()) -> torch.Tensor:
        """Logits of all tokens, computed in chunks of the given sizes (repeated; none: in one chunk)."""
        sizes, out, at, turn = list(sizes) or [len(token_ids)], [], 0, 0
        while at < len(token_ids):
            size = sizes[turn % len(sizes)]
            out += self.step(chunks=[(row, token_ids[at : at + size])])
            at, turn = at + size, turn + 1
        return torch.cat(out)
