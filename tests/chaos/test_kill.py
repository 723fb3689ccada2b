"""The short form of `kill_everything.py`: ten blows, five at a time."""

from __future__ import annotations

import asyncio
import random

from tests.chaos.kill_everything import BLOWS, PHASES, Case, strike
from tests.chaos.rig import FAKE


async def test_ten_blows_leave_nothing():
    """Of the script's table: every kill -9 in two phases, and each other signal in one."""
    chance = random.Random(3)
    kills, others = BLOWS[:3], BLOWS[3:]
    chosen = [Case("serving", *blow) for blow in kills]
    chosen += [Case(phase, *blow) for phase, blow in zip(("draining", "restarting", "starting"), kills, strict=True)]
    chosen += [Case(phase, *blow) for phase, blow in zip(PHASES, others, strict=True)]
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
