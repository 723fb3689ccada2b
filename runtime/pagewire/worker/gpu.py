"""The GPU worker: rows, KV and sampling live on the card, the loop only launches.

    loop      launch_forward, launch_sample │ launch_forward, launch_sample │      handles resolve
    compute   ── step N ────────────────────┼──────── step N + 1 ───────────┼──
    fetch                                   └ results of N ─▶ event ─▶ the loop asks for it

A step is one copy, a CUDA graph of the forward pass and one of the sampling; but one with prompt log-probabilities is
launched kernel by kernel, which holds the loop for some milliseconds. Input tokens never leave the card, so a step may be
queued before the one that draws its tokens has run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from functools import partial
from typing import Final

import torch

from pagewire.config import Config
from pagewire.errors import ConfigError
from pagewire.models.decoder import Decoder
from pagewire.models.load import load_model
from pagewire.models.weights import Progress
from pagewire.step.step import StepPlan, StepResult
from pagewire.worker.gpu_completions import Completions, Pending
from pagewire.worker.gpu_device import CudaDevice, Device
from pagewire.worker.gpu_stepper import MakeOps, Stepper, triton_ops
from pagewire.worker.interface import LogitMasks, WorkerShape

_CLOSE_ASK_S: Final = 0.001


class GpuWorker:
    """See `pagewire.worker.interface.Worker`. Make it with `load`, or from a decoder whose weights are on the card.

    Args:
        config: sections `cache` and `scheduler` are used, and `engine.deterministic`.
        decoder: loaded.
        device: the card.
        make_ops: the kernels; None: those of Triton.
        with_graphs: False: every step is launched kernel by kernel.

    Raises:
        ConfigError: it cannot be served as the configuration asks.
    """

    def __init__(
        self,
        config: Config,
        decoder: Decoder,
        device: Device,
        make_ops: MakeOps | None = None,
        *,
        with_graphs: bool = True,
    ) -> None:
        if make_ops is None:
            make_ops = partial(triton_ops, deterministic=config.engine.deterministic)
        with torch.inference_mode():
            self._stepper: Stepper | None = Stepper(config, decoder, device, make_ops, with_graphs=with_graphs)
        self._shape = self._stepper.shape
        self._completions = Completions()
        self._forwards: dict[int, tuple[asyncio.Future[None], float]] = {}

    @classmethod
    async def load(cls, config: Config, on_progress: Progress | None = None) -> GpuWorker:
        """Load the model and capture graphs, off the loop; see `load_model` for `on_progress`.

        Raises:
            ModelError: the model cannot be served.
            ConfigError: there is no card, or it is too small.
        """

        def work() -> GpuWorker:
            if not torch.cuda.is_available():
                raise ConfigError("there is no CUDA device that PyTorch can use", field="model.device")
            device = CudaDevice()
            free = device.free_bytes()
            try:
                decoder = load_model(
                    config.model,
                    auto_dtype=torch.bfloat16,
                    device=device.device,
                    keeps_fp8=True,
                    on_progress=on_progress,
                )
                torch.cuda.empty_cache()  # what rounding took is free for KV
                return cls(config, decoder, device)
            except torch.OutOfMemoryError:
                raise ConfigError(
                    f"the model does not fit: {free / 2**30:.1f} GiB of the card were free; "
                    "take a smaller model, fewer rows, smaller steps or less KV memory",
                    field="model.path",
                ) from None

        return await asyncio.to_thread(work)

    @property
    def shape(self) -> WorkerShape:
        """Sizes for the scheduler."""
        return self._shape

    def launch_forward(self, plan: StepPlan) -> Awaitable[None]:
        """Queue the plan's deltas, copies and forward pass; resolves with the step."""
        assert self._stepper is not None, "closed"
        launched = time.perf_counter()
        with torch.inference_mode():
            self._stepper.forward(plan)
        handle = asyncio.get_running_loop().create_future()
        self._forwards[plan.step] = handle, launched
        return handle

    def launch_sample(self, plan: StepPlan, masks: LogitMasks | None = None) -> Awaitable[StepResult]:
        """Queue the draw of the plan's samples."""
        assert self._stepper is not None, "closed"
        forward, launched = self._forwards.pop(plan.step)
        with torch.inference_mode():
            arrival = self._stepper.sample(plan, masks)
        handle: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        kind = self._stepper.kind(plan)
        self._completions.add(Pending(kind, arrival.done, arrival.result, forward, handle, launched))
        return handle

    async def close(self) -> None:
        """Wait for what is queued, then free the card."""
        while not self._completions.is_empty:  # noqa: ASYNC110  (once in a life; an event would serve nothing else)
            await asyncio.sleep(_CLOSE_ASK_S)
        stepper, self._stepper = self._stepper, None
        if stepper is not None:
            device = stepper.device
            del stepper
            device.close()
