"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from tests.http.bench import MAX_LEN, serving, text_of

from pagewire.errors import InternalError, ModelError, NumericError
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.messages import Cancel, Finish

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_an_answer_has_the_fields_of_openais(bench):
    body = await bench.chat(max_tokens=5)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "bytes"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_says_what_the_whole_answer_says(bench):
    for fields in ({}, {"n": 3}, {"max_tokens": 4}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 0}):
        whole = await bench.chat(**fields)
        events = await bench.events(CHAT, {**HI, **fields, "stream_options": {"include_usage": True}})
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == whole["usage"]
        assert all(one["usage"] is None for one in events[:-2])
        assert len({one["id"] for one in events[:-1]}) == 1
        for choice in whole["choices"]:
            assert text_of(events, choice["index"]) == choice["message"]["content"]
            mine = [one["choices"][0] for one in events[:-2] if one["choices"][0]["index"] == choice["index"]]
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
            assert all(one["finish_reason"] is None for one in mine[:-1])
            assert mine[0]["delta"]["role"] == "assistant"
            assert not any("role" in one["delta"] for one in mine[1:])


async def test_logprobs_are_the_same_streaming_or_not_and_never_nan(bench):
    """F38."""
    bench.engine.logprob = lambda index: [-0.5, float("-inf"), float("nan"), -3.0][index % 4]
    whole = await bench.chat(logprobs=True, top_logprobs=3)
    events = await bench.events(CHAT, {**HI, "logprobs": True, "top_logprobs": 3})
    told = [
        entry
        for one in events[:-1]
        if one["choices"][0]["logprobs"] is not None
        for entry in one["choices"][0]["logprobs"]["content"]
    ]
    entries = whole["choices"][0]["logprobs"]["content"]
    assert told == entries
    assert [entry["token"] for entry in entries] == list("Hello, world!")
    assert [entry["logprob"] for entry in entries[:4]] == [-0.5, -9999.0, -9999.0, -3.0]
    assert entries[0]["top_logprobs"] == [
        {"token": "H", "logprob": -0.5, "bytes": [72]},
        {"token": "I", "logprob": -1.5, "bytes": [73]},
        {"token": "J", "logprob": -2.5, "bytes": [74]},
    ]


async def test_split_characters_arrive_whole(bench):
    """F40: every token is a byte."""
    bench.engine.text = "Grüße, 世界! 🙂 é"
    events = await bench.events(CHAT, {**HI, "logprobs": True})
    assert text_of(events) == bench.engine.text
    assert "�" not in text_of(events)
    whole = await bench.chat(logprobs=True)
    assert whole["choices"][0]["message"]["content"] == bench.engine.text
    data = b"".join(bytes(entry["bytes"]) for entry in whole["choices"][0]["logprobs"]["content"])
    assert data.decode() == bench.engine.text
    bench.engine.text = "cut short 🙂"
    cut = await bench.chat(max_tokens=12)
    assert cut["choices"][0]["message"]["content"] == "cut short �"
    assert text_of(await bench.events(CHAT, {**HI, "max_tokens": 12})) == "cut short �"


@pytest.mark.parametrize("stop", [" three", ["three", " th"], ["zzz", "e t"], ["two three", "tw"]])
async def test_stop_strings_end_the_text_before_them(bench, stop):
    """F41: the string whose last byte comes first wins, and neither it nor what follows is shown."""
    bench.engine.text = "one two three four"
    stops = [stop] if isinstance(stop, str) else stop
    text, end = bench.engine.text, len(bench.engine.text)
    ends = {one: text.find(one) + len(one) for one in stops if one in text}
    first = min(ends, key=ends.get)
    expected = text[: text.find(first)]
    whole = await bench.chat(stop=stop)
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == ends[first] < end
    events = await bench.events(CHAT, {**HI, "stop": stop, "logprobs": True})
    assert text_of(events) == expected
    told = [one["choices"][0]["logprobs"] for one in events[:-1]]
    assert sum(len(one["content"]) for one in told if one) == ends[first]  # none of tokens behind the stop
    assert any(isinstance(one, Finish) for one in bench.engine.told)


