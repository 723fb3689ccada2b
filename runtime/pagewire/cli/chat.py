"""`pagewire chat`: ask a running server one question, with the model's chat template."""

from __future__ import annotations

import argparse
import asyncio
import sys

from pagewire.cli.answer import params_of, prompt_of, show, speed, url_of
from pagewire_client import connect


def run(namespace: argparse.Namespace) -> int:
    """Stream the answer to standard output."""
    asyncio.run(_chat(namespace, prompt_of(namespace), url_of(namespace)))
    return 0


async def _chat(namespace: argparse.Namespace, prompt: str, url: str) -> None:
    messages = [{"role": "system", "content": namespace.system}] if namespace.system is not None else []
    messages.append({"role": "user", "content": prompt})
    async with connect(url, name="pagewire chat") as client:
        result = await show(client.chat(messages, **params_of(namespace)), sys.stdout)
    if namespace.stats:
        print(speed(result), file=sys.stderr)
