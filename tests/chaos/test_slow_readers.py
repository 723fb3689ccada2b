"""The short form of `slow_readers.py`: memory and ends. What they cost the others in time is the script's to say."""

from __future__ import annotations

import pytest
from tests.chaos import slow_readers
from tests.chaos.rig import FAKE


@pytest.mark.soak
async def test_slow_readers_get_their_ends_and_cost_no_memory():
    plan = slow_readers.Plan(
        rounds=3, seconds=1.0, lead_s=2.0, num_normal=10, latency_us=4000, patience_ms=1000, tokens=500, grace_ms=6_000
    )
    told = await slow_readers.run(plan, FAKE)
    assert told.wrong == []
    assert len(told.ends) == 3 * (1 + 2 * len(slow_readers.KINDS))
    assert told.is_flat, told.grown
