"""The client goes on over the next connection by itself, or says in time that it cannot; and the face without `async`."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.server.bench import serve, until
from tests.server.fake_core import FakeCore, logprob, tokens

from pagewire_client import connect, sync
from pagewire_transport.errors import ConnectionLost, InvalidRequest, UnknownStream


def cut(client):
    """As if the connection broke: the client makes another."""
    client._link._lost(ConnectionLost("cut by the test"))


async def test_streams_go_on_over_the_next_connection():
    async with serve() as server, connect(server.endpoint) as client:
        streams = [client.generate([1], max_tokens=20, seed=seed, n=2, logprobs=1) for seed in (10, 20)]
        await until(lambda: len(server.core.live) == 4)
        for round_ in range(5):
            for _ in range(3):
                server.core.step()
            if round_ != 3:  # else: cut again before anything came
                await until(lambda: all(s.received == [3 * (round_ + 1)] * 2 for s in streams))  # noqa: B023
            cut(client)
        for _ in range(5):
            server.core.step()
        for stream in streams:
            result = await asyncio.wait_for(stream.result(), 10)
            for choice, one in enumerate(result.choices):
                seed = result.seed + choice
                assert one.token_ids == tokens(seed, 20)
                assert [p.logprob for p in one.logprobs] == [logprob(seed, i) for i in range(20)]
        assert client.num_streams == 0


async def test_a_request_that_was_not_accepted_begins_anew():
    async with serve() as server, connect(server.endpoint) as client:
        stream = client.generate([1], max_tokens=3, seed=4)
        cut(client)  # it may have been on its way
        await until(lambda: stream.request_id is not None)
        server.core.step(3)
        assert (await asyncio.wait_for(stream.result(), 10)).token_ids == tokens(4, 3)


async def test_a_cancel_reaches_the_server_over_the_next_connection():
    async with serve() as server, connect(server.endpoint) as client:
        stream = client.generate([1], max_tokens=100, seed=4)
        await until(lambda: stream.request_id is not None)
        cut(client)
        stream.cancel()
        await until(lambda: not server.core.live)
        server.core.report()
        assert (await asyncio.wait_for(stream.result(), 10)).finish_reason == "cancelled"


async def test_an_end_that_the_user_found_reaches_the_server_over_the_next_connection():
    async with serve() as server, connect(server.endpoint) as client:
        stream = client.generate([1], max_tokens=100, seed=4, n=2)
        await until(lambda: stream.request_id is not None)
        server.core.step(5)
        await until(lambda: stream.received == [5, 5])
        cut(client)
        stream.finish(3, choice=1)
        stream.finish(3, choice=2)  # is none
        await until(lambda: len(server.core.live) == 1)
        server.core.step(95)
        first, second = (await asyncio.wait_for(stream.result(), 10)).choices
        assert (first.finish_reason, first.token_ids) == ("length", tokens(4, 100))
        assert (second.finish_reason, second.token_ids) == ("stop", tokens(5, 3))


async def test_a_server_that_does_not_come_back_is_told_in_time():
    server = serve()
    running = await server.__aenter__()
    async with connect(running.endpoint, resume_timeout_s=0.1) as client:
        stream = client.generate([1], max_tokens=5, seed=1)
        await until(lambda: stream.request_id is not None)
        running.core.step(2)
        await until(lambda: stream.received == [2])
        await server.__aexit__(None, None, None)
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(stream.result(), 10)
        assert stream._state.choices[0].token_ids.tolist() == tokens(1, 2)


async def test_a_server_that_forgot_says_so():
    async with serve() as server, connect(server.endpoint) as client:
        stream = client.generate([1], max_tokens=5, seed=1)
        await until(lambda: stream.request_id is not None)
        server._survivors._streams.forget(stream.request_id)
        cut(client)
        with pytest.raises(UnknownStream):
            await asyncio.wait_for(stream.result(), 10)


async def test_a_client_that_crashed_and_came_back():
    async with serve() as server:
        async with connect(server.endpoint) as client:
            first = client.generate([1], max_tokens=8, seed=1)
            await until(lambda: first.request_id is not None)
            server.core.step(3)
            await until(lambda: first.received == [3])
            async with connect(server.endpoint) as other:
                second = other.resume(first.request_id, first.resume_key, received=[2])
                await until(lambda: second.request_id is not None)
                server.core.step(5)
                result = await asyncio.wait_for(second.result(), 10)
                assert result.token_ids == tokens(1, 6, 2)
                assert (result.request_id, result.usage.completion) == (first.request_id, 8)
            with pytest.raises(ConnectionLost, match="another connection"):
                await first.result()
            for wrong in ([], [-1], ["x"]):
                with pytest.raises(InvalidRequest, match="received"):
                    client.resume("a", "b", received=wrong)


class TestSync:
    @pytest.fixture
    def server(self):
        """Steps by itself, on a loop of its own."""
        ready, stop = threading.Event(), threading.Event()
        found = []

        async def main():
            async with serve(FakeCore()) as server:
                found.append(server.endpoint)
                ready.set()
                while not stop.is_set():
                    server.core.step()
                    server.core.report()
                    await asyncio.sleep(0.001)

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        ready.wait(10)
        yield found[0]
        stop.set()
        thread.join()

    def test_chunks_results_and_ends(self, server):
        with sync.connect(server) as client:
            assert client.info.model == "fake"
            chunks = list(client.generate([1], max_tokens=5, seed=3))
            assert [i for chunk in chunks for i in chunk.token_ids] == tokens(3, 5)
            with client.generate([1], max_tokens=4000, seed=3) as stream:
                assert next(stream).index == 0
                stream.cancel()
                assert stream.result().finish_reason == "cancelled"
            assert stream.seed == 3
            first = client.generate([1], max_tokens=50, seed=3)
            next(first)
            second = client.resume(first.request_id, first.resume_key, received=[0])
            assert second.result().token_ids == tokens(3, 50)
            with pytest.raises(InvalidRequest):
                client.generate([], max_tokens="x")
            assert "sequences_running" in client.stats()
        client.close()

    def test_no_server_is_told(self, tmp_path):
        with pytest.raises(ConnectionLost):
            sync.connect(f"ipc://{tmp_path}/none")
        assert not [t for t in threading.enumerate() if t.name == "pagewire client"]
