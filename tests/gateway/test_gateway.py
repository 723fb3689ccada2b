"""The gateway's core: numbers, text, stops, cancels, slow readers, faults, shutdown."""

from __future__ import annotations

import asyncio
import re
import threading
from array import array
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from tests.gateway.bench import BYTES, WELCOME, accepted, done, ids_of, logprob_columns, tokens

from pagewire.errors import Draining, EngineFailed, InvalidRequest, Overloaded
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    Done,
    Error,
    Finish,
    Finished,
    Generate,
    GetStats,
    LogprobColumns,
    PromptLogprobs,
    Stats,
    Tokens,
)
from pagewire_transport.params import SamplingParams


async def test_a_prompt_becomes_ids_and_tokens_become_text(bench):
    bench.client("a", Generate(stream=7, prompt="grüß", priority=3, namespace="t"))
    await bench.settle()
    (asked,) = bench.to_engine(Generate)
    assert array("I", asked.prompt_ids).tolist() == ids_of("grüß")
    assert (asked.prompt, asked.priority, asked.namespace) == (None, 3, "t")
    number = asked.stream
    euro = ids_of("a€")
    bench.from_engine(
        accepted(number), tokens((number, 0, 0, euro[:2])), tokens((number, 0, 2, euro[2:])), done(number, 4)
    )
    assert [type(message) for message in bench.sent["a"]] == [Accepted, Tokens, Tokens, Done]
    assert [message.texts for message in bench.of(Tokens)] == [("a",), ("€",)]
    assert {message.stream for message in bench.sent["a"] if not isinstance(message, Tokens)} == {7}
    assert bench.of(Done)[0].usage.cached == 2
    assert bench.gateway.num_streams == 0


async def test_messages_go_through_the_template(bench):
    turns = (ChatMessage(role="system", content="s"), ChatMessage(role="user", content="u"))
    bench.client("a", Generate(stream=0, messages=turns))
    await bench.settle()
    assert array("I", bench.to_engine(Generate)[0].prompt_ids).tolist() == ids_of("s|u")


async def test_a_stop_string_cuts_the_stream_where_it_stands(bench):
    """F41: nothing after the stop, nothing of it, usage counts the tokens up to it; the engine is told."""
    number = bench.start(params={"stop": ("END",)})
    assert bench.to_engine(Generate)[0].params.stop == ()
    bench.from_engine(tokens((number, 0, 0, ids_of("one E"))), tokens((number, 0, 5, ids_of("ND two"))))
    assert bench.to_engine(Finish) == [Finish(stream=number, choice=0, at=7)]
    # More of it was under way, and the engine's own end comes too late.
    bench.from_engine(
        tokens((number, 0, 11, ids_of(" three"))),
        Finished(stream=number, reason="length", num_tokens=17),
        done(number, 17),
    )
    assert bench.text() == "one "
    assert bench.of(Finished) == [Finished(stream=7, reason="stop", num_tokens=7, stop="END")]
    assert b"".join(message.ids for message in bench.of(Tokens)) == array("I", ids_of("one END")).tobytes()
    assert bench.of(Done)[0].usage.completion == 7


async def test_what_cannot_become_a_stop_any_more_is_given_at_the_end(bench):
    number = bench.start(params={"stop": ("END",)})
    bench.from_engine(
        tokens((number, 0, 0, ids_of("the EN"))),
        Finished(stream=number, reason="length", num_tokens=6),
        done(number, 6),
    )
    assert bench.text() == "the EN"
    assert bench.of(Finished)[0].reason == "length"


async def test_choices_have_texts_and_stops_of_their_own(bench):
    number = bench.start(params={"n": 2, "stop": ("x",)})
    bench.from_engine(tokens((number, 0, 0, ids_of("ax")), (number, 1, 0, ids_of("bb"))))
    bench.from_engine(tokens((number, 1, 2, ids_of("cc"))))
    bench.from_engine(
        Finished(stream=number, choice=0, reason="stop", num_tokens=2),
        Finished(stream=number, choice=1, reason="length", num_tokens=4),
        done(number, 6),
    )
    assert (bench.text(choice=0), bench.text(choice=1)) == ("a", "bbcc")
    assert [(m.choice, m.reason, m.stop) for m in bench.of(Finished)] == [(0, "stop", "x"), (1, "length", None)]


