"""Faults of text through a whole server: the demo model's tokenizer and template in the gateway, an engine that echoes."""

from __future__ import annotations

import asyncio
import shutil
import time

import pytest
import pytest_asyncio
from tests.chaos.rig import Served, served, temporary_folder

import pagewire_client
from pagewire.cli.model_path import demo_model
from pagewire.errors import InvalidRequest, PagewireError, PromptTooLong

MODEL = demo_model()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.model,
    pytest.mark.skipif(MODEL is None, reason="the demo model is not installed"),
]
ECHO = ("--name", "vocab=49152 latency_us=200", "--max-model-len", "8192", "--kv-bytes", str(2**20))
TEXT = "Grüße, 世界! 🙂👩‍👩‍👧‍👦 naïve café\n\tdef f(x): return x # ¼ ≠ ½ "


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    async with served(*ECHO, model=str(MODEL)) as made:
        yield made
        assert await made.stop() == 0
        assert not [line for line in made.lines if "level=error" in line]


@pytest_asyncio.fixture(loop_scope="module")
async def client(server):
    async with pagewire_client.connect(server.url) as made:
        yield made


async def echo(client, text, **params):
    """The prompt comes back as the output; the deltas, and the result."""
    ids = (await client.generate(text, max_tokens=0).result()).usage.prompt
    stream = client.generate(text, max_tokens=ids, seed=ids, ignore_eos=True, temperature=0, **params)
    deltas = [chunk.text async for chunk in stream]
    return deltas, await stream.result()


async def test_f40_the_join_of_the_deltas_is_the_text(client):
    deltas, result = await echo(client, TEXT)
    assert "".join(deltas) == result.text == TEXT
    assert all("\ufffd" not in delta for delta in deltas)
    assert len(deltas) > 10
    many = await asyncio.gather(*(echo(client, TEXT[i:]) for i in range(0, len(TEXT), 3)))
    for i, (deltas, result) in zip(range(0, len(TEXT), 3), many, strict=True):
        assert "".join(deltas) == result.text == TEXT[i:]


async def test_f41_stop_strings_at_every_place(client):
    """Nothing of the stop is shown, nothing after it, and what is before it is not held back."""
    text = "one two three four five six seven eight"
    stops = [text[i : i + 5] for i in range(1, 30)]
    outcomes = await asyncio.gather(*(echo(client, text, stop=(stop, "never seen")) for stop in stops))
    for stop, (deltas, result) in zip(stops, outcomes, strict=True):
        assert "".join(deltas) == result.text == text[: text.find(stop)], stop
        assert (result.finish_reason, result.stop) == ("stop", stop)
    deltas, result = await echo(client, text, stop=("thr", "three", "th"))
    assert (result.text, result.stop) == ("one two ", "th")


@pytest.mark.parametrize("prompt", ["", [], {}])
async def test_f42_an_empty_prompt_is_refused_by_name(client, prompt):
    with pytest.raises(PagewireError) as caught:
        await client.generate(prompt, max_tokens=1).result()
    assert "prompt" in (caught.value.field or "")


@pytest.mark.parametrize("prompt", [" ", "    ", "\n", "<|im_end|>", "<|endoftext|>", "\x00", "\u200d"])
async def test_f42_prompts_of_nothing_much_are_served(client, prompt):
    result = await client.generate(prompt, max_tokens=2, ignore_eos=True).result()
    assert result.usage.prompt >= 1
    assert result.usage.completion == 2


async def test_f43_a_text_that_cannot_fit_is_refused_by_its_field(client):
    with pytest.raises(PromptTooLong) as caught:
        await client.generate("word " * 9000, max_tokens=1).result()
    assert caught.value.field == "prompt"
    with pytest.raises(PromptTooLong) as caught:
        await client.chat([{"role": "user", "content": "x" * 10_000_000}], max_tokens=1).result()
    assert caught.value.field == "messages"


async def test_f50_a_text_that_is_megabytes_holds_up_nobody(client):
    stream = client.generate("Once upon a time", max_tokens=2000, seed=1, ignore_eos=True)
    await anext(stream)
    long = [asyncio.create_task(client.generate("word " * 80_000, max_tokens=1).result()) for _ in range(4)]
    begun = time.monotonic()
    await anext(stream)
    assert time.monotonic() - begun < 1
    for outcome in await asyncio.gather(*long, return_exceptions=True):
        assert isinstance(outcome, PromptTooLong)
    await stream.aclose()


async def test_f45_what_a_template_cannot_take_is_refused_by_name(client):
    turns = [{"role": "user", "content": "hi"}]
    assert (await client.chat(turns, max_tokens=1).result()).usage.prompt > 3
    with pytest.raises(InvalidRequest) as caught:
        await client.chat(turns, max_tokens=1, template_kwargs={"tools": "x"}).result()
    assert caught.value.field == "template_kwargs.tools"
    with pytest.raises(InvalidRequest) as caught:
        await client.chat([], max_tokens=1).result()
    assert caught.value.field == "messages"


def with_template(folder, template):
    """A copy of a model folder whose chat template is this."""
    import json

    from tests.cli.test_serve import TINY
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    model = folder / "model"
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text(json.dumps({**TINY, "vocab_size": 256}))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return model


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "template"),
        ("{% for i in range(10**12) %}x{% endfor %}", "template"),
    ],
)
async def test_f45_f51_a_hostile_or_broken_template_ends_its_chat_and_nothing_else(template, says):
    with temporary_folder() as folder:
        model = with_template(folder, template)
        server = await Served.start(folder, "--load-format", "dummy", "--name", "vocab=256", model=str(model))
        try:
            async with pagewire_client.connect(await server.ready()) as client:
                with pytest.raises(PagewireError, match=says) as caught:
                    await asyncio.wait_for(client.chat([{"role": "user", "content": "hi"}], max_tokens=1).result(), 30)
                assert caught.value.code in ("invalid_request", "unsupported", "model", "internal", "overloaded")
                assert "Traceback" not in str(caught.value)
                _, result = await echo(client, "still here")
                assert result.text == "still here"
            assert await server.stop() == 0
        finally:
            await server.close()


async def test_f46_a_truncated_model_is_one_line_and_2():
    with temporary_folder() as folder:
        cut = folder / "cut.gguf"
        shutil.copy(MODEL, cut)
        with cut.open("r+b") as file:
            file.truncate(MODEL.stat().st_size // 3)
        server = await Served.start(folder, model=str(cut))
        try:
            assert await server.ended() == 2
        finally:
            await server.close()
        assert "cut.gguf" in server.lines[-1]
        assert "Traceback" not in "".join(server.lines)
