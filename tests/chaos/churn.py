"""Connections that open, stream and close, ten thousand of them: `python tests/chaos/churn.py`.

Every stream is complete, and engine and gateway hold afterwards what they held before: descriptors, memory within an
allowance, connections, streams that wait for somebody, rows, and KV blocks, each of which is free or in the prefix cache
again. Ends with 1 and says what is missing otherwise.
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
WARM_UP = 3000
"""Until the engine has met the sizes of step that there are: on a CPU torch keeps buffers for each, 60 to 140 MiB in all."""
PARTS = 10
NUM_TOKENS = 4
LONG_PROMPT = 40
"""Of every fourth: two full blocks, which go to the prefix cache, and other ones each time, so that it evicts."""

MORE_FDS = 4
MORE_MIB = 24
"""More than before, of each part. Measured over 10,000: 5 to 12 (the collector's young objects, the heap's holes)."""
SETTLE_S = 15.0
OPTIONS = (
    "--resume-grace-ms", "500", "--heartbeat-ms", "100", "--heartbeat-timeout-ms", "500", "--log-level", "warning",
    "--kv-bytes", "1MiB",
)  # fmt: skip


def prompt(number: int) -> list[int]:
    """Token ids below 100."""
    if number % 4:
        return [1 + number % 90, 2, 3]
    return [1 + (number // 90**place) % 90 for place in range(3)] * (LONG_PROMPT // 3 + 1)


async def one(url: str, number: int, *, says_goodbye: bool) -> int:
    """Connect, stream, leave; how many tokens came."""
    async with pagewire_client.connect(url, timeout_s=30) as client:
        result = await client.generate(prompt(number), max_tokens=NUM_TOKENS, ignore_eos=True).result()
        if not says_goodbye:
            client._link.welcome = None  # then `close` goes without a word
    return len(result.token_ids)


async def many(url: str, numbers: range) -> int:
    """How many streams were complete."""
    left = iter(numbers)
    complete = 0

    async def work() -> None:
        nonlocal complete
        for number in left:
            num_tokens = await one(url, number, says_goodbye=number % 2 == 0)
            complete += num_tokens == NUM_TOKENS

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return complete


async def held(server: Served) -> dict[str, float]:
    """What the parts hold now, and the engine's accounts of its blocks."""
    out: dict[str, float] = {}
    async with pagewire_client.connect(server.url) as client:
        await asyncio.sleep(0.7)  # the gateway asks the engine twice a second
        stats = await client.stats()
        for name in ("engine", "gateway"):
            part = server.part(name)
            assert part is not None
            out[f"{name}_fds"] = part.num_fds()
            out[f"{name}_mib"] = round(part.memory_info().rss / 2**20, 1)
    out["connections"] = stats["gateway_connections"]
    out["streams"] = stats["gateway_streams"]
    out["orphans"] = stats["gateway_orphans"]
    out["running"] = stats["sequences_running"]
    out["waiting"] = stats["sequences_waiting"]
    out["blocks"] = stats["kv_blocks"]
    out["blocks_used"] = stats["kv_blocks_used"]
    out["blocks_cached"] = stats["kv_blocks_cached"]
    return out


def missing(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """What is not as it was."""
    out = []
    for name, value in after.items():
        more = value - before[name]
        allowed = MORE_FDS if name.endswith("_fds") else MORE_MIB if name.endswith("_mib") else 0
        if name != "blocks_cached" and more > allowed:
            out.append(f"{name}: {before[name]} before, {value} after")
    # The tree keeps what it may, and gives it to whoever needs it: it may hold more than before, and never more than all.
    if after["blocks_used"] + after["blocks_cached"] > after["blocks"] or after["blocks"] != before["blocks"]:
        out.append(f"blocks: {after['blocks_used']} used and {after['blocks_cached']} cached of {after['blocks']}")
    return out


async def settled(server: Served, before: dict[str, float]) -> dict[str, float]:
    """What is held once it is what it was, or after `SETTLE_S`: silent connections and streams have their time first."""
    until = time.monotonic() + SETTLE_S
    while True:
        after = await held(server)
        if not missing(before, after) or time.monotonic() > until:
            return after


async def run(num: int, warm_up: int, command: tuple[str, ...]) -> tuple[int, dict[str, float], dict[str, float]]:
    """Complete streams of `num`; what was held before and after. Shows memory after each tenth."""
    async with served(*OPTIONS, command=command) as server:
        await many(server.url, range(warm_up))
        await asyncio.sleep(2)
        before = await held(server)
        complete = 0
        for part in range(PARTS):
            first, last = (warm_up + num * place // PARTS for place in (part, part + 1))
            complete += await many(server.url, range(first, last))
            memory = {name: server.part(name).memory_info().rss >> 20 for name in ("engine", "gateway")}
            print(json.dumps({"streams": last, "mib": memory}), flush=True)
        after = await settled(server, before)
        assert await server.stop() == 0
    return complete, before, after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--fake", action="store_true", help="an engine without torch")
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    given = parser.parse_args()
    begun = time.monotonic()
    complete, before, after = asyncio.run(run(given.num, given.warm_up, FAKE if given.fake else REAL))
    print(json.dumps({"complete": complete, "of": given.num, "seconds": round(time.monotonic() - begun, 1)}))
    print(json.dumps({"before": before}), json.dumps({"after": after}), sep="\n")
    wrong = missing(before, after)
    if complete < given.num:
        wrong.append(f"{given.num - complete} streams were not complete")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
