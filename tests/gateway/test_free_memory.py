"""Free memory is handed back when a flood is over, and not while it lasts."""

from __future__ import annotations

import asyncio

from pagewire.gateway.free_memory import FreeMemory


class Library:
    def __init__(self):
        self.trimmed = 0

    def malloc_trim(self, pad):
        self.trimmed += 1
        return 1


async def test_once_after_each_flood_and_never_in_its_midst():
    closed, library = [500], Library()
    memory = FreeMemory(lambda: closed[0])
    memory._library = library

    async def look(more):
        closed[0] += more
        memory.look()
        await asyncio.sleep(0.02)

    for _ in range(20):
        await look(0)
    await look(900)
    await look(0)
    assert library.trimmed == 0, "a few hundred are nothing"
    for _ in range(5):
        await look(700)
        assert library.trimmed == 0, "more are coming"
    await look(10)
    assert library.trimmed == 1
    for _ in range(20):
        await look(0)
    assert library.trimmed == 1
    await look(5000)
    await look(0)
    assert library.trimmed == 2


async def test_among_clients_that_connect_for_each_request_too():
    closed, library = [0], Library()
    memory = FreeMemory(lambda: closed[0])
    memory._library = library

    async def look(more):
        closed[0] += more
        memory.look()
        await asyncio.sleep(0.02)

    for _ in range(30):
        await look(150)
    assert library.trimmed == 0, "there was no flood"
    await look(3000)
    for _ in range(30):
        await look(150)
    assert library.trimmed == 1
