"""Many connections that want nothing: bodies that do not come, headers that do not end, keys that ask for too much."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.http.bench import serving
from tests.server.bench import until

from pagewire import keys
from pagewire.gateway.http.idle import IdleConnections

POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Peer:
    """A connection, byte for byte."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def say(self, data):
        self.writer.write(data)

    async def hear(self, timeout_s=2.0):
        """What comes until the server closes, or is quiet."""
        out = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(timeout_s):
                while data := await self.reader.read(65_536):
                    out += data
                    if out.startswith(b"HTTP") and b"\r\n\r\n" in out and not out.endswith(b"\r\n\r\n"):
                        return out
        return out

    @property
    def is_cut(self):
        return self.reader.at_eof() or self.reader.exception() is not None


@contextlib.asynccontextmanager
async def peers(bench, num):
    host, port = bench.url.removeprefix("http://").split(":")
    made = []
    try:
        for _ in range(num):
            made.append(Peer(*await asyncio.open_connection(host, int(port))))
        yield made
    finally:
        for peer in made:
            peer.writer.close()
            with contextlib.suppress(ConnectionError):
                await peer.writer.wait_closed()


@pytest.mark.parametrize("announced", [b"Content-Length: 2048\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
async def test_bodies_that_are_announced_and_do_not_come_keep_nobody_out(announced):
    """F50: what counts is what came. Sixteen largest ones that had only been announced once closed the door for all."""
    async with serving(max_body_bytes=2048) as bench, peers(bench, 40) as slow:
        for peer in slow:
            peer.say(POST + announced)
        bodies = bench.server._bodies
        await until(lambda: bodies.num_reading == 40)
        assert (await bench.post("/tokenize", {"prompt": "x"}))[0] == 200
        bodies.check_invariants()
    await until(lambda: bodies.num_reading == 0)
    bodies.check_invariants()


async def test_of_too_many_bodies_the_one_that_was_begun_first_is_given_up():
    async with serving(max_requests=3) as bench, peers(bench, 5) as slow:
        bodies = bench.server._bodies
        for number, peer in enumerate(slow):
            peer.say(POST + b"Content-Length: 100\r\n\r\n{")
            await until(
                lambda n=number: bodies.num_reading == min(3, n + 1) and bench.server.meters.num_open >= min(3, n + 1)
            )
            await asyncio.sleep(0.02)
        for peer in slow[:2]:
            answer = await peer.hear()
            assert b" 429 " in answer
            assert b'"overloaded"' in answer
            assert b"Retry-After: 1" in answer
        assert bodies.num_reading == 3
        assert (await bench.post("/tokenize", {"prompt": "x"}))[0] == 200, "whoever sends at once is served"
        bodies.check_invariants()


async def test_what_was_read_is_bounded_and_the_first_gives_way():
    """Sixteen times the largest body's bytes, of all that are being read."""
    async with serving(max_body_bytes=2048) as bench, peers(bench, 20) as large:
        bodies = bench.server._bodies
        for peer in large:
            peer.say(POST + b"Content-Length: 2048\r\n\r\n" + b"[" * 2047)
            await asyncio.sleep(0.01)
            bodies.check_invariants()
        answers = [await peer.hear(0.1) for peer in large]
        assert [b" 429 " in answer for answer in answers] == [True] * 4 + [False] * 16
        assert bodies._num_bytes == 16 * 2047
        large[-1].say(b"[")  # and who sends the rest is answered
        assert b" 400 " in await large[-1].hear()
        assert (await bench.post("/tokenize", {"prompt": "x"}))[0] == 200


async def test_a_large_body_in_one_piece_and_in_many():
    text = "ab" * 200_000
    async with serving(max_body_bytes=2**19) as bench:
        status, body = await bench.post("/tokenize", {"prompt": text})
        assert status in (200, 400), body
        async with peers(bench, 1) as (peer,):
            data = b'{"prompt": "' + b"x" * 100_000 + b'"}'
            peer.say(POST + b"Content-Length: %d\r\n\r\n" % len(data))
            for start in range(0, len(data), 5_000):
                peer.say(data[start : start + 5_000])
                await asyncio.sleep(0)
            assert b"HTTP/1.1 " in await peer.hear()
        for extra in (0, 1):
            data = b'"' + b"x" * (2**19 - 2 + extra) + b'"'
            status, body = await bench.post("/tokenize", data=data, headers={"Content-Type": "application/json"})
            assert (status, body["error"]["code"]) == (
                (400, "invalid_request") if not extra else (413, "body_too_large")
            )


async def test_of_too_many_idle_connections_those_go_that_never_asked_and_wait_longest():
    async with serving(max_idle_connections=4) as bench, peers(bench, 2) as known:
        for peer in known:
            peer.say(GET)
            assert b"200 OK" in await peer.hear()
        async with peers(bench, 6) as crowd:
            for peer in crowd[2:]:
                peer.say(b"GET /health HTTP/1.1\r\nX-")
            await until(lambda: [peer.is_cut for peer in crowd] == [True] * 4 + [False] * 2)
            for peer in known:  # who was answered before is no stranger
                peer.say(GET)
                assert b"200 OK" in await peer.hear()
            assert len(bench.server._idle) <= 4
            bench.server._idle.check_invariants()


async def test_a_keys_requests_are_counted_together_and_no_other_key_pays(tmp_path):
    path = tmp_path / "keys"
    ann, bob = (keys.add(path, name, now=datetime.now(UTC)) for name in ("ann", "bob"))
    async with serving(api_key_file=str(path), max_requests_per_key=2) as bench:
        bench.engine.pause_s = None
        of_ann, of_bob = ({"Authorization": f"Bearer {key}"} for key in (ann, bob))
        waiting = [asyncio.create_task(bench.post(CHAT, HI, headers=of_ann)) for _ in range(2)]
        await until(lambda: len(bench.engine.asked) == 2)
        async with bench.session.post(bench.url + CHAT, json=HI, headers=of_ann) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            error = (await response.json())["error"]
            assert (error["code"], "of this key" in error["message"]) == ("overloaded", True)
        assert (await bench.get("/v1/models", headers=of_ann))[0] == 200, "looking is always allowed"
        bench.engine.pause_s = 0.0
        assert (await bench.post(CHAT, HI, headers=of_bob))[0] == 200
        for task in waiting:
            task.cancel()
        await bench.idle()
        assert (await bench.post(CHAT, HI, headers=of_ann))[0] == 200
        assert len(bench.server._of_key) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["made", "asks", "rests", "gone", "too_many", "overdue"]),
            st.integers(0, 7),
            st.integers(0, 9),
        ),
        max_size=80,
    )
)
def test_idle_connections_in_any_order(events):
    """Against a model: who waits, since when, and whether it was answered before."""
    idle = IdleConnections(3, 20.0)
    now, model = 0.0, {}
    for what, number, later in events:
        now += later
        waits = sorted(model, key=lambda one: (model[one][0], model[one][1], model[one][2]))
        if what == "made":
            idle.gone(number)
            idle.made(number, now)
            model[number] = (False, now, len(events) + now)
        elif what == "asks":
            idle.asks(number)
            model.pop(number, None)
        elif what == "rests":
            idle.gone(number)
            idle.rests(number, now)
            model[number] = (True, now, now)
        elif what == "gone":
            idle.gone(number)
            model.pop(number, None)
        elif what == "too_many":
            cut = list(idle.too_many())
            assert len(cut) == max(0, len(model) - 3)
            for one in cut:
                fresh = [other for other in model.values() if not other[0]]
                turn = fresh if len(fresh) > 1 else [other for other in model.values() if other[0]]
                before = model.pop(one)
                assert before in turn
                assert before[1] == min(other[1] for other in turn)
        else:
            due = {one for one in waits if now - model[one][1] > 20}
            assert set(idle.overdue(now)) == due
            for one in due:
                del model[one]
        idle.check_invariants()
        assert len(idle) == len(model)


async def test_who_leaves_before_his_body_is_read_is_no_fault_of_ours(caplog):
    """The framework says `RuntimeError` then."""
    async with serving() as bench:
        for _ in range(50):
            async with peers(bench, 1) as (peer,):
                peer.say(POST + b"Content-Length: 100\r\n\r\n{")
                peer.writer.transport.abort()
        await bench.idle()
        assert bench.server.meters.responses.get(500, 0) == 0
        assert bench.server._bodies.num_reading == 0
