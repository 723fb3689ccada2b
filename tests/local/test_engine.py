"""The engine in this process: the client's face, the same results, nothing left behind."""

import asyncio
import inspect
import subprocess
import sys
import threading

import pytest
from echo import EOS, MAX_LEN, EchoEngine

from pagewire.errors import (
    ConfigError,
    EngineFailed,
    InternalError,
    InvalidRequest,
    ModelError,
    PromptTooLong,
    UnsupportedFeature,
)
from pagewire.local.engine import Engine
from pagewire_client.client import Client

TEXT = "Once upon a time"


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def nothing_left(engine):
    """No sequence, no block, no feed."""
    core = engine.core
    await until(lambda: core.num_live == 0 and core._launches.oldest is None)
    assert core.scheduler.memory.num_available == core.scheduler.memory.num_usable
    assert not engine._feeds._by_slot
    assert not engine._preparing


# ---- what comes out ----------------------------------------------------------------------------------------------------


async def test_chunks_and_result_agree(engine):
    stream = engine.generate(TEXT)
    chunks = [chunk async for chunk in stream]
    result = await stream.result()
    assert "".join(chunk.text for chunk in chunks) == result.text == TEXT
    assert [i for chunk in chunks for i in chunk.token_ids] == result.token_ids == [*TEXT.encode(), EOS]
    assert [chunk.index for chunk in chunks] == list(range(len(TEXT) + 1))
    assert (result.finish_reason, result.stop) == ("stop", EOS)
    assert (result.usage.prompt, result.usage.completion, result.usage.cached) == (16, 17, 0)
    assert result.request_id == stream.request_id
    assert result.seed == stream.seed
    times = result.timings
    assert 0 <= times.queue_ns <= times.ttft_ns <= times.total_ns
    assert 0 <= times.server.queue_ns <= times.server.first_token_ns <= times.server.total_ns
    await nothing_left(engine)


async def test_token_ids_in(engine):
    result = await engine.generate([72, 105], max_tokens=2).result()
    assert (result.text, result.token_ids, result.finish_reason) == ("Hi", [72, 105], "length")


async def test_text_that_takes_several_tokens_a_character(engine):
    text = "naïve 🦊 fox"
    stream = engine.generate(text)
    chunks = [chunk.text async for chunk in stream]
    assert "".join(chunks) == text
    assert "🦊" in chunks, "whole, not in parts"


async def test_a_cut_character_becomes_a_replacement_at_the_end(engine):
    result = await engine.generate("é", max_tokens=1).result()
    assert (result.text, result.token_ids) == ("\ufffd", [0xC3])


async def test_no_text_where_none_is_wanted(engine):
    stream = engine.generate(TEXT, echo_text=False)
    assert all(chunk.text == "" for chunk in [chunk async for chunk in stream])
    result = await stream.result()
    assert (result.text, len(result.token_ids)) == ("", 17)


async def test_forks(engine):
    result = await engine.generate(TEXT, n=3, seed=5).result()
    assert [choice.text for choice in result.choices] == [TEXT] * 3
    assert result.usage.completion == 3 * 17
    assert result.seed == 5
    await nothing_left(engine)


async def test_chunks_of_forks_name_their_choice(engine):
    texts = {0: "", 1: ""}
    async for chunk in engine.generate(TEXT, n=2):
        texts[chunk.choice] += chunk.text
    assert texts == {0: TEXT, 1: TEXT}


async def test_max_tokens_zero(engine):
    result = await engine.generate(TEXT, max_tokens=0).result()
    assert (result.text, result.token_ids, result.finish_reason) == ("", [], "length")
    assert result.timings.ttft_ns is None


async def test_logprobs(engine):
    stream = engine.generate("ab", logprobs=2, max_tokens=2)
    chunks = [chunk async for chunk in stream]
    result = await stream.result()
    assert [(p.logprob, p.top) for p in result.logprobs] == [
        (-97 / 8, ((98, -98 / 8), (99, -99 / 8))),
        (-98 / 8, ((99, -99 / 8), (100, -100 / 8))),
    ]
    assert [p for chunk in chunks for p in chunk.logprobs] == result.logprobs