async def test_one_message_to_a_client_for_one_of_the_engine(bench):
    numbers = [bench.start(peer, stream) for peer in "ab" for stream in (1, 2, 3)]
    before = {peer: len(bench.sent[peer]) for peer in "ab"}
    bench.from_engine(tokens(*((number, 0, 0, ids_of("x")) for number in numbers)))
    for peer in "ab":
        (message,) = bench.sent[peer][before[peer] :]
        assert array("I", message.streams).tolist() == [1, 2, 3]
        assert message.counts == message.choices == b""
        assert message.texts == ("x", "x", "x")


async def test_without_text_the_client_gets_ids_and_may_finish_by_itself(bench):
    number = bench.start(echo_text=False)
    bench.from_engine(tokens((number, 0, 0, ids_of("abc"))))
    assert bench.of(Tokens)[0].texts == ()
    bench.client("a", Finish(stream=7, at=2))
    assert bench.to_engine(Finish) == [Finish(stream=number, at=2)]
    bench.from_engine(Finished(stream=number, reason="stop", num_tokens=2), done(number, 2))
    assert bench.of(Done)[0].usage.completion == 2


async def test_stops_are_found_for_a_client_that_wants_no_text(bench):
    number = bench.start(echo_text=False, params={"stop": ("b",)})
    bench.from_engine(tokens((number, 0, 0, ids_of("abc"))))
    assert bench.text() == ""
    assert bench.of(Finished)[0].stop == "b"


async def test_logprobs_stay_with_their_tokens(bench):
    first, second = bench.start(stream=1), bench.start(stream=2, params={"stop": ("c",)})
    columns = LogprobColumns(
        entries=array("I", [1]).tobytes(),
        top=bytes([2]),
        chosen=array("f", [-1, -2, -3]).tobytes(),
        top_ids=array("I", range(6)).tobytes(),
        top_logprobs=array("f", range(6)).tobytes(),
    )
    bench.from_engine(tokens((first, 0, 0, ids_of("x")), (second, 0, 0, ids_of("bcd")), logprobs=columns))
    (message,) = bench.of(Tokens)
    assert array("H", message.counts).tolist() == [1, 2]
    assert array("I", message.logprobs.entries).tolist() == [1]
    assert array("f", message.logprobs.chosen).tolist() == [-1, -2]
    assert array("I", message.logprobs.top_ids).tolist() == [0, 1, 2, 3]


async def test_prompt_logprobs_come_before_the_first_token(bench):
    number = bench.start()
    bench.deafen("a")
    bench.from_engine(PromptLogprobs(stream=number, top=0, chosen=b"abcd"), tokens((number, 0, 0, ids_of("x"))))
    bench.listen("a")
    assert [type(message) for message in bench.sent["a"]] == [Accepted, PromptLogprobs, Tokens]
    assert bench.of(PromptLogprobs)[0].stream == 7


# ---- cancel ----------------------------------------------------------------------------------------------------------


async def test_cancel_goes_to_the_engine_and_its_answer_to_the_client(bench):
    number = bench.start()
    bench.client("a", Cancel(stream=7))
    assert bench.to_engine(Cancel) == [Cancel(stream=number)]
    bench.from_engine(Finished(stream=number, reason="cancelled", num_tokens=0), done(number))
    assert [type(message) for message in bench.sent["a"]] == [Accepted, Finished, Done]


