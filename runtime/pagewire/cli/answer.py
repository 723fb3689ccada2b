"""One answer on a terminal: asked of a server, streamed as it comes, and how fast it came."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Protocol

from pagewire.cli.flags import values_of
from pagewire.errors import ConfigError, InvalidRequest, PagewireError
from pagewire_client import Client, Result, Stream, connect
from pagewire_transport.servers import find_url

_PATIENCE_S: Final = 1.0


def prompt_of(namespace: argparse.Namespace) -> str:
    """The prompt argument, or what standard input holds.

    Raises:
        ConfigError: there is neither.
        InvalidRequest: standard input holds no UTF-8.
    """
    if namespace.prompt is not None:
        return str(namespace.prompt)
    if sys.stdin.isatty():
        raise ConfigError("give a prompt, or pipe one into standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidRequest("standard input is no text in UTF-8", field="prompt") from None


@contextlib.asynccontextmanager
async def connected(namespace: argparse.Namespace) -> AsyncIterator[Client]:
    """A connection to the server that is meant: by `--url`, or the newest that runs here; with the keys that were given.

    Who sits at a terminal is told what keeps them waiting.

    Raises:
        PagewireError: as `connect`.
    """
    url = str(namespace.url) if namespace.url is not None else find_url()
    waiting = asyncio.get_running_loop().call_later(_PATIENCE_S, _say_waiting, url)
    keys = {"server_key": namespace.server_key, "key_file": namespace.key_file}
    try:
        async with connect(url, name=f"pagewire {namespace.command}", **keys) as client:
            waiting.cancel()
            yield client
    finally:
        waiting.cancel()


def _say_waiting(url: str) -> None:
    if sys.stderr.isatty():
        print(f"waiting for {url} …", file=sys.stderr, flush=True)


def params_of(namespace: argparse.Namespace) -> Mapping[str, Any]:
    """The sampling flags that were given."""
    return values_of(namespace, "params")


class Out(Protocol):
    """Where an answer goes: a text file, or what passes it on."""

    def write(self, text: str, /) -> object:
        """Take text."""
        ...

    def flush(self) -> object:
        """Let it be seen."""
        ...


async def show(stream: Stream, out: Out) -> Result:
    """Write the text as it comes; several continuations one after the other, each under a heading.

    Raises:
        PagewireError: the request was refused or failed; it finds the cursor at the start of a line.
    """
    last = "\n"
    try:
        async with stream:
            async for chunk in stream:
                if chunk.choice == 0 and chunk.text:
                    out.write(chunk.text)
                    out.flush()
                    last = chunk.text[-1]
            result = await stream.result()
    except (PagewireError, asyncio.CancelledError):
        out.write("" if last == "\n" else "\n")
        out.flush()
        raise
    others = [f"\n--- {number} ---\n{choice.text}" for number, choice in enumerate(result.choices[1:], start=2)]
    out.write("\n".join(["", *others, ""]) if others or not result.text.endswith("\n") else "")
    out.flush()
    return result


def speed(result: Result) -> str:
    """One line: tokens, time to the first, gaps between the others, tokens a second."""
    timings, count = result.timings, result.usage.completion
    parts = [f"{count} tokens from a prompt of {result.usage.prompt}"]
    if timings.ttft_ns is not None:
        parts.append(f"TTFT {timings.ttft_ns / 1e6:.0f} ms")
        if timings.itl_p50_ns is not None and timings.itl_p99_ns is not None:
            parts.append(f"ITL p50 {timings.itl_p50_ns / 1e6:.1f} ms, p99 {timings.itl_p99_ns / 1e6:.1f} ms")
        decoding_s = (timings.total_ns - timings.ttft_ns) / 1e9
        if count > 1 and decoding_s > 0:
            parts.append(f"{(count - 1) / decoding_s:.1f} tokens/s")
    return " · ".join(parts)
