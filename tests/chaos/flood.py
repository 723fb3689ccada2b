"""Floods of connections against a whole server: `python tests/chaos/flood.py [--door tcp] [--kind silent] [--num 10000]`.

For each door (tcp, ipc, curve, http) and each kind of peer (see `flood_peers.py`) so many connections are opened as fast as they
can be, while twenty neighbours stream over the same door and one newcomer after the other connects. Every token of
a neighbour must be the right one and none may be disturbed; newcomers must be served; no part may die or log a fault;
memory must stay bounded meanwhile, and come back with the descriptors afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
from tests.chaos.flood_peers import KEYED, KINDS
from tests.chaos.rig import Served, temporary_folder

import pagewire_client
from pagewire import curve_keys
from pagewire.cli.model_path import demo_model

NEIGHBOURS = 20
PROMPT = list(range(1000, 1020))
FLAGS = (
    "--name", "vocab=49152 latency_us=200", "--max-model-len", "8192", "--kv-bytes", str(2**20),
    "--heartbeat-ms", "500", "--heartbeat-timeout-ms", "3000", "--resume-grace-ms", "300", "--log-level", "info",
    "--hello-timeout-ms", "3000", "--http", "127.0.0.1:0", "--header-timeout-ms", "3000", "--body-timeout-ms", "3000",
)  # fmt: skip
HOLD_S = 5.0
SETTLE_S = 5.0
PEAK_MIB = 192
LEFT_MIB = 64
"""What Python keeps of two thousand requests that were open at once; the next flood takes it again."""
LEFT_FDS = NEIGHBOURS
NEWCOMER_S = 10.0


@dataclass
class Seen:
    """What the neighbours and newcomers of one flood met."""

    streams: int = 0
    longest_s: float = 0.0
    newcomers: int = 0
    longest_newcomer_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Door:
    """Where, and with which keys."""

    name: str
    address: str
    options: dict[str, str]
    flooder: dict[str, str]
    """The same of those who flood it: another key."""

    def connect(self, timeout_s: float = 20.0):
        return pagewire_client.connect(self.address, timeout_s=timeout_s, **self.options)


async def neighbour(door: Door, seen: Seen, stop: asyncio.Event) -> None:
    """Streams, one after the other, over one connection."""
    async with door.connect() as client:
        while not stop.is_set():
            began = time.monotonic()
            stream = client.generate(PROMPT, max_tokens=20, seed=20, ignore_eos=True, echo_text=False)
            ids = list((await stream.result()).token_ids)
            if ids != PROMPT:
                seen.wrong.append(f"tokens of a neighbour: {ids}")
            seen.streams += 1
            seen.longest_s = max(seen.longest_s, time.monotonic() - began)
            await asyncio.sleep(0.02)


async def newcomers(door: Door, seen: Seen, stop: asyncio.Event) -> None:
    """Somebody who connects anew each time."""
    while not stop.is_set():
        began = time.monotonic()
        try:
            async with door.connect(NEWCOMER_S) as client:
                result = await client.generate(PROMPT, max_tokens=3, seed=20, ignore_eos=True).result()
                if list(result.token_ids) != PROMPT[:3]:
                    seen.wrong.append(f"tokens of a newcomer: {result.token_ids}")
                seen.newcomers += 1
        except Exception as error:
            seen.wrong.append(f"newcomer after {time.monotonic() - began:.1f} s: {error!r}")
        seen.longest_newcomer_s = max(seen.longest_newcomer_s, time.monotonic() - began)
        await asyncio.sleep(0.1)


async def http_neighbour(door: Door, seen: Seen, stop: asyncio.Event, *, keeps: bool) -> None:
    """Completions over HTTP; `keeps` its connection, or makes a new one for each."""
    body = {"prompt": PROMPT, "max_tokens": 20, "seed": 20, "ignore_eos": True, "stream": True}
    connector = aiohttp.TCPConnector(force_close=not keeps)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(20)) as session:
        first = ""
        while not stop.is_set():
            began = time.monotonic()
            try:
                async with session.post(f"{door.address}/v1/completions", json=body) as answer:
                    lines = [line async for line in answer.content if line.startswith(b"data: {")]
                text = "".join(choice["text"] for line in lines for choice in json.loads(line[6:])["choices"])
                first = first or text
                if answer.status != 200 or text != first or not text:
                    seen.wrong.append(f"{answer.status}: {text!r} after {first!r}")
            except (aiohttp.ClientError, TimeoutError) as error:
                seen.wrong.append(f"{'a kept' if keeps else 'a new'} connection: {error!r}")
            took = time.monotonic() - began
            if keeps:
                seen.streams, seen.longest_s = seen.streams + 1, max(seen.longest_s, took)
            else:
                seen.newcomers, seen.longest_newcomer_s = seen.newcomers + 1, max(seen.longest_newcomer_s, took)
            await asyncio.sleep(0.02)


def people(door: Door, seen: Seen, stop: asyncio.Event) -> list[asyncio.Task[None]]:
    """Neighbours and newcomers."""
    if door.name == "http":
        calls = [http_neighbour(door, seen, stop, keeps=index % 2 == 0) for index in range(NEIGHBOURS)]
    else:
        calls = [neighbour(door, seen, stop) for _ in range(NEIGHBOURS)] + [newcomers(door, seen, stop)]
    return [asyncio.create_task(call) for call in calls]


class Watch:
    """Memory and descriptors of engine and gateway."""

    def __init__(self, server: Served) -> None:
        self._parts = {name: server.part(name) for name in ("gateway", "engine")}
        self.before = self.now()
        self.peak = self.before

    def now(self) -> dict[str, float]:
        out: dict[str, float] = {}
        for name, part in self._parts.items():
            assert part is not None
            out[f"{name}_mib"] = round(part.memory_info().rss / 2**20, 1)
            out[f"{name}_fds"] = part.num_fds()
        return out

    async def follow(self) -> None:
        """Note the highest."""
        while True:
            now = self.now()
            self.peak = {name: max(value, now[name]) for name, value in self.peak.items()}
            await asyncio.sleep(0.05)


async def flood(server: Served, door: Door, kind: str, num: int, hold_s: float = HOLD_S) -> dict[str, object]:
    """One of them, held for `hold_s` when all are open; figures, with what was wrong."""
    seen, stop = Seen(), asyncio.Event()
    pids = sorted(child.pid for child in server.family())
    running = people(door, seen, stop)
    await asyncio.sleep(1.0)
    watch = Watch(server)
    calm_s, seen.longest_s, seen.longest_newcomer_s = seen.longest_s, 0.0, 0.0
    following = asyncio.create_task(watch.follow())
    keys = [f"--{name.replace('_', '-')}={value}" for name, value in door.flooder.items()]
    thrower = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("flood_peers.py")), "--door", door.name, "--kind", kind,
        "--address", door.address, "--num", str(num), "--hold", str(hold_s), *keys,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    told, _ = await thrower.communicate()
    await asyncio.sleep(SETTLE_S)
    following.cancel()
    after = watch.now()
    stop.set()
    ended = await asyncio.gather(*running, return_exceptions=True)
    wrong = seen.wrong + [repr(error) for error in ended if error is not None]
    if sorted(child.pid for child in server.family()) != pids:
        wrong.append("a part of the server died")
    for name in ("gateway", "engine"):
        mib, fds = f"{name}_mib", f"{name}_fds"
        if watch.peak[mib] - watch.before[mib] > PEAK_MIB:
            wrong.append(f"{name}: {watch.peak[mib] - watch.before[mib]:.0f} MiB more meanwhile")
        if after[mib] - watch.before[mib] > LEFT_MIB:
            wrong.append(f"{name}: {after[mib] - watch.before[mib]:.0f} MiB more afterwards")
        if after[fds] - watch.before[fds] > LEFT_FDS:
            wrong.append(f"{name}: {after[fds] - watch.before[fds]} descriptors more afterwards")
    peers = json.loads(told) if told else {}
    return {
        "door": door.name, "kind": kind, "peers": peers, "before": watch.before, "peak": watch.peak, "after": after,
        "neighbours": {"streams": seen.streams, "longest_s": round(seen.longest_s, 3), "calm_s": round(calm_s, 3)},
        "newcomers": {"served": seen.newcomers, "longest_s": round(seen.longest_newcomer_s, 3)},
        "load": os.getloadavg()[0], "wrong": wrong[:10], "num_wrong": len(wrong),
    }  # fmt: skip


async def at_door(name: str, kinds: list[str], num: int, hold_s: float = HOLD_S) -> list[dict[str, object]]:
    """All kinds at one door of a fresh server."""
    out = []
    with temporary_folder() as folder:
        flags, options, flooder = FLAGS, {}, {}
        if name != "ipc":
            flags = (*flags, "--bind", "tcp://127.0.0.1:0")
        if name == "curve":
            now = datetime.now(UTC)
            server_pair = curve_keys.make(folder / "server.key", "server", now=now)
            pair = curve_keys.make(folder / "alice.key", "alice", now=now)
            other = curve_keys.make(folder / "mallory.key", "mallory", now=now)
            for who, public in (("alice", pair.public), ("mallory", other.public)):
                curve_keys.allow(folder / "allowed", who, public, now=now)
            flags = (
                *flags,
                "--curve-key-file",
                str(folder / "server.key"),
                "--curve-allow-file",
                str(folder / "allowed"),
            )
            options = {"server_key": server_pair.public, "key_file": str(folder / "alice.key")}
            flooder = {**options, "key_file": str(folder / "mallory.key")}
        server = await Served.start(folder, *flags, model=str(demo_model() or ""))
        try:
            url = await server.ready(120)
            if name == "http":
                line = await server.said("gateway_ready")
                url = line.split("http=")[1].split()[0].rstrip("/")
            door = Door(name, url, options, flooder)
            for kind in kinds:
                figures = await flood(server, door, kind, num if kind != KEYED else min(num, 2000), hold_s)
                print(json.dumps(figures), flush=True)
                out.append(figures)
            assert await server.stop() == 0
            faults = [line for line in server.lines if "fault" in line or "Traceback" in line or "level=error" in line]
            if faults:
                print("\n".join(faults[:20]), file=sys.stderr)
                out.append({"wrong": faults[:5], "num_wrong": len(faults)})
        finally:
            await server.close()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--kind", help="default: all of the door's")
    parser.add_argument("--num", type=int, default=10_000)
    given = parser.parse_args()
    num_wrong = 0
    for name in given.door or KINDS:
        kinds = [kind for kind in KINDS[name] if given.kind in (None, kind)]
        for figures in asyncio.run(at_door(name, kinds, given.num)):
            num_wrong += int(str(figures["num_wrong"]))
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
