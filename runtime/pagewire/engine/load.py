"""Which worker computes, by the configuration."""

from __future__ import annotations

from pagewire.config import Config
from pagewire.errors import ConfigError
from pagewire.worker.cpu import CpuWorker
from pagewire.worker.interface import Worker


async def load_worker(config: Config) -> Worker:
    """The worker that the configuration asks for, its model loaded; off the loop.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: it cannot be served as asked.
    """
    if config.model.device == "cuda":
        raise ConfigError("this version computes on the CPU only; say `cpu` or `auto`", field="model.device")
    return await CpuWorker.load(config)
