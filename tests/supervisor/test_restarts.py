"""Restarts: a part that dies, is silent or stalls is started again; deaths in a row wait longer, and end it in the end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time

import psutil
import pytest

from pagewire.errors import EngineFailed
from pagewire.supervisor import server as supervisor
from pagewire.supervisor.liveness import Limits, Liveness
from pagewire.supervisor.restarts import HEALTHY_S, LONGEST_S, SETTLED_S, Restarts, longest_wait_s
from pagewire.supervisor.server import serve


def _children():
    return [child for child in psutil.Process().children() if "fake_child" in " ".join(child.cmdline())]


def _lives(base, role):
    """Where each process of that role was told to listen."""
    path = base / f"{role}.lives"
    return path.read_text().split() if path.exists() else []


async def _outcome(server):
    """Why it ended by itself."""
    with pytest.raises(EngineFailed) as caught:
        await serve(server, stop=asyncio.Event(), announce=lambda _: None)
    assert _children() == []
    return str(caught.value)


async def _until(server, stop, condition):
    """Serve until `condition` holds, then stop."""
    serving = asyncio.create_task(serve(server, stop=stop, announce=lambda _: None))
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.02)
            assert not serving.done()
    stop.set()
    await serving
    assert _children() == []


# ---- the pure parts ----------------------------------------------------------------------------------------------------


def test_delays_double_up_to_a_limit_and_end():
    restarts = Restarts(12, 0.5)
    delays = [restarts.next_delay_s(1.0) for _ in range(13)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[11] == LONGEST_S
    assert delays[12] is None
    assert Restarts(0, 0.5).next_delay_s(HEALTHY_S) is None


def test_a_part_that_served_long_has_recovered():
    restarts = Restarts(2, 0.5)
    assert [restarts.next_delay_s(served) for served in (0, 0, HEALTHY_S, 0, 0)] == [0.5, 1.0, 0.5, 1.0, None]
    assert restarts.num_total == 4


def test_a_part_that_had_served_is_started_again_without_delay_however_often_it_dies():
    restarts = Restarts(100, 0.5)
    assert [restarts.next_delay_s(served) for served in (0, 1, SETTLED_S, SETTLED_S, 1, 20)] == [
        0.5, 1.0, 0.5, 0.5, 1.0, 0.5,
    ]  # fmt: skip
    few = Restarts(2, 0.5)
    assert [few.next_delay_s(SETTLED_S) for _ in range(3)] == [0.5, 0.5, None], "they count towards the limit"


def test_no_wait_is_as_long_as_streams_are_kept():
    """Else nobody is there in time whom they could be resumed with."""
    assert longest_wait_s(30_000, 60_000) == 7.5
    assert longest_wait_s(30_000, 2000) == 0.5
    assert longest_wait_s(0, 0) == longest_wait_s(10**9, 0) == LONGEST_S
    restarts = Restarts(100, 0.5, longest_wait_s(30_000, 60_000))
    assert max(restarts.next_delay_s(0) for _ in range(100)) == 7.5
    assert Restarts(1, 0.5, 0.125).next_delay_s(0) == 0.5, "never less than what was asked for"


def test_a_gap_that_we_slept_through_is_nobodys_silence():
    liveness = Liveness(Limits(interval_s=1.0, silence_s=5.0, stall_s=0))
    assert liveness.check(100.0, 1, "") is None
    assert liveness.check(1000.0, 1, "") is None
    for now in (1001.0, 1002.0, 1003.0):
        assert liveness.check(now, 1, "") is None
    assert liveness.check(1004.0, 1, "") == "did not answer for 6.0 s"
    assert liveness.check(1005.0, 2, "") is None


def test_a_stall_is_waited_out_for_a_while_or_for_ever():
    short, endless = (Liveness(Limits(interval_s=1.0, silence_s=5.0, stall_s=stall)) for stall in (2.0, 0.0))
    for now in range(3):
        assert short.check(now, now, "forward of step 7") is None
    assert short.check(3, 3, "forward of step 7") == "stalled: forward of step 7"
    assert all(endless.check(now, now, "forward of step 7") is None for now in range(100))
    assert short.check(4, 4, "") is None
    for now in range(5, 20):  # a stall that comes and goes is none
        assert short.check(now, now, "" if now % 2 else "forward of step 8") is None


# ---- with processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["engine", "gateway"])
async def test_a_part_that_died_is_started_again_at_its_address_and_the_other_lives_on(make_server, base, role):
    server = make_server(f"{role}=die_later,ok", restart_max=2, restart_backoff_ms=20)
    other = "gateway" if role == "engine" else "engine"
    await _until(server, asyncio.Event(), lambda: len(_lives(base, role)) == 2 and len(_children()) == 2)
    assert len(set(_lives(base, role))) == 1
    assert len(_lives(base, other)) == 1


@pytest.mark.parametrize(
    ("behaviour", "limits", "reason"),
    [
        ("crash_later", {}, "the engine ended with exit code 9; its last words: ValueError: nine lives"),
        ("fail_later", {}, "the engine failed: the device fell off the bus"),
        ("segfault", {}, "the engine was killed by SIGSEGV; its last words: Fatal Python error: Segmentation fault"),
        ("hush", {"heartbeat_timeout_ms": 300}, r"the engine did not answer for 0\.\d s and was killed"),
        ("stall", {"stall_restart_ms": 200}, "the engine stalled: forward of step 7 and was killed"),
    ],
)
async def test_the_reason_is_told_and_without_restarts_the_server_ends(make_server, behaviour, limits, reason):
    before = time.monotonic()
    told = await _outcome(make_server(f"engine={behaviour}", heartbeat_ms=50, **limits))
    assert re.match(reason, told), told
    assert time.monotonic() - before < 5


async def test_a_stopped_part_is_killed_and_started_again(make_server, base, capfd):
    """SIGSTOP: it exists, and does nothing."""
    server = make_server(heartbeat_ms=50, heartbeat_timeout_ms=400, restart_max=1, restart_backoff_ms=20)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(server, stop=stop, announce=lambda _: None))
    async with asyncio.timeout(10):
        while not server.url:
            await asyncio.sleep(0.02)
        os.kill(server._engine.child.pid, signal.SIGSTOP)
        while len(_lives(base, "engine")) < 2 or not server._engine.child.is_ready:
            await asyncio.sleep(0.02)
    stop.set()
    await serving
    assert _children() == []
    out = capfd.readouterr()
    assert "(it was stopped) and was killed" in out.out + out.err


async def test_deaths_in_a_row_are_given_up(make_server, base):
    told = await _outcome(make_server("engine=die_later,exit3", restart_max=3, restart_backoff_ms=10))
    assert "ended with exit code 3 while it was starting, at: import" in told
    assert told.endswith("; it was restarted 3 times in a row, that is given up")
    assert len(_lives(base, "engine")) == 4


async def test_a_part_that_does_not_get_ready_again_is_given_up_inside_its_deadline(make_server):
    before = time.monotonic()
    told = await _outcome(
        make_server("gateway=die_later,sleep", restart_max=1, restart_backoff_ms=10, start_timeout_ms=1000)
    )
    assert told == "server.start_timeout_ms: the gateway was not ready after 1 s, at: weights; it was restarted once"
    assert time.monotonic() - before < 6


async def test_a_stop_in_the_middle_of_a_restart_is_prompt(make_server, base):
    server = make_server("engine=die_later,sleep", restart_max=3, restart_backoff_ms=10)
    before = time.monotonic()
    await _until(server, asyncio.Event(), lambda: len(_lives(base, "engine")) == 2)
    assert time.monotonic() - before < 6


async def test_a_stop_while_a_restart_is_waited_for_is_prompt(make_server, base):
    server = make_server("engine=die_later", restart_max=3, restart_backoff_ms=20_000)
    await _until(server, asyncio.Event(), lambda: server.url and server._engine.child.returncode is not None)
    assert len(_lives(base, "engine")) == 1


async def test_an_address_is_still_watched_after_the_gateway_was_restarted(make_server, base, monkeypatch):
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.05)
    path = base / "gateway.sock"
    path.touch()
    server = make_server("gateway=die_later,ok", restart_max=1, restart_backoff_ms=20)

    serving = asyncio.create_task(serve(server, stop=asyncio.Event(), announce=lambda _: None))
    async with asyncio.timeout(10):
        while len(_lives(base, "gateway")) < 2 or not server._gateway.child.is_ready:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        path.unlink()
        with pytest.raises(EngineFailed, match="was removed or replaced"):
            await serving