async def test_the_first_event_follows_the_first_token(bench):
    """F22: nothing that a client could take for a token comes before one."""
    bench.engine.pause_s = 0.1
    async with bench.session.post(bench.url + CHAT, json={**HI, "stream": True}) as response:
        assert response.status == 200
        loop = asyncio.get_running_loop()
        begun = loop.time()
        line = await response.content.readline()
        assert loop.time() - begun > 0.05
        assert b'"content":"H"' in line
    await bench.idle()
    assert bench.server.meters.first_token.count == 1
    assert 0.05 < bench.server.meters.first_token.sum < 0.5


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pause", [None, 0.05])
async def test_a_client_that_leaves_takes_its_request_with_it(bench, stream, pause):
    """F15."""
    bench.engine.pause_s = pause
    task = asyncio.create_task(bench.post(CHAT, {**HI, "stream": stream, "n": 2}))
    while not bench.engine.asked:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    task.cancel()
    async with asyncio.timeout(1):
        while not bench.engine.told:
            await asyncio.sleep(0.005)
    assert bench.engine.told == [Cancel(stream=bench.engine.asked[0].stream)]
    await bench.idle()


@pytest.mark.parametrize("behind", ["requests", "a body"])
async def test_a_client_that_leaves_with_more_sent_than_is_read(bench, behind):
    """F15: its end stands behind requests, or a body, that wait until the one before them is answered."""
    bench.engine.pause_s = None
    body = json.dumps(HI).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ".encode()
    rest = {
        "requests": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000,
        "a body": head + b"4000000\r\n\r\n" + b" " * 1_000_000,
    }
    host, port = bench.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.setblocking(False)
        client.send(head + b"%d\r\n\r\n" % len(body) + body)
        while not bench.engine.asked:
            await asyncio.sleep(0.001)
        client.send(rest[behind])
        await asyncio.sleep(0.05)
    async with asyncio.timeout(2):
        while not bench.engine.told:
            await asyncio.sleep(0.005)
    assert bench.engine.told == [Cancel(stream=bench.engine.asked[0].stream)]
    await bench.idle()


async def test_a_client_that_leaves_while_its_prompt_is_prepared(bench):
    """F15, before the engine knows of it."""
    gate = asyncio.Event()
    real = bench.preparation.prompt_ids

    async def slow(request):
        await gate.wait()
        return await real(request)

    bench.preparation.prompt_ids = slow
    task = asyncio.create_task(bench.post(CHAT, HI))
    while not bench.gateway._preparing:
        await asyncio.sleep(0.001)
    task.cancel()
    while bench.gateway.num_streams:
        await asyncio.sleep(0.001)
    gate.set()
    await asyncio.sleep(0.01)
    assert not bench.engine.asked


@pytest.mark.parametrize("error", [InternalError("x"), NumericError("NaN")])
async def test_an_error_of_the_engine(bench, error):
    """F7: before the first token it is a status, after it an event; the next request is served."""
    bench.engine.error = error
    status, body = await bench.post(CHAT, {**HI, "stream": True})
    assert (status, body["error"]["code"]) == (500, error.code)
    bench.engine.error_after = 3
    status, body = await bench.post(CHAT, HI)
    assert (status, body["error"]["type"]) == (500, "internal_server_error")
    events = await bench.events(CHAT, HI)
    assert text_of(events) == "Hel"
    assert events[-1] == {
        "error": {"message": error.message, "type": "internal_server_error", "param": None, "code": error.code}
    }
    bench.engine.error = bench.engine.error_after = None
    assert (await bench.chat())["choices"][0]["message"]["content"] == "Hello, world!"


async def test_a_fault_while_making_text_ends_one_request_only(bench):
    """F7."""

    class Broken(TextStream):
        def push(self, ids):
            raise RuntimeError("planted")

    good = bench.make_text
    bench.engine.pause_s = 0.01
    other = asyncio.create_task(bench.chat())
    while not bench.engine.asked:
        await asyncio.sleep(0.001)
    bench.make_text = lambda stops: Broken(bench.text.byte_table, stops)
    status, body = await bench.post(CHAT, HI)
    assert (status, body["error"]["code"]) == (500, "internal")
    bench.make_text = good
    assert (await other)["choices"][0]["message"]["content"] == "Hello, world!"
    assert await bench.chat()