async def test_cancel_while_the_prompt_is_prepared_never_reaches_the_engine(make_bench):
    gate = threading.Event()
    bench = make_bench(encode=lambda text: gate.wait(5) and ids_of(text))
    bench.client("a", Generate(stream=7, prompt="x", params=SamplingParams(n=2)))
    bench.client("a", Cancel(stream=7))
    assert [type(message) for message in bench.sent["a"]] == [Finished, Finished, Done]
    gate.set()
    await bench.settle()
    assert bench.engine == []
    assert bench.gateway.num_streams == 0


@pytest.mark.parametrize("state", ["preparing", "queued", "streaming", "stopped", "blocked"])
async def test_a_lost_client_is_cancelled_in_every_state(make_bench, state):
    gate = threading.Event()
    bench = make_bench(encode=lambda text: gate.wait(5) and ids_of(text))
    if state == "preparing":
        bench.client("a", Generate(stream=7, prompt="x"))
    else:
        number = bench.start(params={"stop": ("!",)})
    if state == "blocked":
        bench.deafen("a")
    if state in ("streaming", "blocked"):
        bench.from_engine(tokens((number, 0, 0, ids_of("abc"))))
    if state == "stopped":
        bench.from_engine(tokens((number, 0, 0, ids_of("ab!"))))
    bench.lose("a")
    bench.lose("a")
    gate.set()
    await bench.settle()
    assert bench.to_engine(Cancel) == ([] if state == "preparing" else [Cancel(stream=number)])
    if state != "preparing":
        told = len(bench.sent["a"])
        bench.from_engine(
            tokens((number, 0, 3, ids_of("def"))), Finished(stream=number, reason="cancelled", num_tokens=6)
        )
        bench.from_engine(done(number))
        assert len(bench.sent["a"]) == told
    assert bench.gateway.num_streams == 0
    assert len(bench.gateway._upstream) == 0
    assert not bench.gateway.has_news


# ---- slow readers ----------------------------------------------------------------------------------------------------


async def test_a_slow_reader_lags_by_text_not_by_messages_and_disturbs_nobody(bench):
    """F18: what waits for it is one run and one text a stream, however many messages the engine sent."""
    slow, quick = bench.start("slow"), bench.start("quick")
    bench.deafen("slow")
    for step in range(1000):
        bench.from_engine(tokens((slow, 0, step, ids_of("s")), (quick, 0, step, ids_of("q"))))
    assert bench.text("quick") == "q" * 1000
    assert len(bench.connections["slow"].kept) <= 1
    bench.listen("slow")
    assert bench.text("slow") == "s" * 1000
    assert len(bench.of(Tokens, "slow")) == 2
    assert array("I", bench.of(Tokens, "slow")[1].starts).tolist() == [1]
    assert not bench.gateway.has_news


async def test_a_lag_longer_than_a_count_can_say_is_cut_into_runs(bench):
    number = bench.start()
    bench.deafen("a")
    bench.from_engine(tokens((number, 0, 0, ids_of("x"))))
    for start in range(1, 150_001, 50_000):
        bench.from_engine(tokens((number, 0, start, ids_of("y" * 50_000))))
    bench.listen("a")
    await bench.caught_up("a")
    counts = [count for message in bench.of(Tokens)[1:] for count in array("H", message.counts)]
    assert len(counts) == 3  # each ends where a piece of what the engine sent does, of which text was made at once
    assert max(counts) <= 65_535
    assert sum(counts) == 150_000
    assert bench.text() == "x" + "y" * 150_000


