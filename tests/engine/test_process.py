"""The engine process: ready or a reason, streams over its own socket, an end that tells its clients."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from engine_bench import HandWorker

from pagewire.child import decode_report
from pagewire.config import from_mapping
from pagewire.engine import process as engine_process
from pagewire.errors import Draining, EngineFailed, InvalidRequest
from pagewire_client import connect

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 100_000,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


class Process:
    """An engine process with its two pipes, as the supervisor would start it."""

    def __init__(self, config):
        config_out, config_in = os.pipe()
        self.reports, report_in = os.pipe()
        os.write(config_in, config if isinstance(config, bytes) else msgspec.json.encode(config))
        os.close(config_in)
        self.pid = os.posix_spawn(
            sys.executable,
            [
                sys.executable,
                "-m",
                "pagewire.engine.main",
                "--config-fd",
                str(config_out),
                "--report-fd",
                str(report_in),
            ],
            {**os.environ, "OMP_NUM_THREADS": "1"},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, config_out, config_out),
                (os.POSIX_SPAWN_DUP2, report_in, report_in),
            ],
        )
        os.close(config_out)
        os.close(report_in)
        self.code = None

    async def report(self, event):
        """The next report of that kind; the process may end instead."""
        return await asyncio.to_thread(self._read, event)

    def _read(self, event):
        with os.fdopen(os.dup(self.reports), "rb") as file:
            for line in file:
                report = decode_report(line)
                if report.event == event:
                    return report
        raise EOFError(f"ended without {event!r}")

    async def ended(self, timeout_s=10.0):
        """Its exit code; minus the signal that killed it."""
        deadline = time.monotonic() + timeout_s
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "still runs"
            await asyncio.sleep(0.01)
        return self.code

    def close_pipe(self):
        if self.reports >= 0:
            os.close(self.reports)
            self.reports = -1


@pytest.fixture
async def start(tmp_path):
    started = []
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def start(**sections):
        server = {"bind": f"ipc://{tmp_path}/engine.sock", "drain_timeout_ms": 300, **sections.pop("server", {})}
        model = {"path": str(tmp_path), "load_format": "dummy", **sections.pop("model", {})}
        config = from_mapping(
            {"server": server, "model": model, "engine": {"threads": 1}, "cache": {"kv_bytes": 2**24}, **sections}
        )
        process = Process(config)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.code is None:
            os.kill(process.pid, signal.SIGKILL)
            await process.ended()
        process.close_pipe()


async def test_it_serves_and_drains(start):
    process = start()
    assert (await process.report("loading")).stage == "import"
    ready = await process.report("ready")
    assert ready.endpoint.startswith("ipc://")
    assert ready.info["kv_blocks"] > 100
    async with connect(ready.endpoint) as client:
        result = await client.generate([5, 6, 7], max_tokens=8, seed=1, ignore_eos=True).result()
        assert len(result.token_ids) == 8
        with pytest.raises(InvalidRequest) as caught:
            await client.generate([64], max_tokens=8).result()
        assert caught.value.field == "prompt_ids[0]"
        assert (await client.stats())["requests_total"] == 1

        # F20: an open stream ends complete or is told, inside the deadline.
        long = client.generate([5, 6, 7], max_tokens=60_000, ignore_eos=True)
        await anext(long)
        os.kill(process.pid, signal.SIGTERM)
        begun = time.monotonic()
        with pytest.raises(Draining):
            await long.result()
        assert await process.ended() == 0
        assert time.monotonic() - begun < 3.0


async def test_f19_it_leaves_with_its_parents_pipe(start):
    process = start()
    await process.report("ready")
    process.close_pipe()
    assert await process.ended(5.0) == -signal.SIGKILL


async def test_f19_it_leaves_while_it_loads(start):
    process = start()
    await process.report("loading")
    process.close_pipe()
    assert await process.ended(5.0) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_f19_a_signal_ends_it_while_it_loads(start, number):
    process = start()
    await process.report("loading")
    os.kill(process.pid, number)
    assert await process.ended(5.0) == -number


async def test_a_model_that_cannot_be_served_is_reported(start, tmp_path):
    process = start(model={"path": str(tmp_path / "missing.gguf"), "load_format": "auto"})
    failed = await process.report("failed")
    assert failed.code == "model"
    assert "missing.gguf" in failed.message
    assert await process.ended() == 2


async def test_a_configuration_that_is_none_is_reported():
    process = Process(b'{"scheduler": {"max_rows": 0}}')
    failed = await process.report("failed")
    assert failed.code in ("config", "internal")
    assert "max_rows" in failed.message + (failed.field or "")
    assert await process.ended() == 2
    process.close_pipe()


# ---- the same life inside this process, with a worker that fails -------------------------------------------------------


class Reports:
    def __init__(self):
        self.sent = asyncio.Queue()
        self.stalls = set()

    def loading(self, stage):
        pass

    def weights(self, part):
        pass

    def send(self, report):
        self.sent.put_nowait(report)

    def beat(self, stall=""):
        self.stalls.add(stall)


@pytest.fixture
async def served(tmp_path, monkeypatch):
    """An engine's life as a task, with a worker driven by hand and a connected client."""
    worker = HandWorker(max_model_len=512)

    async def load(config, on_progress):
        return worker

    monkeypatch.setattr(engine_process, "load_worker", load)
    monkeypatch.setattr(engine_process, "tame_collector", lambda: None)
    monkeypatch.setattr(engine_process, "_CLOSE_S", 0.2)
    config = from_mapping(
        {
            "server": {"bind": f"ipc://{tmp_path}/engine.sock", "drain_timeout_ms": 200},
            "engine": {"dump_dir": str(tmp_path), "stall_timeout_ms": 100},
            "scheduler": {"max_rows": 8, "max_step_tokens": 64},
        }
    )
    reports = Reports()
    life = asyncio.create_task(engine_process._serve(config, reports))
    ready = await reports.sent.get()
    async with connect(ready.endpoint) as client:
        yield worker, life, client
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_an_engine_that_fails_tells_its_clients_and_ends_with_code_1(served):
    worker, life, client = served
    worker.is_held = True
    stream = client.generate([1, 2, 3], max_tokens=9)
    waiting = asyncio.create_task(stream.result())
    while not worker.samples:
        await asyncio.sleep(0.001)
    worker.samples[0][1].set_exception(RuntimeError("device lost"))
    with pytest.raises(EngineFailed, match="device lost"):
        await waiting
    assert await asyncio.wait_for(life, 5) == (1, True)
    worker.samples.clear()


