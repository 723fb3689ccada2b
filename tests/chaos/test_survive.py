"""The short form of `survive.py`."""

from __future__ import annotations

from tests.chaos import survive
from tests.chaos.rig import FAKE


async def test_streams_outlive_a_bad_network_and_both_parts():
    (told,) = await survive.run(1, 0.5, 10, 7, FAKE)
    assert told.wrong == []
    assert told.num_streams >= 10
