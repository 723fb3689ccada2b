"""Cores around a worker that the test drives by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_bench import Bench, HandWorker


@pytest.fixture
def worker():
    return HandWorker()


@pytest.fixture
async def make_bench(tmp_path):
    """Make started cores; they are stopped and checked at the end."""
    made = []

    def make(worker=None, **options):
        bench = Bench(worker if worker is not None else HandWorker(), tmp_path, **options)
        bench.core.start()
        made.append(bench)
        return bench

    yield make
    for bench in made:
        bench.worker.release_all()
        assert await bench.core.stop(1.0)
        assert bench.worker.is_closed


@pytest.fixture
async def bench(make_bench):
    return make_bench()
