"""The gateway process with real sockets: between the Python client and an engine that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from array import array
from pathlib import Path

import msgspec
import pytest
from tests.gateway.bench import tokens

import pagewire_client
from pagewire.child import Report, Reporter, decode_report
from pagewire.cli.model_path import demo_model
from pagewire.config import Config, from_mapping
from pagewire.errors import Draining, EngineFailed, InvalidRequest
from pagewire.gateway import process as gateway_process_module
from pagewire_transport.connection import Connection
from pagewire_transport.door import Door
from pagewire_transport.handler import DoorLimits
from pagewire_transport.messages import Accepted, Cancel, Done, Finish, Finished, Generate, Timings, Usage, Welcome

MODEL = demo_model()
pytestmark = [pytest.mark.model, pytest.mark.skipif(MODEL is None, reason="the demo model is not installed")]


class FakeEngine:
    """Speaks the protocol; generates what the test tells it to, by default an echo of the prompt."""

    def __init__(self):
        self.connection: Connection | None = None
        self.asked: list[Generate] = []
        self.told: list[Cancel | Finish] = []
        self.is_silent = False
        self.is_ready = True
        self.unready = "not now"

    def welcome(self):
        return Welcome(
            version=1, role="engine", server="fake", model="fake-model", vocab_size=49152, max_model_len=2**18,
            max_streams=100, max_message_bytes=2**24, heartbeat_ms=100, heartbeat_timeout_ms=5000,
        )  # fmt: skip

    def on_message(self, connection, message):
        self.connection = connection
        if not isinstance(message, Generate):
            self.told.append(message)
            if isinstance(message, Cancel):
                self.end(message.stream, "cancelled", 0)
            return
        self.asked.append(message)
        ids = list(array("I", message.prompt_ids))
        connection.send(
            Accepted(stream=message.stream, request_id="r", seed=1, num_prompt_tokens=len(ids), max_tokens=len(ids))
        )
        if not self.is_silent:
            for start, token in enumerate(ids):
                connection.send(tokens((message.stream, 0, start, [token])))
            self.end(message.stream, "length", len(ids))

    def end(self, stream, reason, count):
        self.connection.send(Finished(stream=stream, reason=reason, num_tokens=count))
        timings = Timings(queue_ns=1, first_token_ns=2, total_ns=3)
        self.connection.send(Done(stream=stream, seed=1, usage=Usage(prompt=count, completion=count), timings=timings))

    def has_stream(self, connection, stream):
        return True

    def on_writable(self, connection):
        pass

    def on_lost(self, connection, reason):
        self.connection = None

    def stats(self):
        return {}


@contextlib.asynccontextmanager
async def gateway_process(folder: Path, engine: FakeEngine, *, http: str = "", **server):
    """(process, url of the gateway, the fake engine's door)."""
    door = Door(f"ipc://{folder}/engine.sock", handler=engine, limits=DoorLimits(), on_fault=lambda doing, error: None)
    config = from_mapping(
        {
            "model": {"path": str(MODEL)},
            "server": {"bind": f"ipc://{folder}/g.sock", "heartbeat_ms": 50, **server},
            "http": {"address": http},
        }
    )
    config_out, config_in = os.pipe()
    report_out, report_in = os.pipe()
    os.write(config_in, msgspec.json.encode(config))
    os.close(config_in)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.gateway.main", "--engine", door.url,
        "--config-fd", str(config_out), "--report-fd", str(report_in), pass_fds=(config_out, report_in),
    )  # fmt: skip
    os.close(config_out)
    os.close(report_in)
    try:
        yield process, await asyncio.wait_for(asyncio.to_thread(_ready, report_out), 30), door
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(report_out)
        await door.close()


def _ready(fd: int) -> str:
    rest = b""
    while True:
        rest += os.read(fd, 4096)
        while b"\n" in rest:
            line, _, rest = rest.partition(b"\n")
            report: Report = decode_report(line)
            assert report.event != "failed", report
            if report.event == "ready":
                assert report.model == "fake-model"
                return report.endpoint


async def test_text_in_text_out_stops_chats_and_errors(short_folder):
    engine = FakeEngine()
    async with gateway_process(short_folder, engine) as (process, url, _), pagewire_client.connect(url) as client:
        assert client.info.role == "gateway"
        text = "Grüße, 世界! 🙂 and more"
        stream = client.generate(text)
        assert "".join([chunk.text async for chunk in stream]) == text
        result = await stream.result()
        assert result.finish_reason == "length"

        stopped = await client.generate("one two three four", stop=(" three",)).result()
        assert (stopped.text, stopped.finish_reason, stopped.stop) == ("one two", "stop", " three")
        assert stopped.usage.completion == len(stopped.token_ids) < 4
        async with asyncio.timeout(5):  # the answer and this go different ways
            while not engine.told:
                await asyncio.sleep(0.01)
        assert engine.told == [Finish(stream=engine.asked[-1].stream, at=stopped.usage.completion)]

        chat = await client.chat([{"role": "user", "content": "hello there"}]).result()
        assert "hello there" in chat.text

        for prompt in ("", []):
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(prompt).result()
            assert caught.value.field == ("prompt" if prompt == "" else "prompt_ids")
        assert process.returncode is None


