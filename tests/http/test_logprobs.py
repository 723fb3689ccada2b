"""Log-probabilities as JSON: beside a plain reading of the same columns, and a few at a time however many there are."""

from __future__ import annotations

import math
from array import array

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.bench import logprob_columns, tokens
from tests.http.bench import serving

from pagewire.gateway.columns import LogprobRun
from pagewire.gateway.http.tokens import CompletionLogprobs, Vocabulary
from pagewire_client.text.byte_table import ByteTable
from pagewire_transport.messages import Accepted, Done, Finished, PromptLogprobs, Timings, Usage

_NUMBERS = st.floats(width=32)
_PIECES = st.lists(st.sampled_from([b"a", b"a", b'"', b"\\", b"\n", b"\xe2\x82", b"", b"\xc3\xbc", b","]), min_size=4)


@st.composite
def _runs(draw):
    pieces = draw(_PIECES)
    count, top = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    ids = st.integers(0, len(pieces))  # one beyond: a row that pads an embedding
    rows = [draw(st.lists(ids, min_size=top, max_size=top, unique=True)) for _ in range(count)]
    numbers = st.lists(_NUMBERS, min_size=count * top, max_size=count * top)
    return (
        pieces,
        draw(st.lists(ids, min_size=count, max_size=count)),
        draw(st.lists(_NUMBERS, min_size=count, max_size=count)),
        rows,
        draw(numbers),
        top,
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -9999.0


@given(_runs())
def test_json_says_what_the_columns_say(drawn):
    pieces, ids, chosen, rows, numbers, top = drawn
    vocabulary = Vocabulary(ByteTable(tuple(pieces)))
    columns = (array("f", chosen), array("I", [token for row in rows for token in row]), array("f", numbers))
    run = LogprobRun(top, *(memoryview(column.tobytes()) for column in columns))
    values = array("f", numbers).tolist()

    entries = [msgspec.json.decode(entry) for entry in vocabulary.chat_entries(ids, run)]
    lists = CompletionLogprobs(vocabulary)
    lists.add(vocabulary.completion_entries(ids, run))
    completion = msgspec.json.decode(lists.take())
    assert len(entries) == len(ids)
    offset = 0
    for i, token in enumerate(ids):
        row = list(zip(rows[i], values[i * top : (i + 1) * top], strict=True))
        own = _finite(array("f", chosen)[i])
        assert entries[i] == {
            "token": vocabulary.name(token),
            "logprob": own,
            "bytes": list(vocabulary.piece(token)),
            "top_logprobs": [
                {"token": vocabulary.name(t), "logprob": _finite(p), "bytes": list(vocabulary.piece(t))} for t, p in row
            ],
        }
        named: dict[str, float] = {}
        for t, p in [*row, (token, own)]:
            named.setdefault(vocabulary.name(t), _finite(p))
        assert completion["top_logprobs"][i] == named
        assert completion["tokens"][i] == vocabulary.name(token)
        assert completion["token_logprobs"][i] == own
        assert completion["text_offset"][i] == offset
        offset += vocabulary.num_chars(token)


def _watched(bench, monkeypatch, name: str) -> list[int]:
    """Sizes of the runs that are made JSON, in log-probabilities."""
    sizes: list[int] = []
    real = getattr(Vocabulary, name)

    def watch(self, ids, run):
        sizes.append(len(ids) * (1 + run.top))
        return real(self, ids, run)

    monkeypatch.setattr(Vocabulary, name, watch)
    return sizes


async def test_a_reader_is_given_much_a_little_at_a_time(monkeypatch):
    """F18, F27: what comes, or waited, in one piece is handed over turn by turn, and nothing is lost or doubled."""
    async with serving() as bench:
        sizes = _watched(bench, monkeypatch, "chat_entries")

        async def answer(asked):
            number, count = asked.stream, 900
            bench.gateway.on_engine(
                Accepted(stream=number, request_id="r", seed=1, num_prompt_tokens=1, max_tokens=count)
            )
            for step in range(count):
                entries = [(number, choice, step, [97 + choice]) for choice in range(4)]
                bench.gateway.on_engine(tokens(*entries, logprobs=logprob_columns(4, 20, entries=4)))
            for choice in range(4):
                bench.gateway.on_engine(Finished(stream=number, choice=choice, reason="length", num_tokens=count))
            bench.engine.running.pop(number)
            bench.gateway.on_engine(_done(number, 4 * count))

        bench.engine._answer = answer
        asked = {"n": 4, "logprobs": True, "top_logprobs": 20}
        whole = await bench.chat(**asked)
        assert sum(sizes) == 4 * 900 * 21
        assert max(sizes) <= 2048 + 21
        assert [choice["message"]["content"] for choice in whole["choices"]] == [
            "a" * 900,
            "b" * 900,
            "c" * 900,
            "d" * 900,
        ]
        assert all(len(choice["logprobs"]["content"]) == 900 for choice in whole["choices"])

        events = await bench.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **asked})
        chunks = [choice for event in events[:-1] for choice in event["choices"]]
        assert max(len(choice["logprobs"]["content"]) for choice in chunks if choice["logprobs"]) <= 98
        for index, choice in enumerate(whole["choices"]):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert [e for chunk in mine if chunk["logprobs"] for e in chunk["logprobs"]["content"]] == choice[
                "logprobs"
            ]["content"]
            assert all(  # text comes with its tokens
                chunk["delta"].get("content", "") == "".join(e["token"] for e in chunk["logprobs"]["content"])
                for chunk in mine
                if chunk["logprobs"]
            )
            assert mine[-1]["finish_reason"] == "length"


async def test_a_long_prompt_is_echoed_a_little_at_a_time(monkeypatch):
    async with serving() as bench:
        sizes = _watched(bench, monkeypatch, "completion_entries")
        prompt = [97 + i % 26 for i in range(900)]

        async def answer(asked):
            number, count = asked.stream, len(prompt) - 1
            bench.gateway.on_engine(
                Accepted(stream=number, request_id="r", seed=1, num_prompt_tokens=900, max_tokens=0)
            )
            columns = logprob_columns(count, 20)
            bench.gateway.on_engine(
                PromptLogprobs(
                    stream=number,
                    top=20,
                    chosen=array("f", [-float(i) for i in range(1, 900)]).tobytes(),
                    top_ids=columns.top_ids,
                    top_logprobs=columns.top_logprobs,
                )
            )
            for choice in range(2):
                bench.gateway.on_engine(Finished(stream=number, choice=choice, reason="length", num_tokens=0))
            bench.engine.running.pop(number)
            bench.gateway.on_engine(_done(number, 0))

        bench.engine._answer = answer
        asked = {"prompt": prompt, "n": 2, "max_tokens": 0, "echo": True, "logprobs": 20}
        whole = await bench.complete(**asked)
        assert sum(sizes) == 899 * 21
        assert max(sizes) <= 2048 + 21
        events = await bench.events("/v1/completions", asked)
        for index, choice in enumerate(whole["choices"]):
            lists = choice["logprobs"]
            assert lists["token_logprobs"] == [None, *(-float(i) for i in range(1, 900))]
            assert lists["text_offset"] == list(range(900))
            mine = [c for event in events[:-1] for c in event["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in mine) == choice["text"]
            for name, values in lists.items():
                assert [v for c in mine if c["logprobs"] for v in c["logprobs"][name]] == values


def _done(number: int, completion: int) -> Done:
    timings = Timings(queue_ns=1, first_token_ns=2, total_ns=3)
    return Done(stream=number, seed=1, usage=Usage(prompt=1, completion=completion), timings=timings)
