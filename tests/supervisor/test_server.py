"""The supervisor: start inside a deadline with a reason (F3), a death is told (F4), shutdown is bounded (F20)."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from pagewire.errors import EngineFailed, ModelError
from pagewire.supervisor import server as supervisor
from pagewire.supervisor.server import serve


def _children_of_this_process():
    return [child for child in psutil.Process().children() if "fake_child" in " ".join(child.cmdline())]


async def test_start_tells_where_and_what_and_leaves_nothing_behind(make_server, base):
    async with make_server() as server:
        assert server.url.startswith(f"ipc://{base}")
        assert server.model == "fake"
        assert server.info == {"kv_blocks": 7}
        assert len(_children_of_this_process()) == 2
    assert _children_of_this_process() == []
    assert [path for path in base.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("behaviour", "wanted"),
    [
        ("engine=exit3", "the engine ended with exit code 3 while it was starting, at: import"),
        ("engine=exit0", "the engine ended with exit code 0"),
        ("engine=killed", "the engine was killed by SIGKILL"),
        ("gateway=exit3", "the gateway ended with exit code 3"),
        ("gateway=killed", "the gateway was killed by SIGKILL"),
    ],
)
async def test_a_child_that_ends_while_it_loads_fails_the_start_with_the_reason(make_server, behaviour, wanted):
    with pytest.raises(EngineFailed, match=wanted):
        await make_server(behaviour).start()
    assert _children_of_this_process() == []


@pytest.mark.parametrize("behaviour", ["engine=sleep", "gateway=sleep", "engine=spin"])
async def test_a_child_that_never_gets_ready_fails_the_start_inside_the_deadline(make_server, behaviour):
    before = time.monotonic()
    with pytest.raises(EngineFailed) as caught:
        await make_server(behaviour, start_timeout_ms=1000).start()
    assert time.monotonic() - before < 3
    role = behaviour.partition("=")[0]
    assert f"the {role} was not ready after 1 s, at: weights" in str(caught.value)
    assert caught.value.field == "server.start_timeout_ms"
    assert _children_of_this_process() == []


async def test_an_error_of_the_child_arrives_with_code_and_field(make_server):
    with pytest.raises(ModelError, match="truncated") as caught:
        await make_server("engine=model_error").start()
    assert caught.value.field == "model.path"


async def test_an_engine_that_dies_after_it_was_ready_fails_a_start_that_waits_for_the_gateway(make_server):
    before = time.monotonic()
    with pytest.raises(EngineFailed, match="the engine was killed by SIGKILL"):
        await make_server("engine=die_later gateway=sleep").start()
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("role", ["engine", "gateway"])
async def test_a_death_while_serving_ends_the_server_with_the_reason(make_server, role):
    announced = []
    with pytest.raises(EngineFailed, match=f"the {role} was killed by SIGKILL"):
        await serve(make_server(f"{role}=die_later"), stop=asyncio.Event(), announce=announced.append)
    assert len(announced) == 1
    assert _children_of_this_process() == []


async def test_an_address_that_disappears_ends_the_server_with_the_reason(make_server, base, monkeypatch):
    monkeypatch.setattr(supervisor, "_LOOK_S", 0.05)
    path = base / "gateway.sock"
    path.touch()
    with pytest.raises(EngineFailed, match=r"gateway\.sock was removed or replaced"):
        await serve(make_server(), stop=asyncio.Event(), announce=lambda _: path.unlink())
    assert (base / "terminated").read_text().split() == ["gateway", "engine"]
    assert _children_of_this_process() == []


async def test_open_streams_are_told_of_when_the_gateway_drains(make_server):
    told = []
    stop = asyncio.Event()
    server = make_server("gateway=draining", on_draining=told.append)
    await serve(server, stop=stop, announce=lambda _: stop.set())
    assert told == [3]


async def test_the_gateway_drains_before_the_engine_is_stopped(make_server, base):
    stop = asyncio.Event()
    await serve(make_server(), stop=stop, announce=lambda _: stop.set())
    assert (base / "terminated").read_text().split() == ["gateway", "engine"]


async def test_a_gateway_that_does_not_drain_is_ended_at_the_deadline(make_server):
    stop = asyncio.Event()
    stopped_at = []

    def announce(_):
        stopped_at.append(time.monotonic())
        stop.set()

    await serve(make_server("gateway=deaf", drain_timeout_ms=100), stop=stop, announce=announce)
    assert time.monotonic() - stopped_at[0] < 3.5
    assert _children_of_this_process() == []


async def test_a_gateway_that_hangs_is_gone_before_the_engine_drains(make_server, monkeypatch):
    """Else the engine would wait for it to read, until its own time is over."""
    server = make_server("gateway=deaf", drain_timeout_ms=100)
    was_told = []
    try:
        await server.start()
        engine, gateway = server._children()
        process, terminate = psutil.Process(gateway.pid), engine.terminate

        def end_engine():
            deadline = time.monotonic() + 3
            while _runs(process) and time.monotonic() < deadline:
                time.sleep(0.01)
            was_told.append(_runs(process))
            terminate()

        monkeypatch.setattr(engine, "terminate", end_engine)
        await server.drain()
    finally:
        await server.close()
    assert was_told == [False]


def _runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_stop_while_starting_ends_at_once(make_server):
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, stop.set)
    before = time.monotonic()
    await serve(make_server("engine=sleep"), stop=stop, announce=lambda _: pytest.fail("it never got ready"))
    assert time.monotonic() - before < 3
    assert _children_of_this_process() == []


async def test_cancelled_while_serving_leaves_no_child(make_server):
    ready = asyncio.Event()
    task = asyncio.create_task(serve(make_server(), stop=asyncio.Event(), announce=lambda _: ready.set()))
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _children_of_this_process() == []


@pytest.mark.parametrize("behaviour", ["", "engine=sleep", "engine=spin"])
async def test_kill_9_of_the_parent_leaves_no_child(make_server, tmp_path, behaviour):
    """F19: in every state of the children, also one that never gives the interpreter back."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from pagewire.config import from_mapping\n"
        "from pagewire.supervisor.server import Server\n"
        "async def main():\n"
        "    config = from_mapping({'model': {'name': sys.argv[1]}})\n"
        "    server = Server(config, engine_module='fake_child', gateway_module='fake_child', base=Path(sys.argv[2]))\n"
        "    starting = asyncio.create_task(server.start())\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    base = tmp_path / "b"
    base.mkdir()
    parent = await asyncio.create_subprocess_exec(os.sys.executable, str(script), behaviour, str(base))
    try:
        children = []
        deadline = time.monotonic() + 10
        while len(children) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) == 2
        await asyncio.sleep(0.5)  # past the children's first line
    finally:
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
    assert alive == []
