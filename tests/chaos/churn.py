"""Connections that open, stream and close, ten thousand of them: `python tests/chaos/churn.py`.

Every stream is complete, and engine and gateway hold afterwards what they held before: sockets, memory, KV blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.chaos.rig import FAKE, REAL, Served, served

import pagewire_client

AT_ONCE = 16
WARM_UP = 100


async def one(url: str, number: int, *, says_goodbye: bool) -> int:
    """Connect, stream, leave; how many tokens came."""
    async with pagewire_client.connect(url, timeout_s=30) as client:
        result = await client.generate([1 + number % 90, 2, 3], max_tokens=4, ignore_eos=True).result()
        if not says_goodbye:
            client._link.welcome = None  # then `close` goes without a word
    return len(result.token_ids)


async def many(url: str, num: int) -> int:
    """How many streams were complete."""
    numbers = iter(range(num))
    complete = 0

    async def work() -> None:
        nonlocal complete
        for number in numbers:
            num_tokens = await one(url, number, says_goodbye=number % 2 == 0)
            complete += num_tokens == 4

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return complete


async def held(server: Served) -> dict[str, float]:
    """What the parts hold once nothing is kept for anybody."""
    await asyncio.sleep(1.5)
    out: dict[str, float] = {}
    for name in ("engine", "gateway"):
        part = server.part(name)
        assert part is not None
        out[f"{name}_fds"] = part.num_fds()
        out[f"{name}_mib"] = round(part.memory_info().rss / 2**20, 1)
    async with pagewire_client.connect(server.url) as client:
        await asyncio.sleep(0.6)  # the gateway asks the engine twice a second
        stats = await client.stats()
    out["connections"] = stats["gateway_connections"]
    out["orphans"] = stats["gateway_orphans"]
    out["running"] = stats["sequences_running"]
    return out


async def run(num: int, command: tuple[str, ...]) -> tuple[int, dict[str, float], dict[str, float]]:
    """Complete streams of `num`; what was held before and after."""
    options = (
        "--resume-grace-ms",
        "500",
        "--heartbeat-ms",
        "100",
        "--heartbeat-timeout-ms",
        "500",
        "--log-level",
        "warning",
    )
    async with served(*options, command=command) as server:
        await many(server.url, WARM_UP)
        before = await held(server)
        complete = await many(server.url, num)
        after = await held(server)
        assert await server.stop() == 0
    return complete, before, after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--fake", action="store_true", help="an engine without torch")
    given = parser.parse_args()
    begun = time.monotonic()
    complete, before, after = asyncio.run(run(given.num, FAKE if given.fake else REAL))
    print(json.dumps({"complete": complete, "of": given.num, "seconds": round(time.monotonic() - begun, 1)}))
    print(json.dumps({"before": before}), json.dumps({"after": after}), sep="\n")
    return 0 if complete == given.num else 1


if __name__ == "__main__":
    sys.exit(main())
