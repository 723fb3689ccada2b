"""The short form of `soak.py`."""

from __future__ import annotations

from tests.chaos.rig import free_address, served
from tests.chaos.soak import OPTIONS, soak


async def test_a_few_seconds_of_everything():
    address = free_address()
    async with served(*OPTIONS, "--http", address, has_text=True) as server:
        await soak(server, f"http://{address}", 8.0, seed=2, num_users=9)
        assert await server.stop() == 0
        assert server.left_over() == []
