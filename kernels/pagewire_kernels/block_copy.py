"""Copy KV blocks within the pools of all layers at once: a fork's partly filled last block, before its first write.

    pool[dst[i]] = pool[src[i]]    for every pool and pair i

Bytes: 2 · pools · pairs · bytes of a block. One launch serves all layers: the pools are given by a table of their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


class BlockPools:
    """The K and V pools of all layers, of one shape and dtype; keeps their addresses on the device, and them alive."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        first = pools[0]
        for pool in pools:
            if pool.shape != first.shape or pool.dtype != first.dtype or not pool.is_contiguous():
                raise ValueError("pools have to be contiguous and of one shape and dtype")
        self.pools = tuple(pools)
        addresses = [pool.data_ptr() for pool in pools]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=first.device)  # [pools]


def copy_blocks(pools: BlockPools, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy blocks in every pool; no block may be both a source and a destination.

    Args:
        pools: all of them.
        src: int32 [pairs], block ids.
        dst: int32 [pairs], block ids; pairs whose destination is the null block 0 are padding and skipped.
    """
    if src.shape != dst.shape:
        raise ValueError(f"{src.shape[0]} sources for {dst.shape[0]} destinations")
    if src.shape[0] == 0:
        return
    first = pools.pools[0]
    _copy_blocks_kernel[(src.shape[0], len(pools.pools))](
        pools.addresses, first, src, dst, NUMEL=first[0].numel(), BLOCK=2048, num_warps=4
    )


@triton.jit
def _copy_blocks_kernel(
    addresses_ptr,  # [pools] int64
    like_ptr,  # of the pools' dtype, not read
    src_ptr,  # [pairs]
    dst_ptr,  # [pairs]
    NUMEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dst = tl.load(dst_ptr + tl.program_id(0)).to(tl.int64)
    if dst == 0:
        return
    src = tl.load(src_ptr + tl.program_id(0)).to(tl.int64)
    pool_ptr = tl.load(addresses_ptr + tl.program_id(1)).to(like_ptr.dtype)
    pool_ptr = tl.multiple_of(pool_ptr, 16)
    for start in range(0, NUMEL, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(pool_ptr + src * NUMEL + i, mask=i < NUMEL)
        tl.store(pool_ptr + dst * NUMEL + i, values, mask=i < NUMEL)
