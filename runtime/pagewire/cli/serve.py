"""`pagewire serve [MODEL]`: run a server in the foreground until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

from pagewire import log
from pagewire.cli.flags import config_from
from pagewire.cli.model_check import check_model
from pagewire.cli.model_path import model_name, with_model_here
from pagewire.cli.progress import stages_shown
from pagewire.config import Config
from pagewire.errors import ConfigError
from pagewire.supervisor.server import Server, serve

_CHILDREN_NEED: Final = ("torch", "tokenizers", "jinja2")
"""Not imported here; without them the engine or the gateway would fail a moment later, with less of a reason."""


def run(namespace: argparse.Namespace) -> int:
    """Serve. Exit code 0 after SIGTERM, 130 after Ctrl-C, 129 after SIGHUP, 1 if the server did not start or a part of it died."""
    for name in _CHILDREN_NEED:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    config = config_from(namespace)
    if namespace.model is not None:
        if config.model.path:
            raise ConfigError("the model is named twice: as MODEL and as --path", field="model.path")
        config = with_model(config, namespace.model)
    if config.http.api_key_file and not config.http.address:
        raise ConfigError(
            "keys are asked for over HTTP, and HTTP is off: give --http HOST:PORT as well", field="http.api_key_file"
        )
    config = with_model_here(config)
    check_model(Path(config.model.path), config.model.load_format)
    _say(f"loading {model_name(config)} …")
    log.configure("supervisor", level=config.server.log_level)
    number = asyncio.run(_serve(config))
    return 0 if number == signal.SIGTERM else 128 + number


def with_model(config: Config, path: str) -> Config:
    """The same configuration for another model."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))


async def _serve(config: Config) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, and drain; the signal's number. A second signal ends everything at once.

    SIGHUP comes when the terminal is closed; under `nohup` it does not count.
    """
    stop = asyncio.Event()
    received: list[int] = []
    this = asyncio.current_task()
    assert this is not None

    def on_signal(number: int) -> None:
        received.append(number)
        if stop.is_set():
            this.cancel()
        stop.set()

    def on_draining(num_streams: int) -> None:
        if num_streams:
            what = "1 stream has" if num_streams == 1 else f"{num_streams} streams have"
            again = "; Ctrl-C again stops at once" if received[:1] == [signal.SIGINT] else ""
            _say(f"stopping: {what} up to {config.server.drain_timeout_ms / 1000:g} s{again}")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal, number)
    server = Server(config, on_draining=on_draining)
    try:
        async with stages_shown(lambda: server.stages, sys.stderr) as end_of_loading:

            def announce(server: Server) -> None:
                end_of_loading()
                _announce(server, asks_for_keys=bool(config.server.curve_key_file))

            await serve(server, stop=stop, announce=announce)
    except asyncio.CancelledError:
        if not received:
            raise
    return received[0] if received else signal.SIGTERM  # the owner asked at the admin socket


def _announce(server: Server, *, asks_for_keys: bool) -> None:
    print(f"{server.model} is served at {server.url}")
    if server.http_url:
        print(f"OpenAI-compatible HTTP at {server.http_url}/v1")
    keys = " --server-key PUBLIC --key-file FILE" if asks_for_keys else ""
    print(f'Try, in another terminal:  pagewire chat "Why is the sky blue?"{keys}')
    print("Stop with Ctrl-C.", flush=True)


def _say(text: str) -> None:
    """To a person; standard output is for programs that wait for the address. Whose terminal was closed reads nothing."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
