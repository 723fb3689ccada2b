"""KV blocks on the card: how many fit, and where they lie."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagewire.config import CacheConfig
from pagewire.errors import ConfigError
from pagewire.models.config import DecoderConfig
from pagewire.models.kv_scales import KvScales

_KEPT_FREE: Final = 0.02
"""Of the card: for CUDA graphs, which are captured after the pool was sized, and for what else runs on the card."""


class GpuKV:
    """All KV blocks.

    Args:
        config: of the model.
        num_blocks: the null block included.
        block_size: tokens of a block.
        dtype: of a value.
        device: where.
        scales: of 8-bit values.

    Attributes:
        keys, values: one tensor a layer, `[num_blocks, num_kv_heads, block_size, head_dim]`.
        k_scales, v_scales: float32 [num_kv_heads] a layer, what a stored value is multiplied by; None: 1.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: KvScales | None = None,
    ) -> None:
        assert (scales is not None) == (dtype.itemsize == 1), dtype
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        # Zeroed: no block may hold a NaN that nobody computed.
        self._all: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.keys: Final = [layer[0] for layer in self._all]
        self.values: Final = [layer[1] for layer in self._all]
        self.k_scales: list[Tensor | None] = [None] * config.num_layers
        self.v_scales: list[Tensor | None] = [None] * config.num_layers
        if scales is not None:
            self.k_scales = list(torch.from_numpy(scales.k).to(device))
            self.v_scales = list(torch.from_numpy(scales.v).to(device))
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self.num_bytes: Final = self._all.numel() * dtype.itemsize
        assert self.num_bytes == config.kv_bytes(num_blocks * block_size, dtype.itemsize)


def num_blocks_on_card(
    config: DecoderConfig, cache: CacheConfig, *, free_bytes: int, total_bytes: int, itemsize: int, max_tokens: int
) -> int:
    """Blocks, the null block included, that `cache.kv_bytes` pays for; with 0 what `cache.gpu_memory_fraction` leaves.

    Args:
        config: of the model.
        cache: of the configuration.
        free_bytes: what is left on the card once weights are loaded and the largest step was tried.
        total_bytes: all that the card has.
        itemsize: bytes of a value in the cache.
        max_tokens: more than so many can never be in use.

    Raises:
        ConfigError: they do not fit, or are too few; it says what would fit.
    """
    block_bytes = config.kv_bytes(cache.block_size, itemsize)
    fitting = max(free_bytes - int(total_bytes * _KEPT_FREE), 0) // block_bytes
    allowed = max(free_bytes - int(total_bytes * (1 - cache.gpu_memory_fraction)), 0) // block_bytes
    num_blocks = cache.kv_bytes // block_bytes if cache.kv_bytes else min(allowed, fitting)
    if num_blocks > fitting:
        raise ConfigError(
            f"{cache.kv_bytes} bytes for KV do not fit on the card; {fitting * block_bytes} would",
            field="cache.kv_bytes",
        )
    if num_blocks < 2:
        raise ConfigError(
            f"KV memory must hold at least 2 blocks, {2 * block_bytes} bytes for this model; "
            f"{fitting * block_bytes} bytes fit on the card, {allowed * block_bytes} within its fraction of "
            f"{cache.gpu_memory_fraction:g}",
            field="cache.kv_bytes" if cache.kv_bytes else "cache.gpu_memory_fraction",
        )
    return num_blocks if cache.kv_bytes else min(num_blocks, -(-max_tokens // cache.block_size) + 1)
