"""Frames: what goes in comes out, and nothing that comes in gets further than an error (F11, F47)."""

from __future__ import annotations

import struct
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_transport.codec import convert, decode_client, decode_server, encode, stream_to_refuse
from pagewire_transport.errors import InvalidRequest, PagewireError, ProtocolError, VersionMismatch
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
    Goodbye,
    Hello,
    LogprobColumns,
    Ping,
    Pong,
    PromptLogprobs,
    Stats,
    Timings,
    Tokens,
    Usage,
    Welcome,
)
from pagewire_transport.params import SamplingParams

CLIENT = [
    Hello(client="x", versions=(1, 2)),
    Generate(
        stream=2**32 - 1,
        prompt="é",
        template_kwargs={"a": 1, "b": None, "c": "x", "d": 0.5, "e": True},
        params=SamplingParams(max_tokens=3, logit_bias={1: -5.0}, stop=("a", "b"), n=3, seed=2**63 - 1),
        priority=-3,
        namespace="n",
    ),
    Generate(stream=0, prompt_ids=b"\1\0\0\0"),
    Generate(stream=1, messages=(ChatMessage(role="user", content="hi"),)),
    Cancel(stream=1),
    Finish(stream=1, choice=2, at=3),
    Ping(nonce=5),
    Goodbye(),
    GetStats(),
]
SERVER = [
    Welcome(
        version=1, role="engine", server="s", model="m", vocab_size=1, max_model_len=2, max_streams=3,
        max_message_bytes=4, heartbeat_ms=5, heartbeat_timeout_ms=6, eos_ids=(1, 2),
    ),
    Accepted(stream=1, request_id="r", seed=2**63 - 1, num_prompt_tokens=3, max_tokens=4),
    Tokens(
        streams=b"1234", starts=b"\0\0\0\0", ids=b"12345678", counts=b"\2\0", choices=b"\1\0", texts=("ä",),
        logprobs=LogprobColumns(entries=b"\0\0\0\0", top=b"\1", chosen=b"12345678", top_ids=b"1", top_logprobs=b"2"),
    ),
    PromptLogprobs(stream=1, top=0, chosen=b""),
    Finished(stream=1, choice=2, reason="stop", num_tokens=3, stop=5),
    Done(stream=1, seed=2, usage=Usage(prompt=1, completion=2), timings=Timings(queue_ns=1, first_token_ns=2, total_ns=3)),
    Error(code="x", message="y", stream=1, field="z", retry_after_ms=5),
    Pong(nonce=7, ready=False),
    Stats(values={"a": 1.0}),
]  # fmt: skip


def frame(**fields) -> bytes:
    return b"\1" + msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("message", CLIENT, ids=lambda m: type(m).__name__)
def test_client_messages_survive(message):
    assert decode_client(encode(message)) == message


@pytest.mark.parametrize("message", SERVER, ids=lambda m: type(m).__name__)
def test_server_messages_survive(message):
    assert decode_server(encode(message)) == message


def test_a_newer_server_may_say_more():
    assert decode_server(frame(t="pong", nonce=1, mood=[1, {"a": 2}])) == Pong(nonce=1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"t": "generate", "stream": -1}, "stream"),
        ({"t": "generate", "stream": 2**32}, "stream"),
        ({"t": "generate"}, "stream"),
        ({"t": "generate", "stream": 1, "promt": "x"}, "promt"),
        ({"t": "generate", "stream": 1, "prompt": 5}, "prompt"),
        ({"t": "generate", "stream": 1, "params": {"temperature": -0.1}}, "params.temperature"),
        ({"t": "generate", "stream": 1, "params": {"temperature": float("nan")}}, "params.temperature"),
        ({"t": "generate", "stream": 1, "params": {"top_p": float("inf")}}, "params.top_p"),
        ({"t": "generate", "stream": 1, "params": {"min_p": "0.5"}}, "params.min_p"),
        ({"t": "generate", "stream": 1, "params": {"max_tokens": 2**31}}, "params.max_tokens"),
        ({"t": "generate", "stream": 1, "params": {"n": 10**6}}, "params.n"),
        ({"t": "generate", "stream": 1, "params": {"logit_bias": {1: 1e9}}}, "params.logit_bias"),
        ({"t": "generate", "stream": 1, "params": {"logit_bias": {"x": 1.0}}}, "params.logit_bias"),
        ({"t": "generate", "stream": 1, "params": {"logit_bias": dict.fromkeys(range(301), 1.0)}}, "params.logit_bias"),
        ({"t": "generate", "stream": 1, "params": {"stop": ["a", ""]}}, "params.stop[1]"),
        ({"t": "generate", "stream": 1, "params": {"best_of": 3}}, "params.best_of"),
        ({"t": "generate", "stream": 1, "params": {"a - at `$.b`": 3}}, "params.a - at `$.b`"),
        ({"t": "generate", "stream": 1, "messages": [{"role": "u"}]}, "messages[0].content"),
        ({"t": "generate", "stream": 1, "messages": [{"role": "u", "content": "", "x": 1}]}, "messages[0].x"),
        ({"t": "generate", "stream": 1, "template_kwargs": {"a": [1]}}, "template_kwargs"),
        ({"t": "hello", "versions": list(range(1000))}, "versions"),
        ({"t": "finish", "stream": 1, "choice": 70000, "at": 1}, "choice"),
    ],
)
def test_a_bad_field_is_named(fields, field):
    with pytest.raises(InvalidRequest) as caught:
        decode_client(frame(**fields))
    assert caught.value.field == field
    assert caught.value.message


