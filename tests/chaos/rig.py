"""Whole servers for tests and scripts: supervisor, gateway and engine as processes, with the engine of `fake_engine.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import psutil
import tokenizers
from tests.cli.test_serve import TINY

FOLDER = Path(__file__).parent
FAKE = (str(FOLDER / "serve_fake.py"),)
REAL = ("-m", "pagewire.cli.main")


@contextlib.contextmanager
def temporary_folder():
    """With a short path: ipc endpoints have room for 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="pw-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Served:
    """One server in a folder of its own, which also is its folder for temporary files."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process) -> None:
        self.folder = folder
        self.process = process
        self.url = ""
        self.lines: list[str] = []
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, folder: Path, *arguments: str, command: tuple[str, ...] = FAKE, model: str = "", has_text: bool = False
    ) -> Served:
        """Start it; it is not ready yet. `has_text`: the small model has a tokenizer, whose token i is ASCII's i."""
        tiny = folder / "tiny"
        tiny.mkdir(exist_ok=True)
        (tiny / "config.json").write_text(json.dumps(TINY))
        if has_text:
            ascii_tokenizer().save(str(tiny / "tokenizer.json"))
        environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
        environment.pop("XDG_RUNTIME_DIR", None)
        served = [model] if model else [str(tiny), "--load-format", "dummy"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "serve", *served, "--threads", "1", *arguments,
            env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return cls(folder, process)

    async def ready(self, timeout_s: float = 60) -> str:
        """Its address, once it tells it."""
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), timeout_s)).decode()
        assert " is served at " in line, "\n".join(self.lines)
        self.url = line.split(" is served at ")[1].split()[0]
        return self.url

    async def _read(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.lines.append(line.decode("utf-8", "replace").rstrip())

    def family(self) -> list[psutil.Process]:
        """Its processes but the supervisor; none if that is gone."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def part(self, name: str) -> psutil.Process | None:
        """The engine or the gateway, if it runs."""
        for child in self.family():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if (name == "engine" and {"fake_engine", "pagewire.engine.main"} & set(words)) or (
                    name == "gateway" and "pagewire.gateway.main" in words
                ):
                    return child
        return None

    async def said(self, words: str, timeout_s: float = 10) -> str:
        """The first line of its standard error that has these words."""
        async with asyncio.timeout(timeout_s):
            while True:
                for line in self.lines:
                    if words in line:
                        return line
                await asyncio.sleep(0.02)

    async def ended(self, timeout_s: float = 15) -> int:
        """Its exit code; all it wrote is in `lines` then."""
        await asyncio.wait_for(self.process.wait(), timeout_s)
        await asyncio.wait({self._reading}, timeout=5)
        return self.process.returncode

    async def stop(self) -> int:
        """Ctrl-C's quieter sister; its exit code, and nothing of it is left."""
        family = self.family()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        code = await self.ended()
        assert await gone(family) == []
        return code

    async def close(self) -> None:
        """Make sure of it."""
        family = self.family()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        for child in await gone(family):
            child.kill()
        await self._reading

    def left_over(self) -> list[str]:
        """Sockets, locks and records in its folder."""
        return [
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_socket() or path.name.endswith((".lock", "lock", "server.json"))
        ]


def free_address() -> str:
    """Of a TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def ascii_tokenizer() -> tokenizers.Tokenizer:
    """Of 128 tokens, a character each."""
    plain = [
        chr(i) if 33 <= i <= 126 else chr(256 + i if i <= 32 else 289) for i in range(128)
    ]  # as ByteLevel writes bytes
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({symbol: i for i, symbol in enumerate(plain)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


async def gone(processes: list[psutil.Process], timeout_s: float = 5) -> list[psutil.Process]:
    """Wait for their end; those that still run."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout_s)
    return alive


@contextlib.asynccontextmanager
async def served(*arguments: str, **options):
    """A server that is ready; killed at the end if need be."""
    with temporary_folder() as folder:
        server = await Served.start(folder, *arguments, **options)
        try:
            await server.ready()
            yield server
        finally:
            await server.close()
