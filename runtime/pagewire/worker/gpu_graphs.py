"""Decode steps as CUDA graphs, one pair (forward, sample) for each batch bucket.

A step of B rows runs in the smallest bucket that holds them; the rest of it is the padding row, which writes nothing. All
that changes from step to step lies in one small buffer, the inbox, that a single copy fills:

    word      0            4            4 + N       4 + 2 N
    inbox     │ num_deltas │ rows [N]   │ starts [N] │ block deltas (row, column, id) …
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagewire.step.step import StepPlan
from pagewire.worker.gpu_device import Device
from pagewire.worker.gpu_staging import ALIGN, Staging

_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
_MORE: Final = 256
_HEADER: Final = ALIGN


@dataclass(slots=True)
class Batch:
    """What a bucket's graphs read, views of the inbox."""

    rows: Tensor  # int32 [N]
    starts: Tensor  # int32 [N]
    num_deltas: Tensor  # int32 [1]
    deltas: Tensor  # int32 [capacity, 3]


@dataclass(slots=True)
class _Bucket:
    size: int
    forward: Callable[[], None]
    sample: Callable[[], None]


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Ascending; the last one holds `max_rows`."""
    sizes = [size for size in _BUCKETS if size < max_rows]
    while max_rows > _BUCKETS[-1] and sizes[-1] + _MORE < max_rows:
        sizes.append(sizes[-1] + _MORE)
    return (*sizes, max_rows)


class Inbox:
    """The buffer of a decode step's inputs."""

    def __init__(self, *, max_rows: int, padding_row: int, device: torch.device) -> None:
        self._padding = padding_row
        self._max_deltas = 2 * max_rows
        size = _HEADER + 2 * _aligned(max_rows) + 3 * self._max_deltas
        self._words = torch.zeros(size, dtype=torch.int32, device=device)

    def batch(self, size: int) -> Batch:
        """Views for a bucket."""
        at = _HEADER + _aligned(size)
        deltas = self._words[at + _aligned(size) :]
        return Batch(
            rows=self._words[_HEADER : _HEADER + size],
            starts=self._words[at : at + size],
            num_deltas=self._words[:1],
            deltas=deltas[: 3 * self._max_deltas].view(-1, 3),
        )

    def takes(self, plan: StepPlan) -> bool:
        """Whether its deltas have room."""
        return plan.block_rows.size <= self._max_deltas

    def fill(self, plan: StepPlan, size: int, staging: Staging) -> None:
        """One copy: the plan's rows padded to `size`, their starts, and the block deltas."""
        num, num_deltas = plan.rows.size, plan.block_rows.size
        at = _HEADER + _aligned(size)
        parts = [
            (0, np.array([num_deltas], np.int32)),
            (_HEADER, plan.rows),
            (_HEADER + num, np.full(size - num, self._padding, np.int32)),
            (at, plan.starts),
        ]
        end = at + _aligned(size)
        if num_deltas:
            deltas = np.empty((num_deltas, 3), np.int32)
            deltas[:, 0], deltas[:, 1], deltas[:, 2] = plan.block_rows, plan.block_cols, plan.block_ids
            parts.append((end, deltas.ravel()))
            end += 3 * num_deltas
        staging.write(self._words, parts, end)

    def clear(self, size: int) -> None:
        """Padding alone, for trying and capturing."""
        batch = self.batch(size)
        batch.num_deltas.zero_()
        batch.rows.fill_(self._padding)
        batch.starts.zero_()


class DecodeGraphs:
    """Captured once, replayed for every decode step.

    Args:
        device: where.
        inbox: what the graphs read.
        forward: launches the forward pass of a batch.
        sample: launches its sampling.
        max_rows: of a batch.
    """

    def __init__(
        self,
        device: Device,
        inbox: Inbox,
        *,
        forward: Callable[[Batch], None],
        sample: Callable[[Batch], None],
        max_rows: int,
    ) -> None:
        self._buckets: list[_Bucket] = []
        for size in reversed(bucket_sizes(max_rows)):  # the largest first: the others fit into its memory
            with device.computing():
                inbox.clear(size)
            batch = inbox.batch(size)
            bucket = _Bucket(size, device.capture(partial(forward, batch)), device.capture(partial(sample, batch)))
            self._buckets.insert(0, bucket)
        self._sizes = np.array([bucket.size for bucket in self._buckets])

    def size_for(self, num_rows: int) -> int:
        """Of the bucket that a batch runs in."""
        return self._bucket(num_rows).size

    def forward(self, num_rows: int) -> None:
        """Replay on the current stream."""
        self._bucket(num_rows).forward()

    def sample(self, num_rows: int) -> None:
        """Replay on the current stream."""
        self._bucket(num_rows).sample()

    def _bucket(self, num_rows: int) -> _Bucket:
        return self._buckets[int(np.searchsorted(self._sizes, num_rows))]


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
