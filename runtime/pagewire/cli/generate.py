"""`pagewire generate`: continue a text on a running server."""

from __future__ import annotations

import argparse
import asyncio
import sys

from pagewire.cli.answer import connected, params_of, prompt_of, show, speed


def run(namespace: argparse.Namespace) -> int:
    """Stream the continuation to standard output."""
    asyncio.run(_generate(namespace, prompt_of(namespace)))
    return 0


async def _generate(namespace: argparse.Namespace, prompt: str) -> None:
    async with connected(namespace) as client:
        result = await show(client.generate(prompt, **params_of(namespace)), sys.stdout)
    if namespace.stats:
        print(speed(result), file=sys.stderr)