async def test_a_reader_that_is_owed_much_gets_it_turn_by_turn_beside_others(bench):
    """F18, F27: n × alternatives × tokens that waited are no one turn's work, and nobody waits for them."""
    slow, quick = bench.start("slow", params={"n": 4, "logprobs": 20}), bench.start("quick")
    bench.deafen("slow")
    for step in range(0, 10_000, 1000):
        entries = [(slow, choice, step, [97 + choice] * 1000) for choice in range(4)]
        bench.from_engine(tokens(*entries, logprobs=logprob_columns(4000, 20, entries=4)))
    bench.from_engine(*(Finished(stream=slow, choice=c, reason="length", num_tokens=10_000) for c in range(4)))
    bench.from_engine(done(slow, 40_000))
    bench.listen("slow")
    turns = 0
    while bench.gateway.num_streams > 1:
        bench.from_engine(tokens((quick, 0, turns, ids_of("q"))))
        turns += 1
        assert len(bench.text("quick")) == turns, "a token of another reader comes in the turn in which it was made"
        await asyncio.sleep(0)
    messages = bench.of(Tokens, "slow")
    assert 10 < len(messages) <= turns + 2
    for message in messages:
        assert len(message.logprobs.top_ids) // 4 <= 65_536
        assert len(message.logprobs.chosen) == len(message.ids)
    assert [bench.text("slow", choice=c) for c in range(4)] == [chr(97 + c) * 10_000 for c in range(4)]
    assert len(bench.of(Finished, "slow")) == 4
    assert isinstance(bench.sent["slow"][-1], Done)


async def test_many_that_are_owed_much_share_a_turn(bench):
    numbers = [bench.start(peer, params={"logprobs": 20}) for peer in range(40)]
    for peer in range(40):
        bench.deafen(peer)
    for number in numbers:
        bench.from_engine(tokens((number, 0, 0, [97] * 4000), logprobs=logprob_columns(4000, 20)))
    for peer in range(40):
        bench.listen(peer)
    while bench.gateway.has_news:
        before = [len(bench.of(Tokens, peer)) for peer in range(40)]
        await asyncio.sleep(0)
        new = [message for peer in range(40) for message in bench.of(Tokens, peer)[before[peer] :]]
        assert sum(21 * len(message.ids) // 4 for message in new) <= 8192 * 32 + 21
        bench.gateway.check_invariants()
    assert all(bench.text(peer) == "a" * 4000 for peer in range(40))


async def test_a_reader_that_leaves_while_it_is_owed_much_is_forgotten(bench):
    number = bench.start(params={"logprobs": 20})
    bench.deafen("a")
    for start in (0, 30_000):
        bench.from_engine(tokens((number, 0, start, [97] * 30_000), logprobs=logprob_columns(30_000, 20)))
    bench.listen("a")
    bench.lose("a")
    num_sent = len(bench.sent["a"])
    await asyncio.sleep(0.01)
    assert len(bench.sent["a"]) == num_sent
    bench.gateway.check_invariants()


async def test_an_end_waits_for_the_tokens_before_it(bench):
    number = bench.start()
    bench.deafen("a")
    bench.from_engine(
        tokens((number, 0, 0, ids_of("ab"))), Finished(stream=number, reason="length", num_tokens=2), done(number, 2)
    )
    assert len(bench.gateway._upstream) == 0
    bench.listen("a")
    assert [type(message) for message in bench.sent["a"]] == [Accepted, Tokens, Finished, Done]
    assert bench.gateway.num_streams == 0


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt_ids": b""}, "prompt_ids"),
        ({"messages": ()}, "messages"),
        ({}, "prompt"),
        ({"prompt": "a", "prompt_ids": b"abcd"}, "prompt_ids"),
    ],
)
async def test_a_prompt_must_be_given_once_and_hold_something(bench, fields, field):
    bench.client("a", Generate(stream=7, **fields))
    (error,) = bench.sent["a"]
    assert (error.code, error.field, error.stream) == ("invalid_request", field, 7)
    assert bench.engine == []


async def test_a_prompt_of_no_tokens_is_refused(make_bench):
    bench = make_bench(encode=lambda _: [])
    bench.client("a", Generate(stream=7, prompt="\u200b"))
    await bench.settle()
    assert [(m.code, m.field, m.stream) for m in bench.sent["a"]] == [("invalid_request", "prompt", 7)]


async def test_a_number_in_use_is_refused_without_harm_to_its_stream(bench):
    number = bench.start()
    bench.client("a", Generate(stream=7, prompt_ids=b"abcd"))
    assert [(m.code, m.field, m.stream) for m in bench.of(Error)] == [("invalid_request", "stream", None)]
    bench.from_engine(tokens((number, 0, 0, ids_of("ok"))))
    assert bench.text() == "ok"


