"""What a worker remembers of each row between steps, apart from sampling state and KV."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagewire.errors import InternalError
from pagewire.request.request import TokenArray
from pagewire.step.step import NULL_BLOCK, Int32Array, RowJoin, StepPlan


class RowState:
    """Struct of arrays over rows. All operations are vectorised over the rows that they name.

    Attributes:
        last_token: int32 [max_rows], the input of a row's next decode entry.
        block_table: int32 [max_rows, max_blocks], NULL_BLOCK where there is none.
        epoch: int32 [max_rows], which tenancy of the row it is; −1: nobody's.
        stopped: bool [max_rows], the sampler met a stop or bad logits: what is still queued for the row is dropped.
        prompts: prompt ids of the rows that asked for prompt log-probabilities.
    """

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        self.last_token: Int32Array = np.zeros(max_rows, np.int32)
        self.block_table: Int32Array = np.full((max_rows, max_blocks), NULL_BLOCK, np.int32)
        self.epoch: Int32Array = np.full(max_rows, -1, np.int32)
        self.stopped: npt.NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        self.prompts: dict[int, TokenArray] = {}

    def leave(self, rows: Int32Array) -> None:
        """Forget rows."""
        self.block_table[rows] = NULL_BLOCK
        self.epoch[rows] = -1
        for row in rows.tolist():
            self.prompts.pop(row, None)

    def join(self, join: RowJoin) -> None:
        """Set up a row. Its blocks come as deltas."""
        row = join.row
        self.epoch[row] = join.epoch
        self.stopped[row] = False
        if join.params.prompt_logprobs is not None:
            self.prompts[row] = join.prompt_ids

    def update(self, plan: StepPlan) -> None:
        """Apply leaves, joins and block deltas of a plan, in this order.

        Raises:
            InternalError: the plan names a row that is not the tenant it takes it for.
        """
        if plan.leaves.size:
            self.leave(plan.leaves)
        for join in plan.joins:
            self.join(join)
        if plan.block_rows.size:
            self.block_table[plan.block_rows, plan.block_cols] = plan.block_ids
        if (self.epoch[plan.rows] != plan.epochs).any() or (self.epoch[plan.sample_rows] != plan.sample_epochs).any():
            raise InternalError(f"step {plan.step} names a row that has another tenant")
