"""The thread that computes: order, faults, an end that nobody has to wait for."""

import asyncio
import subprocess
import sys
import threading

import pytest

from pagewire.worker.compute_thread import ComputeThread


def nothing() -> None:
    pass


def test_order_and_faults():
    seen = []
    thread = ComputeThread("t", lambda: seen.append("prepared"))
    futures = [thread.submit(lambda i=i: seen.append(i)) for i in range(5)]
    fault = thread.submit(lambda: 1 / 0)
    last = thread.submit(threading.get_ident)
    assert last.result() not in (None, threading.get_ident())
    assert all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        fault.result()
    assert seen == ["prepared", 0, 1, 2, 3, 4]
    thread.stop()
    thread.ended.result()


def test_stop_ends_after_what_is_queued():
    gate, thread = threading.Event(), ComputeThread("t", nothing)
    thread.submit(gate.wait)
    last = thread.submit(lambda: 7)
    thread.stop()
    thread.stop()
    with pytest.raises(RuntimeError, match="takes no more work"):
        thread.submit(nothing)
    assert not thread.ended.done()
    gate.set()
    assert last.result() == 7
    thread.ended.result()


async def test_who_waits_may_leave():
    """Cancelled while it is queued, it never runs; while it runs, nobody hears of it. The thread goes on."""
    gate, ran, thread = threading.Event(), [], ComputeThread("t", nothing)
    running = asyncio.ensure_future(asyncio.wrap_future(thread.submit(gate.wait)))
    queued = asyncio.ensure_future(asyncio.wrap_future(thread.submit(lambda: ran.append(1))))
    ended = asyncio.ensure_future(asyncio.wrap_future(thread.ended))
    await asyncio.sleep(0.01)
    for waiter in (running, queued, ended):
        waiter.cancel()
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.wrap_future(thread.submit(lambda: 7)) == 7
    assert not ran
    thread.stop()
    await asyncio.wrap_future(thread.ended)


def test_endless_work_does_not_keep_the_process():
    code = (
        "import threading; from pagewire.worker.compute_thread import ComputeThread;"
        "ComputeThread('t', lambda: None).submit(threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0
