"""What the cost model learnt is kept across restarts: one small file for each model, card and kind of numbers.

Read before the loop serves, written by a thread. A file that cannot be read or written costs nothing but the first steps'
precision, so it is logged and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import torch

from pagewire.config import Config
from pagewire.scheduler.cost_model import CostModel
from pagewire.worker.interface import WorkerShape

_FOLDER: Final = Path("~/.cache/pagewire/cost")
_EVERY_S: Final = 60.0
_MAX_BYTES: Final = 65_536

_log = structlog.get_logger("pagewire.engine")


def key_of(config: Config, shape: WorkerShape) -> dict[str, str]:
    """What makes steps take as long as they do."""
    on_gpu = config.model.device != "cpu" and torch.cuda.is_available()
    return {
        "model": shape.model_name,
        "path": config.model.path,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "dtype": config.model.dtype,
        "quantization": str(config.model.quantization),
        "kv_dtype": config.cache.kv_dtype,
        "deterministic": str(config.engine.deterministic),
        "threads": str(config.engine.threads),
    }


class Learnt:
    """One file. Used only where something is promised by the configuration."""

    def __init__(self, config: Config, shape: WorkerShape) -> None:
        self._key = key_of(config, shape)
        self._buckets = shape.decode_buckets, shape.mixed_buckets
        name = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:24]
        self.path = Path(config.engine.state_dir or _FOLDER).expanduser() / f"{name}.json"
        self._is_used = bool(config.scheduler.itl_target_ms or config.scheduler.ttft_target_ms)
        self.model = self._load()

    def _load(self) -> CostModel:
        decode, mixed = self._buckets
        with contextlib.suppress(FileNotFoundError):
            if self._is_used:
                try:
                    with self.path.open("rb") as file:
                        saved = msgspec.json.decode(file.read(_MAX_BYTES), type=dict[str, Any])
                    if saved.get("key") == self._key:
                        return CostModel.from_state(saved["cost"], buckets=decode, mixed_buckets=mixed)
                except FileNotFoundError:
                    raise
                except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
                    _log.warning("cost_model_unreadable", path=str(self.path), error=str(error))
        return CostModel(buckets=decode, mixed_buckets=mixed)

    async def keep(self) -> None:
        """Write it now and then, until cancelled; and then once more."""
        try:
            while self._is_used:
                await asyncio.sleep(_EVERY_S)
                await asyncio.to_thread(self._write, self._state())
        finally:
            if self._is_used and self.model.num_observed:
                self._write(self._state())  # the loop serves nobody any more

    def _state(self) -> bytes:
        return msgspec.json.encode({"key": self._key, "cost": self.model.to_state()})

    def _write(self, state: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(prefix=".cost-", dir=self.path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(state)
                Path(name).replace(self.path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            _log.warning("cost_model_not_kept", path=str(self.path), error=str(error))