async def test_streams_of_others_cannot_be_touched(bench):
    bench.start("a")
    bench.client("b", Cancel(stream=7))
    bench.client("b", Finish(stream=7, at=1))
    assert [m.code for m in bench.of(Error, "b")] == ["unknown_stream"] * 2
    assert len(bench.engine) == 1


async def test_streams_of_a_connection_are_capped(bench):
    for stream in range(4):
        bench.start(stream=stream)
    bench.client("a", Generate(stream=4, prompt_ids=b"abcd"))
    (error,) = bench.of(Error)
    assert (error.code, error.stream) == ("overloaded", 4)
    assert error.retry_after_ms


async def test_prompts_that_wait_are_capped(make_bench):
    gate = threading.Event()
    bench = make_bench(encode=lambda text: gate.wait(5) and ids_of(text), num_threads=1, max_waiting=2)
    for stream in range(3):
        bench.client("a", Generate(stream=stream, prompt="x"))
    gate.set()
    await bench.settle()
    assert [(m.code, m.stream) for m in bench.of(Error)] == [("overloaded", 2)]
    bench.client("b", Generate(stream=1, prompt="x"))
    await bench.settle()
    assert bench.of(Error, "b") == []


async def test_a_text_that_no_tokens_make_short_enough_is_refused_unread(make_bench):
    """F50: encoding takes many times a text's memory."""
    bench = make_bench(max_chars=lambda: 10)
    bench.client("a", Generate(stream=1, prompt="x" * 11))
    bench.client("a", Generate(stream=2, messages=(ChatMessage(role="user", content="x" * 6),) * 2))
    bench.client("a", Generate(stream=3, prompt="x" * 10))
    await bench.settle()
    assert [(m.code, m.stream, m.field) for m in bench.of(Error)] == [
        ("prompt_too_long", 1, "prompt"),
        ("prompt_too_long", 2, "messages"),
    ]
    assert len(bench.to_engine(Generate)) == 1


@pytest.mark.parametrize("limit", [{"max_model_len": 5}, {"max_message_bytes": 16_384 + 5 * 4}])
async def test_ids_that_the_engines_door_would_not_take_stay_here(make_bench, limit):
    bench = make_bench()
    bench.gateway.engine_ready(msgspec.structs.replace(WELCOME, **limit))
    bench.client("a", Generate(stream=1, prompt="123456"))
    bench.client("a", Generate(stream=2, prompt_ids=bytes(4 * 5 + 1)))
    bench.client("a", Generate(stream=3, prompt_ids=bytes(4 * 5)))
    await bench.settle()
    assert sorted((m.code, m.stream, m.field) for m in bench.of(Error)) == [
        ("prompt_too_long", 1, "prompt"),
        ("prompt_too_long", 2, "prompt_ids"),
    ]
    assert len(bench.to_engine(Generate)) == 1


async def test_an_engine_that_answers_again_is_asked_again(bench):
    bench.gateway.engine_lost(EngineFailed("silent"))
    bench.client("a", Generate(stream=1, prompt_ids=b"abcd"))
    assert bench.of(Error)[0].code == "unavailable"
    bench.gateway.engine_ready(WELCOME)
    assert bench.gateway.is_ready
    bench.client("a", Generate(stream=2, prompt_ids=b"abcd"))
    assert len(bench.to_engine(Generate)) == 1


async def test_a_prompt_that_is_ready_at_once_waits_no_more(make_bench, monkeypatch):
    """A thread that is quicker than the loop leaves nothing behind in the count of those that wait."""

    def submit(call, *arguments):
        future = Future()
        future.set_result(call(*arguments))
        return future

    bench = make_bench(max_waiting=1)
    monkeypatch.setattr(bench.preparation._pool, "submit", submit)
    for stream in range(3):
        bench.client("a", Generate(stream=stream, prompt="x"))
        await bench.settle()
    assert len(bench.to_engine(Generate)) == 3


