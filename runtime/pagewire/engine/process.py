"""What the engine process does once it may import torch: load the model, serve it, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Final

import structlog

from pagewire.child import Report, Reporter, failure, keep_beating
from pagewire.clock import MonotonicClock
from pagewire.config import Config
from pagewire.engine.core import EngineCore
from pagewire.engine.learnt import Learnt
from pagewire.engine.load import load_worker
from pagewire.engine.recorder import Recorder
from pagewire.engine.server import WireServer
from pagewire.event_loop import run_loop, tame_collector
from pagewire.scheduler.scheduler import Scheduler

_FAREWELL_S: Final = 0.5
"""After the engine failed: time to send the last error messages."""
_CLOSE_S: Final = 5.0
"""Time for the worker to close; a hung one is left to the end of the process."""

_log = structlog.get_logger("pagewire.engine")


def run(config: Config, reporter: Reporter) -> int:
    """Serve until a signal comes or the engine fails; the exit code.

    Raises:
        ModelError, ConfigError: the model cannot be served.
    """
    code, is_clean = run_loop(_serve(config, reporter))
    if not is_clean:
        # A thread of the worker still computes or hangs; the interpreter would wait for it for ever.
        time.sleep(0.1)  # the log's thread writes its last lines
        os._exit(code or 1)
    return code


async def _serve(config: Config, reporter: Reporter) -> tuple[int, bool]:
    """The exit code, and whether the worker closed."""
    reporter.loading("weights")
    begun = time.monotonic()
    worker = await load_worker(config, reporter.weights)
    tame_collector()
    learnt = Learnt(config, worker.shape)
    recorder = Recorder(config.engine.record) if config.engine.record else None
    make_scheduler = recorder.make_scheduler if recorder is not None else Scheduler
    core = EngineCore(
        worker, config=config, clock=MonotonicClock(), cost_model=learnt.model, make_scheduler=make_scheduler
    )
    server = WireServer(core, config)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    core.start()
    await server.start()
    shape = worker.shape
    info: dict[str, str | int | float | bool] = {
        "kv_blocks": shape.num_blocks - 1,
        "kv_bytes": shape.kv_bytes,
        "block_size": shape.block_size,
        "max_rows": shape.max_rows,
        "max_model_len": core.scheduler.max_len,
        "load_seconds": round(time.monotonic() - begun, 3),
    }
    _log.info("engine_ready", endpoint=server.endpoint, model=shape.model_name, **info)
    reporter.send(Report(event="ready", endpoint=server.endpoint, model=shape.model_name, info=info))
    beating = asyncio.create_task(
        keep_beating(
            reporter,
            config.server.heartbeat_ms / 1000,
            lambda: core.health.reason if core.health.is_stalled else "",
        ),
        name="beats",
    )
    keeping = asyncio.create_task(learnt.keep(), name="keep what was learnt")
    failed = asyncio.create_task(core.wait_failed(), name="failure")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({failed, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        reporter.send(failure(failed.result()))
        await asyncio.sleep(_FAREWELL_S)
    else:
        _log.info("engine_draining", live=core.num_live)
        server.drain()
        draining = asyncio.create_task(core.drain(config.server.drain_timeout_ms / 1000), name="drain")
        await asyncio.wait({failed, draining}, return_when=asyncio.FIRST_COMPLETED)
    code = 1 if failed.done() else 0
    await server.close()
    is_clean = await core.stop(_CLOSE_S)
    if recorder is not None:
        await asyncio.to_thread(recorder.close)
    for task in (failed, stopping, beating, keeping):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    _log.info("engine_stopped", code=code)
    return code, is_clean
