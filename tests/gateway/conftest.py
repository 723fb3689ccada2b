"""A gateway without sockets."""

from __future__ import annotations

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
