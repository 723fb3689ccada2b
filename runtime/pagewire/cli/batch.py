"""`pagewire batch FILE.jsonl`: answer every line, by an engine in this process or a server; go on where it stopped.

`pagewire.Engine` is named and not imported: with `--url`, nothing of it is loaded, and torch need not be there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from tqdm import tqdm

import pagewire
from pagewire.cli.answer import connected, params_of
from pagewire.cli.batch_lines import answered, label_of, parse_line, refused
from pagewire.cli.batch_output import BatchOutput, hash_of
from pagewire.cli.flags import config_from
from pagewire.cli.model_path import model_name, with_model_here
from pagewire.errors import (
    ConfigError,
    ConnectionLost,
    Draining,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    PagewireError,
    Unauthorized,
    Unavailable,
    UnknownStream,
)
from pagewire_client import Stream

_STOPS: Final = (ConnectionLost, Draining, EngineFailed, Unauthorized)
"""Not this line's fault: the batch stops, and the line is asked again when it is run again."""
_AGAIN: Final = (Overloaded, Unavailable, UnknownStream)
"""Others use the server, too; it is getting another engine; it lost all that knew of what was begun."""
_REMOTE_CONCURRENCY: Final = 64
_RETRY_S: Final = 1.0
_LOOKED_AT: Final = 65_536


class _Door(Protocol):
    """What an engine in this process and a client have in common."""

    def generate(self, prompt: Any, **params: Any) -> Stream:
        """Start a stream."""
        ...

    def chat(self, messages: Any, **params: Any) -> Stream:
        """Start a stream."""
        ...


def run(namespace: argparse.Namespace) -> int:
    """Answer what is not answered yet; 1 if some lines are errors."""
    source, target = _files(namespace)
    if namespace.concurrency < 0:
        raise ConfigError("must be at least 0", field="concurrency")
    with BatchOutput(target) as output:
        todo = _todo(source, output)
        if todo:
            try:
                asyncio.run(_answer_all(namespace, source, output, todo))
            except (KeyboardInterrupt, *_STOPS):
                _say(f"stopped: {_count(output)}; the same command goes on from there")
                raise
        output.sort()
        _say(f"{_count(output)} in {target}")
        return 1 if output.num_errors else 0


def _files(namespace: argparse.Namespace) -> tuple[Path, Path]:
    source: Path = namespace.file
    if not source.is_file():
        raise ConfigError(f"{source} is no file; give a file with a request a line")
    _refuse_binary(source)
    target: Path = namespace.out or source.with_name(f"{source.name.removesuffix('.jsonl')}.out.jsonl")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the file of the requests; the answers go elsewhere", field="out")
    return source, target


def _refuse_binary(source: Path) -> None:
    """A model, an archive or a text in UTF-16 would be one error a line; no JSON in UTF-8 has a zero byte."""
    try:
        with source.open("rb") as file:
            is_binary = b"\0" in file.read(_LOOKED_AT)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
    if is_binary:
        raise ConfigError(f"{source} is no text in UTF-8; give a file with a request, a JSON object, a line")


def _lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; empty ones count, and ask nothing."""
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None


def _todo(source: Path, output: BatchOutput) -> int:
    """How many lines are not answered.

    Raises:
        ConfigError: the answers are those of another file.
    """
    num, known = 0, 0
    for number, line in _lines(source):
        num += 1
        of = output.done.get(number)
        known += of is not None
        if of is not None and of != hash_of(line):
            raise ConfigError(
                f"{output.path} answers another line {number} than {source} has; move it away, or take another --out"
            )
    if known != len(output.done):
        raise ConfigError(f"{output.path} answers lines that {source} has not; move it away, or take another --out")
    return num - known


async def _answer_all(namespace: argparse.Namespace, source: Path, output: BatchOutput, todo: int) -> None:
    defaults = params_of(namespace)
    async with _door(namespace) as (door, model, at_once):
        rest = ((number, line) for number, line in _lines(source) if number not in output.done)
        with tqdm(total=todo + len(output.done), initial=len(output.done), unit="line", disable=None) as bar:

            async def work() -> None:
                for number, line in rest:
                    output.add(number, line, await _record(door, line, defaults, model))
                    bar.update()

            workers = [asyncio.create_task(work(), name="batch") for _ in range(min(at_once, todo))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)


async def _record(door: _Door, line: bytes, defaults: Any, model: str) -> dict[str, Any]:
    """The record that answers `line`: also an error is one, if it is this line's own."""
    is_openai = False
    try:
        asked = parse_line(line)
        is_openai = bool(asked.openai_url)
        start = door.chat if asked.source == "messages" else door.generate
        while True:
            try:
                async with start(asked.value, **{**defaults, **asked.params}) as stream:
                    return answered(asked, await stream.result(), model)
            except _AGAIN as error:
                await asyncio.sleep((error.retry_after_ms or _RETRY_S * 1000) / 1000)
    except _STOPS:
        raise
    except PagewireError as error:
        return refused(label_of(line), error, is_openai=is_openai)
    except (TypeError, ValueError, RecursionError) as error:  # a value that no check foresaw ends its line alone
        return refused(label_of(line), InvalidRequest(f"cannot be read: {error}", field="line"), is_openai=is_openai)


@contextlib.asynccontextmanager
async def _door(namespace: argparse.Namespace) -> AsyncIterator[tuple[_Door, str, int]]:
    """Who answers, the model's name, and how many requests keep it busy."""
    config = config_from(namespace)
    if namespace.url is not None:
        if config.model.path:
            raise ConfigError("a server has its model already: give --url or --model", field="model.path")
        async with connected(namespace) as client:
            at_once = namespace.concurrency or min(_REMOTE_CONCURRENCY, client.info.max_streams)
            yield client, client.info.model, at_once
        return
    config = await asyncio.to_thread(with_model_here, config)
    name = model_name(config)
    _say(f"loading {name} …")
    rows, waiting = config.scheduler.max_rows, config.scheduler.max_waiting
    async with pagewire.Engine(config=config) as engine:
        yield engine, name, namespace.concurrency or min(2 * rows, waiting)


def _count(output: BatchOutput) -> str:
    good = len(output.done) - output.num_errors
    errors = f", {output.num_errors} with an error" if output.num_errors else ""
    return f"{good} line{'' if good == 1 else 's'} answered{errors}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
