"""A line on a terminal that says what a starting server does, and for how long; nothing where there is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, TextIO

_EVERY_S: Final = 0.1
_SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_CLEAR: Final = "\x1b[2K"
_BAR: Final = 20
_PERCENT: Final = re.compile(r"(\d+) %")


@contextlib.asynccontextmanager
async def stages_shown(stages: Callable[[], Mapping[str, str]], out: TextIO) -> AsyncIterator[Callable[[], None]]:
    """Show `stages` (what each part does now) until the block ends or what it is given is called.

    The cursor rests at the start of the line, so that whatever is logged meanwhile overwrites it.
    """
    task = asyncio.create_task(_show(stages, out), name="progress") if out.isatty() else None

    def end() -> None:
        if task is not None and not task.done():
            task.cancel()
            out.write(_CLEAR)
            out.flush()

    try:
        yield end
    finally:
        end()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)


async def _show(stages: Callable[[], Mapping[str, str]], out: TextIO) -> None:
    begun = time.monotonic()
    for turn in itertools.cycle(_SPINNER):
        parts = " · ".join(f"{part}: {_with_bar(stage)}" for part, stage in stages().items())
        out.write(f"{_CLEAR}{turn} {time.monotonic() - begun:4.1f} s  {parts}\r")
        out.flush()
        await asyncio.sleep(_EVERY_S)


def _with_bar(stage: str) -> str:
    """What a part does, with a bar before its percentage where it tells one."""
    found = _PERCENT.search(stage)
    if found is None:
        return stage
    full = min(int(found[1]), 100) * _BAR // 100
    return f"{stage[: found.start()]}{'█' * full}{'░' * (_BAR - full)} {stage[found.start() :]}"
