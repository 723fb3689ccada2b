"""Readers that are slow, stopped or dead: nobody waits for them, nothing grows, nothing is lost (F8, F18)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import uvloop
from tests.server.bench import RawPeer, entries, serve, until
from tests.server.fake_core import logprob, tokens

from pagewire_client import connect
from pagewire_transport.columns import unpack
from pagewire_transport.messages import Accepted, Cancel, Done, Finish, Finished, Tokens

STEPS = 3000
STREAMS = 8


async def test_a_reader_that_does_not_read_lags_and_then_gets_everything():
    """F18: what waits for it is bounded in frames, its cursors catch up in few messages, others see each step."""
    async with serve() as server, connect(server.endpoint) as other:
        with RawPeer(server.endpoint, receive_hwm=1) as slow:
            await slow.hello()
            for stream in range(STREAMS):
                await slow.generate(stream, seed=stream, max_tokens=STEPS + 10, logprobs=1 if stream == 0 else None)
            quick = other.generate([1], seed=99, max_tokens=STEPS)
            await until(lambda: len(server.core.live) == STREAMS + 1)
            (reader,) = [r for c, r in server._readers.items() if c.client == "raw"]
            most = 0
            for step in range(STEPS):
                server.core.step()
                most = max(most, reader.connection.num_unsent)
                if step % 50 == 0:
                    await until(lambda: len(quick._state.choices[0].token_ids) > step)  # noqa: B023
            assert reader.is_behind
            assert most <= 1
            assert (await quick.result()).token_ids == tokens(99, STEPS)
            server.check_invariants()
            for _ in range(10):
                server.core.step()
            got, texts, finished, done, num_messages = {}, [], set(), set(), 0
            while len(done) < STREAMS:
                message = await slow.read()
                if isinstance(message, Tokens):
                    num_messages += 1
                    position = 0
                    for entry, (stream, _, start, ids) in enumerate(entries(message)):
                        assert start == len(got.setdefault(stream, []))
                        assert stream not in finished
                        got[stream].extend(ids)
                        if message.logprobs is not None and entry in list(unpack("I", message.logprobs.entries)):
                            assert stream == 0
                            chosen = list(unpack("f", message.logprobs.chosen))
                            assert len(chosen) == len(ids)
                            texts.extend(chosen)
                        position += len(ids)
                elif isinstance(message, Finished):
                    finished.add(message.stream)
                    assert message.num_tokens == len(got[message.stream]) == STEPS + 10
                elif isinstance(message, Done):
                    assert message.stream in finished
                    done.add(message.stream)
                else:
                    assert isinstance(message, Accepted)
            assert got == {stream: tokens(stream, STEPS + 10) for stream in range(STREAMS)}
            assert texts == [logprob(0, index) for index in range(STEPS + 10)]
            assert num_messages < STEPS / 2
            await until(lambda: not reader.is_behind)
            assert server.num_streams == 0


async def test_a_lagging_reader_may_cancel_and_finish():
    async with serve() as server:
        with RawPeer(server.endpoint, receive_hwm=1) as slow:
            await slow.hello()
            await slow.generate(1, seed=1, max_tokens=4000, logprobs=0)
            await slow.generate(2, seed=2, max_tokens=4000)
            await slow.generate(3, seed=3, max_tokens=4000)
            await until(lambda: len(server.core.live) == 3)
            (reader,) = server._readers.values()
            for _ in range(1500):
                server.core.step()
                if reader.is_behind:
                    break
            assert reader.is_behind
            for _ in range(100):
                server.core.step()
            slow.send(Finish(stream=1, at=3))  # long ago: it was sent already
            slow.send(Finish(stream=2, at=4000))  # further than it is
            slow.send(Cancel(stream=3))
            await until(lambda: not server.core.live)
            server.core.report()
            got, ends = {1: [], 2: [], 3: []}, {}
            while len(ends) < 3:
                message = await slow.read()
                if isinstance(message, Tokens):
                    for stream, _, start, ids in entries(message):
                        assert start == len(got[stream])
                        got[stream].extend(ids)
                elif isinstance(message, Finished):
                    ends[message.stream] = (message.reason, message.num_tokens)
            assert ends[1] == ("stop", 3)
            assert ends[2] == ("stop", len(got[2]))
            assert ends[3] == ("cancelled", len(got[3]))
            assert got[2] == tokens(2, len(got[2]))


CLIENT = """
import asyncio, sys
from pagewire_client import connect

