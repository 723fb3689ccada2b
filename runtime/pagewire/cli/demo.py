"""`pagewire demo`: a server on the demo model, one answer, its figures, and everything stopped again."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Final

from pagewire import log
from pagewire.cli.answer import show, speed
from pagewire.cli.model_path import model_path
from pagewire.config import Config, ModelConfig, ServerConfig
from pagewire.supervisor.server import Server
from pagewire_client import connect

_PROMPT: Final = "What is the capital of France, and what is it known for?"
_MAX_TOKENS: Final = 200


def run(namespace: argparse.Namespace) -> int:
    """Show it."""
    # An address of its own: a server that runs already keeps the default one.
    config = Config(
        model=ModelConfig(path=str(model_path(""))), server=ServerConfig(bind="ipc://*", log_level="warning")
    )
    log.configure("supervisor", level=config.server.log_level)
    asyncio.run(_demo(config, namespace.prompt or _PROMPT))
    return 0


async def _demo(config: Config, prompt: str) -> None:
    begun = time.monotonic()
    print("Starting a server …", file=sys.stderr)
    async with Server(config) as server:
        print(f"{server.model} is ready after {time.monotonic() - begun:.1f} s.\n\n> {prompt}\n", file=sys.stderr)
        async with connect(server.url, name="pagewire demo") as client:
            messages = [{"role": "user", "content": prompt}]
            result = await show(client.chat(messages, max_tokens=_MAX_TOKENS, temperature=0.0), sys.stdout)
    print(f"\n{speed(result)}\nThe server is stopped.", file=sys.stderr)
