"""Drives a decoder over paged KV memory without scheduler, worker or sampler: chunks in, logits of every position out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagewire.models.decoder import Decoder
from pagewire.worker.cpu_attention import PagedAttention
from pagewire.worker.kv_memory import KVMemory


@dataclass
class Row:
    """One sequence: its blocks and how many of its positions are computed."""

    blocks: np.ndarray
    computed: int = 0


@dataclass
class Paged:
    """A decoder and its memory. Blocks are handed out in random order (F39)."""

    decoder: Decoder
    num_blocks: int = 64
    block_size: int = 16
    seed: int = 0
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = KVMemory(
            self.decoder.config, num_blocks=self.num_blocks, block_size=self.block_size, dtype=torch.float32
        )
        self.attention = PagedAttention(self.decoder.config, self.memory)
        self.free = list(np.random.default_rng(self.seed).permutation(np.arange(1, self.num_blocks)))

    def row(self, max_tokens: int) -> Row:
        """A new sequence with room for so many tokens."""
        count = -(-max_tokens // self.block_size)
        row = Row(np.array([self.free.pop() for _ in range(count)], np.int32))
        self.rows.append(row)
        return row

    def step(self, decode: list[tuple[Row, int]] = (), chunks: list[tuple[Row, list[int]]] = ()) -> list[torch.Tensor]:
        """One forward pass; [tokens, V] logits of each entry."""
        entries = [(row, [token]) for row, token in decode] + list(chunks)
        width = max(row.blocks.size for row, _ in entries)
        tables = np.zeros((len(entries), width), np.int32)
        for e, (row, _) in enumerate(entries):
            tables[e, : row.blocks.size] = row.blocks
        starts = np.array([row.computed for row, _ in entries], np.int32)
        sizes = np.array([len(ids) for _, ids in entries], np.int32)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)])
        token_ids = torch.tensor([token for _, ids in entries for token in ids])
        with torch.inference_mode():
            self.attention.prepare(tables, starts, sizes, len(decode))
            hidden = self.decoder.forward(token_ids, torch.from_numpy(positions), self.attention)
            logits = self.decoder.logits(hidden)
        for row, ids in entries:
            row.computed += len(ids)
        return list(logits.split(sizes.tolist()))
