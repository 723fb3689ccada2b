"""Layouts of a step's attention, made once and refilled every step: of decode one for each window, of prefill one for all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch
from torch import Tensor

from pagewire.models.config import DecoderConfig
from pagewire_kernels.decode_plan import DecodePlan, DecodeTiling, plan_decode, straight_tiling
from pagewire_kernels.paged_prefill import PrefillPlan, PrefillTiling, plan_prefill, tiling_for

_PREFILL_SIZES: Final = (256, 384, 512)
_FEW_CHUNKS: Final = 64


class AttentionPlans:
    """Plans for all sizes of steps.

    Args:
        config: of the model.
        windows: of its layers.
        kv_dtype: of the cache.
        max_rows: of a step.
        max_step_tokens: of a step.
        prefill_tiling: of prefill; None: what is fastest at each size.
        device: where.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        windows: Collection[int],
        kv_dtype: torch.dtype,
        max_rows: int,
        max_step_tokens: int,
        prefill_tiling: PrefillTiling | None,
        device: torch.device,
    ) -> None:
        # By how many rows at most: ascending, each with the tiling that is best from the size before on.
        self._decode_plans: list[tuple[int, dict[int, DecodePlan]]] = []
        tilings = {}
        for num_rows in (*(1 << n for n in range((max_rows - 1).bit_length())), max_rows):
            tiling = straight_tiling(
                kv_dtype, config.head_dim, config.group_size, device, num_units=num_rows * config.num_kv_heads
            )
            tilings[tiling or DecodeTiling(min_share=1)] = num_rows
        for tiling, num_rows in tilings.items():
            plans = {
                window: DecodePlan(
                    max_rows=num_rows,
                    num_heads=config.num_heads,
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    device=device,
                    window=window,
                    tiling=tiling,
                )
                for window in sorted(set(windows))
            }
            self._decode_plans.append((num_rows, plans))
        self._decode_plan = self._decode_plans[0][1]  # by window
        sizes = list(_PREFILL_SIZES)
        while sizes[-1] < max_step_tokens:
            sizes.append(2 * sizes[-1])
        # Room for many chunks is room for many tiles, most of them empty: the plans of few chunks come first.
        self._prefill_plans = [
            PrefillPlan(
                max_tokens=size,
                max_rows=num_chunks,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                device=device,
                tiling=prefill_tiling or tiling_for(size, kv_dtype, config.head_dim),
            )
            for num_chunks in sorted({min(_FEW_CHUNKS, max_rows), max_rows})
            for size in sizes
        ]
        self.prefill = self._prefill_plans[0]

    def decode(self, window: int) -> DecodePlan:
        """Of layers of this window, as the last `plan_decode` left it."""
        return self._decode_plan[window]

    def plan_decode(self, lens: Tensor) -> None:
        """Lay out decode attention of rows that see so many positions, int32 [R]."""
        self._decode_plan = next(plans for num_rows, plans in self._decode_plans if num_rows >= lens.numel())
        for plan in self._decode_plan.values():
            plan_decode(plan, lens)

    def plan_prefill(self, query_starts: Tensor, num_tokens: int) -> None:
        """Lay out prefill attention of chunks, int32 [C + 1], of at most so many tokens; `prefill` is then the plan."""
        num_chunks = query_starts.numel() - 1
        self.prefill = next(p for p in self._prefill_plans if p.max_tokens >= num_tokens and p.max_rows >= num_chunks)
        plan_prefill(self.prefill, query_starts)
