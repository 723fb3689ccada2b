"""Engine cores around a device that checks every read; invariants are checked after every step."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))

from engine_bench import Bench, back_to_baseline, check_after_every_step
from fakes import fake

from pagewire.worker.fake import FakeWorker


@pytest.fixture
async def make_bench(tmp_path):
    """Make started cores. At the end: no fault of the engine, nothing live, every block back."""
    made = []

    def make(worker=None, *, is_checked=True, **options):
        bench = Bench(worker or fake(), tmp_path, **options)
        if is_checked:
            check_after_every_step(bench.core)
        bench.core.start()
        made.append(bench)
        return bench

    yield make
    for bench in made:
        if isinstance(bench.worker, FakeWorker):
            bench.worker.unhang()
        bench.worker.release_all()
        await bench.core.drain(5.0)
        assert "engine_failed" not in bench.log, bench.log.events
        await back_to_baseline(bench)
        if isinstance(bench.worker, FakeWorker):
            bench.worker.check()
        assert await bench.core.stop(1.0)


@pytest.fixture
async def make_plain_bench(make_bench):
    """The same, for long runs: invariants are checked at the end only."""
    return lambda worker, **options: make_bench(worker, is_checked=False, **options)
