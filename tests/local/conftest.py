"""Engines around a model that repeats its prompt."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from echo import EchoEngine


@pytest.fixture
async def engine():
    async with EchoEngine() as engine:
        yield engine
    assert engine.echo.is_closed


@pytest.fixture
async def slow():
    """A step takes 2 ms."""
    async with EchoEngine(delay_s=0.002) as engine:
        yield engine
