"""KV blocks in host memory: how many fit, where they lie, and what must be true of what is in them.

Every layer has one tensor for keys and one for values, `[num_blocks, num_kv_heads, block_size, head_dim]`, side by side,
so that one call reads or writes both. All lie in one anonymous memory map, which the system hands out zeroed and page by
page: what is never written costs nothing.

Positions of a block that its owner has not written yet are zero. Masked positions weigh nothing in attention, but a NaN
that a former owner left there would not stay masked: 0 × NaN is NaN (F32). So a block is cleared when its first
position is written, and the null block is never written at all.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.config import CacheConfig
from pagewire.errors import ConfigError
from pagewire.models.config import DecoderConfig
from pagewire.step.step import Int32Array

DEFAULT_TOKENS_A_ROW: Final = 1024
"""With `kv_bytes = 0`: room for this much in every row, …"""
DEFAULT_MEMORY_SHARE: Final = 0.25
"""… but no more than this share of what the machine has free."""


class KVMemory:
    """All KV blocks of a worker.

    Attributes:
        keys, values: one tensor a layer, `[num_blocks, num_kv_heads, block_size, head_dim]`.

    Raises:
        ConfigError: the system does not give so much memory.
    """

    def __init__(self, config: DecoderConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self.num_kv_heads: Final = config.num_kv_heads
        self.head_dim: Final = config.head_dim
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self._map = _memory_map(math.prod(shape) * dtype.itemsize)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._all = torch.frombuffer(self._map, dtype=dtype).view(shape)
        self.keys: Final = [layer[0] for layer in self._all]
        self.values: Final = [layer[1] for layer in self._all]
        self.num_bytes: Final = self._all.numel() * dtype.itemsize
        assert self.num_bytes == config.kv_bytes(num_blocks * block_size, dtype.itemsize)
        self._blocks = [layer.view(-1, block_size * config.head_dim) for layer in self._all]
        self._slots = [layer.view(-1, config.head_dim) for layer in self._all]
        self._heads = np.arange(config.num_kv_heads)
        self._written = torch.empty(0, dtype=torch.int64)

    def prepare_write(self, tables: Int32Array, starts: Int32Array, num_tokens: Int32Array) -> None:
        """Lay out where the next calls of `write` put a step's tokens, and clear the blocks that these begin.

        Args:
            tables: int32 [B, max_blocks], each entry's blocks.
            starts: int32 [B], position of its first token.
            num_tokens: int32 [B].
        """
        entry = np.repeat(np.arange(starts.size), num_tokens)
        positions = starts[entry] + np.arange(entry.size) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
        blocks, within = tables[entry, positions // self.block_size], positions % self.block_size
        fresh = blocks[within == 0]
        if fresh.size:
            self._all.index_fill_(2, _index(fresh), 0)
        keys = (blocks[:, None] * self.num_kv_heads + self._heads) * self.block_size + within[:, None]
        values = keys + self.num_blocks * self.num_kv_heads * self.block_size
        self._written = _index(np.concatenate((keys, values), axis=1).ravel())

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the prepared tokens, [T, num_kv_heads, head_dim]."""
        self._slots[layer].index_copy_(0, self._written, torch.cat((k, v), dim=1).view(-1, self.head_dim))

    def gather_index(self, blocks: npt.NDArray[np.integer]) -> Tensor:
        """What `gather` takes for [b, n] blocks: rows of a layer viewed as [2 × num_blocks × num_kv_heads, …]."""
        rows = blocks.astype(np.int64)[:, None] * self.num_kv_heads + self._heads[:, None]
        return torch.from_numpy(np.concatenate((rows, rows + self.num_blocks * self.num_kv_heads)).ravel())

    def gather(self, layer: int, index: Tensor, b: int) -> tuple[Tensor, Tensor]:
        """Keys and values of b sequences, a run each: [b, num_kv_heads, n × block_size, head_dim]."""
        gathered = self._blocks[layer].index_select(0, index)
        k, v = gathered.view(2, b, self.num_kv_heads, -1, self.head_dim).unbind()
        return k, v

    def copy(self, src: Int32Array, dst: Int32Array) -> None:
        """Copy whole blocks, in all layers; all are read before any is written."""
        self._all[:, :, _index(dst)] = self._all[:, :, _index(src)]


def num_blocks_for(
    config: DecoderConfig, cache: CacheConfig, *, max_rows: int, max_model_len: int, itemsize: int
) -> int:
    """Blocks, the null block included, that `cache.kv_bytes` pays for; with 0 what suits the machine.

    Raises:
        ConfigError: not even one block beside the null block, or a format that a CPU does not compute with.
    """
    if cache.kv_dtype != "auto":
        raise ConfigError(f"KV in {cache.kv_dtype} takes a GPU; a CPU keeps it in float32", field="cache.kv_dtype")
    block_bytes = config.kv_bytes(cache.block_size, itemsize)
    if cache.kv_bytes:
        num_blocks = cache.kv_bytes // block_bytes
    else:
        tokens = max(max_rows * min(DEFAULT_TOKENS_A_ROW, max_model_len), max_model_len)
        wanted = -(-tokens // cache.block_size) + 1
        num_blocks = min(wanted, int(available_memory() * DEFAULT_MEMORY_SHARE) // block_bytes)
    if num_blocks < 2:
        raise ConfigError(
            f"KV memory must hold at least 2 blocks, {2 * block_bytes} bytes for this model", field="cache.kv_bytes"
        )
    return num_blocks


def _memory_map(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError) as error:  # more than the system would ever back, or can address
        raise ConfigError(
            f"{num_bytes} bytes for KV cannot be had on this machine; {available_memory()} are free",
            field="cache.kv_bytes",
        ) from error


def available_memory() -> int:
    """Bytes that this process may still take: free memory, or what its control group leaves, whichever is less."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or "max"
        pass
    return max(free, 0)


def _index(blocks: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(blocks.astype(np.int64))
