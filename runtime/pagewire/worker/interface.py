"""What an engine loop asks of a worker. The CPU worker, the GPU worker and the test doubles all look like this."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagewire.step.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What the scheduler must know of a loaded worker."""

    num_blocks: int
    """KV blocks, the null block (id 0) included."""
    block_size: int
    max_rows: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    kv_bytes: int
    """Bytes that the KV blocks really occupy."""
    model_name: str = ""
    kv_format: str = ""
    """Tells KV from KV of other types and scales; "" for that of the weights' type."""
    max_step_tokens: int | None = None
    """Steps of more would gain nothing, or hold the loop; None: as many as the configuration says."""
    decode_buckets: tuple[int, ...] = ()
    """Rows that steps without prefill are padded to, ascending; without any, nothing is padded."""
    mixed_buckets: tuple[int, ...] = ()
    """Tokens that steps with prefill are padded to, likewise."""


@dataclass(slots=True)
class LogitMasks:
    """Allowed tokens for the samples that have a grammar; others never wait for it. (No grammar compiles yet.)"""

    samples: npt.NDArray[np.int32]  # [M] indices into the plan's samples
    allowed: npt.NDArray[np.uint32]  # [M, ceil(V / 32)] bit masks


class Worker(Protocol):
    """Runs plans in the order given. Forward and sample are two launches, so that masks may arrive between them.

    Launching never blocks the caller. The handle of `launch_sample` resolves when the step is complete: its KV is
    written, its tokens are known. Handles resolve in launch order. An exception in a handle is a fault of the worker as
    a whole (the engine fails its requests and says so); faults of one request are flags of its sample.
    """

    @property
    def shape(self) -> WorkerShape:
        """Known once loaded."""
        ...

    def launch_forward(self, plan: StepPlan) -> Awaitable[None]:
        """Queue the plan's deltas, copies and forward pass."""
        ...

    def launch_sample(self, plan: StepPlan, masks: LogitMasks | None = None) -> Awaitable[StepResult]:
        """Queue the draw of the plan's samples; must follow `launch_forward` of the same plan."""
        ...

    async def close(self) -> None:
        """Wait for what is queued, then free everything. Idempotent."""
        ...