async def test_logprobs_for_some_of_a_batch_only(engine):
    with_top, chosen_only, without = (
        engine.generate("abc", logprobs=1),
        engine.generate("xyz", logprobs=0),
        engine.generate("klm"),
    )
    assert [p.top[0][0] for p in (await with_top.result()).logprobs] == [98, 99, 100, 1]
    assert [p.logprob for p in (await chosen_only.result()).logprobs] == [-120 / 8, -121 / 8, -122 / 8, 0]
    assert (await without.result()).logprobs is None


async def test_prompt_logprobs_over_several_chunks():
    async with EchoEngine(max_step_tokens=16) as engine:
        prompt = [1 + i % 100 for i in range(50)]
        result = await engine.generate(prompt, prompt_logprobs=1, max_tokens=1).result()
        assert [p.logprob for p in result.prompt_logprobs] == [-t / 8 for t in prompt[1:]]
        assert [p.top[0][0] for p in result.prompt_logprobs] == [t + 1 for t in prompt[1:]]


# ---- stop strings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [" a", [" a"], ("zzz", " a", " a time")])
async def test_a_stop_string_over_several_tokens(engine, stop):
    stream = engine.generate(TEXT, stop=stop)
    chunks = [chunk.text async for chunk in stream]
    result = await stream.result()
    assert "".join(chunks) == result.text == "Once upon"
    assert (result.finish_reason, result.stop) == ("stop", " a")
    assert result.token_ids == list(b"Once upon a")
    assert result.usage.completion == len(b"Once upon a")
    await nothing_left(engine)


async def test_what_is_held_back_for_a_stop_comes_at_the_end(engine):
    result = await engine.generate("abcab", stop="abx").result()
    assert (result.text, result.stop) == ("abcab", EOS)


async def test_a_stop_string_ends_one_of_several_choices_and_cuts_its_logprobs(slow):
    result = await slow.generate(TEXT, n=2, stop="upon", logprobs=0).result()
    for choice in result.choices:
        assert choice.text == "Once "
        assert len(choice.logprobs) == len(choice.token_ids) == 9
    await until(lambda: slow.core.num_live == 0)
    assert slow.core.stats()["sequences_stop_total"] == 2


async def test_a_stop_string_without_a_tokenizer_is_refused():
    async with EchoEngine(has_text=False) as engine:
        with pytest.raises(UnsupportedFeature) as caught:
            engine.generate([1, 2], stop="x")
        assert caught.value.field == "stop"
        with pytest.raises(UnsupportedFeature) as caught:
            await engine.generate("text").result()
        assert caught.value.field == "prompt"
        assert (await engine.generate([72], max_tokens=1).result()).token_ids == [72]


async def test_the_caller_may_find_stops_itself(slow):
    stream = slow.generate(TEXT)
    async for chunk in stream:
        if chunk.index == 3:
            stream.finish(2)
            break
    result = await stream.result()
    assert (result.token_ids, result.finish_reason) == ([*b"On"], "stop")


# ---- chat --------------------------------------------------------------------------------------------------------------


async def test_chat(engine):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    result = await engine.chat(turns, template_kwargs={"tools": None}, max_tokens=100).result()
    assert result.text == "system:Be brief.|user:Hi"
    assert engine.bytes.chats == [(turns, {"tools": None})]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "x", "color": "red"}], "messages[0].color"),
        (["hi"], "messages[0]"),
    ],
)
async def test_messages_that_are_none_are_refused_by_field(engine, messages, field):
    with pytest.raises(InvalidRequest) as caught:
        engine.chat(messages)
    assert caught.value.field == field


