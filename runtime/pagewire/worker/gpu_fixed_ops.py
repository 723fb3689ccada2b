"""The operations of a step whose bits do not depend on the step: the deterministic mode of a card.

A token's products are cut by the weights' shapes alone (`pagewire_kernels.linear_fixed`). Attention has one path, that of
prefill: it takes a sequence's positions in tiles that begin at multiples of the tile, one after another, and a tile that
a query does not see changes nothing of it. A decoding row is a chunk of one query. Norms, gates, rotation and sampling
treat each row alone anyway.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagewire.models.decoder import Decoder
from pagewire.worker.gpu_memory import GpuKV
from pagewire.worker.gpu_ops import TritonOps
from pagewire.worker.gpu_rows import GpuRows
from pagewire_kernels.linear_fixed import linear_fixed
from pagewire_kernels.paged_prefill import LONG, PrefillPlan, PrefillTiling, paged_prefill, plan_prefill
from pagewire_kernels.quantise import Fp8Rows, empty_rows, quantise

_NARROW: Final = PrefillTiling(block_m=64, block_n=64, num_warps=4)
"""Of KV in 8 bits: a decoding row fills few rows of a tile, so tiles are small."""


def tiling_for(kv_dtype: torch.dtype) -> PrefillTiling:
    """Of all attention, whatever the step."""
    return _NARROW if kv_dtype.itemsize == 1 else LONG


class FixedOps(TritonOps):
    """See above."""

    def __init__(self, decoder: Decoder, memory: GpuKV, rows: GpuRows, *, max_step_tokens: int) -> None:
        tiling = tiling_for(memory.keys[0].dtype)
        super().__init__(decoder, memory, rows, max_step_tokens=max_step_tokens, prefill_tiling=tiling)
        config, device = decoder.config, rows.last_token.device
        self._dependent = False
        max_rows = rows.padding
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        sizes = [size for size in (1, 8, 32, 128, 512) if size < max_rows]
        self._row_plans = [
            PrefillPlan(
                max_tokens=size,
                max_rows=size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                device=device,
                tiling=tiling,
            )
            for size in (*sizes, max_rows)
        ]
        self._row_plan = self._row_plans[0]

    def linear(self, x: Tensor, weight: Tensor, *, gated: bool = False, out: Tensor | None = None) -> Tensor:
        """See `Ops`."""
        return linear_fixed(x, weight, self._linear_scratch, gated=gated, out=out)

    def linear_fp8(self, x: Fp8Rows, weight: Tensor, scales: Tensor) -> Tensor:
        """See `Ops`."""
        return linear_fixed(x, weight, self._linear_scratch, scales=scales).to(self._dtype)

    def gated_fp8(self, x: Fp8Rows, weight: Tensor, scales: Tensor) -> Fp8Rows:
        """See `Ops`."""
        inner = linear_fixed(x, weight, self._linear_scratch, scales=scales, gated=True)
        out = empty_rows(inner.shape, inner.device)
        quantise(out, inner)
        return out

    def plan_decode(self, lens: Tensor) -> None:
        """See `Ops`."""
        self._row_plan = next(plan for plan in self._row_plans if plan.max_rows >= lens.numel())
        plan_prefill(self._row_plan, self._starts[: lens.numel() + 1])

    def decode(self, layer: int, out: Tensor, q: Tensor, rows: Tensor, lens: Tensor) -> None:
        """See `Ops`."""
        memory = self._memory
        paged_prefill(
            out,
            q,
            memory.keys[layer],
            memory.values[layer],
            self._rows.block_table,
            self._starts[: lens.numel() + 1],
            lens,
            self._row_plan,
            scale=self._scale,
            window=self._layers[layer].window,
            soft_cap=self._soft_cap,
            table_rows=rows,
            k_scale=memory.k_scales[layer],
            v_scale=memory.v_scales[layer],
        )
