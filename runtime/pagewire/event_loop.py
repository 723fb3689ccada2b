"""The event loop of a server's processes: uvloop where it is installed, else asyncio's own, which does the same slower;
and the collector, which must not hold it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

_GC_THRESHOLDS: Final = (5_000, 20, 20)
"""Young objects are looked at every 5,000 net allocations (about 0.2 ms), the whole heap every two million."""

_run: Any = asyncio.run
with contextlib.suppress(ModuleNotFoundError):  # not built for every platform
    _run = importlib.import_module("uvloop").run

_T = TypeVar("_T")


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` on a new loop; its result."""
    result: _T = _run(main)
    return result


def tame_collector() -> None:
    """Keep collections off the loop's back.

    What is loaded stays (weights, vocabularies, modules: hundreds of thousands of objects), so the collector need not look
    at it again. Turning it off altogether was rejected: exceptions and tasks make cycles, and a server runs for months.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