async def main(url):
    async with connect(url, name="child") as client:
        streams = [client.generate([1], seed=seed, max_tokens=4000) for seed in range(8)]
        async for chunk in streams[0]:
            print("streaming", flush=True)
            break
        results = await asyncio.gather(*(stream.result() for stream in streams))
        print(sum(len(result.token_ids) for result in results), flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def child():
    made = []

    def start(url):
        made.append(subprocess.Popen([sys.executable, "-c", CLIENT, url], stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()
        process.stdout.close()


def timed(server):
    """Seconds (of wall time, in calls of the socket; of CPU, in outcomes) from now on."""
    socket, outcome = server._door._socket, server.on_outcome
    walls, cpus = [], []
    try_send = socket.try_send

    def measured_send(*arguments):
        begun = time.perf_counter()
        try:
            return try_send(*arguments)
        finally:
            walls.append(time.perf_counter() - begun)

    def measured_outcome(given):
        begun = time.thread_time()
        outcome(given)
        cpus.append(time.thread_time() - begun)

    socket.try_send = measured_send
    server.core.sinks[:] = [type("Sink", (), {"on_outcome": staticmethod(measured_outcome)})]
    return walls, cpus


def test_a_stopped_client_holds_nobody_up(child):
    """F8, on uvloop. What a send costs is measured inside the sends: the gaps of a loop on a busy machine say little."""
    uvloop.run(_stopped_client(child))


async def _stopped_client(child):
    async with serve(heartbeat_timeout_ms=60_000) as server, connect(server.endpoint) as other:
        process = child(server.endpoint)
        await until(lambda: len(server.core.live) == 8, timeout=20)
        while not any(r.is_behind for r in server._readers.values()):
            server.core.step()
            if server.core._step == 5:
                assert process.stdout.readline() == "streaming\n"
                os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(0)
            assert server.core._step < 3500, "the kernel took everything"
        quick = other.generate([1], seed=7, max_tokens=400)
        await until(lambda: len(server.core.live) == 9)
        walls, cpus = timed(server)
        for step in range(400):
            server.core.step()
            await until(lambda: len(quick._state.choices[0].token_ids) > step)  # noqa: B023
        assert (await quick.result()).token_ids == tokens(7, 400)
        walls.sort()
        cpus.sort()
        assert walls[len(walls) // 2] < 200e-6
        assert walls[int(len(walls) * 0.98)] < 1e-3, "a send waited"
        assert cpus[int(len(cpus) * 0.98)] < 1e-3
        (reader,) = [r for c, r in server._readers.items() if c.client == "child"]
        assert reader.connection.num_unsent <= 2
        server.core.sinks[:] = [server]
        # It goes on where it stood, with every token.
        os.kill(process.pid, signal.SIGCONT)
        while server.core.live:
            server.core.step(50)
            await asyncio.sleep(0)
        await until(lambda: process.poll() is not None, timeout=20)
        assert process.stdout.readline() == f"{8 * 4000}\n"


async def test_a_killed_clients_streams_end(child):
    """F15: kill -9, no goodbye."""
    async with serve(resume_grace_ms=100, replay_timeout_ms=0) as server:
        process = child(server.endpoint)
        await until(lambda: len(server.core.live) == 8, timeout=20)
        process.kill()
        process.wait()

        def step():
            server.core.step()
            return not server.core.live

        await until(step)
        server.core.report()
        assert server.num_streams == 0


async def test_a_thousand_ends_at_once_reach_a_peer_that_takes_them_slowly():
    async with serve() as server:
        with RawPeer(server.endpoint, receive_hwm=1) as slow:
            await slow.hello()
            for stream in range(1000):
                await slow.generate(stream, seed=stream, max_tokens=1)
            await until(lambda: len(server.core.live) == 1000)
            server.core.step()
            ends = [m.stream for m in await slow.read_all(0.3) if isinstance(m, Done)]
            assert sorted(ends) == list(range(1000))
            assert server.num_streams == 0