async def test_the_engines_refusals_pass_with_code_and_field(bench):
    number = bench.start()
    bench.from_engine(Error(code="overloaded", message="full", stream=number, field="f", retry_after_ms=9))
    assert bench.of(Error) == [Error(code="overloaded", message="full", stream=7, field="f", retry_after_ms=9)]
    assert bench.gateway.num_streams == 0


async def test_wanted_times_and_shares_reach_the_engine(bench):
    for peer, stream, namespace in (("a", 1, ""), ("a", 2, ""), ("b", 3, ""), ("b", 4, "tenant")):
        bench.client(
            peer, Generate(stream=stream, prompt_ids=b"\1\0\0\0", ttft_ms=250.0, itl_ms=12.0, namespace=namespace)
        )
    first, second, third, fourth = bench.to_engine(Generate)
    assert (first.ttft_ms, first.itl_ms, first.deadline_ms) == (250, 12, None)
    assert first.client == second.client != third.client
    assert fourth.client == "tenant"
    bench.client("a", Generate(stream=9, prompt_ids=b"\1\0\0\0", client="somebody else"))
    assert [(m.code, m.stream) for m in bench.of(Error)] == [("unsupported", 9)]
    refused = Error(code="overloaded", message="late", stream=first.stream, retry_after_ms=9, predicted_ttft_ms=99)
    bench.from_engine(refused)
    assert bench.of(Error)[-1].predicted_ttft_ms == 99


async def test_a_complaint_about_the_ids_is_about_the_prompt_that_was_sent(bench):
    bench.client("a", Generate(stream=7, prompt="long"))
    await bench.settle()
    bench.from_engine(Error(code="prompt_too_long", message="m", stream=bench.engine[-1].stream, field="prompt_ids"))
    assert bench.of(Error)[0].field == "prompt"


# ---- faults ----------------------------------------------------------------------------------------------------------


async def test_a_fault_in_one_streams_text_ends_that_stream_only(bench):
    """F7."""

    class Broken(TextStream):
        def push(self, token_ids):
            raise RuntimeError("planted")

    bench.make_text = lambda stops: Broken(BYTES)
    broken = bench.start("a", 1)
    bench.make_text = lambda stops: TextStream(BYTES)
    whole = bench.start("a", 2)
    bench.from_engine(tokens((broken, 0, 0, ids_of("x")), (whole, 0, 0, ids_of("fine"))))
    assert [(m.code, m.stream) for m in bench.of(Error)] == [("internal", 1)]
    assert bench.to_engine(Cancel) == [Cancel(stream=broken)]
    assert bench.text(stream=2) == "fine"


@pytest.mark.parametrize(
    ("raised", "code"),
    [(RuntimeError("planted"), "internal"), (InvalidRequest("no", field="messages"), "invalid_request")],
)
async def test_a_fault_in_preparing_ends_that_stream_only(make_bench, raised, code):
    def encode(text):
        if text == "bad":
            raise raised
        return ids_of(text)

    bench = make_bench(encode=encode)
    bench.client("a", Generate(stream=1, prompt="bad"))
    bench.client("a", Generate(stream=2, prompt="good"))
    await bench.settle()
    assert [(m.code, m.stream) for m in bench.of(Error)] == [(code, 1)]
    assert len(bench.to_engine(Generate)) == 1


async def test_tokens_that_do_not_follow_are_an_error_not_a_garbled_text(bench):
    """F26."""
    number = bench.start()
    bench.from_engine(tokens((number, 0, 0, ids_of("ab"))), tokens((number, 0, 3, ids_of("d"))))
    assert [m.code for m in bench.of(Error)] == ["internal"]


