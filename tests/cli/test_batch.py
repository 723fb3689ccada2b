"""`batch`: every line is answered once, whatever happened in between, and a bad line is answered with its field."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.echo_server import environment_of, pagewire

from pagewire.cli.batch_lines import answered, parse_line
from pagewire.cli.batch_output import BatchOutput, hash_of
from pagewire.cli.main import main
from pagewire.errors import ConfigError, InvalidRequest, Overloaded, Unavailable, UnknownStream
from pagewire_client.result import ChoiceResult, Result, TokenLogprob
from pagewire_transport.messages import Usage


def _records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_lines_are_answered_in_their_order_with_their_own_parameters(served):
    server, url, temporary = served
    source = temporary / "r.jsonl"
    source.write_text(
        '{"prompt": "one two", "max_tokens": 3}\n'
        "\n"
        '{"id": "q", "messages": [{"role": "user", "content": "three"}], "params": {"temperature": 0}}\n'
        '{"prompt_ids": [1, 2, 3], "logit_bias": {"5": 1.5}}\n'
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "stop": "x", '
        '"messages": [{"role": "user", "content": "four"}], "max_completion_tokens": 4, "logprobs": false}}\n'
    )
    code, out, err = await pagewire("batch", str(source), "--url", url, "--max-tokens", "9", temporary=temporary)
    assert (code, out) == (0, ""), err
    assert err.splitlines()[-1] == f"4 lines answered in {temporary}/r.out.jsonl"
    first, second, third, fourth = _records(temporary / "r.out.jsonl")
    assert [record["line"] for record in (first, second, third, fourth)] == [1, 3, 4, 5]
    assert first["choices"] == [{"text": "one two", "token_ids": [1, 1], "finish_reason": "length"}]
    assert (first["usage"]["completion"], first["seed"]) == (2, 3)
    assert (second["id"], second["choices"][0]["text"]) == ("q", "three")
    assert (fourth["custom_id"], fourth["error"], fourth["response"]["status_code"]) == ("a", None, 200)
    body = fourth["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "four"
    assert body["usage"]["total_tokens"] == 6
    by_size = sorted(server.asked, key=lambda asked: asked.params.max_tokens)
    assert [asked.params.max_tokens for asked in by_size] == [3, 4, 9, 9]
    assert by_size[1].params.stop == ("x",)


@pytest.mark.parametrize("logprobs", [None, [TokenLogprob(-0.5, ((7, -0.5), (8, -math.inf))), TokenLogprob(math.nan)]])
def test_answers_in_openais_form_are_read_by_openais_own_types(logprobs):
    types = pytest.importorskip("openai.types", reason="the OpenAI SDK is not installed")
    choice = ChoiceResult("ab", [7, 8], "stop", None, logprobs)
    result = Result("baadca9a-23", [choice] * 2, Usage(prompt=5, completion=4, cached=3), 1, None, None)
    bodies = []
    for url, prompt in (("/v1/chat/completions", {"messages": []}), ("/v1/completions", {"prompt": "x"})):
        asked = parse_line(json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": prompt}).encode())
        bodies.append(json.loads(msgspec.json.encode(answered(asked, result, "m")["response"]["body"])))
    chat = types.chat.ChatCompletion.model_validate(bodies[0], strict=True)
    text = types.Completion.model_validate(bodies[1], strict=True)
    assert (chat.id, text.id) == ("chatcmpl-baadca9a-23", "cmpl-baadca9a-23")
    assert chat.created == pytest.approx(time.time(), abs=60)
    assert chat.usage.prompt_tokens_details.cached_tokens == 3
    assert [chat.choices[1].message.content, text.choices[1].text] == ["ab", "ab"]
    if logprobs is not None:
        first, second = chat.choices[0].logprobs.content
        assert [(top.token, top.logprob) for top in first.top_logprobs] == [("token_id:7", -0.5), ("token_id:8", -9999)]
        assert (second.token, second.logprob) == ("token_id:8", -9999)
        assert text.choices[0].logprobs.token_logprobs == [-0.5, -9999]


BAD = [
    ("nonsense", "line"),
    ("[1]", "line"),
    ('"\\ud800"', "line"),
    ("[" * 100_000, "line"),
    ("{}", "prompt"),
    ('{"prompt": "x", "messages": []}', "messages"),
    ('{"prompt": "x", "temperatur": 1}', "temperatur"),
    ('{"prompt": "x", "params": {"priority": 1}}', "params.priority"),
    ('{"prompt": "x", "params": 1}', "params"),
    ('{"prompt": "x", "template_kwargs": {}}', "template_kwargs"),
    ('{"prompt_ids": "x"}', "prompt_ids"),
    ('{"body": {}, "url": "/v1/embeddings"}', "url"),
    ('{"body": [], "url": "/v1/completions"}', "body"),
    ('{"body": {}, "url": "/v1/completions"}', "body.prompt"),
    ('{"body": {"prompt": "x", "stream": true}, "url": "/v1/completions"}', "body.stream"),
    ('{"body": {"prompt": "x", "best_of": 2}, "url": "/v1/completions"}', "body.best_of"),
]


@pytest.mark.parametrize(("line", "field"), BAD)
def test_what_is_wrong_with_a_line_is_named(line, field):
    with pytest.raises(InvalidRequest) as caught:
        parse_line(line.encode())
    assert caught.value.field == field


@given(st.binary(max_size=60) | st.recursive(st.text() | st.integers() | st.none(), st.lists).map(msgspec.json.encode))
def test_no_line_does_more_than_be_refused(line):
    with pytest.raises(InvalidRequest):
        parse_line(line)


async def test_a_bad_line_is_answered_and_stops_nothing(served):
    _, url, temporary = served
    source = temporary / "r.jsonl"
    lines = ['{"id": 7, "prompt": "refuse"}', "x", '{"prompt": 5}', '{"prompt": "x", "seed": -1}', '{"prompt": "good"}']
    source.write_text("\n".join(lines))
    code, _, err = await pagewire("batch", str(source), "--url", url, temporary=temporary)
    assert code == 1
    assert "1 line answered, 4 with an error in" in err
    *bad, good = _records(temporary / "r.out.jsonl")
    assert [record["error"]["field"] for record in bad] == ["prompt", "line", "prompt", "seed"]
    assert bad[0]["id"] == 7
    assert good["choices"][0]["text"] == "good"


async def test_after_kill_9_nothing_is_lost_asked_again_or_half(served):
    server, url, temporary = served
    source, target = temporary / "r.jsonl", temporary / "r.out.jsonl"
    source.write_text("".join(f'{{"prompt": "line{i}"}}\n' for i in range(60)))
    server.delay_s = 0.03
    arguments = ["batch", str(source), "--url", url, "--concurrency", "3"]
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pagewire.cli.entry", *arguments, env=environment_of(temporary)
        )
        before = target.stat().st_size if target.exists() else 0
        async with asyncio.timeout(20):
            while not target.exists() or target.stat().st_size < before + 500:
                await asyncio.sleep(0.005)
        process.kill()
        await process.wait()
    with target.open("ab") as file:
        file.write(b'{"line":99,"of":"')  # what a kill in the middle of a write leaves
    num_done = target.read_bytes().count(b"\n")
    server.delay_s = 0.0
    arguments += ["--seed", "1"]  # tells its requests from late ones of those that were killed

    def num_asked():
        return sum(asked.params.seed == 1 for asked in server.asked)

    code, _, err = await pagewire(*arguments, temporary=temporary)
    assert code == 0, err
    assert num_asked() == 60 - num_done
    assert [record["line"] for record in _records(target)] == list(range(1, 61))
    assert all(record["choices"][0]["text"] == f"line{i}" for i, record in enumerate(_records(target)))
    whole = target.read_bytes()
    code, _, _ = await pagewire(*arguments, temporary=temporary)
    assert (code, num_asked(), target.read_bytes()) == (0, 60 - num_done, whole)
    source.write_text(source.read_text().replace("line7", "other"))
    code, _, err = await pagewire(*arguments, temporary=temporary)
    assert (code, err.count("\n")) == (2, 1)
    assert "answers another line 8 than" in err


async def test_ctrl_c_is_130_and_says_how_to_go_on(served):
    server, url, temporary = served
    source = temporary / "r.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "never ends"}\n')
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.cli.entry", "batch", str(source), "--url", url,
        env=environment_of(temporary), stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    async with asyncio.timeout(20):
        while len(server.asked) < 2 or not (temporary / "r.out.jsonl").read_bytes():
            await asyncio.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 130
    assert err.decode() == "stopped: 1 line answered; the same command goes on from there\n"


async def test_a_server_that_goes_away_is_1_and_no_error_of_a_line(served):
    _, url, temporary = served
    source = temporary / "r.jsonl"
    source.write_text('{"prompt": "a"}\n')
    code, _, err = await pagewire("batch", str(source), "--url", f"ipc://{temporary}/none.sock", temporary=temporary)
    assert code == 1
    assert "no server answers" in err.splitlines()[-1]
    assert (temporary / "r.out.jsonl").read_bytes() == b""
    code, _, _ = await pagewire("batch", str(source), "--url", url, temporary=temporary)
    assert code == 0


@pytest.mark.parametrize("error", [Overloaded, Unavailable, UnknownStream])
async def test_what_a_server_cannot_do_now_is_asked_again(served, error):
    server, url, temporary = served
    server.refusals += [error("not now", retry_after_ms=20)] * 2
    source = temporary / "r.jsonl"
    source.write_text('{"prompt": "a"}\n')
    code, _, err = await pagewire("batch", str(source), "--url", url, temporary=temporary)
    assert code == 0, err
    assert len(server.asked) == 3
    assert [record["choices"][0]["text"] for record in _records(temporary / "r.out.jsonl")] == ["a"]


async def test_in_this_process_with_a_model_of_random_weights(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    source = tmp_path / "r.jsonl"
    lines = [{"prompt_ids": [1, 2, 3]}, {"prompt_ids": [100]}, {"prompt": "text"}]
    source.write_text("\n".join(map(json.dumps, lines)))
    code, _, err = await pagewire(
        "batch", str(source), "--model", str(folder), "--load-format=dummy", "--max-tokens=4", "--ignore-eos",
        "--threads=1", "--kv-bytes=8MiB", "--out", str(tmp_path / "o"), temporary=tmp_path,
    )  # fmt: skip
    assert code == 1, err
    good, too_high, no_text = _records(tmp_path / "o")
    assert len(good["choices"][0]["token_ids"]) == 4
    assert (too_high["error"]["field"], no_text["error"]["code"]) == ("prompt_ids[0]", "unsupported")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("x\n", "line 1 is no record of a batch"),
        ('{"line": 1, "of": "", "error": ' + "[" * 9999 + "\n", "line 1 is no record of a batch"),
        ('{"line": 1, "of": ""}\n{"line": 1, "of": ""}\n', "answers line 1 twice"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_and_kept(tmp_path, content, says):
    path = tmp_path / "o"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        BatchOutput(path)
    assert path.read_text() == content


def test_two_batches_do_not_write_one_file(tmp_path):
    with BatchOutput(tmp_path / "o"), pytest.raises(ConfigError, match="another batch writes"):
        BatchOutput(tmp_path / "o")


@given(order=st.permutations(range(1, 9)), cut=st.integers(0, 400))
def test_whatever_is_cut_off_the_rest_is_whole_and_sorted(tmp_path_factory, order, cut):
    path = tmp_path_factory.mktemp("b") / "o"
    with BatchOutput(path) as output:
        for number in order:
            output.add(number, b"%d" % number, {"text": "é" * number})
    os.truncate(path, max(0, path.stat().st_size - cut))
    with BatchOutput(path) as output:
        assert set(output.done.items()) <= {(number, hash_of(b"%d" % number)) for number in order}
        for number in sorted(set(order) - set(output.done)):
            output.add(number, b"%d" % number, {"text": "é" * number})
        output.sort()
    assert [(record["line"], record["text"]) for record in _records(path)] == [(n, "é" * n) for n in range(1, 9)]


@pytest.mark.parametrize("content", [b"GGUF\3\0\0\0", '{"prompt": "x"}'.encode("utf-16"), b"\x1f\x8b\0\0"])
def test_a_binary_file_is_refused_as_a_whole(tmp_path, capsys, content):
    source = tmp_path / "r.jsonl"
    source.write_bytes(content)
    assert main(["batch", str(source), "--url", "ipc:///none"]) == 2
    assert capsys.readouterr().err == (
        f"pagewire: {source} is no text in UTF-8; give a file with a request, a JSON object, a line\n"
    )
    assert list(tmp_path.iterdir()) == [source]
