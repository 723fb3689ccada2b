"""Scales of KV in 8 bits: one for each layer and KV head, of K and of V; frozen before the first request.

    stored = x / scale in E4M3 (±448),   x ≈ stored · scale

E4M3 has three bits of mantissa at every magnitude from 2⁻⁶ to 448, so a scale only has to keep values inside that range:
well below the top, since larger ones are clipped, and not far below 2⁻⁶, where bits are lost.

A file is made by `pagewire calibrate`; without one the scales are fixed, and suit keys of some tens and values of
some units, as in Llama-style models.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from pagewire.errors import ConfigError
from pagewire.models.config import DecoderConfig

MAX_E4M3: Final = 448.0
DEFAULT_K: Final = 0.5
DEFAULT_V: Final = 0.0625
MARGIN: Final = 1.25
"""Of the largest value seen while calibrating; other texts may have larger ones."""

Scales = npt.NDArray[np.float32]  # [layers, KV heads]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    k: list[list[float]]
    v: list[list[float]]


_FORMAT: Final = "pagewire-kv-scales-1"


@dataclass(frozen=True)
class KvScales:
    """See above; `k` and `v` are float32 [layers, KV heads]."""

    k: Scales
    v: Scales

    @cached_property
    def digest(self) -> str:
        """Tells these scales from others: part of what a cached block is found by."""
        return "fp8-" + hashlib.sha256(self.k.tobytes() + self.v.tobytes()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        file = _File(_FORMAT, k=self.k.tolist(), v=self.v.tolist())
        path.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")


def default(config: DecoderConfig) -> KvScales:
    """The fixed ones."""
    shape = config.num_layers, config.num_kv_heads
    return KvScales(np.full(shape, DEFAULT_K, np.float32), np.full(shape, DEFAULT_V, np.float32))


def from_largest(k: npt.NDArray[np.floating], v: npt.NDArray[np.floating]) -> KvScales:
    """From the largest magnitudes seen, [layers, KV heads] each."""
    floor = np.float32(2.0**-9)  # a head that was always zero
    scales = [np.maximum(x.astype(np.float32), floor) * np.float32(MARGIN / MAX_E4M3) for x in (k, v)]
    return KvScales(*scales)


def load(path: Path, config: DecoderConfig) -> KvScales:
    """From a file.

    Raises:
        ConfigError: it cannot be read, or is not of this model; `field` is `cache.kv_scales`.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="cache.kv_scales") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no file of KV scales: {error}", field="cache.kv_scales") from None
    if file.format != _FORMAT:
        raise ConfigError(f"{path} has format {file.format!r}, not {_FORMAT!r}", field="cache.kv_scales")
    shape = config.num_layers, config.num_kv_heads
    return KvScales(_checked(file.k, shape, path), _checked(file.v, shape, path))


def for_model(path: str, config: DecoderConfig) -> KvScales:
    """Those of the file that the configuration names, or the fixed ones."""
    return load(Path(path), config) if path else default(config)


def _checked(rows: list[list[float]], shape: tuple[int, int], path: Path) -> Scales:
    if len(rows) != shape[0] or any(len(row) != shape[1] for row in rows):
        raise ConfigError(
            f"{path} is of another model: this one has {shape[0]} layers of {shape[1]} KV heads",
            field="cache.kv_scales",
        )
    scales = np.array(rows, np.float64)
    if not (np.isfinite(scales).all() and (scales > 0).all() and (scales < 1e30).all() and (scales > 1e-30).all()):
        raise ConfigError(f"{path} holds scales that are no positive numbers", field="cache.kv_scales")
    return scales.astype(np.float32)