async def test_leaving_a_stream_cancels_it_at_the_engine(short_folder):
    engine = FakeEngine()
    engine.is_silent = True
    async with gateway_process(short_folder, engine) as (_, url, _door), pagewire_client.connect(url) as client:
        stream = client.generate("x")
        while not engine.asked:
            await asyncio.sleep(0.01)
        await stream.aclose()
        while not engine.told:
            await asyncio.sleep(0.01)
        assert engine.told == [Cancel(stream=engine.asked[0].stream)]


async def test_a_lost_engine_ends_streams_that_may_not_wait_and_readiness(short_folder):
    engine = FakeEngine()
    engine.is_silent = True
    async with (
        gateway_process(short_folder, engine, replay_timeout_ms=0) as (process, url, door),
        pagewire_client.connect(url) as client,
    ):
        streams = [client.generate("x") for _ in range(5)]
        while len(engine.asked) < 5:
            await asyncio.sleep(0.01)
        before = time.monotonic()
        await door.close()
        for stream in streams:
            with pytest.raises(EngineFailed):
                await stream.result()
        assert time.monotonic() - before < 2
        with pytest.raises(EngineFailed):
            await client.generate("y").result()
        assert process.returncode is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_inside_the_deadline(short_folder, number):
    """F20: with 50 live streams each ends complete or with `draining`."""
    engine = FakeEngine()
    engine.is_silent = True
    async with (
        gateway_process(short_folder, engine, drain_timeout_ms=700) as (process, url, _),
        pagewire_client.connect(url) as client,
    ):
        streams = [client.generate("a b c") for _ in range(50)]
        while len(engine.asked) < 50:
            await asyncio.sleep(0.01)
        before = time.monotonic()
        process.send_signal(number)
        await asyncio.sleep(0.2)
        for request in engine.asked[:25]:
            ids = list(array("I", request.prompt_ids))
            engine.connection.send(tokens((request.stream, 0, 0, ids)))
            engine.end(request.stream, "length", len(ids))
        outcomes = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
        # Prompts are prepared in threads, so the engine has them in some order.
        assert sum(isinstance(outcome, Draining) for outcome in outcomes) == 25
        assert [outcome.text for outcome in outcomes if not isinstance(outcome, Draining)] == ["a b c"] * 25
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert 0.6 < time.monotonic() - before < 4


async def test_long_prompts_do_not_hold_up_streams(short_folder):
    """F27: eight prompts of about 128,000 tokens are tokenised while a stream runs."""
    engine = FakeEngine()
    engine.is_silent = True
    async with gateway_process(short_folder, engine) as (_, url, _door), pagewire_client.connect(url) as client:
        stream = client.generate("x", max_tokens=10_000)
        while not engine.asked:
            await asyncio.sleep(0.01)
        running = engine.asked[0].stream
        long = [client.generate("word " * 128_000) for _ in range(8)]
        gaps, sent = [], 0
        last = time.monotonic()
        reader = aiter(stream)
        while len(engine.asked) < 9:
            engine.connection.send(tokens((running, 0, sent, [ord("a")])))
            sent += 1
            await anext(reader)
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            await asyncio.sleep(0.005)
        assert len(gaps) > 20
        assert sorted(gaps)[len(gaps) // 2] < 0.05
        assert max(gaps) < 0.5
        for one in long:
            await one.aclose()


def test_the_collector_is_tamed_once_the_text_side_is_loaded(monkeypatch):
    """F50: a body of many small lists made the default one look at the whole vocabulary again and again."""
    done = []
    monkeypatch.setattr(gateway_process_module, "_load_text", lambda config: done.append("load"))
    monkeypatch.setattr(gateway_process_module, "tame_collector", lambda: done.append("tame"))
    monkeypatch.setattr(gateway_process_module, "_serve", lambda *_: None)
    monkeypatch.setattr(gateway_process_module, "run_loop", lambda _: done.append("serve") or 0)
    out, into = os.pipe()
    assert gateway_process_module.run(Config(), "ipc:///none", Reporter(into)) == 0
    assert done == ["load", "tame", "serve"]
    os.close(out)
    os.close(into)
