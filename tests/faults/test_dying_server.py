"""Faults that end a part of a whole server: it says why, serves again at the same address, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import pytest_asyncio
from tests.chaos.fake_engine import BLOCK, BREAK, DIE, HANG, SEGV, STUCK
from tests.chaos.rig import Served, gone, served, temporary_folder
from tests.faults.test_whole_server import expected

import pagewire_client
from pagewire.errors import ConnectionLost, Draining, EngineFailed, EngineLost, Unavailable, UnknownStream

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK = (
    "--restart-backoff-ms", "50", "--restart-max", "100", "--heartbeat-ms", "100", "--heartbeat-timeout-ms", "2000",
    "--stall-timeout-ms", "500", "--stall-restart-ms", "1500", "--http", "127.0.0.1:0",
)  # fmt: skip
PROBE = [5, 6, 7]


@pytest_asyncio.fixture(loop_scope="module")
async def server():
    """One for each test: whoever sees death after death in a minute waits longer before each start."""
    async with served(*QUICK) as made:
        made.http = re.search(r" http=(\S+)", await made.said("event=gateway_ready"))[1]
        yield made
        assert await made.stop() == 0
        assert made.left_over() == []


@pytest_asyncio.fixture(loop_scope="module")
async def client(server):
    """A client that stays connected through it all, and a server that is healthy at the start of each test."""
    server.lines.clear()
    async with pagewire_client.connect(server.url) as made:
        await serves_again(made)
        yield made


async def serves_again(client, timeout_s=15):
    """Ask until there is an answer, as a patient caller does; every refusal on the way says when to try again."""
    refusals = []
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                result = await client.generate(PROBE, max_tokens=8, seed=1, ignore_eos=True).result()
            except (EngineFailed, ConnectionLost) as error:
                refusals.append(error)
            else:
                assert result.token_ids == expected(PROBE, 1, 8)
                assert all(error.retry_after_ms for error in refusals if isinstance(error, Unavailable))
                return
            await asyncio.sleep(0.05)


async def ready(server):
    """(status, body) of `/ready`."""

    def get():
        try:
            with urllib.request.urlopen(server.http + "/ready", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    return await asyncio.to_thread(get)


async def running(client):
    """A stream that has begun."""
    stream = client.generate([1, 2, 3], max_tokens=8000, ignore_eos=True)
    await anext(stream)
    return stream


async def goes_on(stream):
    """More tokens come, and all are those of an undisturbed run (decision 17); then it is cancelled."""
    async with asyncio.timeout(40):
        had = stream.received[0]
        while stream.received[0] <= had:
            await anext(stream)
        stream.cancel()
        result = await stream.result()
    assert result.token_ids == expected([1, 2, 3], result.seed, len(result.token_ids))


# ---- the engine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "log_says"),
    [
        (DIE, "the engine was killed by SIGKILL"),
        (SEGV, "the engine was killed by SIGSEGV; its last words: Fatal Python error: Segmentation fault"),
        (BREAK, "the engine failed: .*the device fell off the bus"),
        (BLOCK, "the engine did not answer for .* and was killed"),
        (STUCK, "the engine failed: no token for"),
    ],
)
async def test_f2_f4_an_engine_that_ends_or_hangs_is_told_of_and_started_again(server, client, command, log_says):
    """What kills engines takes two with it and no more; its neighbours go on at the next, also if this one told why it ends."""
    stream, gateway = await running(client), server.part("gateway")
    trigger = client.generate([command, 1], max_tokens=5)
    with pytest.raises(EngineLost):
        await asyncio.wait_for(trigger.result(), 40)
    await goes_on(stream)
    lost = [line for line in server.lines if "process=supervisor event=engine_lost" in line]
    assert len(lost) == 2
    assert re.search(log_says, lost[0]), lost[0]
    await serves_again(client)
    assert server.part("gateway") == gateway, "it lived on"


async def test_f1_a_step_that_never_ends(server, client):
    """Not ready within seconds, the stage is named, streams end, decisions are written, and the engine is replaced."""
    stream = await running(client)
    hanging = client.generate([HANG, 1], max_tokens=5)
    begun = time.monotonic()
    for open_one in (stream, hanging):
        with pytest.raises(EngineFailed, match=r"(forward|sample) of step \d+") as caught:
            await asyncio.wait_for(open_one.result(), 20)
        assert caught.value.code == "engine_failed"
    assert time.monotonic() - begun < 10  # 1 s on an idle machine
    with pytest.raises(Unavailable, match=r"of step \d+"):
        await client.generate(PROBE, max_tokens=1).result()
    async with asyncio.timeout(10):
        while (await ready(server))[0] == 200:
            await asyncio.sleep(0.02)
    status, said = await ready(server)
    assert status == 503
    assert re.search(r"of step \d+", said["reason"]), said
    dump = Path((await server.said("event=decisions_written")).partition("path=")[2].split()[0])
    head, *decisions = [json.loads(line) for line in dump.read_text().splitlines()]
    assert re.search(r"of step \d+", head["reason"])
    assert 0 < len(decisions) <= 1000
    assert {"step", "now_ns", "running", "free_blocks"} <= decisions[-1].keys()
    assert re.search(r"stalled: \w+ of step", await server.said("process=supervisor event=engine_lost"))
    await serves_again(client)


@pytest.mark.parametrize("name", ["engine", "gateway"])
async def test_a_stopped_part_is_replaced(server, client, name):
    """SIGSTOP: the process is there and does nothing."""
    stream, other = await running(client), server.part("gateway" if name == "engine" else "engine")
    begun = time.monotonic()
    server.part(name).send_signal(signal.SIGSTOP)
    line = await server.said(f"process=supervisor event={name}_lost")
    assert "(it was stopped) and was killed" in line
    assert time.monotonic() - begun < 6
    await goes_on(stream)
    await serves_again(client)
    assert other.is_running()


async def test_a_gateway_that_dies_comes_back_at_its_address_and_the_engine_lives_on(server, client):
    stream, engine = await running(client), server.part("engine")
    server.part("gateway").kill()
    await server.said("event=gateway_restarted")
    await goes_on(stream)
    await serves_again(client)
    async with pagewire_client.connect(server.url) as newcomer:
        await serves_again(newcomer)
    assert await ready(server) == (200, {"ready": True}), "at the port that was taken at the start"
    assert server.part("engine") == engine


async def test_both_at_once(server, client):
    """Then nobody knows the stream, and it ends with a named error."""
    stream = await running(client)
    for name in ("engine", "gateway"):
        server.part(name).kill()
    await server.said("event=gateway_restarted", 40)
    await server.said("event=engine_restarted", 40)
    with pytest.raises(UnknownStream):
        await asyncio.wait_for(stream.result(), 40)
    await serves_again(client, 40)


# ---- start and end -------------------------------------------------------------------------------------------------------


async def test_f4_without_restarts_a_dead_engine_ends_the_server_with_1():
    async with served("--restart-max", "0") as server, pagewire_client.connect(server.url) as client:
        family, stream = server.family(), await running(client)
        server.part("engine").kill()
        with pytest.raises(EngineLost):
            await stream.result()
        assert await server.ended() == 1
        assert server.lines[-1].startswith("pagewire: the engine was killed by SIGKILL")
        assert await gone(family) == []
        assert server.left_over() == []


async def test_f3_a_start_that_hangs_ends_inside_its_deadline_with_the_reason():
    with temporary_folder() as folder:
        server = await Served.start(folder, "--name", "load_s=60", "--start-timeout-ms", "6000")
        begun = time.monotonic()
        try:
            assert await server.ended() == 1
        finally:
            await server.close()
        assert time.monotonic() - begun < 12
        assert "the engine was not ready after 6 s, at: weights" in server.lines[-1]
        assert server.left_over() == []


async def test_f3_an_engine_that_is_killed_while_it_loads_ends_the_start_with_the_reason():
    with temporary_folder() as folder:
        server = await Served.start(folder, "--name", "load_s=60")
        try:
            async with asyncio.timeout(10):
                while (engine := server.part("engine")) is None:
                    await asyncio.sleep(0.02)
            engine.kill()
            assert await server.ended() == 1
        finally:
            await server.close()
        assert "the engine was killed by SIGKILL (is there enough memory?) while it was starting" in server.lines[-1]


async def test_f20_fifty_live_streams_end_complete_or_with_draining_inside_the_deadline():
    """The long ones outlive the deadline, the short ones end by themselves, and some have not begun."""
    options = ("--drain-timeout-ms", "1500", "--name", "latency_us=3000")
    async with served(*options) as server, pagewire_client.connect(server.url) as client:
        lengths = [20] * 25 + [8000] * 25
        streams = [client.generate([1 + i], max_tokens=n, seed=i, ignore_eos=True) for i, n in enumerate(lengths)]
        await asyncio.gather(*(anext(stream) for stream in streams[20:30]))
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        outcomes = await asyncio.gather(*(stream.result() for stream in streams), return_exceptions=True)
        assert time.monotonic() - begun < 5
        complete = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
        assert complete, "none of the short ones"
        assert max(complete) < 25
        for i in complete:
            assert outcomes[i].token_ids == expected([1 + i], i, 20)
        assert all(isinstance(outcome, Draining) for i, outcome in enumerate(outcomes) if i not in complete)
        assert await server.ended() == 0
        assert time.monotonic() - begun < 1.5 + 5
        assert any("streams have up to 1.5 s" in line for line in server.lines)


async def test_f9_eight_servers_at_one_instant():
    """In one folder, so that all want the same default address."""
    with temporary_folder() as folder:
        servers = await asyncio.gather(*(Served.start(folder) for _ in range(8)))
        try:
            urls = await asyncio.gather(*(server.ready() for server in servers))
            assert len(set(urls)) == 8

            async def ask(url):
                async with pagewire_client.connect(url) as client:
                    return (await client.generate(PROBE, max_tokens=8, seed=1, ignore_eos=True).result()).token_ids

            assert await asyncio.gather(*map(ask, urls)) == [expected(PROBE, 1, 8)] * 8
            assert await asyncio.gather(*(server.stop() for server in servers)) == [0] * 8
            assert servers[0].left_over() == []
        finally:
            for server in servers:
                await server.close()


async def test_a_second_server_at_one_address_says_so():
    async with served() as first:
        second = await Served.start(first.folder, "--bind", first.url)
        try:
            assert await second.ended() == 2
        finally:
            await second.close()
        assert "is in use: another server runs there" in second.lines[-1]
        async with pagewire_client.connect(first.url) as client:
            await serves_again(client)
