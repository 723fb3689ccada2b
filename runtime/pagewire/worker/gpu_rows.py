"""What the card keeps of each row between steps: last token, block table, whether it stopped, how it is sampled.

The host writes it when a row joins and through block deltas. Last tokens and stops are the device's own: the host learns
of them a step later. One row more than can be used stands at the end; it has stopped for ever, and pads a CUDA graph's
batch: nothing is written or drawn for it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagewire.errors import InternalError
from pagewire.request.request import TokenArray
from pagewire.step.step import NULL_BLOCK, Int32Array, RowJoin, StepPlan
from pagewire.worker.gpu_staging import Staging
from pagewire.worker.sampler_rows import SamplerRows
from pagewire_transport.params import MAX_STOP_TOKEN_IDS


class GpuRows:
    """Resident rows.

    Attributes:
        padding: the row that is nobody's.
        last_token, stopped: int32 [R].
        block_table: int32 [R, max_blocks].
        temperature: float32 [R], 0: greedy.
        seeds: int64 [R].
        stop_ids: int32 [R, W], padded with −1.
        special: int32 [R], 1 where drawing takes more than temperature and noise; on the host too, `is_special`.
        params: the sampling parameters on the host.
        prompts: prompt ids of rows that asked for prompt log-probabilities.
    """

    def __init__(self, *, max_rows: int, max_blocks: int, vocab_size: int, num_eos: int, device: torch.device) -> None:
        num_rows = max_rows + 1
        ints = {"dtype": torch.int32, "device": device}
        self.padding: Final = max_rows
        self.last_token: Tensor = torch.zeros(num_rows, **ints)  # type: ignore[call-overload]
        self.stopped: Tensor = torch.ones(num_rows, **ints)  # type: ignore[call-overload]
        self.block_table: Tensor = torch.full((num_rows, max_blocks), NULL_BLOCK, **ints)  # type: ignore[call-overload]
        self.temperature: Tensor = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.seeds: Tensor = torch.zeros(num_rows, dtype=torch.int64, device=device)
        width = 1 << (MAX_STOP_TOKEN_IDS + num_eos - 1).bit_length()
        self.stop_ids: Tensor = torch.full((num_rows, width), -1, **ints)  # type: ignore[call-overload]
        self.special: Tensor = torch.zeros(num_rows, **ints)  # type: ignore[call-overload]
        self.is_special = np.zeros(num_rows, np.bool_)
        self.params = SamplerRows(max_rows, vocab_size)
        self.prompts: dict[int, TokenArray] = {}
        self._epochs: Int32Array = np.full(max_rows, -1, np.int32)

    def update(self, plan: StepPlan, staging: Staging) -> None:
        """Leaves and joins of a plan. Block deltas are the step's own business.

        Raises:
            InternalError: the plan names a row that is not the tenant it takes it for.
        """
        if plan.leaves.size:
            self.params.leave(plan.leaves)
            self._epochs[plan.leaves] = -1
            for row in plan.leaves.tolist():
                self.prompts.pop(row, None)
        if plan.joins:
            self._join(plan.joins, staging)
        epochs = self._epochs
        if (epochs[plan.rows] != plan.epochs).any() or (epochs[plan.sample_rows] != plan.sample_epochs).any():
            raise InternalError(f"step {plan.step} names a row that has another tenant")

    def _join(self, joins: list[RowJoin], staging: Staging) -> None:
        params, rows = self.params, np.array([join.row for join in joins], np.int32)
        for join in joins:
            params.join(join)
            self._epochs[join.row] = join.epoch
            if join.params.prompt_logprobs is not None:
                self.prompts[join.row] = join.prompt_ids
            self.is_special[join.row] = _is_special(params, join)
        width = self.stop_ids.shape[1]
        stops = np.full((len(joins), width), -1, np.int32)
        known = params.stop_ids[rows][:, :width]
        stops[:, : known.shape[1]] = known
        temperature = np.where(params.is_greedy[rows], np.float32(0), params.temperature[rows])
        at, temperatures, seeds, special, stop_ids = staging.upload(
            [rows, temperature, params.seed[rows].view(np.int64), self.is_special[rows].astype(np.int32), stops]
        )
        at = at.long()
        self.temperature[at] = temperatures
        self.seeds[at] = seeds
        self.special[at] = special
        self.stop_ids[at] = stop_ids
        self.stopped.index_fill_(0, at, 0)


def _is_special(params: SamplerRows, join: RowJoin) -> bool:
    row, asked = join.row, join.params
    if params.adjusts[row] or asked.min_tokens > 0 or asked.logprobs is not None:
        return True
    filters = params.top_k[row] > 0 or params.top_p[row] < 1 or params.log_min_p[row] > -np.inf
    return bool(filters and not params.is_greedy[row])
