"""The host's words to the device: arrays packed into one pinned buffer, one copy a message.

A ring of buffers: each is written again only after the event behind its copy. With two steps in flight a ring of a few
never waits; should one be late all the same, the ring grows, since waiting would hold up the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.worker.gpu_device import Device, Event

ALIGN: Final = 4
"""Every array begins at a multiple of 16 bytes: kernels are compiled once more for pointers that do not."""

Words = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Slot:
    pinned: Tensor  # int32 [capacity]
    words: Words  # the same memory
    copied: Event | None = None


class Staging:
    """Not thread-safe. All copies go to the stream that is current.

    Args:
        device: where to.
        capacity: words of a buffer; larger messages get larger buffers.
    """

    def __init__(self, device: Device, *, num_slots: int = 4, capacity: int = 32_768) -> None:
        self._device = device
        self._capacity = capacity
        self._ring = deque(self._slot(capacity) for _ in range(num_slots))

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """New tensors on the device, one an array; of 4- or 8-byte elements, 8-byte floats and integers as such."""
        flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        words = [array.view(np.int32) for array in flat]
        sizes = [-(-part.size // ALIGN) * ALIGN for part in words]
        slot = self._take(sum(sizes))
        target = torch.empty(sum(sizes), dtype=torch.int32, device=self._device.device)
        out, at = [], 0
        for array, part, size in zip(flat, words, sizes, strict=True):
            slot.words[at : at + part.size] = part
            out.append(target[at : at + part.size].view(_dtype_of(array)))
            at += size
        self._copy(slot, target, at)
        return [tensor.view(array.shape) for tensor, array in zip(out, arrays, strict=True)]

    def write(self, target: Tensor, parts: Sequence[tuple[int, Words]], size: int) -> None:
        """target[at : at + len] = words for each (at, words); the first `size` words are copied, gaps hold anything.

        Args:
            target: int32, contiguous, on the device.
            parts: where and what.
            size: up to the end of the last part.
        """
        slot = self._take(size)
        for at, words in parts:
            slot.words[at : at + words.size] = words
        self._copy(slot, target, size)

    def _take(self, size: int) -> _Slot:
        slot = self._ring[0]
        if slot.copied is not None and not slot.copied.query():
            slot = self._slot(max(size, self._capacity))
            self._ring.append(slot)
            return slot
        self._ring.rotate(-1)
        if slot.words.size < size:
            larger = self._slot(size)
            slot.pinned, slot.words = larger.pinned, larger.words
        return slot

    def _copy(self, slot: _Slot, target: Tensor, size: int) -> None:
        target[:size].copy_(slot.pinned[:size], non_blocking=True)
        slot.copied = self._device.mark()

    def _slot(self, capacity: int) -> _Slot:
        pinned = self._device.pinned(capacity, torch.int32)
        return _Slot(pinned, pinned.numpy())


def _dtype_of(array: npt.NDArray[Any]) -> torch.dtype:
    return {"i4": torch.int32, "f4": torch.float32, "i8": torch.int64, "u8": torch.int64, "f8": torch.float64}[
        array.dtype.str[1:]
    ]
