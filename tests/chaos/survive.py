"""Streams through a network that cuts, delays and stalls, while engine and gateway are killed: `python tests/chaos/survive.py`.

Every stream must end with exactly the tokens of an undisturbed run. Each round: so many streams at a time, over connections
through a proxy that does its worst, one kill -9 of the engine and one of the gateway (apart from each other: who loses both at
once is told so). A tiny random model on a CPU with `--deterministic`; `--fake` takes an engine without torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.chaos.rig import FAKE, REAL, Served, served

import pagewire_client
from pagewire.errors import ConnectionLost, PagewireError, Unavailable

NUM_REQUESTS = 40
STREAMS_A_CLIENT = 10
OPTIONS = (
    "--deterministic", "--heartbeat-ms", "200", "--heartbeat-timeout-ms", "2000", "--restart-backoff-ms", "50",
    "--restart-max", "1000", "--max-rows", "64", "--drain-timeout-ms", "1000", "--log-level", "warning",
)  # fmt: skip


class Proxy:
    """Passes bytes on, unless it does not feel like it."""

    def __init__(self, port: int, chance: random.Random) -> None:
        self._port = port
        self._chance = chance
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.num_cut = self.num_stalled = self.num_connections = 0
        self.is_evil = True

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        writers = (writer, far_writer)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, target, writers))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source, target, writers) -> None:
        try:
            while data := await source.read(65_536):
                fate = self._chance.random() if self.is_evil else 1.0
                if fate < 0.002:
                    self.num_cut += 1
                    target.write(data[: self._chance.randrange(len(data) + 1)])  # in the middle of a frame
                    break
                if fate < 0.003:
                    self.num_stalled += 1
                    await asyncio.sleep(self._chance.uniform(0.5, 4.0))
                elif fate < 0.05:
                    await asyncio.sleep(self._chance.uniform(0.0, 0.1))
                target.write(data)
                await target.drain()
        except OSError:
            pass
        finally:
            for writer in writers:
                writer.close()


@dataclass
class Round:
    """What came of it."""

    num_streams: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    wrong: list[str] = field(default_factory=list)


def requests() -> list[tuple[list[int], dict[str, object]]]:
    """Prompts and parameters; sampling of all kinds, penalties among them."""
    chance = random.Random(11)
    made = []
    for i in range(NUM_REQUESTS):
        prompt = [chance.randrange(1, 60) for _ in range(chance.randint(1, 60))]
        params = {"max_tokens": chance.randint(20, 300), "seed": i, "ignore_eos": True}
        params |= chance.choice(
            [{}, {"temperature": 0}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5, "n": 2}]
        )
        made.append((prompt, params))
    return made


async def ask(client, prompt, params):
    """The tokens of all choices."""
    result = await client.generate(prompt, **params).result()
    return [choice.token_ids for choice in result.choices]


async def undisturbed(url: str) -> list[list[list[int]]]:
    async with pagewire_client.connect(url) as client:
        return await asyncio.gather(*(ask(client, *request) for request in requests()))


async def stream_on(client, chance, expected, until, told: Round) -> None:
    """One stream after another until the time is over."""
    asked = requests()
    while time.monotonic() < until:
        which = chance.randrange(NUM_REQUESTS)
        try:
            got = await ask(client, *asked[which])
        except (Unavailable, ConnectionLost) as error:
            if isinstance(error, ConnectionLost) and "welcome" not in str(error) and "refused" not in str(error):
                told.wrong.append(f"request {which}: {error.code}: {error}")
            told.num_refused += 1  # while no engine serves, new requests are refused; that is no stream
            await asyncio.sleep(0.1)
        except PagewireError as error:
            told.wrong.append(f"request {which}: {error.code}: {error}")
        else:
            told.num_streams += 1
            told.num_tokens += sum(map(len, got))
            if got != expected[which]:
                told.wrong.append(f"request {which}: other tokens")


async def kill(server: Served, name: str) -> None:
    """kill -9, and wait until its successor serves."""
    victim = server.part(name)
    assert victim is not None
    victim.kill()
    deadline = time.monotonic() + 60
    while (follower := server.part(name)) is None or follower.pid == victim.pid:
        assert time.monotonic() < deadline, f"no new {name}"
        await asyncio.sleep(0.05)
    async with pagewire_client.connect(server.url, timeout_s=60, resume_timeout_s=60) as client:
        while time.monotonic() < deadline:
            try:
                await client.generate([1, 2], max_tokens=2).result()
            except PagewireError:
                await asyncio.sleep(0.1)
            else:
                return
    raise AssertionError(f"the new {name} does not serve")


async def strike(server: Served, chance, seconds: float) -> None:
    """One kill of each, in any order, the second when what the first cost is made good."""
    names = ["engine", "gateway"]
    chance.shuffle(names)
    for name in names:
        await asyncio.sleep(chance.uniform(0.1, 0.3) * seconds)
        await kill(server, name)
        if name == names[0]:
            await asyncio.sleep(2.5)  # stalled connections are noticed and resumed after 2 s


async def one_round(
    server: Served, port: int, expected, seed: int, seconds: float, num_streams: int
) -> tuple[Round, Proxy]:
    chance = random.Random(seed)
    told, proxy = Round(), Proxy(port, chance)
    url = await proxy.start()
    until = time.monotonic() + seconds
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(pagewire_client.connect(url, timeout_s=30, resume_timeout_s=60))
            for _ in range(max(1, num_streams // STREAMS_A_CLIENT))
        ]
        work = [
            stream_on(clients[i % len(clients)], random.Random(1000 * seed + i), expected, until, told)
            for i in range(num_streams)
        ]
        await asyncio.gather(strike(server, chance, seconds), *work)
        left = sum(client.num_streams for client in clients)
        if left:
            told.wrong.append(f"{left} streams are left open")
    await proxy.close()
    return told, proxy


def deaths(lines: list[str]) -> dict[str, int]:
    """Of each part, as the supervisor tells: on a machine that is too busy there may be more than were planned."""
    return {
        f"{name}s_lost": sum(f"process=supervisor event={name}_lost" in line for line in lines)
        for name in ("engine", "gateway")
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def run(rounds: int, seconds: float, num_streams: int, seed: int, command: tuple[str, ...]) -> list[Round]:
    """All rounds on one server; a line for each."""
    port, out = free_port(), []
    async with served(*OPTIONS, "--bind", f"tcp://127.0.0.1:{port}", command=command) as server:
        expected = await undisturbed(server.url)
        for number in range(rounds):
            begun, num_lines = time.monotonic(), len(server.lines)
            told, proxy = await one_round(server, port, expected, seed + number, seconds, num_streams)
            out.append(told)
            line = {
                "round": number + 1,
                "seconds": round(time.monotonic() - begun, 1),
                "streams": told.num_streams,
                "tokens": told.num_tokens,
                "refused": told.num_refused,
                "connections": proxy.num_connections,
                "cut": proxy.num_cut,
                "stalled": proxy.num_stalled,
                **deaths(server.lines[num_lines:]),
                "wrong": len(told.wrong),
            }
            print(json.dumps(line), flush=True)
            for text in told.wrong[:5] + (server.lines[num_lines:] if told.wrong else []):
                print("   ", text, flush=True)
        assert await server.stop() == 0
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fake", action="store_true", help="an engine without torch: quicker, and less of a test")
    given = parser.parse_args()
    command = FAKE if given.fake else REAL
    told = asyncio.run(run(given.rounds, given.seconds, given.streams, given.seed, command))
    wrong = sum(len(one.wrong) for one in told)
    print(f"{sum(one.num_streams for one in told)} streams in {len(told)} rounds, {wrong} lost, doubled or wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
