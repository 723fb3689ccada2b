"""Which worker computes, by the configuration."""

from __future__ import annotations

import importlib.util

import torch

from pagewire.config import Config
from pagewire.errors import ConfigError
from pagewire.models.weights import Progress
from pagewire.worker.cpu import CpuWorker
from pagewire.worker.interface import Worker


async def load_worker(config: Config, on_progress: Progress | None = None) -> Worker:
    """The worker that the configuration asks for, its model loaded; off the loop. `auto`: a GPU where there is one.

    `on_progress` is told, in another thread, which part of the weights is there.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: it cannot be served as asked.
    """
    device = config.model.device
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise ConfigError("there is no CUDA device that PyTorch can use", field="model.device")
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("a GPU takes Triton (`pip install triton`); --device cpu does not", field="model.device")
        # Imported here and not above: it loads Triton, which a machine without a GPU need not have.
        from pagewire.worker.gpu import GpuWorker  # noqa: PLC0415

        return await GpuWorker.load(config, on_progress)
    return await CpuWorker.load(config, on_progress)
