"""HTTP in whole processes: the gateway's with an engine that the test plays, and a server with the demo model."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys

import aiohttp
import pytest
from tests.gateway.test_process import FakeEngine, gateway_process

from pagewire.cli.model_path import demo_model

MODEL = demo_model()
pytestmark = [pytest.mark.model, pytest.mark.skipif(MODEL is None, reason="the demo model is not installed")]

CHAT = "/v1/chat/completions"


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


@pytest.fixture
def short_folder(tmp_path_factory):
    """For ipc endpoints, which have room for 107 bytes."""
    import shutil
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp(prefix="pw-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def test_text_tokenizer_and_template_are_the_models(short_folder):
    address = free_address()
    async with (
        gateway_process(short_folder, FakeEngine(), http=address),
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        text = "Grüße, 世界! 🙂 and more"
        async with session.post("/v1/completions", json={"prompt": text, "max_tokens": 100}) as response:
            body = await response.json()
        assert body["choices"][0]["text"] == text
        chat = {"messages": [{"role": "user", "content": text}]}
        async with session.post(CHAT, json=chat) as response:
            assert text in (await response.json())["choices"][0]["message"]["content"]
        async with session.post("/tokenize", json=chat) as response:
            tokens = (await response.json())["tokens"]
        async with session.post("/detokenize", json={"tokens": tokens}) as response:
            rendered = (await response.json())["prompt"]
        assert rendered.endswith(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        # F51: what a template may not reach is refused, not run.
        bad = {**chat, "chat_template_kwargs": {"messages": "x"}}
        async with session.post(CHAT, json=bad) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "chat_template_kwargs.messages"


async def test_a_signal_drains_http_streams_too(short_folder):
    """F20: each ends complete or with `draining`; nothing is cut silently; the process ends inside the deadline."""
    address, engine = free_address(), FakeEngine()
    engine.is_silent = True
    async with (
        gateway_process(short_folder, engine, http=address, drain_timeout_ms=700) as (process, _, _),
        aiohttp.ClientSession(f"http://{address}") as session,
    ):

        async def ask(stream: bool) -> str:
            body = {"prompt": "a b c", "max_tokens": 3, "stream": stream}
            async with session.post("/v1/completions", json=body) as response:
                return await response.text()

        asking = [asyncio.create_task(ask(stream=i % 2 == 0)) for i in range(20)]
        while len(engine.asked) < 20:
            await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        async with session.get("/ready") as response:
            assert response.status == 503
        for one in engine.asked[:10]:
            engine.end(one.stream, "stop", 0)
        answers = await asyncio.gather(*asking)
        assert await process.wait() == 0
        assert loop.time() - begun < 3
        done = [answer for answer in answers if '"finish_reason":"stop"' in answer]
        told = [answer for answer in answers if '"code":"draining"' in answer]
        assert (len(done), len(told)) == (10, 10)


@pytest.fixture
async def server(tmp_path_factory):
    """A whole server with the demo model: (process, URL of its HTTP)."""
    folder = tmp_path_factory.mktemp("s")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.cli.main", "serve", "--http", "127.0.0.1:0", "--bind", f"ipc://{folder}/s",
        "--threads", "1", "--kv-bytes", "64MiB", "--max-rows", "8", "--max-step-tokens", "32",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    lines = [(await process.stdout.readline()).decode() for _ in range(2)]
    if "HTTP at" not in lines[1]:
        pytest.fail((await process.stderr.read()).decode())
    yield process, lines[1].split()[-1].removesuffix("/v1")
    if process.returncode is None:
        process.kill()
    await process.wait()


async def test_a_whole_server_says_the_same_streamed_or_not(server):
    """F38 with a prompt that is prefilled in chunks, and again from the prefix cache."""
    process, url = server
    words = " ".join(f"number {i}" for i in range(40))
    body = {
        "messages": [{"role": "user", "content": words}],
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
    }
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/ready") as response:
            assert await response.json() == {"ready": True}
        async with session.post(CHAT, json=body) as response:
            whole = (await response.json())["choices"][0]
        async with session.post(CHAT, json={**body, "stream": True}) as response:
            data = await response.text()
        chunks = [json.loads(line[6:])["choices"][0] for line in data.split("\n\n") if line.startswith("data: {")]
        assert "".join(one["delta"].get("content", "") for one in chunks) == whole["message"]["content"]
        told = [entry for one in chunks if one["logprobs"] for entry in one["logprobs"]["content"]]
        expected = whole["logprobs"]["content"]
        assert [one["token"] for one in told] == [one["token"] for one in expected]
        for mine, other in zip(told, expected, strict=True):
            assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert [t["token"] for t in mine["top_logprobs"]] == [t["token"] for t in other["top_logprobs"]]
        await asyncio.sleep(0.7)  # the engine's figures are asked for twice a second
        async with session.get("/metrics") as response:
            page = await response.text()
        assert "pagewire_prefix_cache_hits_total" in page
        hits = next(line for line in page.splitlines() if line.startswith("pagewire_prefix_cache_hits_total"))
        assert float(hits.split()[-1]) > 0
    process.terminate()
    assert await process.wait() == 0
