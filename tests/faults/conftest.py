"""Engine cores around a device that checks every read; invariants are checked after every step."""

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(_TESTS / "engine"), str(_TESTS / "scheduler")]

from device_worker import DeviceWorker
from engine_bench import Bench, check_after_every_step


@pytest.fixture
async def make_bench(tmp_path):
    """Make started cores. At the end: no fault of the engine, nothing live, every block back."""
    made = []

    def make(worker=None, **options):
        bench = Bench(worker or DeviceWorker(), tmp_path, **options)
        check_after_every_step(bench.core)
        bench.core.start()
        made.append(bench)
        return bench

    yield make
    for bench in made:
        bench.worker.release()
        await bench.core.drain(5.0)
        assert "engine_failed" not in bench.log, bench.log.events
        await back_to_baseline(bench)
        assert await bench.core.stop(1.0)


async def back_to_baseline(bench):
    """Every block is free or cached, nobody holds one, and no row is taken."""
    scheduler = bench.core.scheduler
    await bench.until(lambda: bench.core._launches.oldest is None)
    assert bench.num_available == scheduler.memory.num_usable
    assert not scheduler.memory.pool.ref.any()
    assert scheduler.batch.num_rows == 0
    assert bench.core.num_live == 0
    bench.core.pipeline.check_invariants()
