"""kill -9 of each process in each phase, and the signals that ask politely: `python tests/chaos/kill_everything.py`.

After each: the exit code is right, the reason is told, a part that died is replaced or ends the server, and no process,
socket, lock or shared memory is left.

    phase      when
    starting   somewhere between the first instruction and the ready line: interpreter, import, load, warm-up
    serving    with streams that run
    restarting while the engine of before is being replaced
    draining   after SIGTERM, with streams that run
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import psutil
from tests.chaos.rig import FAKE, REAL, Served, gone, temporary_folder

import pagewire_client
from pagewire.errors import PagewireError

PHASES = ("starting", "serving", "restarting", "draining")
BLOWS = (
    ("supervisor", signal.SIGKILL),
    ("engine", signal.SIGKILL),
    ("gateway", signal.SIGKILL),
    ("supervisor", signal.SIGTERM),
    ("supervisor", signal.SIGINT),
    ("engine", signal.SIGTERM),
    ("gateway", signal.SIGTERM),
)
GONE_S = 5.0
"""F19: nobody outlives the supervisor by more."""


@dataclass(frozen=True)
class Case:
    phase: str
    victim: str
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.phase}: {self.signal.name} to the {self.victim}"


def cases() -> list[Case]:
    """Every victim in every phase."""
    return [Case(phase, victim, number) for phase in PHASES for victim, number in BLOWS]


async def strike(case: Case, chance: random.Random, command: tuple[str, ...]) -> str:
    """Start a server, strike, and check what must hold afterwards.

    Returns:
        how it ended, in words.
    """
    shared = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    with temporary_folder() as folder:
        options = ("--restart-backoff-ms", "200", "--drain-timeout-ms", "1000")
        server = await Served.start(folder, *options, command=command)
        try:
            told = await _strike(case, chance, server)
        finally:
            await server.close()
        if case.victim == "supervisor" and case.signal is signal.SIGKILL:
            # Nobody was left who could clean up; the next server does.
            following = await Served.start(folder, command=FAKE)
            try:
                await following.ready()
                assert await following.stop() == 0
            finally:
                await following.close()
        assert server.left_over() == [], server.left_over()
    if Path("/dev/shm").exists():
        assert set(os.listdir("/dev/shm")) <= shared, "shared memory is left"
    return told


async def _strike(case: Case, chance: random.Random, server: Served) -> str:
    async with contextlib.AsyncExitStack() as stack:
        if case.phase == "starting":
            await asyncio.sleep(chance.uniform(0.0, 2.5))
        else:
            client = await stack.enter_async_context(pagewire_client.connect(await server.ready()))
            streams = [client.generate([1, 2, 3], max_tokens=8000, ignore_eos=True) for _ in range(4)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            if case.phase == "restarting":
                server.part("engine").kill()
                await asyncio.sleep(chance.uniform(0.0, 1.0))
            elif case.phase == "draining":
                server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(chance.uniform(0.0, 0.8))
        family = await _hit(case, server)
        code = await _aftermath(case, server)
        assert await gone([*family, *server.family()], GONE_S) == [], "orphans"
        return f"exit code {code}"


async def _hit(case: Case, server: Served) -> list[psutil.Process]:
    """Strike; whom the server had as children at that moment."""
    family = server.family()
    if case.victim == "supervisor":
        if server.process.returncode is None:
            server.process.send_signal(case.signal)
        return family
    deadline = time.monotonic() + 15
    while (victim := server.part(case.victim)) is None:
        if server.process.returncode is not None or time.monotonic() > deadline:
            return family  # it was gone already
        await asyncio.sleep(0.01)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(case.signal)
    return [*family, victim]


async def _aftermath(case: Case, server: Served) -> int:
    """Wait for what must follow; the exit code of the server, which is ended if it lives on."""
    if case.victim == "supervisor":
        code = await server.ended(20)
        # Python itself dies of a signal that comes before its first line; a start that is drained already is 0.
        early = {-case.signal} if case.phase == "starting" or case.signal is signal.SIGKILL else set()
        polite = {signal.SIGTERM: {0}, signal.SIGINT: {130}, signal.SIGKILL: set()}[case.signal]
        first = {0} if case.phase == "draining" else set()  # the first signal says why it ends
        assert code in early | polite | first, (code, server.lines)
        return code
    if case.phase == "starting" and not await _gets_ready(server):
        code = await server.ended(20)
        assert code == 1, (code, server.lines)
        how = (
            f"was killed by {case.signal.name}",
            "ended with exit code 0",
        )  # one that was just about to be ready drains
        assert any(f"the {case.victim} {end}" in server.lines[-1] for end in how), server.lines
        return code
    if case.phase != "draining":
        await _serves(server)
    return await _finish(server)


async def _finish(server: Served) -> int:
    if server.process.returncode is None:
        server.process.send_signal(signal.SIGTERM)
    code = await server.ended(20)
    assert code == 0, (code, server.lines)
    return code


async def _gets_ready(server: Served) -> bool:
    """A blow that came before there was a victim, or after the ready line, is no failed start."""
    ready = asyncio.create_task(server.ready())
    ended = asyncio.create_task(server.process.wait())
    await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(ready, return_exceptions=True)
    ended.cancel()
    return ready.exception() is None


async def _serves(server: Served) -> None:
    """At the same address as ever; until then it refuses and says so."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with pagewire_client.connect(server.url, timeout_s=30) as client:
                    result = await client.generate([5, 6, 7], max_tokens=4, ignore_eos=True).result()
            except PagewireError:
                await asyncio.sleep(0.05)
            else:
                assert len(result.token_ids) == 4
                return


async def run(num: int, seed: int, command: tuple[str, ...]) -> int:
    """Strike `num` times, each case in turn; how many failed."""
    chance = random.Random(seed)
    todo = cases()
    num_failed = 0
    for i in range(num):
        case = todo[i % len(todo)]
        begun = time.monotonic()
        try:
            told = await strike(case, chance, command)
        except Exception as error:  # every case is tried
            num_failed += 1
            told = f"FAILED: {type(error).__name__}: {error}"
        print(f"{i + 1:4} {case}: {told} ({time.monotonic() - begun:.1f} s)", flush=True)
    print(f"{num - num_failed} of {num} as they should be")
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fake", action="store_true", help="an engine without torch: quicker, and less of a test")
    given = parser.parse_args()
    # A shell that starts us in the background has us ignore Ctrl-C, and so would every server that we start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return 1 if asyncio.run(run(given.num, given.seed, FAKE if given.fake else REAL)) else 0


if __name__ == "__main__":
    sys.exit(main())
