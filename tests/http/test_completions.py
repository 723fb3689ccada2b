"""`/v1/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
import io

import pytest
from tests.http.bench import MAX_LEN, text_of

PATH = "/v1/completions"


async def test_every_kind_of_prompt(bench):
    bench.engine.text = "ok"
    one = await bench.complete("a")
    assert one["object"] == "text_completion"
    assert one["choices"] == [{"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}]
    assert (await bench.complete([97, 98]))["usage"]["prompt_tokens"] == 2
    for prompts in (["a", "bb", "ccc"], [[97], [98, 98], [99, 99, 99]], ["a", [98, 98], "ccc"]):
        body = await bench.complete(prompts, n=2)
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert body["usage"]["prompt_tokens"] == 6
        assert body["usage"]["completion_tokens"] == 12
        sent = sorted(bytes(one.prompt_ids[::4]) for one in bench.engine.asked[-3:])
        assert sent == [b"a", b"bb", b"ccc"]


async def test_sixteen_tokens_where_nothing_is_said(bench):
    bench.engine.text = "z" * 100
    assert (await bench.complete())["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_prompt_logprobs_as_evaluation_harnesses_ask_for_them(bench, max_tokens):
    body = await bench.complete([97, 98, 99], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
    (choice,) = body["choices"]
    assert choice["text"] == "abc" + "H" * max_tokens
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("abc" + "H" * max_tokens)
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, *[-0.5] * max_tokens]
    assert logprobs["top_logprobs"] == [None, {"b": -1.0}, {"c": -2.0}, *[{"H": -0.5}] * max_tokens]
    assert logprobs["text_offset"] == [0, 1, 2, 3][: 3 + max_tokens]
    assert body["usage"]["completion_tokens"] == max_tokens


async def test_a_stream_says_what_the_whole_answer_says(bench):
    """F38, for several prompts and choices, with an echo and without."""
    bench.engine.text = "é!"
    for fields in (
        {"echo": True, "logprobs": 2, "n": 2},
        {"logprobs": 0},
        {"echo": True},
        {"max_tokens": 0, "echo": True},
    ):
        whole = await bench.complete(["ab", "c"], **fields)
        events = await bench.events(PATH, {"prompt": ["ab", "c"], **fields})
        assert events.pop() == "[DONE]"
        assert not any("usage" in one for one in events)
        for choice in whole["choices"]:
            mine = [c for one in events for c in one["choices"] if c["index"] == choice["index"]]
            assert "".join(one["text"] for one in mine) == choice["text"]
            assert mine[-1]["finish_reason"] == choice["finish_reason"]
            told = [one["logprobs"] for one in mine if one["logprobs"]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [value for one in told for value in one[name]] == (
                    choice["logprobs"][name] if "logprobs" in fields else []
                )
    assert whole["choices"][0]["text"] == "ab"


async def test_parts_of_characters_are_named_as_openai_does(bench):
    bench.engine.text = "é!"
    logprobs = (await bench.complete(logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["text_offset"] == [0, 1, 1]


async def test_one_bad_prompt_refuses_the_request_and_frees_the_others(bench):
    bench.engine.pause_s = None
    status, body = await bench.post(PATH, {"prompt": ["a", "x" * MAX_LEN, "c"]})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    async with asyncio.timeout(1):
        while len(bench.engine.told) < 2:
            await asyncio.sleep(0.005)
    await bench.idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": [[1]] * 129}, "prompt"),
        ({"prompt": ["[", *[[1]] * 129]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": -1}, "logprobs"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({}, "prompt"),
    ],
)
async def test_refusals_name_their_field(bench, fields, param):
    """F42 among them."""
    status, body = await bench.post(PATH, fields)
    assert (status, body["error"]["param"]) == (400, param), body


async def test_spaces_and_special_tokens_are_prompts(bench):
    """F42: what has a token can be continued."""
    for prompt in ("   ", "\n", "\x00", [0]):
        assert (await bench.complete(prompt))["choices"][0]["text"] == "Hello, world!"


async def test_tokenize_and_back(bench):
    status, body = await bench.post("/tokenize", {"prompt": "héy"})
    assert (status, body) == (200, {"count": 4, "max_model_len": MAX_LEN, "tokens": list("héy".encode())})
    assert (await bench.post("/detokenize", {"tokens": body["tokens"]}))[1] == {"prompt": "héy"}
    status, body = await bench.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert bytes(body["tokens"]) == b"user:x"
    assert (await bench.post("/tokenize", {"prompt": ""}))[1]["tokens"] == []
    assert (await bench.post("/tokenize", {"prompt": "x", "add_special_tokens": False}))[1]["tokens"] == [120]
    for path, bad, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        ("/detokenize", {"tokens": [256]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1] * (MAX_LEN + 1)}, "tokens"),
    ):
        status, body = await bench.post(path, bad)
        assert (status, body["error"]["param"]) == (400, param)


async def test_f50_what_is_too_long_is_refused_unread(bench):
    """The largest body holds four million ids; a look at each of them held up every stream for a second."""
    many = [7, *["no id"] * MAX_LEN]
    for prompt, param in ((many, "prompt"), (["text", many], "prompt[1]")):
        status, body = await bench.post(PATH, {"prompt": prompt})
        assert (status, body["error"]["param"]) == (400, param)
        assert body["error"]["code"] == "context_length_exceeded"


async def test_streams_are_told_apart(bench):
    events = await bench.events(PATH, {"prompt": ["a", "b"], "max_tokens": 3})
    assert (text_of(events, 0), text_of(events, 1)) == ("Hel", "Hel")


async def test_brackets_of_a_text_are_no_lists(bench):
    for prompt in ("[" * 500, ["[" * 300, "]" * 300]):
        await bench.complete(prompt)


async def test_millions_of_small_values_are_counted_not_made(bench):
    """F50: the loop was held for a second, most of it by the collector."""
    lists = b'{"prompt":[' + b",".join([b"[1]"] * 1_000_000) + b"]}"
    bias = b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}}"
    for data, param, what in ((lists, "prompt", "1000000 prompts"), (bias, "logit_bias", "300000 entries")):
        status, body = await bench.post(PATH, data=io.BytesIO(data), headers={"Content-Type": "application/json"})
        assert (status, body["error"]["param"]) == (400, param)
        assert what in body["error"]["message"]
