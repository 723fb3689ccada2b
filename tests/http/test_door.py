"""Who is let in, what is routed where, and what a connection may cost."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import socket
import time
from datetime import UTC, datetime

import pytest
from tests.http.bench import serving

from pagewire import keys
from pagewire.errors import ConfigError, Draining, EngineFailed, Overloaded, Unavailable

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
POSTS = (CHAT, "/v1/completions", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/bytes", "/metrics", "/openapi.json")


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"
    return path, keys.add(path, "ann", now=datetime.now(UTC)), keys.add(path, "bob", now=datetime.now(UTC))


async def raw(bench, data: bytes, *, wait_s: float = 2.0) -> bytes:
    """Send bytes, read until the server closes."""
    host, port = bench.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        async with asyncio.timeout(wait_s):
            return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_key_is_asked_for_before_anything_else(key_file, monkeypatch):
    """F49: at every path and method, known or not, but `/health` and `/ready`; compared in constant time."""
    path, ann, bob = key_file
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(1) or real(a, b))
    async with serving(api_key_file=str(path)) as bench:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {ann}"}, {"Authorization": ann}):
            for method in ("GET", "POST", "OPTIONS", "DELETE", "HEAD"):
                for where in (*POSTS, *GETS, "/", "/nothing", "/v1/models/", "//health", "/health/", "/READY"):
                    async with bench.session.request(method, bench.url + where, headers=given) as response:
                        assert response.status == 401, (method, where)
                        assert response.headers["WWW-Authenticate"] == "Bearer"
        status, body = await bench.post(CHAT, HI, headers={"Authorization": "Bearer x"})
        assert (status, body["error"]["type"], body["error"]["code"]) == (401, "authentication_error", "unauthorized")
        assert (await bench.get("/health"))[0] == (await bench.get("/ready"))[0] == 200
        compared.clear()
        for key in (ann, bob):
            assert (await bench.post(CHAT, HI, headers={"Authorization": f"Bearer {key}"}))[0] == 200
            assert (await bench.get("/v1/models", headers={"authorization": f"bearer {key}"}))[0] == 200
        assert len(compared) == 8  # each key with each that is known
        first, second = bench.engine.asked[-2:]
        assert first.namespace != second.namespace  # F33: no one sees another's cache
        keys.revoke(path, "ann")
        assert (await bench.get("/v1/models", headers={"Authorization": f"Bearer {ann}"}))[0] == 401


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "example.org:80", "10.0.0.1:80"])
def test_others_are_served_with_keys_only(address):
    """F10."""
    from tests.http.bench import HttpBench

    with pytest.raises(ConfigError) as caught:
        HttpBench(address=address)
    assert caught.value.field == "http.address"
    assert "api-key-file" in caught.value.message
    HttpBench(address=address, allow_no_keys=True).preparation.close()


@pytest.mark.parametrize("address", ["8000", "localhost", "127.0.0.1:99999", "127.0.0.1:x", ":"])
def test_addresses_that_are_none(address):
    from tests.http.bench import HttpBench

    with pytest.raises(ConfigError):
        HttpBench(address=address)


async def test_an_address_in_use_is_refused():
    async with serving() as bench:
        with pytest.raises(ConfigError) as caught:
            async with serving(address=bench.url.removeprefix("http://")):
                pass
        assert caught.value.field == "http.address"
        assert "another program listens there; stop it, or take another port" in str(caught.value)


async def test_paths_and_methods(bench):
    for where in (*GETS, "/health", "/ready"):
        assert (await bench.get(where))[0] == 200
        status, body = await bench.post(where, {})
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
    for where in POSTS:
        async with bench.session.get(bench.url + where) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
    for where in ("/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/%2e%2e/etc/passwd"):
        status, body = await bench.get(where)
        assert (status, body["error"]["code"], body["error"]["type"]) == (404, "not_found", "invalid_request_error")
    assert (await bench.get("/v1/models"))[1]["data"][0]["id"] == "bytes"
    assert (await bench.get("/v1/models/other"))[0] == 404


async def test_bodies_that_are_no_json(bench):
    for data in (b"", b"{", b"[1]", b"nul", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b'{"messages": NaN}'):
        status, body = await bench.post(CHAT, data=data, headers={"Content-Type": "application/json"})
        assert status == 400, data[:20]
        assert body["error"]["type"] == "invalid_request_error"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert (await bench.post(CHAT, data=json.dumps(HI).encode(), headers={"Content-Type": kind}))[0] == 415
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (await bench.post(CHAT, data=b"x", headers=headers))[0] == 415


async def test_limits_of_size():
    """F50."""
    async with serving(max_body_bytes=2000, max_headers=16, max_header_bytes=1000, max_n=2, max_stop=1) as bench:
        status, body = await bench.post(CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]})
        assert (status, body["error"]["code"]) == (413, "body_too_large")

        async def chunks():
            for _ in range(100):
                yield b"x" * 1000

        status, body = await bench.post(CHAT, data=chunks(), headers={"Content-Type": "application/json"})
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        for fields, param in (({"n": 3}, "n"), ({"stop": ["a", "b"]}, "stop")):
            status, body = await bench.post(CHAT, {**HI, **fields})
            assert (status, body["error"]["param"]) == (400, param)
        many = b"".join(b"X-%d: 1\r\n" % i for i in range(50))
        assert b" 400 " in await raw(bench, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + many + b"\r\n")
        long = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 3000 + b"\r\n\r\n"
        assert b" 400 " in await raw(bench, long)
        assert b" 400 " in await raw(bench, b"GET /" + b"z" * 3000 + b" HTTP/1.1\r\n\r\n")
        assert await bench.chat()
        await bench.idle()


async def test_limits_of_time():
    """Headers and bodies that never end, and connections that ask nothing, are given up."""
    async with serving(header_timeout_ms=300, body_timeout_ms=300) as bench:
        for begun in (
            b"",
            b"GET /health HTTP/1.1\r\nHost: ",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he",
        ):
            before = time.monotonic()
            answer = await raw(bench, begun)
            assert 0.2 < time.monotonic() - before < 1.5
            assert b"200 OK" in answer if begun.count(b"\r\n\r\n") else answer == b""
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        answer = await raw(bench, head + b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in answer
        assert b'"code":"timeout"' in answer
        await bench.idle()


async def test_continue_is_said_to_those_who_wait_for_it(bench):
    data = json.dumps(HI).encode()
    host, port = bench.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data)
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(data)
    assert b"Hello, world!" in await reader.read()
    writer.close()


async def test_old_clients_get_streams_without_chunks(bench):
    data = json.dumps({**HI, "stream": True}).encode()
    head = b"POST %b HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    answer = await raw(bench, head % (CHAT.encode(), len(data)) + data)
    assert answer.endswith(b"}\n\ndata: [DONE]\n\n")
    assert b"chunked" not in answer.lower()


async def test_overload_says_when_to_try_again():
    async with serving(max_requests=2) as bench:
        bench.engine.pause_s = None
        waiting = [asyncio.create_task(bench.post(CHAT, HI)) for _ in range(2)]
        while len(bench.engine.asked) < 2:
            await asyncio.sleep(0.001)
        async with bench.session.post(bench.url + CHAT, json=HI) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["code"] == "overloaded"
        assert (await bench.get("/health"))[0] == (await bench.get("/metrics"))[0] == 200
        for task in waiting:
            task.cancel()
        await bench.idle()
        bench.engine.pause_s, bench.engine.error = 0.0, Overloaded("the queue is full", retry_after_ms=2500)
        async with bench.session.post(bench.url + CHAT, json=HI) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "3")
        bench.engine.error = Overloaded("late", field="ttft_ms", retry_after_ms=1590, predicted_ttft_ms=1840)
        async with bench.session.post(bench.url + CHAT, json={**HI, "ttft_ms": 250}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
            error = (await response.json())["error"]
        assert (error["param"], error["predicted_ttft_ms"], error["retry_after_ms"]) == ("ttft_ms", 1840, 1590)
        assert bench.engine.asked[-1].ttft_ms == 250


async def test_ready_tells_whether_tokens_can_move(bench):
    assert await bench.get("/ready") == (200, {"ready": True})
    bench.engine_moves = False
    assert await bench.get("/ready") == (503, {"ready": False, "reason": "the engine does not say that tokens move"})
    bench.engine_moves = True
    bench.gateway.engine_lost(EngineFailed("gone"))
    status, said = await bench.get("/ready")
    assert status == 503
    assert "no engine serves now" in said["reason"]
    assert (await bench.get("/health"))[0] == 200
    async with bench.session.post(bench.url + CHAT, json=HI) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1


async def test_open_streams_end_when_the_engine_is_lost_or_time_is_over(bench):
    """F20: an error in the stream, or as the status of an answer that has not begun."""
    for end, code in ((_lose_engine, "engine_failed"), (_drain, "draining")):
        bench.engine.pause_s = 0.02
        streaming = asyncio.create_task(bench.events(CHAT, HI))
        whole = asyncio.create_task(bench.post(CHAT, HI))
        before = len(bench.engine.asked)
        while bench.server.meters.first_token.count == before and len(bench.engine.asked) < before + 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        end(bench)
        if end is _lose_engine:
            for task in bench.engine.running.values():
                task.cancel()
            bench.engine.running.clear()
        assert (await streaming)[-1]["error"]["code"] == code
        status, body = await whole
        assert (status, body["error"]["code"]) == (503, code)
        bench.gateway.engine_ready(bench.gateway.engine)
    bench.engine.pause_s = 0.0


def _lose_engine(bench):
    bench.gateway.engine_lost(EngineFailed("gone"))
    bench.gateway._engine_missed()  # no other one came in time


def _drain(bench):
    bench.gateway.drain()
    bench.gateway.end_draining()
    assert isinstance(bench.gateway._refusing, Draining)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_reads_nothing_is_cut(stream):
    """F18: what waits for it is bounded, then its connection ends, and its request with it. Others are not held up."""
    async with serving(slow_reader_timeout_ms=500) as bench:
        bench.engine.text = "x" * 900
        body = {"prompt": "hi", "max_tokens": 900, "n": 8 if stream else 16, "stream": stream, "logprobs": 20}
        data = json.dumps(body).encode()
        host, port = bench.url.removeprefix("http://").split(":")
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(narrow, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=narrow, limit=1000)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(data)
            + data
        )
        others = 0
        waits = []
        async with asyncio.timeout(20):
            while not bench.server.meters.slow_readers.value:
                assert await bench.get("/health") == (200, {"status": "ok"})
                others += 1
                waits += [c.connection.num_unsent for c in bench.gateway._clients.values()]
                await asyncio.sleep(0.01)
        assert others > 10
        assert 65_536 < max(waits) < (2**20 if stream else 2**24)  # one answer is as large as it is
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(2**30)
        writer.close()
        await bench.idle()


async def test_a_reader_that_pauses_loses_nothing(bench):
    bench.engine.text = "".join(chr(97 + i % 26) for i in range(900))
    body = {"prompt": "hi", "max_tokens": 900, "n": 4, "stream": True, "logprobs": 20}
    async with bench.session.post(bench.url + "/v1/completions", json=body) as response:
        await asyncio.sleep(1.0)
        data = await response.read()
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]
    for index in range(4):
        assert "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) == bench.engine.text


async def test_metrics_have_the_fields_names(bench):
    await bench.chat(n=2)
    with contextlib.suppress(asyncio.TimeoutError):
        await bench.post(CHAT, {**HI, "n": 99})
    status, page = await bench.get("/metrics")
    assert status == 200
    figures = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line[0] != "#"}
    label = '{model_name="bytes"}'
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert figures[f"pagewire_{name}_seconds_count{label}"] == 1, name
    assert figures["pagewire_inter_token_latency_seconds_count" + label] == 2 * 12
    assert figures['pagewire_request_queue_time_seconds_bucket{le="0.00178",model_name="bytes"}'] == 1
    assert figures["pagewire_kv_cache_usage_perc" + label] == 0.4
    assert figures["pagewire_num_requests_running" + label] == 2
    assert figures['pagewire_request_success_total{finished_reason="stop",model_name="bytes"}'] == 2
    assert figures['pagewire_http_responses_total{status="200"}'] == 1
    assert figures['pagewire_http_responses_total{status="400"}'] == 1
    from prometheus_client.parser import text_string_to_metric_families

    assert len(list(text_string_to_metric_families(page))) > 10


async def test_long_prompts_do_not_hold_up_the_loop():
    """F27: they are read by threads; streams and other requests go on meanwhile."""

    def slow(text):
        time.sleep(0.3)
        return list(text.encode())

    async with serving() as bench:
        bench.preparation._encode = slow
        bench.engine.pause_s = 0.002
        loop, gaps = asyncio.get_running_loop(), []
        asking = [asyncio.create_task(bench.complete("x" * 900)) for _ in range(8)]
        bodies = asyncio.gather(*asking)
        while not bodies.done():
            before = loop.time()
            await asyncio.sleep(0.001)
            gaps.append(loop.time() - before)
        await bodies
        gaps.sort()
        assert len(gaps) > 200
        assert gaps[len(gaps) // 2] < 0.01
        assert gaps[-1] < 0.25  # one of the threads' naps would be more


async def test_many_requests_leave_nothing_behind():
    """F17: requests that succeed, fail, are refused, and whose clients leave."""
    async with serving() as bench:
        for i in range(300):
            kind = i % 4
            if kind == 0:
                await bench.chat(max_tokens=2)
            elif kind == 1:
                await bench.events(CHAT, {**HI, "max_tokens": 2})
            elif kind == 2:
                await bench.post(CHAT, {**HI, "temperature": -1})
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.002):
                        await bench.chat()
        await bench.idle()
        async with asyncio.timeout(2):
            while len(bench.server._idle) > len(bench.server._server.connections):
                await asyncio.sleep(0.01)
        bench.server._idle.check_invariants()
        assert len(bench.server._of_key) == bench.server._bodies.num_reading == 0
        assert bench.server.meters.num_open == 0


async def test_a_key_file_that_is_missing_refuses_to_start(tmp_path):
    with pytest.raises(ConfigError):
        async with serving(api_key_file=str(tmp_path / "none")):
            pass


async def test_before_the_engine_is_there_every_door_gives_one_answer(bench):
    """A gateway may start first; ZeroMQ's door says `unavailable` then, and so does this one, at every path."""
    bench.gateway._engine = None
    bench.gateway._refusing = Unavailable("the server is still starting", retry_after_ms=1000)
    with pytest.raises(Unavailable) as refusal:
        bench.gateway.welcome()
    hello = {"messages": [{"role": "user", "content": "x"}]}
    answers = [await bench.get(path) for path in ("/v1/models", "/v1/models/x", "/metrics")]
    answers += [
        await bench.post(path, body)
        for path, body in (
            ("/v1/chat/completions", hello),
            ("/v1/completions", {"prompt": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        )
    ]
    for status, body in answers:
        assert (status, body["error"]["code"]) == (503, refusal.value.code)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (b"nonsense\r\n\r\n", "no HTTP request"),
        (b"GET / HTTP/9.9x\r\n\r\n", "no HTTP request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "without TLS"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 20_000 + b"\r\n\r\n", "too long"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", "too long"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100 + b"\r\n", ""),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nbroken header\r\n\r\n", "no HTTP request"),
    ],
)
async def test_what_is_no_request_is_refused_as_everything_else(bench, request_, says):
    """In OpenAI's shape, and without the name and version of a library."""
    answer = await raw(bench, request_)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] 400 ", head)
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "bad_request", None)
    assert says in error["message"]
    assert b"aiohttp" not in answer


