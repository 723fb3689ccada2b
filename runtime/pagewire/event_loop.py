"""The event loop of a server's processes: uvloop where it is installed, else asyncio's own, which does the same slower."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Coroutine
from typing import Any, TypeVar

_run: Any = asyncio.run
with contextlib.suppress(ModuleNotFoundError):  # not built for every platform
    _run = importlib.import_module("uvloop").run

_T = TypeVar("_T")


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` on a new loop; its result."""
    result: _T = _run(main)
    return result
