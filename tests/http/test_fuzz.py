"""F47: whatever the JSON, the answer is 200 or a refusal that names a field, never a fault, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import threading

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.http.bench import HttpBench

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 16, 17, 255, 256, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-300, 1e300, 2.0]),
    st.text(max_size=8),
    st.sampled_from(["", "user", "text", "\ud800", "\x00", "🙂", "auto", "none", "bytes"]),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", ""]) | _scalars, "content": st.text(max_size=8) | _values}
    ),
    max_size=3,
)
_NUMBERS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "max_tokens",
    "repetition_penalty", "min_tokens", "priority", "max_completion_tokens", "top_logprobs", "best_of",
)  # fmt: skip
_ANYTHING = (
    "model", "stop", "logit_bias", "stop_token_ids", "ignore_eos", "stream", "stream_options", "user", "logprobs", "echo",
    "chat_template_kwargs", "tools", "tool_choice", "functions", "function_call", "response_format", "modalities", "audio",
    "suffix", "add_special_tokens", "unknown",
)  # fmt: skip
_bodies = st.fixed_dictionaries(
    {},
    optional={
        "messages": _messages | _values,
        "prompt": st.text(max_size=8) | st.lists(st.integers(0, 255) | st.text(max_size=4), max_size=4) | _values,
        "tokens": st.lists(st.integers(-2, 300), max_size=5) | _values,
        **dict.fromkeys(_NUMBERS, _scalars),
        **dict.fromkeys(_ANYTHING, _values),
        "logit_bias": st.dictionaries(st.integers(-5, 300).map(str), st.floats(), max_size=3) | _values,
    },
)


@pytest.fixture(scope="module")
def asking():
    """Asks a server that runs in a thread of its own: hypothesis' examples are plain calls."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    async def start():
        bench = HttpBench()
        await bench.server.start()
        bench.session = aiohttp.ClientSession()
        return bench

    async def stop():
        await bench.idle()
        await bench.session.close()
        await bench.server.close()
        bench.preparation.close()

    bench = call(start())
    yield bench, call
    call(stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), body=_bodies | _values)
def test_whatever_the_body_no_fault(asking, path, body):
    bench, call = asking
    data = json.dumps(body).encode()
    status, answer = call(bench.post(path, data=data, headers={"Content-Type": "application/json"}))
    assert status in (200, 400, 404), answer
    if status != 200:
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    call(bench.idle())


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(PATHS), data=st.binary(max_size=60))
def test_whatever_the_bytes_no_fault(asking, path, data):
    bench, call = asking
    status, _ = call(bench.post(path, data=data, headers={"Content-Type": "application/json"}))
    assert status in (200, 400, 404)
