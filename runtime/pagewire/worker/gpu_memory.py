"""KV blocks on the card: how many fit, and where they lie."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagewire.config import CacheConfig
from pagewire.errors import ConfigError
from pagewire.models.config import DecoderConfig

MEMORY_SHARE: Final = 0.9
"""With `kv_bytes = 0`: of what is free once weights are loaded and the largest step was tried; graphs and fragmentation
take of the rest."""


class GpuKV:
    """All KV blocks.

    Attributes:
        keys, values: one tensor a layer, `[num_blocks, num_kv_heads, block_size, head_dim]`.
    """

    def __init__(
        self, config: DecoderConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        # Zeroed: no block may hold a NaN that nobody computed.
        self._all: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.keys: Final = [layer[0] for layer in self._all]
        self.values: Final = [layer[1] for layer in self._all]
        self.num_blocks: Final = num_blocks
        self.block_size: Final = block_size
        self.num_bytes: Final = self._all.numel() * dtype.itemsize
        assert self.num_bytes == config.kv_bytes(num_blocks * block_size, dtype.itemsize)


def num_blocks_on_card(
    config: DecoderConfig, cache: CacheConfig, *, free_bytes: int, itemsize: int, max_tokens: int
) -> int:
    """Blocks, the null block included, that `cache.kv_bytes` pays for; with 0 what the card has room for.

    Args:
        config: of the model.
        cache: of the configuration.
        free_bytes: what is left on the card.
        itemsize: bytes of a value in the cache.
        max_tokens: more than so many can never be in use.

    Raises:
        ConfigError: they do not fit, or are too few; it says what would fit.
    """
    block_bytes = config.kv_bytes(cache.block_size, itemsize)
    fitting = int(free_bytes * MEMORY_SHARE) // block_bytes
    num_blocks = cache.kv_bytes // block_bytes if cache.kv_bytes else fitting
    if num_blocks > fitting:
        raise ConfigError(
            f"{cache.kv_bytes} bytes for KV do not fit on the card; {fitting * block_bytes} would",
            field="cache.kv_bytes",
        )
    if num_blocks < 2:
        raise ConfigError(
            f"KV memory must hold at least 2 blocks, {2 * block_bytes} bytes for this model; "
            f"{max(fitting, 0) * block_bytes} bytes fit on the card",
            field="cache.kv_bytes",
        )
    return num_blocks if cache.kv_bytes else min(num_blocks, -(-max_tokens // cache.block_size) + 1)