# ---- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"priority": 1000}, "priority"),
    ],
)
async def test_bad_arguments_are_raised_at_once_by_field(engine, params, field):
    with pytest.raises(InvalidRequest) as caught:
        engine.generate(TEXT, **params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "field"),
    [
        (TEXT, {"max_tokens": MAX_LEN}, InvalidRequest, "max_tokens"),
        (TEXT, {"stop_token_ids": [300]}, InvalidRequest, "stop_token_ids[0]"),
        ("x" * MAX_LEN, {}, PromptTooLong, "prompt"),
        ([1] * MAX_LEN, {}, PromptTooLong, "prompt_ids"),
        ([], {}, InvalidRequest, "prompt_ids"),
        ([256], {}, InvalidRequest, "prompt_ids[0]"),
        ("", {}, InvalidRequest, "prompt"),
    ],
)
async def test_what_only_the_model_knows_is_raised_by_the_stream(engine, prompt, params, kind, field):
    stream = engine.generate(prompt, **params)
    with pytest.raises(kind) as caught:
        await stream.result()
    assert caught.value.field == field
    with pytest.raises(kind):
        async for _ in stream:
            pass
    await nothing_left(engine)


async def test_a_prompt_that_is_no_list_of_ids(engine):
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([1, -2])
    assert caught.value.field == "prompt_ids"


# ---- leaving -----------------------------------------------------------------------------------------------------------


async def test_leaving_the_loop_cancels(slow):
    async for _ in slow.generate("x" * 100):
        break
    await nothing_left(slow)
    assert slow.core.stats()["sequences_cancelled_total"] == 1
    assert slow.echo.num_steps < 20


async def test_dropping_the_stream_cancels(slow):
    slow.generate("x" * 100)
    await until(lambda: slow.core.stats()["sequences_cancelled_total"] == 1 or not slow._preparing)
    await nothing_left(slow)


async def test_a_cancelled_stream_has_a_result(slow):
    stream = slow.generate("x" * 100)
    await anext(stream)
    stream.cancel()
    stream.cancel()
    result = await stream.result()
    assert result.finish_reason == "cancelled"
    assert 0 < len(result.token_ids) < 100
    assert result.text == "x" * len(result.token_ids)
    await nothing_left(slow)


async def test_cancelling_the_waiting_task_cancels(slow):
    task = asyncio.create_task(slow.generate("x" * 100).result())
    await until(lambda: slow.core.num_live == 1)
    task.cancel()
    await asyncio.wait([task])
    await nothing_left(slow)


async def test_cancelled_while_its_prompt_is_prepared(engine):
    gate = threading.Event()
    engine.bytes.before_encode = lambda text: gate.wait(5)
    try:
        stream = engine.generate(TEXT)
        await asyncio.sleep(0.01)
        stream.cancel()
        result = await stream.result()
    finally:
        gate.set()
    assert (result.finish_reason, result.token_ids) == ("cancelled", [])
    assert engine.core.stats()["requests_total"] == 0
    await nothing_left(engine)


async def test_closing_ends_open_streams():
    async with EchoEngine(delay_s=0.002) as engine:
        running = engine.generate("x" * 100)
        await anext(running)
    assert (await running.result()).finish_reason == "cancelled"
    with pytest.raises(EngineFailed, match="not running"):
        engine.generate(TEXT)
    await engine.close()


async def test_closing_while_a_prompt_is_prepared():
    gate = threading.Event()
    async with EchoEngine() as engine:
        engine.bytes.before_encode = lambda text: gate.wait(5)
        stream = engine.generate(TEXT)
        await asyncio.sleep(0.01)
    gate.set()
    assert (await stream.result()).finish_reason == "cancelled"


# ---- faults ------------------------------------------------------------------------------------------------------------


async def test_f7_a_fault_in_making_text_ends_that_stream_alone(slow):
    good, bad = slow.generate("good " * 10), slow.generate("bad " * 10, n=2)
    await until(lambda: len(slow._feeds._by_slot) == 3)
    feed = next(feed for feed, _ in slow._feeds._by_slot.values() if len(feed.sequences) == 2)

    def broken(ids):
        raise ZeroDivisionError("planted")

    feed.texts[1] = type("Broken", (), {"push": staticmethod(broken)})()
    with pytest.raises(InternalError, match="planted"):
        await bad.result()
    assert (await good.result()).text == "good " * 10
    await nothing_left(slow)
    assert slow.health.ready


async def test_f7_a_fault_in_preparing_ends_that_stream_alone(engine):
    def broken(text):
        if text == "bad":
            raise ZeroDivisionError("planted")

    engine.bytes.before_encode = broken
    bad, good = engine.generate("bad"), engine.generate("good")
    with pytest.raises(InternalError, match="planted"):
        await bad.result()
    assert (await good.result()).text == "good"


