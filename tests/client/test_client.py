"""The client: what it gives, how its streams end, what it does when the server is not what it should be."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
import time

import pytest
import uvloop
from tests.server.bench import serve, until
from tests.server.fake_core import tokens
from tests.transport.test_door import opened

from pagewire.supervisor.rendezvous import ServerFolder
from pagewire_client import Chunk, connect
from pagewire_client.result import percentile
from pagewire_transport.columns import pack
from pagewire_transport.errors import ConfigError, ConnectionLost, Draining, InvalidRequest, ProtocolError, Unavailable
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    Done,
    Error,
    Finished,
    Generate,
    Timings,
    Tokens,
    Usage,
)
from pagewire_transport.servers import ServerRecord


@contextlib.asynccontextmanager
async def running(**config):
    """Server, client, and a core that steps by itself."""
    async with serve(**config) as server, connect(server.endpoint) as client:
        task = asyncio.create_task(server.core.run(0.002))
        try:
            yield server, client
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# ---- reading ---------------------------------------------------------------------------------------------------------


async def test_chunks_and_result_agree():
    async with running() as (_, client):
        stream = client.generate([1, 2], max_tokens=20, seed=4)
        chunks = [chunk async for chunk in stream]
        result = await stream.result()
        assert [chunk.index for chunk in chunks] == list(range(20))
        assert [i for chunk in chunks for i in chunk.token_ids] == result.token_ids == tokens(4, 20)
        timings = result.timings
        assert timings.total_ns >= timings.ttft_ns > 0
        assert timings.itl_p99_ns >= timings.itl_p95_ns >= timings.itl_p50_ns > 1_000_000
        assert [chunk async for chunk in stream] == []
        assert await stream.result() == result


async def test_many_streams_many_readers_under_uvloop_too():
    async def main():
        async with running() as (server, client):
            results = await asyncio.gather(
                *(client.generate([1], max_tokens=1 + seed % 9, seed=seed).result() for seed in range(200))
            )
            assert [r.token_ids for r in results] == [tokens(seed, 1 + seed % 9) for seed in range(200)]
            assert client.num_streams == server.num_streams == 0

    await main()
    await asyncio.to_thread(uvloop.run, main())


async def test_an_unread_stream_is_kept_and_nothing_more():
    async with running() as (_, client):
        stream = client.generate([1], max_tokens=50, seed=1)
        assert len((await stream.result()).token_ids) == 50
        assert len([chunk async for chunk in stream]) == 50


async def test_no_tokens_at_all():
    async with running() as (_, client):
        result = await client.generate([1], max_tokens=0).result()
        assert (result.token_ids, result.timings.ttft_ns, result.timings.itl_p50_ns) == ([], None, None)


def test_percentiles():
    assert [percentile(list(range(1, 101)), share) for share in (0.5, 0.95, 0.99)] == [50, 95, 99]
    assert percentile([7], 0.5) == 7
    assert percentile([], 0.5) is None


# ---- leaving ---------------------------------------------------------------------------------------------------------


async def leave_by_break(client):
    async for _ in client.generate([1], max_tokens=4000):
        break


async def leave_by_return(client):
    async for _ in client.generate([1], max_tokens=4000):
        return


async def leave_by_exception(client):
    with contextlib.suppress(ZeroDivisionError):
        async for _ in client.generate([1], max_tokens=4000):
            raise ZeroDivisionError


async def leave_by_aclose(client):
    stream = client.generate([1], max_tokens=4000)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert [chunk async for chunk in stream] == []
    assert (await stream.result()).finish_reason == "cancelled"


async def leave_by_cancel(client):
    stream = client.generate([1], max_tokens=4000)
    await anext(stream)
    stream.cancel()
    chunks = [chunk async for chunk in stream]  # what was under way, then the end
    assert (await stream.result()).finish_reason == "cancelled"
    assert len(chunks) + 1 == len((await stream.result()).token_ids)


async def leave_a_with_block(client):
    async with client.generate([1], max_tokens=4000) as stream:
        async for _ in stream:
            break


async def leave_by_cancelled_reader(client):
    async def read():
        async for _ in client.generate([1], max_tokens=4000):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def leave_by_cancelled_result(client):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.generate([1], max_tokens=4000).result(), 0.05)


async def leave_unread(client):
    client.generate([1], max_tokens=4000)


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break, leave_by_return, leave_by_exception, leave_by_aclose, leave_by_cancel, leave_a_with_block,
        leave_by_cancelled_reader, leave_by_cancelled_result, leave_unread,
    ],
)  # fmt: skip
async def test_leaving_cancels_on_the_server(leave):
    gc.disable()  # at once, and not when the collector comes by
    try:
        async with running() as (server, client):
            await leave(client)
            await until(lambda: len(server.core.requests) == 1 and not server.core.live and not client.num_streams)
            assert server.core.requests[0].max_tokens == 4000
            assert server.num_streams == 0
    finally:
        gc.enable()


async def test_a_named_stream_outlives_a_break():
    async with running() as (server, client):
        stream = client.generate([1], max_tokens=30, seed=2)
        ids = []
        async for chunk in stream:
            ids.extend(chunk.token_ids)
            break
        async for chunk in stream:
            ids.extend(chunk.token_ids)
        assert ids == tokens(2, 30)
        assert server.core.cancelled == []


async def test_closing_the_client_ends_everything():
    async with running() as (server, client):
        async with connect(server.endpoint) as second:
            stream = second.generate([1], max_tokens=4000)
            await anext(stream)
        with pytest.raises(ConnectionLost):
            await stream.result()
        with pytest.raises(ConnectionLost):
            second.generate([1])
        await until(lambda: not server.core.live)
        assert (await client.generate([1], max_tokens=2, seed=1).result()).token_ids == tokens(1, 2)


async def test_dropping_a_stream_after_its_loop_is_silent():
    """No exception may come out of a destructor."""

    def main():
        async def inner():
            async with serve() as server, connect(server.endpoint) as client:
                kept.append(client.generate([1], max_tokens=9))
                kept.append(client.generate([1], max_tokens=9))
                kept[1]._state.error = None

        asyncio.run(inner())

    kept = []
    await asyncio.to_thread(main)
    kept[1]._state.error = None  # as if it were open
    kept[1]._state.done = None
    kept.clear()
    gc.collect()


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.generate("x", temprature=1.0), "temprature"),
        (lambda c: c.generate("x", temperature=float("nan")), "temperature"),
        (lambda c: c.generate("x", n=0), "n"),
        (lambda c: c.generate("x", max_tokens="9"), "max_tokens"),
        (lambda c: c.generate("x", stop=["ok", ""]), "stop[1]"),
        (lambda c: c.generate("x", priority=1000), "priority"),
        (lambda c: c.generate("x", namespace=5), "namespace"),
        (lambda c: c.generate("x", on_lag="wait"), "on_lag"),
        (lambda c: c.generate("caf\udce9"), "prompt"),
        (lambda c: c.generate("x", stop="caf\udce9"), "stop[0]"),
        (lambda c: c.generate([1], namespace="\udce9"), "namespace"),
        (lambda c: c.generate(5), "prompt"),
        (lambda c: c.generate(None), "prompt"),
        (lambda c: c.generate(b"abcd"), "prompt"),
        (lambda c: c.chat("hi"), "messages"),
        (lambda c: c.chat(None), "messages"),
        (lambda c: c.chat({"role": "user", "content": "x"}), "messages"),
        (lambda c: c.chat(["hi"]), "messages[0]"),
        (
            lambda c: c.chat([{"role": "user", "content": "a"}, {"role": "user", "content": "\udce9"}]),
            "messages[1].content",
        ),
        (lambda c: c.chat([], template_kwargs=5), "template_kwargs"),
        (lambda c: c.generate([1, -1]), "prompt_ids"),
        (lambda c: c.generate(["a"]), "prompt_ids"),
        (lambda c: c.generate("x" * 70_000), "prompt"),
        (lambda c: c.generate([1] * 20_000), "prompt_ids"),
        (lambda c: c.chat([{"role": "user"}]), "messages[0].content"),
        (lambda c: c.chat([{"role": "user", "content": "x", "name": "y"}]), "messages[0].name"),
        (lambda c: c.chat([{"role": "user", "content": "x" * 70_000}]), "messages"),
        (lambda c: c.chat([], template_kwargs={"a": [1]}), "template_kwargs"),
    ],
)
async def test_a_bad_argument_is_named_at_once(call, field):
    async with serve(max_message_bytes=65_536) as server, connect(server.endpoint) as client:
        with pytest.raises(InvalidRequest) as caught:
            call(client)
        assert caught.value.field == field
        assert client.num_streams == 0


async def test_params_reach_the_server():
    async with opened() as (door, handler), connect(door.url) as client:
        kept = [
            client.generate(
                "x", stop="END", n=2, logit_bias={5: -1.0}, namespace="n", priority=-1, echo_text=False, on_lag="pause"
            ),
            client.chat([{"role": "user", "content": "hi"}], template_kwargs={"a": True}, max_tokens=3),
        ]
        await until(lambda: len(handler.messages) == 2)
        (_, first), (_, second) = handler.messages
        assert (first.prompt, first.params.stop, first.params.n, first.params.logit_bias) == (
            "x",
            ("END",),
            2,
            {5: -1.0},
        )
        assert (first.namespace, first.priority, first.echo_text, first.on_lag) == ("n", -1, False, "pause")
        assert (second.messages[0].content, second.template_kwargs, second.params.max_tokens) == ("hi", {"a": True}, 3)
        assert len(kept) == 2


# ---- servers that are not what they should be ------------------------------------------------------------------------


async def test_no_server_is_told_in_time(tmp_path):
    begun = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"nosuch.*is it running"):
        async with connect(f"ipc://{tmp_path}/nosuch", timeout_s=0.2):
            pass
    assert time.monotonic() - begun < 2
    with pytest.raises(ConfigError):
        async with connect("http://x"):
            pass
    with pytest.raises(ConfigError, match="name"):
        async with connect("tcp://127.0.0.1:9", name="\ud800"):
            pass


async def test_a_socket_that_is_missing_or_dead_is_told_at_once(tmp_path, monkeypatch):
    begun = time.monotonic()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "dead"))
    for name in ("nosuch", "dead"):
        with pytest.raises(ConnectionLost, match=rf"{name}: is it running"):
            async with connect(f"ipc://{tmp_path}/{name}"):
                pass
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with pytest.raises(ConnectionLost, match="no server of yours runs"):
        async with connect():
            pass
    assert time.monotonic() - begun < 2


async def test_without_a_url_the_newest_server_is_found(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    async with serve() as server:
        folder = ServerFolder.create()
        folder.publish(ServerRecord(url=server.endpoint, model="m", pid=1, started=1.0))
        async with connect() as client:
            assert client.url == server.endpoint
        folder.close()


async def test_a_server_that_comes_later_is_found():
    async with serve() as server:
        url = server.endpoint
    waiting = asyncio.create_task(_ask(url))
    await asyncio.sleep(0.15)
    async with serve(bind=url) as server:
        await until(lambda: server.core.live)
        server.core.step(2)
        assert await waiting == tokens(1, 2)


async def _ask(url):
    async with connect(url, timeout_s=10) as client:
        return (await client.generate([1], max_tokens=2, seed=1).result()).token_ids


async def test_a_server_that_lets_nobody_in():
    async with opened() as (door, handler):
        handler.shut = Draining("closing")
        with pytest.raises(Draining):
            async with connect(door.url):
                pass


async def test_a_silent_server_ends_all_streams_and_is_used_again_when_it_speaks():
    async with opened() as (door, handler):
        async with connect(door.url, resume_timeout_s=0) as client:  # heartbeat 100 ms, timeout 1 s
            streams = [client.generate("x") for _ in range(3)]
            await until(lambda: len(handler.messages) == 3)
            door._socket._loop.remove_reader(door._socket._socket.fileno())  # it hears and says nothing
            door._socket._is_round_due = True
            for stream in streams:
                with pytest.raises(ConnectionLost, match="silent"):
                    await stream.result()
            door._socket._watch()
            door._socket._round()
            again = client.generate("x")
            await until(lambda: len(handler.messages) == 4)
            again.cancel()
            await until(lambda: isinstance(handler.messages[-1][1], Cancel))
            # The server noticed, too, that the old connection is gone.
            assert len(door.connections) <= 2


async def test_a_connection_that_the_server_forgot():
    async with opened() as (door, handler), connect(door.url, resume_timeout_s=0) as client:
        stream = client.generate("x")
        await until(lambda: handler.messages)
        door._lose(door.connections[0], Draining("forgotten"))
        with pytest.raises(ConnectionLost, match="gave this connection up"):
            await stream.result()
        await client.wait_ready(5)
        assert len(door.connections) == 1


async def test_a_request_behind_a_hello_that_is_refused_fares_as_that():
    """A server that restarts lets nobody in yet: its reason is told, not that this connection is unknown."""
    async with opened() as (door, handler), connect(door.url, resume_timeout_s=0) as client:
        stream = client.generate("x")
        await until(lambda: handler.messages)
        handler.shut = Unavailable("the engine restarts", retry_after_ms=100)
        door._lose(door.connections[0], Draining("forgotten"))
        with pytest.raises(ConnectionLost):
            await stream.result()
        for _ in range(3):  # on its way before the hello's answer, and after
            with pytest.raises(Unavailable, match="the engine restarts") as caught:
                await client.generate("y").result()
            assert caught.value.retry_after_ms == 100


async def test_who_gave_time_waits_for_a_server_that_starts():
    """Both parts of a server restart, say: the gateway is back first, and lets nobody in before the engine is."""
    async with opened() as (door, handler):
        handler.shut = Unavailable("the server is still starting", retry_after_ms=100)
        with pytest.raises(Unavailable):  # who gave none is told at once
            async with connect(door.url):
                pass
        with pytest.raises(Unavailable, match="still starting"):
            async with connect(door.url, timeout_s=0.1):
                pass
        asyncio.get_running_loop().call_later(0.2, setattr, handler, "shut", None)
        async with connect(door.url, timeout_s=20) as client:
            assert client.info.model
        handler.shut = Draining("no")
        with pytest.raises(Draining):  # it does not say that trying again helps
            async with connect(door.url, timeout_s=20):
                pass


def finished(stream, num, **fields):
    return Finished(stream=stream, reason="length", num_tokens=num, **fields)


def done(stream):
    return Done(
        stream=stream,
        seed=1,
        usage=Usage(prompt=1, completion=2),
        timings=Timings(queue_ns=1, first_token_ns=2, total_ns=3),
    )


def run_of(stream, start, ids, **fields):
    fields.setdefault("counts", pack("H", [len(ids)]))
    return Tokens(streams=pack("I", [stream]), starts=pack("I", [start]), ids=pack("I", ids), **fields)


async def scripted(*script, n=1):
    """What a client makes of these messages after `accepted`."""
    async with opened() as (door, handler), connect(door.url) as client:
        stream = client.generate("x", n=n)
        await until(lambda: handler.messages)
        connection, asked = handler.messages[0]
        assert isinstance(asked, Generate)
        number = asked.stream
        connection.send(Accepted(stream=number, request_id="r1", seed=1, num_prompt_tokens=1, max_tokens=9))
        for make in script:
            connection.send(make(number))
        chunks = []
        try:
            async for chunk in stream:
                chunks.append(chunk)
            return chunks, await stream.result()
        except ProtocolError as error:
            if asked.params.n == 1:
                await until(lambda: isinstance(handler.messages[-1][1], Cancel))
            return chunks, error


async def test_text_held_back_comes_with_the_end():
    chunks, result = await scripted(
        lambda s: run_of(s, 0, [5, 6], texts=("ab",)),
        lambda s: run_of(s, 2, [], texts=("c",)),
        lambda s: finished(s, 2, text="d", stop="END"),
        done,
    )
    assert chunks == [Chunk("ab", (5, 6), 0), Chunk("c", (), 2), Chunk("d", (), 2)]
    assert (result.text, result.stop, result.request_id) == ("abcd", "END", "r1")


@pytest.mark.parametrize(
    "script",
    [
        [lambda s: run_of(s, 1, [5])],  # the first token is missing
        [lambda s: run_of(s, 0, [5]), lambda s: run_of(s, 0, [5])],  # it comes twice
        [lambda s: run_of(s, 0, [5], choices=pack("H", [1]))],  # a choice that was not asked for
        [lambda s: run_of(s, 0, [5], counts=pack("H", [2]))],
        [lambda s: run_of(s, 0, [5], texts=("a", "b"))],
        [lambda s: Tokens(streams=b"123", starts=b"", ids=b"")],
        [lambda s: run_of(s, 0, [5]), lambda s: finished(s, 2)],  # the end counts more than came
        [done],  # no end of the choice
        [lambda s: finished(s, 0, choice=3)],
    ],
)
async def test_tokens_that_do_not_add_up_are_an_error_never_a_wrong_text(script):
    _, error = await scripted(*script)
    assert isinstance(error, ProtocolError)


async def test_an_error_comes_after_the_chunks_before_it():
    async with opened() as (door, handler), connect(door.url) as client:
        stream = client.generate("x")
        await until(lambda: handler.messages)
        connection, asked = handler.messages[0]
        connection.send(run_of(asked.stream, 0, [5]))
        connection.send(Error(code="numeric", message="NaN", stream=asked.stream))
        assert (await anext(stream)).token_ids == (5,)
        for _ in range(2):
            with pytest.raises(Exception, match="NaN") as caught:
                await anext(stream)
            assert caught.value.code == "numeric"


async def test_an_error_code_of_a_newer_server():
    async with opened() as (door, handler), connect(door.url) as client:
        stream = client.generate("x")
        await until(lambda: handler.messages)
        connection, asked = handler.messages[0]
        connection.send(Error(code="quota", message="too much", stream=asked.stream, retry_after_ms=9))
        with pytest.raises(Exception, match="too much") as caught:
            await stream.result()
        assert caught.value.retry_after_ms == 9


def test_the_client_needs_no_gpu_stack():
    code = (
        "import sys, pagewire_client; "
        "heavy = {'torch', 'triton', 'numpy', 'transformers', 'jinja2', 'tokenizers'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
