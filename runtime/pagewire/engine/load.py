"""Which worker computes, by the configuration."""

from __future__ import annotations

import torch

from pagewire.config import Config
from pagewire.worker.cpu import CpuWorker
from pagewire.worker.interface import Worker


async def load_worker(config: Config) -> Worker:
    """The worker that the configuration asks for, its model loaded; off the loop. `auto`: a GPU where there is one.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: it cannot be served as asked.
    """
    device = config.model.device
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        # Imported here and not above: it loads Triton, which a machine without a GPU need not have.
        from pagewire.worker.gpu import GpuWorker  # noqa: PLC0415

        return await GpuWorker.load(config)
    return await CpuWorker.load(config)
