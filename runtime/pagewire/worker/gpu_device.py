"""A card as a worker uses it: one stream that computes, one that brings results home, pinned memory, events.

    compute   ── step N ──────────┐── step N + 1 ─────────
    fetch                         └─ results of N ─▶ event

Results travel on a stream of their own, so step N + 1 begins while they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Whether it was reached. Never waits.

        Raises:
            RuntimeError: the device failed.
        """
        ...


class Device(Protocol):
    """What the worker asks of a device; tests bring one that is a CPU."""

    device: torch.device

    def computing(self) -> AbstractContextManager[object]:
        """Whatever is launched inside goes to the compute stream."""
        ...

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to by itself."""
        ...

    def mark(self) -> Event:
        """After all that was launched on the compute stream."""
        ...

    def fetch(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """Copy (pinned, device) pairs home once the compute stream is there; the event says that they have come.

        The caller keeps the device tensors unchanged until then.
        """
        ...

    def capture(self, work: Callable[[], None], *, is_launched: bool = True) -> Callable[[], None]:
        """What launches the same work again, on the compute stream. Runs it once; may wait.

        Args:
            work: what is captured.
            is_launched: run it once more, from the capture: a first launch takes longer than all others.

        What two captured works write beside their own static tensors may lie in the same memory.
        """
        ...

    def synchronise(self) -> None:
        """Wait for all of the device's work; only while loading."""
        ...

    def free_bytes(self) -> int:
        """Memory that nobody has taken, what the allocator keeps for reuse not counted."""
        ...

    def total_bytes(self) -> int:
        """Memory of the device."""
        ...

    def close(self) -> None:
        """Give back what the allocator keeps."""
        ...


class CudaDevice:
    """A CUDA card; see `Device`."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self._graph_memory = torch.cuda.graph_pool_handle()
        self._compute = torch.cuda.Stream(self.device)
        self._fetch = torch.cuda.Stream(self.device)

    def computing(self) -> AbstractContextManager[object]:
        """See `Device`."""
        return torch.cuda.stream(self._compute)

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """See `Device`."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def mark(self) -> Event:
        """See `Device`."""
        event: Event = self._compute.record_event()
        return event

    def fetch(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        """See `Device`."""
        self._fetch.wait_event(self._compute.record_event())
        with torch.cuda.stream(self._fetch):
            for pinned, source in pairs:
                pinned.copy_(source, non_blocking=True)
        event: Event = self._fetch.record_event()
        return event

    def capture(self, work: Callable[[], None], *, is_launched: bool = True) -> Callable[[], None]:
        """See `Device`. `torch.cuda.graph` was rejected: it collects garbage before each of dozens of captures.

        In a recording of an H200 the first step in each graph took some 20 ms more, most likely its first launch: so it is launched here.
        """
        graph = torch.cuda.CUDAGraph()
        with self.computing():
            work()  # loads kernels, which a capture may not; the card computes it while the host captures
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
            if is_launched:
                graph.replay()
        return graph.replay

    def synchronise(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """See `Device`."""
        return torch.cuda.mem_get_info(self.device)[0]

    def total_bytes(self) -> int:
        """See `Device`."""
        return torch.cuda.mem_get_info(self.device)[1]

    def close(self) -> None:
        """See `Device`."""
        torch.cuda.empty_cache()
