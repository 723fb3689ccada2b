"""How long eight prompts of 128,000 tokens hold the engine's loop while 32 streams run (F27), beside a run without them.

A whole server, supervisor, gateway and engine, with a worker that costs nothing (`tests/chaos/fake_engine.py`): what is left
is the loop's own work, messages read, prompts admitted, matched and planned, tokens sent. A timer of a millisecond on that
loop tells how late it comes: its wall time, and what of it the loop's thread computed, since on a shared machine the rest is
others' work.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import Report
from tests.chaos.rig import served

import pagewire_client

NUM_TOKENS = 128_000
NUM_LONG, NUM_RUNNING = 8, 32
OPTIONS = (
    "--name", "light=1 latency_us=2000", "--kv-bytes", str(1024 * 80_000), "--max-model-len", "140000",
    "--max-step-tokens", "8192",
)  # fmt: skip


async def measure(num_long: int, *, alike: bool) -> dict[str, float]:
    """Gaps in ms: p50, p99, p100 of wall time, own50, own99, own100 of the thread's CPU time."""
    async with served(*OPTIONS) as server:
        async with pagewire_client.connect(server.url) as client:
            streams = [client.generate([1 + i], max_tokens=100_000, ignore_eos=True) for i in range(NUM_RUNNING)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            await asyncio.sleep(1.0)
            long = [
                client.generate([2 if alike else 2 + i] * NUM_TOKENS, max_tokens=3, ignore_eos=True).result()
                for i in range(num_long)
            ]
            await asyncio.gather(*long)
            await asyncio.sleep(1.0)
            for stream in streams:
                await stream.aclose()
        await server.stop()
        line = await server.said("longest loop gaps")
        return {name: float(value) for name, value in re.findall(r"(\w+\d+)=([\d.]+)", line)}


async def main_async(args: argparse.Namespace) -> None:
    report = Report("loop_gap")
    cases = (("32 streams", 0, False), ("8 prompts of 128,000", NUM_LONG, False), ("8 alike", NUM_LONG, True))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in cases}
    for _ in range(args.rounds):  # in turns, since a shared machine's speed changes
        for name, num_long, alike in cases:
            runs[name].append(await measure(num_long, alike=alike))
    for name, of in runs.items():
        for metric, key in (("wall_p50", "p50"), ("wall_p99", "p99"), ("wall_longest", "p100")):
            report.add(name, metric, statistics.median(one[key] for one in of), "ms")
        for metric, key in (("own_p99", "own99"), ("own_longest", "own100")):
            report.add(name, metric, statistics.median(one[key] for one in of), "ms")
    report.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    Report.arguments(parser)
    asyncio.run(main_async(parser.parse_args()))


if __name__ == "__main__":
    main()
