"""Free memory is handed back when a flood is over, and not while it lasts."""

from __future__ import annotations

import asyncio

from pagewire.gateway.free_memory import FreeMemory


class Looks:
    """Looks at connections of which so many more were closed each time; counts how often memory was handed back."""

    def __init__(self):
        self.closed, self.trimmed = 500, 0
        self._memory = FreeMemory(lambda: self.closed)
        self._memory._library = self

    def malloc_trim(self, pad):
        self.trimmed += 1
        return 1

    async def __call__(self, more, times=1):
        for _ in range(times):
            self.closed += more
            self._memory.look()
            await asyncio.sleep(0.002)


async def test_once_after_each_flood_and_never_in_its_midst():
    look = Looks()
    await look(0, 20)
    await look(900)
    await look(0)
    assert look.trimmed == 0, "a few hundred are nothing"
    await look(700, 5)
    assert look.trimmed == 0, "more are coming"
    await look(10)
    assert look.trimmed == 1
    await look(0, 80)
    assert look.trimmed == 1
    await look(5000)
    await look(0)
    assert look.trimmed == 2


async def test_among_clients_that_connect_for_each_request_too():
    look = Looks()
    await look(150, 30)
    assert look.trimmed == 0, "there was no flood"
    await look(550, 18)
    assert look.trimmed == 0
    await look(150, 200)
    assert look.trimmed == 1


async def test_seldom_among_clients_that_come_in_waves():
    look = Looks()
    for _ in range(40):
        await look(2000)
        await look(100)
    assert 5 <= look.trimmed <= 10
