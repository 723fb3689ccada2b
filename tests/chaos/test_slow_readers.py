"""The short form of `slow_readers.py`: memory and ends. What they cost the others in time is the script's to say."""

from __future__ import annotations

from tests.chaos import slow_readers
from tests.chaos.rig import FAKE


async def test_slow_readers_get_their_ends_and_cost_no_memory():
    plan = slow_readers.Plan(
        rounds=3, seconds=2.0, lead_s=3.0, num_normal=10, latency_us=4000, patience_ms=1500, tokens=800, grace_ms=12_000
    )
    told = await slow_readers.run(plan, FAKE)
    assert told.wrong == []
    assert len(told.ends) == 3 * (1 + 2 * len(slow_readers.KINDS))
    assert told.is_flat, told.grown