async def test_a_fault_of_the_worker_reaches_every_stream(slow):
    streams = [slow.generate("x" * 100) for _ in range(3)]
    await anext(streams[0])
    slow.echo.fault = RuntimeError("device lost")
    for stream in streams:
        with pytest.raises(EngineFailed, match="device lost"):
            await stream.result()
    assert not slow.health.ready
    late = slow.generate(TEXT)
    with pytest.raises(EngineFailed, match="device lost"):
        await late.result()


async def test_a_model_that_cannot_be_loaded_leaves_nothing(tmp_path):
    engine = Engine(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="missing"):
        await engine.start()
    assert not engine.health.ready
    await engine.close()


# ---- many --------------------------------------------------------------------------------------------------------------


async def test_more_streams_than_rows(engine):
    streams = [engine.generate(f"prompt {i}") for i in range(100)]
    results = await asyncio.gather(*(stream.result() for stream in streams))
    assert [result.text for result in results] == [f"prompt {i}" for i in range(100)]
    stats = await engine.stats()
    assert stats["requests_total"] == 100
    await nothing_left(engine)


async def test_prefix_cache_is_shared_inside_a_namespace_only(engine):
    prompt = [1 + i % 90 for i in range(64)]
    for namespace, cached in (("a", 0), ("a", 48), ("b", 0), ("", 0), ("b", 48)):
        result = await engine.generate(prompt, namespace=namespace, max_tokens=1).result()
        assert result.usage.cached == cached, namespace


# ---- the face ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["generate", "chat"])
def test_the_face_is_the_clients(method):
    ours, theirs = inspect.signature(getattr(Engine, method)), inspect.signature(getattr(Client, method))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_importing_pagewire_is_light():
    code = (
        "import sys, pagewire\n"
        "heavy = {'torch', 'numpy', 'zmq', 'asyncio', 'msgspec'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
        "shown = {name for name in dir(pagewire) if not name.startswith('__')}\n"
        "assert {'Engine', 'LLM', 'Config'} <= shown, shown\n"
        "assert not {'Any', 'Final', 'importlib', 'sys', 'spin_briefly', '_LAZY'} & shown, shown\n"
        "from pagewire import Config\n"
        "assert Config().scheduler.overlap\n"
        "assert 'torch' not in sys.modules\n"
        "try: pagewire.Nothing\n"
        "except AttributeError as error: assert 'Nothing' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_second_start_is_a_mistake_of_the_caller():
    async def twice():
        async with EchoEngine() as engine:
            with pytest.raises(AssertionError):
                await engine.start()

    asyncio.run(twice())


def test_options_reach_the_configuration():
    engine = EchoEngine(deterministic=True, block_size=32)
    assert engine.config.engine.deterministic
    assert engine.config.cache.block_size == 32
    assert engine.config.scheduler.max_rows == 8
    with pytest.raises(ConfigError):
        Engine()


async def test_a_text_that_is_far_too_long_is_refused_before_it_is_read(engine):
    """F50: encoding takes 250 bytes of memory a token."""
    read = []
    engine.bytes.before_encode = read.append
    with pytest.raises(PromptTooLong) as caught:
        await engine.generate("x" * (MAX_LEN + 1)).result()
    assert caught.value.field == "prompt"
    with pytest.raises(PromptTooLong) as caught:
        await engine.chat([{"role": "user", "content": "x" * MAX_LEN}, {"role": "user", "content": "x"}]).result()
    assert caught.value.field == "messages"
    assert (read, engine.bytes.chats) == ([], [])
    await nothing_left(engine)


@pytest.mark.parametrize("on_lag", ["coalesce", "pause", "cancel"])
async def test_nothing_lags_in_one_process(on_lag):
    async with EchoEngine() as engine:
        stream = engine.generate([1, 2, 3], max_tokens=3, on_lag=on_lag)
        await asyncio.sleep(0.05)
        assert (await stream.result()).usage.completion == 3
        with pytest.raises(InvalidRequest) as refused:
            engine.generate([1], on_lag="wait")
        assert refused.value.field == "on_lag"
