"""Programs that nobody here wrote, unmodified: what they send must be taken, and what is answered understood."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import UTC, datetime

import pytest
from tests.http.bench import serving

from pagewire import keys
from pagewire_transport.messages import Cancel

openai = pytest.importorskip("openai", reason="the OpenAI SDK is not installed")

TEXT = "Grüße, 世界! 🙂"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(bench):
    """OpenAI's own, for asyncio."""
    bench.engine.text = TEXT
    return openai.AsyncOpenAI(base_url=bench.url + "/v1", api_key="none", max_retries=0)


async def test_openai_answers_streams_and_usage(bench, client):
    async with client:
        answer = await client.chat.completions.create(model="bytes", messages=HI, n=2, logprobs=True, top_logprobs=2)
        assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
        assert answer.usage.completion_tokens == 2 * len(TEXT.encode())
        assert answer.choices[1].logprobs.content[1].top_logprobs[0].logprob == -1.5
        stream = await client.chat.completions.create(
            model="bytes", messages=HI, stream=True, stream_options={"include_usage": True}, max_completion_tokens=100
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.total_tokens == 7 + len(TEXT.encode())
        async with client.chat.completions.stream(model="bytes", messages=HI) as events:
            async for _ in events:
                pass
            assert (await events.get_final_completion()).choices[0].message.content == TEXT


async def test_openai_completions_and_models(bench, client):
    async with client:
        answer = await client.completions.create(
            model="bytes", prompt=["a", "b"], logprobs=1, echo=True, max_tokens=1, stop=["."], seed=7
        )
        assert [choice.logprobs.tokens for choice in answer.choices] == [["a", "G"], ["b", "G"]]
        stream = await client.completions.create(model="bytes", prompt="a", stream=True, max_tokens=100)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT
        assert [model.id async for model in client.models.list()] == ["bytes"]
        assert (await client.models.retrieve("bytes")).id == "bytes"


async def test_openai_raises_what_it_raises_elsewhere(bench, client):
    async with client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="bytes", messages=HI, temperature=-1)
        assert (caught.value.param, caught.value.code, caught.value.status_code) == (
            "temperature",
            "invalid_request",
            400,
        )
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4o", messages=HI)
        assert missing.value.code == "model_not_found"
        bench.engine.error, bench.engine.error_after = openai_error(), 2
        stream = await client.chat.completions.create(model="bytes", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="planted"):
            async for _ in stream:
                pass
        bench.engine.error_after = None
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="bytes", messages=HI)


def openai_error():
    from pagewire.errors import Overloaded

    return Overloaded("planted", retry_after_ms=1)


async def test_openai_tries_again_when_it_is_told_to(bench):
    bench.engine.error = openai_error()
    async with openai.AsyncOpenAI(base_url=bench.url + "/v1", api_key="none", max_retries=2) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="bytes", messages=HI))
        while not bench.engine.asked:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        bench.engine.error = None
        assert (await asking).choices[0].message.content == bench.engine.text
        assert len(bench.engine.asked) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_openai_timeouts_and_leaving_free_the_request(bench, client, stream):
    bench.engine.pause_s = None if not stream else 0.3
    async with client:
        if stream:
            chunks = await client.chat.completions.create(model="bytes", messages=HI, stream=True)
            await anext(aiter(chunks))
            await chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.1).chat.completions.create(model="bytes", messages=HI)
        async with asyncio.timeout(2):
            while not bench.engine.told:
                await asyncio.sleep(0.005)
        assert bench.engine.told == [Cancel(stream=bench.engine.asked[0].stream)]


async def test_openai_keys(tmp_path):
    key = keys.add(tmp_path / "keys", "ann", now=datetime.now(UTC))
    async with serving(api_key_file=str(tmp_path / "keys")) as bench:
        for given, good in ((key, True), ("wrong", False)):
            async with openai.AsyncOpenAI(base_url=bench.url + "/v1", api_key=given, max_retries=0) as client:
                if good:
                    assert await client.chat.completions.create(model="bytes", messages=HI)
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()


async def test_langchain(bench):
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_openai import ChatOpenAI

    bench.engine.text = TEXT
    model = ChatOpenAI(base_url=bench.url + "/v1", api_key="none", model="bytes", max_retries=0, stream_usage=True)
    answer = await model.ainvoke([("system", "be kind"), ("human", "hi")])
    assert answer.content == TEXT
    assert answer.usage_metadata["output_tokens"] == len(TEXT.encode())
    chunks = [chunk async for chunk in model.astream("hi")]
    assert "".join(chunk.content for chunk in chunks) == TEXT
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == len(TEXT.encode())
    model.root_client.close()
    await model.root_async_client.close()


async def test_llm(bench, tmp_path):
    """Simon Willison's command line, with this server as an extra model."""
    pytest.importorskip("llm", reason="llm is not installed")
    bench.engine.text = TEXT
    (tmp_path / "extra-openai-models.yaml").write_text(
        json.dumps([{"model_id": "here", "model_name": "bytes", "api_base": bench.url + "/v1", "api_key_name": "x"}])
    )
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": "", "PYTHONIOENCODING": "utf-8"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "llm", "prompt", "-m", "here", "--key", "none", "hi",
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert out.decode().strip() == TEXT


async def test_schemathesis(bench, tmp_path):
    """No answer is a fault, and every answer is one that the document names."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", bench.url + "/openapi.json", "--checks", "not_a_server_error,status_code_conformance,content_type_conformance",
        "--max-examples", "8", "--phases", "examples,coverage,fuzzing", "--seed", "1", "--generation-database", "none",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, out.decode()
