"""Pagewire: an event-driven serving runtime for large language models.

>>> async with pagewire.Engine("model.gguf") as engine:                  # doctest: +SKIP
...     result = await engine.generate("Once upon", max_tokens=64).result()

>>> with pagewire.LLM("model.gguf") as llm:                              # doctest: +SKIP
...     results = llm.generate(["Once upon", "In the beginning"], max_tokens=64)

Importing this package is cheap: what needs torch is imported when it is first named.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

from pagewire.spinning import spin_briefly

if TYPE_CHECKING:  # for type checkers alone; at run time see __getattr__
    from pagewire.config import Config as Config
    from pagewire.local.engine import Engine as Engine
    from pagewire.local.llm import LLM as LLM

__version__: Final = "0.1.0"

_LAZY: Final = {
    "Config": "pagewire.config",
    "Engine": "pagewire.local.engine",
    "LLM": "pagewire.local.llm",
}

__all__ = ["LLM", "Config", "Engine", "__version__"]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    spin_briefly()  # before torch is imported, where it was not yet
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__:  # a fault of ours
            raise
        raise ModuleNotFoundError(
            f"pagewire.{name} needs {error.name}, which is not installed: pip install 'pagewire[serve]'"
            " (`pip install pagewire` alone is the client: pagewire_client.connect)",
            name=error.name,
        ) from None


def __dir__() -> list[str]:
    """Without what this module imports for itself; modules of the package that are loaded can be named."""
    loaded = [name for name, value in globals().items() if sys.modules.get(f"{__name__}.{name}") is value]
    return sorted({*__all__, *loaded, *(name for name in globals() if name.startswith("__"))})
