"""The short form of `kill_everything.py`: ten blows, five at a time."""

from __future__ import annotations

import asyncio
import random

from tests.chaos.kill_everything import BLOWS, Case, cases, strike
from tests.chaos.rig import FAKE


async def test_ten_blows_leave_nothing():
    """Each victim twice, in phases that change with it; the whole table is the script's."""
    chance = random.Random(3)
    chosen = [case for i, case in enumerate(cases()) if i % len(BLOWS) == (2 * i // len(BLOWS)) % len(BLOWS)]
    chosen += [Case("serving", victim, number) for victim, number in BLOWS[:3]]
    chosen += [Case("draining", "engine", BLOWS[1][1]), Case("restarting", "supervisor", BLOWS[3][1])]
    chosen += [Case("starting", "gateway", BLOWS[2][1])]
    slots = asyncio.Semaphore(5)

    async def one(case):
        async with slots:
            try:
                await strike(case, chance, FAKE)
            except BaseException as error:
                error.add_note(str(case))
                raise

    async with asyncio.TaskGroup() as group:
        for case in chosen:
            group.create_task(one(case))
