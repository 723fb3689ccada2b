"""An example of every message, and frames that are refused: what `protocol_vectors.py` makes the golden vectors of."""

from __future__ import annotations

import math
from array import array

import msgspec

from pagewire_transport.codec import encode
from pagewire_transport.columns import pack
from pagewire_transport.limits import FileInfo
from pagewire_transport.messages import (
    RESERVED_TAGS,
    Accepted,
    AdminDone,
    Cancel,
    ChatMessage,
    Done,
    Drain,
    Error,
    FilePiece,
    Finish,
    Finished,
    FromClient,
    FromServer,
    Generate,
    GetFile,
    GetLoad,
    GetStats,
    Goodbye,
    Hello,
    Load,
    LogprobColumns,
    Pause,
    Ping,
    Pong,
    PromptLogprobs,
    Reload,
    Replay,
    Resume,
    Stats,
    Timings,
    Tokens,
    Usage,
    Welcome,
)
from pagewire_transport.params import SamplingParams


def _bytes(typecode: str, *values: float) -> bytes:
    return pack(typecode, array(typecode, values))


FROM_CLIENT: dict[str, FromClient] = {
    "hello": Hello(),
    "hello, all fields": Hello(versions=(1, 2), client="example 1.0"),
    "generate, token ids": Generate(stream=1, prompt_ids=_bytes("I", 1, 128_000, 4_294_967_295)),
    "generate, text": Generate(stream=2, prompt="Once upon a time, in Zürich 🏔", params=SamplingParams(max_tokens=64)),
    "generate, messages": Generate(
        stream=3,
        messages=(ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Why?")),
        template_kwargs={"thinking": False, "date": "2026-01-31", "depth": 3, "share": 0.5, "tools": None},
    ),
    "generate, all parameters": Generate(
        stream=4_294_967_295,
        prompt_ids=_bytes("I", 5),
        params=SamplingParams(
            max_tokens=2**31 - 1,
            min_tokens=3,
            temperature=0.7,
            top_k=40,
            top_p=0.95,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={7: -100.0, 128_000: 1.5},
            seed=2**63 - 1,
            n=2,
            logprobs=5,
            prompt_logprobs=0,
            stop=("\n\n", "###"),
            stop_token_ids=(2, 3),
            ignore_eos=True,
        ),
        priority=-100,
        namespace="tenant-a",
        echo_text=False,
    ),
    "generate, slow readers pause it": Generate(
        stream=5, prompt_ids=_bytes("I", 5), on_lag="pause", resumable=False, params=SamplingParams(temperature=0.0)
    ),
    "generate, with promises": Generate(
        stream=7,
        prompt_ids=_bytes("I", 5),
        ttft_ms=250.0,
        itl_ms=12.5,
        deadline_ms=30_000.0,
        client="client-3",
    ),
    "generate, replayed": Generate(
        stream=6,
        prompt_ids=_bytes("I", 5, 6),
        params=SamplingParams(n=2, seed=9),
        replay=Replay(
            request_id="r-00c0ffee",
            resume_key="00112233445566778899aabbccddeeff",
            output_ids=(_bytes("I", 10, 11), b""),
        ),
        memo=b"\x00\xff",
    ),
    "resume": Resume(
        stream=1,
        request_id="r-00c0ffee",
        resume_key="00112233445566778899aabbccddeeff",
        received=_bytes("I", 17),
    ),
    "resume, recalled": Resume(
        stream=1,
        request_id="r-00c0ffee",
        resume_key="00112233445566778899aabbccddeeff",
        received=_bytes("I", 17, 70_000),
        recall=True,
    ),
    "pause": Pause(stream=1),
    "pause, go on": Pause(stream=1, paused=False),
    "cancel": Cancel(stream=1),
    "finish": Finish(stream=1, choice=1, at=17),
    "finish, first choice": Finish(stream=1, at=0),
    "ping": Ping(),
    "ping, nonce": Ping(nonce=2**63 - 1),
    "goodbye": Goodbye(),
    "get_stats": GetStats(),
    "get_load": GetLoad(),
    "get_file": GetFile(name="tokenizer.json", offset=65_536),
    "drain": Drain(),
    "reload": Reload(),
}

FROM_SERVER: dict[str, FromServer] = {
    "welcome": Welcome(
        version=1,
        role="gateway",
        server="pagewire 0.1.0",
        model="SmolLM2-135M-Instruct",
        vocab_size=49_152,
        max_model_len=8192,
        max_streams=4096,
        max_message_bytes=16_777_216,
        heartbeat_ms=1000,
        heartbeat_timeout_ms=10_000,
        eos_ids=(2,),
        files=(FileInfo(name="tokenizer.json", size=2_104_556, sha256="0f" * 32),),
    ),
    "accepted": Accepted(stream=1, request_id="r-00c0ffee", seed=2**63 - 1, num_prompt_tokens=3, max_tokens=64),
    "accepted, resumable": Accepted(
        stream=1,
        request_id="r-00c0ffee",
        seed=7,
        num_prompt_tokens=3,
        max_tokens=64,
        resume_key="00112233445566778899aabbccddeeff",
    ),
    "accepted, recalled": Accepted(
        stream=1,
        request_id="r-00c0ffee",
        seed=7,
        num_prompt_tokens=2,
        max_tokens=64,
        resume_key="00112233445566778899aabbccddeeff",
        prompt_ids=_bytes("I", 5, 6),
        output_ids=(_bytes("I", 10, 11), b""),
        memo=b"\x00\xff",
    ),
    "tokens, one each": Tokens(streams=_bytes("I", 1, 2), starts=_bytes("I", 0, 41), ids=_bytes("I", 17, 128_001)),
    "tokens, runs of several choices": Tokens(
        streams=_bytes("I", 1, 1, 9),
        starts=_bytes("I", 5, 6, 70_000),
        ids=_bytes("I", 10, 11, 12, 20, 30, 31),
        counts=_bytes("H", 3, 1, 2),
        choices=_bytes("H", 0, 1, 0),
        texts=(" a b", "", "ü€🏔"),
    ),
    "tokens, logprobs of some": Tokens(
        streams=_bytes("I", 1, 2, 3),
        starts=_bytes("I", 0, 8, 4),
        ids=_bytes("I", 100, 200, 201, 300),
        counts=_bytes("H", 1, 2, 1),
        logprobs=LogprobColumns(
            entries=_bytes("I", 1, 2),
            top=_bytes("B", 2, 0),
            chosen=_bytes("f", -0.5, -1.25, -3.0),
            top_ids=_bytes("I", 200, 7, 201, 8),
            top_logprobs=_bytes("f", -0.5, -2.0, -1.25, -1.5),
        ),
    ),
    "prompt_logprobs": PromptLogprobs(
        stream=4,
        top=1,
        chosen=_bytes("f", -1.5, -0.25),
        top_ids=_bytes("I", 7, 9),
        top_logprobs=_bytes("f", -0.75, -0.25),
    ),
    "finished, stop string": Finished(stream=1, choice=1, reason="stop", num_tokens=17, stop="###", text=" end"),
    "finished, stop token": Finished(stream=1, reason="stop", num_tokens=9, stop=2),
    "finished, length": Finished(stream=1, reason="length", num_tokens=64),
    "finished, cancelled": Finished(stream=1, reason="cancelled", num_tokens=3),
    "done": Done(
        stream=1,
        seed=7,
        usage=Usage(prompt=3, completion=64, cached=0),
        timings=Timings(queue_ns=1_000, first_token_ns=2_000_000, total_ns=60_000_000_000, num_preemptions=1),
    ),
    "error, of a stream": Error(
        code="invalid_request", message="Expected `float` >= 0.0", stream=1, field="params.temperature"
    ),
    "error, not in time": Error(
        code="overloaded",
        message="the first token would come after about 1840 ms, promised are 250",
        stream=7,
        field="ttft_ms",
        retry_after_ms=1590,
        predicted_ttft_ms=1840,
    ),
    "error, of no stream": Error(
        code="unknown_stream", message="5 is no open stream of this connection", field="stream"
    ),
    "error, try again": Error(code="overloaded", message="the queue is full", stream=1, retry_after_ms=1000),
    "error, hello first": Error(
        code="protocol", message="this connection is not known here: say hello first", field="hello"
    ),
    "error, taken over": Error(code="taken_over", message="the stream was resumed over another connection", stream=1),
    "pong": Pong(nonce=5),
    "pong, not ready": Pong(nonce=5, ready=False, reason="step 17 is late: forward"),
    "stats": Stats(values={"tokens_total": 1000.0, "sequences_running": 2.0}),
    "load": Load(ready=True, running=12, waiting=3, kv_blocks=4096, kv_blocks_used=1024),
    "file_piece": FilePiece(name="tokenizer.json", offset=65_536, data=b'{"a": 1}', size=65_544),
    "admin_done": AdminDone(what="drain", message="3 streams are open"),
}


def _frame(body: object) -> bytes:
    return b"\1" + msgspec.msgpack.encode(body)


_PING = {"t": "ping"}

TOLERATED: dict[str, tuple[str, bytes]] = {
    "a newer server says more": ("server", _frame({"t": "pong", "nonce": 1, "mood": [1, {"a": None}]})),
    "fields in another order": ("server", _frame({"num_tokens": 3, "reason": "stop", "stream": 1, "t": "finished"})),
    "defaults that are written out": (
        "server",
        _frame(
            {"t": "finished", "stream": 1, "choice": 0, "reason": "length", "num_tokens": 3, "stop": None, "text": ""}
        ),
    ),
    "integers longer than they need be": (
        "server",
        b"\1\x82\xa1t\xa4pong\xa5nonce\xd3" + (5).to_bytes(8, "big"),
    ),
    "texts with long headers": ("server", b"\1\xde\0\1\xd9\1t\xda\0\4pong"),
    "a float as float32": ("client", b"\1\x83\xa1t\xa8generate\xa6stream\1\xa6params\x81\xabtemperature\xca\x3f\0\0\0"),
    "a whole number where a float is meant": (
        "client",
        _frame({"t": "generate", "stream": 1, "params": {"temperature": 1}}),
    ),
    "nil where a field may be missing": ("client", _frame({"t": "generate", "stream": 1, "prompt": None})),
}

REFUSED: dict[str, tuple[str, bytes]] = {
    "no bytes": ("client", b""),
    "no message": ("client", b"\1"),
    "version 0": ("client", b"\0" + encode(Ping())[1:]),
    "version 2": ("client", b"\2" + encode(Ping())[1:]),
    "cut": ("client", encode(Ping())[:-1]),
    "bytes after the message": ("client", encode(Ping()) + b"\0"),
    "a byte that MessagePack does not have": ("client", b"\1\xc1"),
    "an array": ("client", _frame(["ping"])),
    "no tag": ("client", _frame({"stream": 1})),
    "a tag that is no text": ("client", _frame({"t": 5})),
    "an unknown tag": ("client", _frame({"t": "shout"})),
    "a server's message": ("client", _frame({"t": "pong"})),
    "text that is not UTF-8": ("client", b"\1\x82\xa1t\xa5hello\xa6client\xa2\xff\xfe"),
    "a length beyond the frame": ("client", b"\1\x82\xa1t\xa8generate\xa6prompt\xdb\xff\xff\xff\xff"),
    "nested without end": ("client", b"\1\x82\xa1t\xa8generate\xa1x" + b"\x91" * 1024),
    "an unknown field": ("client", _frame({"t": "generate", "stream": 1, "promt": "x"})),
    "a missing field": ("client", _frame({"t": "generate"})),
    "a field of another type": ("client", _frame({"t": "generate", "stream": 1, "prompt": 5})),
    "a stream below 0": ("client", _frame({"t": "cancel", "stream": -1})),
    "a stream of 33 bits": ("client", _frame({"t": "cancel", "stream": 2**32})),
    "a temperature below 0": ("client", _frame({"t": "generate", "stream": 1, "params": {"temperature": -0.1}})),
    "a temperature that is NaN": (
        "client",
        _frame({"t": "generate", "stream": 1, "params": {"temperature": math.nan}}),
    ),
    "n too large": ("client", _frame({"t": "generate", "stream": 1, "params": {"n": 17}})),
    "an empty stop string": ("client", _frame({"t": "generate", "stream": 1, "params": {"stop": ["a", ""]}})),
    "an unknown parameter": ("client", _frame({"t": "generate", "stream": 1, "params": {"best_of": 3}})),
    "a turn without content": ("client", _frame({"t": "generate", "stream": 1, "messages": [{"role": "user"}]})),
    "an argument that is a list": ("client", _frame({"t": "generate", "stream": 1, "template_kwargs": {"a": [1]}})),
    **{f"reserved: {tag}": ("client", _frame({"t": tag, "id": 1})) for tag in sorted(RESERVED_TAGS)},
    "from a server: no bytes": ("server", b""),
    "from a server: version 2": ("server", b"\2" + encode(Pong())[1:]),
    "from a server: an unknown tag": ("server", _frame({"t": "shout"})),
    "from a server: cut": ("server", encode(Pong(nonce=5))[:-1]),
    "from a server: a missing field": ("server", _frame({"t": "finished", "stream": 1})),
    "from a server: a field of another type": ("server", _frame({"t": "pong", "nonce": "x"})),
}