async def test_a_lost_engine_is_told_to_every_stream_and_to_those_that_come(make_bench):
    bench = make_bench(server={"replay_timeout_ms": 0})
    bench.start("a", 1)
    bench.start("b", 2)
    bench.gateway.engine_lost(EngineFailed("the engine is gone"))
    bench.gateway.check_invariants()
    assert [(m.code, m.stream) for m in bench.of(Error, "a")] == [("engine_failed", 1)]
    assert [(m.code, m.stream) for m in bench.of(Error, "b")] == [("engine_failed", 2)]
    assert not bench.gateway.is_ready
    bench.client("a", Generate(stream=3, prompt="x"))
    assert bench.of(Error, "a")[-1].code == "unavailable"
    assert bench.gateway.num_streams == 0


async def test_draining_lets_streams_end_and_refuses_new_ones(bench):
    """F20."""
    number = bench.start()
    bench.gateway.drain()
    bench.client("a", Generate(stream=8, prompt_ids=b"abcd"))
    assert [(m.code, m.stream) for m in bench.of(Error)] == [("draining", 8)]
    bench.from_engine(tokens((number, 0, 0, ids_of("x"))), done(number, 1))
    assert bench.text() == "x"
    assert bench.of(Done)
    assert bench.gateway.num_streams == 0


async def test_a_number_may_be_used_again_after_its_end(bench):
    bench.from_engine(done(bench.start()))
    second = bench.start()
    bench.from_engine(tokens((second, 0, 0, ids_of("again"))))
    assert bench.text() == "again"


async def test_a_client_is_welcomed_with_this_doors_limits_and_refused_while_draining(bench):
    welcome = bench.gateway.welcome()
    assert (welcome.role, welcome.model, welcome.vocab_size, welcome.max_streams) == ("gateway", "bytes", 256, 4)
    bench.gateway.drain()
    with pytest.raises(Draining):
        bench.gateway.welcome()


async def test_stats_are_the_engines_and_our_own(bench):
    bench.start()
    bench.gateway.ask_stats()
    assert bench.to_engine(GetStats) == [GetStats()]
    bench.from_engine(Stats(values={"steps_total": 5.0}))
    stats = bench.gateway.stats()
    assert (stats["steps_total"], stats["gateway_streams"], stats["gateway_requests_total"]) == (5.0, 1, 1)


async def test_ready_means_that_the_engine_says_that_tokens_move(bench):
    assert bench.gateway.is_ready
    bench.engine_moves = False
    assert not bench.gateway.is_ready


async def test_streams_that_outlast_the_drain_are_told(bench):
    bench.start()
    bench.gateway.drain()
    bench.gateway.end_draining()
    assert [(m.code, m.stream) for m in bench.of(Error)] == [("draining", 7)]
    assert bench.gateway.num_streams == 0
    assert not bench.gateway.has_news


async def test_a_model_without_text_serves_ids_and_refuses_stop_strings(bench):
    bench.gateway._text_stream = None
    number = bench.start(stream=1)
    bench.from_engine(tokens((number, 0, 0, ids_of("x"))))
    assert bench.of(Tokens)[0].texts == ()
    bench.client("a", Generate(stream=2, prompt_ids=b"abcd", params=SamplingParams(stop=("x",))))
    assert [(m.code, m.field) for m in bench.of(Error)] == [("unsupported", "params.stop")]


async def test_a_link_that_takes_nothing_is_told_to_the_stream_that_needs_it(bench, monkeypatch):
    def full(message):
        raise Overloaded("the engine takes no messages now", retry_after_ms=5)

    monkeypatch.setattr(bench.gateway._upstream, "_send", full)
    bench.client("a", Generate(stream=7, prompt_ids=b"abcd"))
    assert [(m.code, m.stream, m.retry_after_ms) for m in bench.of(Error)] == [("overloaded", 7, 5)]
    assert bench.gateway.num_streams == len(bench.gateway._upstream) == 0


async def test_every_figure_of_its_own_is_documented(bench):
    """`docs/metrics.md` names them, and nothing else."""
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    table = text.partition("A gateway's `stats()`")[2].partition("# Metrics over HTTP")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(bench.gateway.stats())
