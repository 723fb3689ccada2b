"""`load_model`: from what the configuration names to a decoder, whatever the format."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from pagewire.config import ModelConfig
from pagewire.errors import ConfigError, ModelError
from pagewire.models import dummy, gguf, safetensors
from pagewire.models.decoder import Decoder
from pagewire.models.weights import Kinds, Progress

_LOADERS: Final = {"gguf": gguf.load, "safetensors": safetensors.load, "dummy": dummy.load}
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    config: ModelConfig,
    *,
    auto_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    vector_dtype: torch.dtype | None = None,
    keeps_fp8: bool = False,
    on_progress: Progress | None = None,
) -> Decoder:
    """Load a model.

    Args:
        config: all but `device` is read.
        auto_dtype: what `dtype="auto"` means on the caller's device.
        device: where the weights go.
        vector_dtype: of norms and biases; None: as matrices.
        keeps_fp8: see `pagewire.models.weights.Kinds`.
        on_progress: told how far it is.

    Raises:
        ModelError: the model cannot be served; one line that says why and what to do.
        ConfigError: `max_model_len` exceeds what the model was made for.
    """
    path = Path(config.path).expanduser()
    if not config.path or not path.exists():
        raise ModelError(f"{config.path or 'the model path'} does not exist; name a GGUF file or a model folder")
    kind = detect_format(path) if config.load_format == "auto" else config.load_format
    if kind == "gguf" and path.is_dir():
        path = _only_gguf(path)
    if kind == "safetensors" and path.is_file():
        path = path.parent
    dtype = auto_dtype if config.dtype == "auto" else _DTYPES[config.dtype]
    kinds = Kinds(dtype, torch.device(device), vector_dtype, config.quantization, keeps_fp8)
    decoder_config, weights, eos_ids = _LOADERS[kind](path, kinds, on_progress)
    if config.max_model_len > decoder_config.max_positions:
        raise ConfigError(
            f"{config.max_model_len} is more than the {decoder_config.max_positions} tokens of this model",
            field="model.max_model_len",
        )
    return Decoder(
        decoder_config,
        weights,
        name=config.name or (path.stem if path.is_file() else path.resolve().name),
        eos_ids=eos_ids,
        max_model_len=config.max_model_len or decoder_config.max_positions,
    )


def detect_format(path: Path) -> str:
    """The loader for what lies at `path`: a folder with `config.json` is Hugging Face's, else GGUF files are looked for.

    Raises:
        ModelError: neither.
    """
    if path.is_dir():
        if (path / "config.json").exists():
            return "safetensors"
        if list(path.glob("*.gguf")):
            return "gguf"
        raise ModelError(f"{path} holds no model; expected a GGUF file, or config.json beside safetensors files")
    if path.suffix == ".safetensors":
        return "safetensors"
    return "gguf"


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelError(f"{folder} must hold exactly one GGUF file, has: {names}; name the file itself")
    return found[0]