async def test_f1_a_stalled_engine_tells_its_clients_and_recovers(served):
    worker, life, client = served
    worker.is_held = True
    with pytest.raises(EngineFailed, match="step 0"):
        await client.generate([1, 2, 3], max_tokens=9).result()
    with pytest.raises(EngineFailed, match="not ready"):
        await client.generate([1, 2, 3], max_tokens=9).result()
    worker.release_all()
    async with asyncio.timeout(3):
        while (await client.stats())["ready"] == 0:
            await asyncio.sleep(0.01)
    assert len((await client.generate([1, 2, 3], max_tokens=9).result()).token_ids) == 9
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(life, 5) == (0, True)


async def test_a_worker_that_does_not_close_is_told(served):
    worker, life, client = served

    async def hang():
        await asyncio.sleep(60)

    worker.close = hang
    worker.is_held = True
    stream = client.generate([1, 2, 3], max_tokens=9)
    waiting = asyncio.create_task(stream.result())
    while not worker.samples:
        await asyncio.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises((Draining, EngineFailed)):
        await waiting
    assert await asyncio.wait_for(life, 5) == (0, False)


def test_the_collector_is_tamed():
    code = (
        "import gc\n"
        "from pagewire.event_loop import tame_collector\n"
        "tame_collector()\n"
        "assert gc.get_freeze_count() > 10_000\n"
        "assert gc.isenabled()\n"
        "assert gc.get_threshold()[0] >= 5_000\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
