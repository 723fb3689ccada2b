"""What can be known about a model without loading it: its architecture is supported, its files are whole.

`serve` looks before it starts two processes, so that the first complaint is the one that matters; `info` says the same.
Nothing here imports torch. The loaders check again, and more: they are the ones who compute with what they find.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from pagewire.errors import ModelError
from pagewire.gguf_header import GGUFHeader, read_header
from pagewire.models.config import DecoderConfig
from pagewire.models.gguf_config import check_extents, from_gguf
from pagewire.models.hf_config import from_hf


def check_model(path: Path, load_format: str = "auto") -> DecoderConfig:
    """What the decoder looks like.

    Args:
        path: a GGUF file or a folder; it exists.
        load_format: as in the configuration. `dummy` needs no weights.

    Raises:
        ModelError: it cannot be served, for one of the reasons that are found without reading weights.
    """
    file = gguf_file(path, load_format)
    if file is not None:
        return check_gguf(file, read_header(file))
    folder = path if path.is_dir() else path.parent
    config = from_hf(read_json(folder / "config.json"))
    if load_format != "dummy":
        for weights in check_has_weights(folder):
            _check_safetensors(weights)
    return config


def gguf_file(path: Path, load_format: str = "auto") -> Path | None:
    """The GGUF file that is meant, by the loaders' rules; None for a folder in Hugging Face layout.

    Raises:
        ModelError: a folder with several GGUF files and no config.json.
    """
    if load_format in ("safetensors", "dummy"):
        return None
    if path.is_dir():
        if load_format == "auto" and (path / "config.json").exists():
            return None
        found = sorted(path.glob("*.gguf"))
        if len(found) > 1:
            raise ModelError(f"{path} holds several GGUF files; name one: {', '.join(file.name for file in found)}")
        if not found:
            check_has_weights(path)
        return found[0] if found else None
    return None if path.suffix == ".safetensors" else path


def check_gguf(path: Path, header: GGUFHeader) -> DecoderConfig:
    """The decoder that the header describes.

    Raises:
        ModelError: another architecture, or a tensor that lies beyond the end of the file.
    """
    config = from_gguf(header)
    check_extents(path, header)
    return config


def check_has_weights(folder: Path) -> list[Path]:
    """The weight files of a folder in Hugging Face layout.

    Raises:
        ModelError: it holds none.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{folder} holds no weights: no *.safetensors and no *.gguf file; is the download complete?")
    return weights


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: there is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model folder needs it") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON object: {error}; download it again") from None


def _check_safetensors(path: Path) -> None:
    """The header is read, and the file ends where it says."""
    try:
        with safe_open(str(path), framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}); download it again") from None
