"""The short form of `soak.py`."""

from __future__ import annotations

from tests.chaos.rig import served
from tests.chaos.soak import OPTIONS, soak


async def test_a_quarter_of_a_minute_of_everything():
    async with served(*OPTIONS) as server:
        await soak(server, 12.0, seed=2, num_users=8)
        assert await server.stop() == 0
        assert server.left_over() == []