@pytest.mark.parametrize(
    ("bytes_", "kind"),
    [
        (b"", ProtocolError),
        (b"\1", ProtocolError),
        (b"\0" + encode(Ping())[1:], VersionMismatch),
        (b"\2" + encode(Ping())[1:], VersionMismatch),
        (b"\xff", VersionMismatch),
        (encode(Ping())[:-1], ProtocolError),
        (encode(Ping()) + b"\0", ProtocolError),
        (b"\1\xc1", ProtocolError),
        (frame(t="shout"), ProtocolError),
        (frame(t=5), ProtocolError),
        (frame(stream=1), ProtocolError),
        (b"\1" + b"\x91" * 100_000, PagewireError),
        (b"\1\x82\xa1t\xa8generate\xa1x" + b"\x91" * 1_000_000, PagewireError),
        (b"\1\x82\xa1t\xa5hello\xa6client\xa2\xff\xfe", ProtocolError),
        *(
            (b"\1\x82\xa1t\xa8generate" + bytes([0xA0 + len(name)]) + name + opcode + struct.pack(">I", size), ProtocolError)
            for name in (b"messages", b"prompt_ids", b"prompt", b"template_kwargs", b"params")
            for opcode in (b"\xdd", b"\xc6", b"\xdb", b"\xdf")
            for size in (2**20, 2**32 - 1)
        ),
    ],
)  # fmt: skip
def test_no_message_is_an_error_at_once(bytes_, kind):
    """Nesting and declared lengths without the bytes to go with them cost nothing."""
    begun = time.thread_time()
    with pytest.raises(PagewireError) as caught:
        decode_client(bytes_)
    if kind is ProtocolError and not isinstance(caught.value, InvalidRequest):
        assert isinstance(caught.value, ProtocolError)
    else:
        assert isinstance(caught.value, InvalidRequest | kind)
    assert len(str(caught.value)) < 1000
    assert time.thread_time() - begun < 0.5
    with pytest.raises(ProtocolError):
        decode_server(bytes_)


def test_sizes_are_checked_first():
    big = encode(Generate(stream=1, prompt="x" * 5000))
    assert decode_client(big, len(big))
    with pytest.raises(ProtocolError, match="at most"):
        decode_client(big, len(big) - 1)
    with pytest.raises(ProtocolError, match="at most"):
        decode_client(b"\7" * 100, 99)


def test_an_error_does_not_give_back_what_it_was_sent():
    with pytest.raises(InvalidRequest) as caught:
        decode_client(frame(t="ping", **{"x" * 10**6: 1}))
    assert len(caught.value.field) < 1000
    assert len(caught.value.message) < 1000


def test_the_stream_of_a_refused_generate_is_known():
    assert stream_to_refuse(frame(t="generate", stream=7, params={"n": "x"})) == 7
    assert stream_to_refuse(frame(stream=7, t="generate", nested=[[[{}]]])) == 7
    assert stream_to_refuse(frame(t="cancel", stream=7)) is None
    assert stream_to_refuse(frame(t="generate", stream=-7)) is None
    assert stream_to_refuse(b"\1junk") is None
    assert stream_to_refuse(b"") is None


def test_convert_is_as_strict_as_the_wire():
    assert convert({"stop": ["a"], "n": 2}, SamplingParams) == SamplingParams(stop=("a",), n=2)
    with pytest.raises(InvalidRequest) as caught:
        convert({"temprature": 1}, SamplingParams)
    assert caught.value.field == "temprature"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200).flatmap(lambda b: st.sampled_from([b, b"\1" + b])))
def test_any_bytes(bytes_):
    survives(bytes_)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
NAMES = [
    *(
        "stream",
        "prompt",
        "prompt_ids",
        "messages",
        "params",
        "priority",
        "versions",
        "client",
        "nonce",
        "at",
        "choice",
    ),
    *SamplingParams.__struct_fields__,
]
KINDS = ["hello", "generate", "cancel", "finish", "ping", "goodbye", "get_stats", "tokens", "done", "error"]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(NAMES), plain, max_size=4),
    st.dictionaries(st.sampled_from(NAMES), plain, max_size=3),
)
def test_any_values_in_known_fields(kind, fields, params):
    survives(frame(**{**fields, "params": params, "t": kind}))
    survives(frame(**{**fields, "t": kind}))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([encode(m) for m in CLIENT + SERVER]), st.data())
def test_valid_frames_with_wrong_bytes(good, data):
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 1)) if changed else 0
        action = data.draw(st.sampled_from(["set", "cut", "insert", "double"]))
        if action == "set" and changed:
            changed[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del changed[at : at + data.draw(st.integers(1, 8))]
        elif action == "insert":
            changed[at:at] = data.draw(st.binary(min_size=1, max_size=6))
        else:
            changed += changed[at:]
    survives(bytes(changed))


def survives(bytes_):
    """A message or an error of the tree, and a message goes back as it came."""
    stream_to_refuse(bytes_)
    for decode in (decode_client, decode_server):
        try:
            message = decode(bytes_)
        except PagewireError as error:
            assert isinstance(error, ProtocolError | InvalidRequest)  # noqa: PT017
            assert error.field is None or isinstance(error.field, str)  # noqa: PT017
        else:
            again = decode(encode(message))
            assert again == message or "nan" in repr(message)
