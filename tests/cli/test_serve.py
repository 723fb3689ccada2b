"""`pagewire serve` as a whole, on the demo model: start, answer, drain, deaths (F4, F19, F20, F46)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

import pagewire_client
from pagewire.cli.model_path import demo_model
from pagewire.cli.serve import _announce as announce
from pagewire.errors import Draining, PagewireError

MODEL = demo_model()
needs_model = pytest.mark.skipif(MODEL is None, reason="the demo model is not installed")

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 100_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
"""Random weights and no tokenizer: served by token ids, and loaded in a moment."""


@pytest.fixture
def temporary():
    path = Path(tempfile.mkdtemp(prefix="pw-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _environment(temporary: Path) -> dict[str, str]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    environment.pop("XDG_RUNTIME_DIR", None)
    return environment


def _tiny(temporary: Path) -> list[str]:
    folder = temporary / "tiny"
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(TINY))
    return [str(folder), "--load-format", "dummy"]


async def _start(temporary: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.cli.main", "serve", "--threads", "1", "--kv-bytes", str(64 * 2**20), *arguments,
        env=_environment(temporary), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def _served(temporary: Path, *arguments: str):
    """(process, url) of a server that is ready; killed at the end if need be."""
    process = await _start(temporary, *arguments)
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert " is served at " in line, (await process.stderr.read()).decode()
        yield process, line.split(" is served at ")[1].strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _family(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


async def _gone(processes: list[psutil.Process]) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 5)
    assert alive == []


@pytest.mark.model
@needs_model
async def test_serve_answers_and_drains_on_sigterm(temporary):
    async with _served(temporary) as (process, url):
        family = _family(process)
        async with pagewire_client.connect(url) as client:
            ask = [{"role": "user", "content": "What is the capital of France?"}]
            result = await client.chat(ask, temperature=0, max_tokens=12).result()
            assert "Paris" in result.text
            streams = [client.generate("Once upon a time", max_tokens=20, ignore_eos=True) for _ in range(8)]
            await anext(streams[0])
            process.send_signal(signal.SIGTERM)
            outcomes = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
            for outcome in outcomes:
                assert isinstance(outcome, Draining) or outcome.finish_reason == "length"
            assert not isinstance(outcomes[0], Draining)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await _gone(family)


async def test_ctrl_c_is_130_and_open_streams_are_told_at_the_deadline(temporary):
    async with _served(temporary, *_tiny(temporary), "--drain-timeout-ms", "300") as (process, url):
        async with pagewire_client.connect(url) as client:
            stream = client.generate([1, 2, 3], max_tokens=50_000, ignore_eos=True)
            await anext(stream)
            before = time.monotonic()
            process.send_signal(signal.SIGINT)
            with pytest.raises(Draining):
                await stream.result()
        assert await asyncio.wait_for(process.wait(), 10) == 130
        assert time.monotonic() - before < 8


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM)])
async def test_a_second_signal_ends_everything_at_once_and_open_streams_are_told(temporary, signals):
    """F20: a client that is told nothing would look for the server for half a minute, to resume its streams."""
    async with _served(temporary, *_tiny(temporary), "--drain-timeout-ms", "60000") as (process, url):
        async with pagewire_client.connect(url) as client:
            stream = client.generate([1, 2, 3], max_tokens=50_000, ignore_eos=True)
            await anext(stream)
            process.send_signal(signals[0])
            await asyncio.sleep(0.3)
            process.send_signal(signals[1])
            with pytest.raises(Draining):
                await asyncio.wait_for(stream.result(), 5)
        assert await asyncio.wait_for(process.wait(), 5) == (130 if signals[0] == signal.SIGINT else 0)


@pytest.mark.parametrize("ignores", [False, True], ids=["", "nohup"])
async def test_a_terminal_that_is_closed_lets_streams_end(temporary, ignores):
    """Its end comes as SIGHUP, to the foreground alone, and then nothing can be written to it any more."""
    ours, theirs = os.openpty()

    def in_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if ignores:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    address = f"ipc://{temporary}/engine.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.cli.main", "serve", "--threads", "1", "--kv-bytes", str(64 * 2**20),
        *_tiny(temporary), "--bind", address,
        stdin=theirs, stdout=theirs, stderr=theirs, env=_environment(temporary), preexec_fn=in_terminal,
    )  # fmt: skip
    os.close(theirs)
    try:
        async with pagewire_client.connect(address, timeout_s=30) as client:
            stream = client.generate([1, 2, 3], max_tokens=300, ignore_eos=True)
            await anext(stream)
            os.close(ours)
            result = await asyncio.wait_for(stream.result(), 20)
            assert len(result.choices[0].token_ids) == 300
        if ignores:
            await asyncio.sleep(0.3)
            assert process.returncode is None
        else:
            assert await asyncio.wait_for(process.wait(), 10) == 129
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 10)


@pytest.mark.parametrize("module", ["pagewire.engine.main", "pagewire.gateway.main"])
async def test_kill_9_of_a_part_is_1_with_the_reason_and_streams_are_told(temporary, module):
    """F4."""
    async with _served(temporary, *_tiny(temporary), "--restart-max", "0") as (process, url):
        family = _family(process)
        (victim,) = (child for child in family if module in child.cmdline())
        async with pagewire_client.connect(url, resume_timeout_s=0) as client:
            stream = client.generate([1, 2, 3], max_tokens=50_000, ignore_eos=True)
            await anext(stream)
            victim.kill()
            with pytest.raises(PagewireError) as caught:
                await asyncio.wait_for(stream.result(), 5)
            assert caught.value.code == ("engine_lost" if "engine" in module else "connection_lost")
        assert await asyncio.wait_for(process.wait(), 10) == 1
        assert "was killed by SIGKILL" in (await process.stderr.read()).decode().splitlines()[-1]
        await _gone(family)


async def test_kill_9_of_the_supervisor_leaves_nothing(temporary):
    """F19."""
    async with _served(temporary, *_tiny(temporary)) as (process, _):
        family = _family(process)
        assert len(family) >= 2
        process.kill()
        await process.wait()
        await _gone(family)


@pytest.mark.parametrize("delay", [0.2, 0.8, 1.6])
async def test_sigterm_while_starting_ends_everything(temporary, delay):
    """F19: at import and at load likewise."""
    process = await _start(temporary, *_tiny(temporary))
    await asyncio.sleep(delay)
    family = _family(process)
    process.send_signal(signal.SIGTERM)
    code = await asyncio.wait_for(process.wait(), 10)
    assert code in (0, -signal.SIGTERM), (await process.stderr.read()).decode()
    await _gone(family)


async def _refused(temporary: Path, *arguments: str) -> str:
    process = await _start(temporary, *arguments)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2, err.decode()
    lines = [line for line in err.decode().splitlines() if line.startswith("pagewire: ")]
    assert "Traceback" not in err.decode()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.model
@needs_model
async def test_a_truncated_model_is_2(temporary):
    """F46."""
    file = temporary / "cut.gguf"
    file.write_bytes(MODEL.read_bytes()[: MODEL.stat().st_size // 2])
    assert "cut.gguf" in await _refused(temporary, str(file))


async def test_a_folder_without_weights_is_2(temporary):
    folder = temporary / "empty"
    folder.mkdir()
    assert "holds no weights" in await _refused(temporary, str(folder))


async def test_an_address_that_others_reach_is_2(temporary):
    """F10."""
    assert "bind" in await _refused(temporary, *_tiny(temporary), "--bind", "tcp://0.0.0.0:5570")


async def test_keys_without_http_are_2(temporary):
    said = await _refused(temporary, *_tiny(temporary), "--api-key-file", str(temporary / "keys.jsonl"))
    assert "give --http HOST:PORT as well" in said


@pytest.mark.parametrize(
    ("asks", "wanted"), [(False, 'blue?"\n'), (True, 'blue?" --server-key PUBLIC --key-file FILE\n')]
)
def test_the_command_that_is_proposed_is_one_that_is_let_in(capsys, asks, wanted):
    server = SimpleNamespace(model="m", url="tcp://127.0.0.1:5570", http_url="")
    announce(server, asks_for_keys=asks)
    assert wanted in capsys.readouterr().out