async def test_no_answer_names_its_software(bench):
    for path in ("/health", "/v1/models", "/nothing"):
        async with bench.session.get(bench.url + path) as response:
            assert "Server" not in response.headers
    async with bench.session.post(bench.url + CHAT, json={**HI, "stream": True}) as response:
        assert "Server" not in response.headers
        await response.read()


async def test_a_name_that_somebody_points_here_is_not_answered(bench):
    """DNS rebinding: a web page's own host name, which its owner lets point to 127.0.0.1."""
    port = bench.url.rpartition(":")[2]
    for host in ("localhost", "LOCALHOST", f"127.0.0.1:{port}", "[::1]:8000", "models.localhost"):
        assert (await bench.get("/v1/models", headers={"Host": host}))[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example"):
        status, body = await bench.get("/v1/models", headers={"Host": host})
        assert (status, body["error"]["code"]) == (403, "host_not_allowed")
    async with serving(allow_no_keys=True) as behind_a_proxy:
        assert (await behind_a_proxy.get("/v1/models", headers={"Host": "models.example"}))[0] == 200


@pytest.mark.parametrize(
    ("address", "says"), [("203.0.113.7:8000", "no such address"), ("no.such.host.invalid:8000", "")]
)
async def test_an_address_that_cannot_be_had_says_what_helps(address, says):
    with pytest.raises(ConfigError) as caught:
        async with serving(address=address, allow_no_keys=True):
            pass
    assert caught.value.field == "http.address"
    assert says in str(caught.value)
    assert ";" in str(caught.value)
