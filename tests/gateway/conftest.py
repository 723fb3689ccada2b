"""A gateway without sockets."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from tests.gateway.bench import Bench


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.preparation.close()


@pytest.fixture
def make_bench():
    made = []

    def make(**options):
        made.append(Bench(**options))
        return made[-1]

    yield make
    for bench in made:
        bench.preparation.close()


@pytest.fixture
def short_folder():
    """For ipc endpoints, which have room for 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="pw-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
