"""The short forms of `survive.py` and `churn.py`."""

from __future__ import annotations

from tests.chaos import churn, survive
from tests.chaos.rig import FAKE


async def test_streams_outlive_a_bad_network_and_both_parts():
    (told,) = await survive.run(1, 0.5, 10, 7, FAKE)
    assert told.wrong == []
    assert told.num_streams >= 10


async def test_connections_that_come_and_go_leave_nothing():
    complete, before, after = await churn.run(100, FAKE)
    assert complete == 100
    for name in ("engine_fds", "gateway_fds", "connections", "orphans", "running"):
        assert after[name] <= before[name] + 2, (name, before, after)