async def test_a_fault_while_answering_ends_one_request_only(bench, monkeypatch):
    """F7: in our own JSON."""
    from pagewire.gateway.http.shapes import ChatShape

    def broken(self, index, piece):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(ChatShape, "add", broken)
        status, body = await bench.post(CHAT, HI)
        assert (status, body["error"]["code"]) == (500, "internal")
        events = await bench.events(CHAT, HI)
        assert events[-1]["error"]["code"] == "internal"
    await bench.idle()
    assert await bench.chat()


async def test_a_template_that_fails_is_a_clear_error():
    """F45: swallowed neither, nor replaced by another one."""

    def broken(messages, kwargs):
        raise ModelError("the chat template is broken: unknown function 'now'", field="messages")

    async with serving(encode_chat=broken) as bench:
        status, body = await bench.post(CHAT, HI)
        assert status == 400
        assert body["error"] == {
            "message": "the chat template is broken: unknown function 'now'",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "model",
        }


async def test_prompts_around_the_limit(bench):
    """F43: the prompt is `user:` and the text; with it and one token the model's length is full."""
    room = MAX_LEN - len("user:")
    assert (await bench.chat("x" * (room - 2), max_tokens=2))["usage"]["total_tokens"] == MAX_LEN
    assert (await bench.chat("x" * (room - 1)))["usage"]["total_tokens"] == MAX_LEN
    for length, fields in ((room, {}), (room + 1, {}), (room + 1, {"max_tokens": 0}), (10 * MAX_LEN, {})):
        status, body = await bench.post(CHAT, {"messages": [{"role": "user", "content": "x" * length}], **fields})
        assert status == 400, (length, fields)
        assert (body["error"]["code"], body["error"]["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_lengths_of_the_answer(bench, name):
    """F44."""
    bench.engine.text = "z" * 2 * MAX_LEN
    room = MAX_LEN - len("user:hi")
    for asked, got in ((1, 1), (room, room), (0, 0), (None, room)):
        assert (await bench.chat(**{name: asked}))["usage"]["completion_tokens"] == got
    for asked in (room + 1, 2**31 - 1, 2**31, 2**63 - 1, -1):
        status, body = await bench.post(CHAT, {**HI, name: asked})
        assert (status, body["error"]["param"]) == (400, name), asked


async def test_contents_are_text_or_parts_of_text(bench):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await bench.post(
        CHAT,
        {"messages": [{"role": "developer", "content": "be kind", "name": "x"}, {"role": "user", "content": parts}]},
    )
    assert bytes(bench.engine.asked[0].prompt_ids[::4]) == b"system:be kind|user:a\nb"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias[300]"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [256]}, "stop_token_ids[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": 101}, "priority"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": "hi"}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_refusals_name_their_field(bench, fields, param):
    status, body = await bench.post(CHAT, {**HI, **fields})
    assert status == 400
    assert (body["error"]["param"], body["error"]["type"]) == (param, "invalid_request_error")
    assert body["error"]["message"]


async def test_fields_that_sdks_send_are_accepted(bench):
    await bench.chat(
        user="u", store=False, metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, tools=[],
        tool_choice="none", response_format={"type": "text"}, reasoning_effort="low", seed=-1, stop=None, n=None,
        logit_bias={"7": 1.5}, top_k=-1, modalities=["text"], logprobs=False, model="bytes", some_new_field=1,
        min_p=0.1, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5, ignore_eos=True,
        stop_token_ids=[3], top_p=0.9, priority=3, min_tokens=1,
    )  # fmt: skip
    asked = bench.engine.asked[0]
    params = asked.params
    assert (params.seed, params.logit_bias, params.top_k, params.min_tokens) == (2**63 - 1, {7: 1.5}, 0, 1)
    assert (params.min_p, params.repetition_penalty, params.ignore_eos, params.stop_token_ids) == (0.1, 1.1, True, (3,))
    assert (params.presence_penalty, params.frequency_penalty, params.top_p, asked.priority) == (0.5, -0.5, 0.9, 3)


async def test_another_model_is_not_served(bench):
    status, body = await bench.post(CHAT, {**HI, "model": "gpt-4o"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
