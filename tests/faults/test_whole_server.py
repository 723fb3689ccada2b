"""Faults through a whole server that stays healthy: supervisor, gateway, engine, and the client over ZeroMQ.

One server for the module. Its engine is a fake that checks every read of KV, so tokens are known.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import psutil
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from tests.chaos.fake_engine import EOS, POISON, UNADMITTED, VOCAB
from tests.chaos.rig import served

import pagewire_client
from pagewire.errors import InternalError, InvalidRequest, NumericError, PagewireError, PromptTooLong
from pagewire.worker.fake import continuation, hash_tokens
from pagewire_transport.codec import decode_server, encode
from pagewire_transport.messages import Accepted, Error, Generate, Hello, Tokens
from pagewire_transport.params import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_LEN = 8192


def expected(prompt, seed, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return continuation(hash_tokens(VOCAB), prompt, params, seed, vocab_size=VOCAB, eos_ids=(EOS,))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    # Little is kept for clients that do not come back: what these tests count is there soon.
    keeping = ("--resume-grace-ms", "500", "--max-kept-streams", "100")
    async with served("--kv-bytes", str(1024 * 1024), "--stall-timeout-ms", "250", *keeping) as made:
        yield made
        assert await made.stop() == 0
        assert made.left_over() == []
        assert not [line for line in made.lines if "event=engine_lost" in line or "engine_failed" in line]


@pytest_asyncio.fixture(loop_scope="module")
async def client(server):
    async with pagewire_client.connect(server.url) as made:
        yield made
        await idle(made)


async def idle(client):
    """Nothing runs any more, and every block is free or cached."""
    async with asyncio.timeout(10):
        while True:
            stats = await client.stats()
            if stats["sequences_running"] == 0 == stats["sequences_waiting"] and stats["kv_blocks_used"] == 0:
                return
            await asyncio.sleep(0.1)


async def probe(client, seed=1):
    result = await client.generate([5, 6, 7], max_tokens=8, seed=seed, ignore_eos=True).result()
    assert result.token_ids == expected([5, 6, 7], seed, 8)


async def test_f5_an_idle_server_raises_no_alarm(server, client):
    """Ten times the limit of a quarter of a second, at the end of which it serves."""
    await asyncio.sleep(2.5)
    await probe(client)
    assert not [line for line in server.lines if "stall" in line or "level=error" in line]


async def test_f6_a_full_pool_of_cancelled_requests_serves_a_probe(client):
    streams = [client.generate([10 + i] * 2000, max_tokens=2000, ignore_eos=True) for i in range(20)]
    await anext(streams[0])
    for stream in streams:
        await stream.aclose()
    async with asyncio.timeout(10):
        result = await client.generate([5] * 8000, max_tokens=10, seed=2, ignore_eos=True).result()
    assert result.token_ids == expected([5] * 8000, 2, 10)


async def test_f7_what_one_request_breaks_ends_that_request(client):
    good = client.generate([3, 4], max_tokens=300, seed=4, ignore_eos=True)
    await anext(good)
    with pytest.raises(InternalError, match="planted"):
        await client.generate([UNADMITTED, 1], max_tokens=5).result()
    with pytest.raises(NumericError):
        await client.generate([POISON, 1], max_tokens=5).result()
    assert (await good.result()).token_ids == expected([3, 4], 4, 300)


async def test_f15_f16_a_client_that_goes_leaves_nothing_running(server, client):
    """Not streaming, in the middle of a long prompt, and without a goodbye."""
    for prompt in ([1, 2, 3], [9] * 8000):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(server.url)
            await peer.send(encode(Hello()))
            ids = b"".join(token.to_bytes(4, "little") for token in prompt)
            params = SamplingParams(max_tokens=MAX_LEN - len(prompt), ignore_eos=True)
            await peer.send(encode(Generate(stream=1, prompt_ids=ids, params=params)))
            while not isinstance(decode_server(await asyncio.wait_for(peer.recv(), 10)), Accepted):
                pass
        async with pagewire_client.connect(server.url) as leaver:
            stream = leaver.generate(prompt, max_tokens=MAX_LEN - len(prompt), ignore_eos=True)
            await asyncio.sleep(0.1)
            del stream
        await probe(client)
    # The socket that just closed is found dead when something is sent to it, long before any heartbeat.
    await idle(client)


async def test_f17_two_thousand_requests_one_after_another_leave_nothing(server, client):
    parts = [server.part("engine"), server.part("gateway")]

    async def ask(num):
        for i in range(num):
            result = await client.generate([1 + i % 90, 2, 3 + i // 90], max_tokens=1, ignore_eos=True).result()
            assert len(result.token_ids) == 1

    await ask(300)
    before = [part.memory_info().rss for part in parts]
    await ask(2000)
    grown = [part.memory_info().rss - rss for part, rss in zip(parts, before, strict=True)]
    assert max(grown) < 4 * 2**20, f"engine and gateway grew by {grown} bytes"


async def test_f18_a_slow_reader_costs_itself_alone(server, client):
    """It reads nothing; others' streams go on, the server's memory stays flat."""
    gateway = server.part("gateway")
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger, peer.rcvhwm = 0, 1
        peer.connect(server.url)
        await peer.send(encode(Hello()))
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        for stream in range(16):
            await peer.send(encode(Generate(stream=stream, prompt_ids=bytes([1 + stream, 0, 0, 0]), params=params)))
        before = gateway.memory_info().rss
        gaps, last, count = [], time.monotonic(), 0
        async for _ in client.generate([5, 6, 7], max_tokens=300, seed=1, ignore_eos=True):
            gaps.append(time.monotonic() - last)
            last, count = time.monotonic(), count + 1
        assert count > 100
        assert sorted(gaps)[len(gaps) // 2] < 0.1
        assert gateway.memory_info().rss - before < 16 * 2**20
    # Its streams go on for a while. What a gateway says of its engine is up to half a second old, from before they began.
    await asyncio.sleep(0.6)


async def test_f22_the_first_content_follows_the_first_token(server):
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(server.url)
        await peer.send(encode(Hello()))
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        await peer.send(encode(Generate(stream=1, prompt_ids=bytes([5, 0, 0, 0]) * 3000, params=params)))
        kinds = []
        while "done" not in kinds:
            message = decode_server(await asyncio.wait_for(peer.recv(), 10))
            kinds.append(type(message).__name__.lower())
            if isinstance(message, Tokens):
                assert len(message.ids) >= 4
    assert kinds[:3] == ["welcome", "accepted", "tokens"]
    assert kinds[-2:] == ["finished", "done"]


async def test_f33_namespaces_see_nothing_of_each_other(client):
    prompt = [7] * 640
    cached = [
        (await client.generate(prompt, max_tokens=1, namespace=tenant).result()).usage.cached
        for tenant in ("a", "a", "b", "", "b")
    ]
    assert cached == [0, 624, 0, 0, 624]


async def test_f30_a_prompt_that_is_cached_up_to_any_offset_gives_the_same_tokens(client):
    prompt = [50 + i % 7 for i in range(100)]
    for shared in (0, 15, 16, 17, 47, 48, 95, 96, 99):
        other = [*prompt[:shared], *([49] * (100 - shared))]
        for ids in (other, other, prompt):
            result = await client.generate(ids, max_tokens=5, seed=9, ignore_eos=True, namespace="f30").result()
            assert result.token_ids == expected(ids, 9, 5), (shared, result.usage)


@pytest.mark.parametrize("num", [MAX_LEN - 2, MAX_LEN - 1, MAX_LEN, MAX_LEN + 1])
async def test_f43_prompts_around_the_limit(client, num):
    stream = client.generate([8] * num, max_tokens=1, seed=1, ignore_eos=True)
    if num < MAX_LEN:
        assert len((await stream.result()).token_ids) == 1
    else:
        with pytest.raises(PromptTooLong) as caught:
            await stream.result()
        assert caught.value.field == "prompt_ids"


@pytest.mark.parametrize(
    ("max_tokens", "wanted"), [(None, 92), (0, 0), (1, 1), (92, 92), (93, "refused"), (2**31 - 1, "refused")]
)
async def test_f44_max_tokens_around_the_room(client, max_tokens, wanted):
    given = {} if max_tokens is None else {"max_tokens": max_tokens}
    stream = client.generate([8] * (MAX_LEN - 92), seed=1, ignore_eos=True, **given)
    if wanted == "refused":
        with pytest.raises(InvalidRequest) as caught:
            await stream.result()
        assert caught.value.field == "max_tokens"
    else:
        assert len((await stream.result()).token_ids) == wanted


JUNK = {
    "temperature": ["hot", -1, 1e400, None, [], 2**70],
    "top_p": [0, 1.5, "x", -0.0],
    "top_k": [-2, 1.5, "x", 2**40],
    "n": [0, -1, 10**6, 1.5],
    "max_tokens": [-1, 2**40, "x"],
    "stop": ["", [""] * 2, ["x"] * 10_000, [1]],
    "stop_token_ids": [[-1], [2**40], ["x"], list(range(100_000))],
    "logprobs": [-1, 10**6, "x"],
    "logit_bias": [{"x": 1}, {VOCAB: 1.0}, {1: "x"}, {1: 1e400}],
    "seed": [-1, 2**70, "x"],
    "nonsense": [1],
}


@pytest.mark.parametrize("name", JUNK)
async def test_f47_f50_junk_is_refused_by_name(server, client, name):
    """As a hostile client would send it, past our own client's checks, and by our client."""
    import msgspec

    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(server.url)
        await peer.send(encode(Hello()))
        await peer.recv()
        for junk in JUNK[name]:
            if isinstance(junk, int) and junk >= 2**64:
                continue  # no MessagePack
            version = encode(Hello())[:1]
            asked = {"t": "generate", "stream": 1, "prompt_ids": bytes([5, 0, 0, 0]), "params": {name: junk}}
            await peer.send(version + msgspec.msgpack.encode(asked))
            answer = decode_server(await asyncio.wait_for(peer.recv(), 10))
            is_harmless = name == "temperature" and junk is None
            assert isinstance(answer, Error), (junk, answer)
            assert answer.code in ("invalid_request", "unsupported", "protocol"), (junk, answer)
            assert name in f"{answer.field} {answer.message}" or is_harmless, (junk, answer)
    for junk in JUNK[name]:
        with pytest.raises((PagewireError, TypeError)):
            await client.generate([5], **{name: junk}).result()
    await probe(client)


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [2**40], ["x"], [1.5]])
async def test_f42_f47_a_prompt_that_is_none_is_refused(client, prompt):
    with pytest.raises(InvalidRequest) as caught:
        await client.generate(prompt, max_tokens=1).result()
    assert "prompt" in (caught.value.field or "")
    await probe(client)


async def test_a_server_counts_what_it_served(client):
    stats = await client.stats()
    assert stats["requests_total"] > 100
    with contextlib.suppress(psutil.Error):
        assert stats["ready"] == 1
