"""Random load against a whole server for a long time: `python tests/chaos/soak.py --seconds 3600`.

Clients that finish, cancel, leave without a word, and read slowly, over ZeroMQ and over HTTP. At the end: every stream had its end and every token was
right (the engine is the fake that checks each read of KV), all blocks are back, and no process has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import aiohttp
import psutil
import zmq
import zmq.asyncio
from tests.chaos.fake_engine import EOS, POISON, VOCAB
from tests.chaos.rig import Served, free_address, served

import pagewire_client
from pagewire.errors import NumericError
from pagewire.worker.fake import continuation, hash_tokens
from pagewire_transport.codec import decode_server, encode
from pagewire_transport.messages import Done, Generate, Hello, Ping
from pagewire_transport.params import SamplingParams

GROWTH_BYTES = 6 * 2**20
"""Between the second quarter and the last, of one process: allocators breathe."""
OPTIONS = ("--kv-bytes", str(600 * 1024), "--max-rows", "32", "--name", "latency_us=1000")


@dataclass
class Soak:
    """What happened so far."""

    seed: int
    url: str
    http: str
    ends: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    is_over: bool = False

    async def user(self, number: int) -> None:
        """One client after another, until it is over."""
        chance = random.Random(self.seed * 1000 + number)
        while not self.is_over:
            async with pagewire_client.connect(self.url) as client:
                for _ in range(chance.randint(1, 20)):
                    if self.is_over:
                        return
                    act = chance.choices((self.finish, self.cancel, self.fail), (6, 3, 1))[0]
                    await asyncio.wait_for(act(client, chance), 60)
                if chance.random() < 0.5:
                    self.leave(client, chance)
            if chance.random() < 0.2:
                await asyncio.wait_for(self.read_slowly(chance), 90)

    def prompt(self, chance: random.Random) -> list[int]:
        """Many share a beginning."""
        shared = [1 + chance.randrange(8)] * chance.choice((0, 16, 40, 160))
        return shared + [chance.randrange(1, 100) for _ in range(chance.randint(1, 300))]

    def wanted(self, prompt: list[int], length: int, seed: int) -> list[int]:
        """What the model says."""
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        return continuation(hash_tokens(VOCAB), prompt, params, seed, vocab_size=VOCAB, eos_ids=(EOS,))

    async def finish(self, client: pagewire_client.Client, chance: random.Random) -> None:
        prompt, seed, length = self.prompt(chance), chance.randrange(1000), chance.randint(1, 120)
        stream = client.generate(
            prompt, max_tokens=length, seed=seed, ignore_eos=True, priority=chance.choice((0, 0, 0, 1))
        )
        assert (await stream.result()).token_ids == self.wanted(prompt, length, seed), (prompt, seed, length)
        self.num_tokens += length
        self.ends["finished"] += 1

    async def cancel(self, client: pagewire_client.Client, chance: random.Random) -> None:
        num, length = chance.choice((1, 1, 3)), 2000
        stream = client.generate(self.prompt(chance), max_tokens=length, ignore_eos=True, n=num)
        for _ in range(chance.randint(0, 30)):
            if await anext(stream, None) is None:
                break
        await stream.aclose()
        result = await stream.result()
        # On a busy machine a chunk may hold hundreds of tokens, and the end come before the cancel.
        assert result.finish_reason == "cancelled" or result.usage.completion == num * length, result.finish_reason
        self.ends[result.finish_reason] += 1

    async def fail(self, client: pagewire_client.Client, chance: random.Random) -> None:
        try:
            await client.generate([POISON, *self.prompt(chance)], max_tokens=5).result()
        except NumericError:
            self.ends["failed"] += 1

    def leave(self, client: pagewire_client.Client, chance: random.Random) -> None:
        """Streams are open when the client goes."""
        for _ in range(chance.randint(1, 4)):
            client.generate(self.prompt(chance), max_tokens=2000, ignore_eos=True)
            self.ends["left"] += 1

    async def browser(self, number: int) -> None:
        """As `user`, over HTTP: answers at once, as events, and events that nobody waits for."""
        chance = random.Random(self.seed * 1000 + number)
        while not self.is_over:
            async with aiohttp.ClientSession(self.http, read_bufsize=1024) as session:
                for _ in range(chance.randint(1, 20)):
                    if self.is_over:
                        return
                    await asyncio.wait_for(self.ask(session, chance), 90)

    async def ask(self, session: aiohttp.ClientSession, chance: random.Random) -> None:
        prompt, seed, length = self.prompt(chance), chance.randrange(1000), chance.randint(1, 120)
        how = chance.choices(("whole", "events", "left", "slow"), (3, 4, 2, 1))[0]
        body = {"prompt": prompt, "max_tokens": length, "seed": seed, "ignore_eos": True}
        async with session.post("/v1/completions", json={**body, "stream": how != "whole"}) as response:
            assert response.status == 200, await response.text()
            if how == "whole":
                text = (await response.json())["choices"][0]["text"]
            else:
                text = await self.events(response, chance, how)
        if how != "left":
            assert text == bytes(self.wanted(prompt, length, seed)).decode(), (prompt, seed, length)
            self.num_tokens += length
        self.ends[f"HTTP {how}"] += 1

    async def events(self, response: aiohttp.ClientResponse, chance: random.Random, how: str) -> str:
        """The text of what was read."""
        parts: list[str] = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                parts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
            if how == "left" and chance.random() < 0.2:
                break
            if how == "slow" and chance.random() < 0.2:
                await asyncio.sleep(chance.uniform(0, 0.3))
        return "".join(parts)

    async def read_slowly(self, chance: random.Random) -> None:
        """A frame now and then, and in the end all of it: nothing is missing."""
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger, peer.rcvhwm = 0, 1
            peer.connect(self.url)
            await peer.send(encode(Hello()))
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            await peer.send(encode(Generate(stream=1, prompt_ids=bytes([5, 0, 0, 0]), params=params)))
            until = time.monotonic() + 3
            message = None
            while not isinstance(message, Done):
                if not await peer.poll(1000):
                    await peer.send(encode(Ping()))  # or a busy machine takes its silence for its end
                    continue
                message = decode_server(await peer.recv())
                if time.monotonic() < until:
                    await asyncio.sleep(chance.uniform(0, 0.3))
            assert message.usage.completion == 300
            self.ends["read slowly"] += 1


async def watch(processes: dict[str, psutil.Process], seconds: float) -> dict[str, list[int]]:
    """Resident bytes of each, sampled."""
    sizes: dict[str, list[int]] = {name: [] for name in processes}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for name, process in processes.items():
            sizes[name].append(process.memory_info().rss)
        await asyncio.sleep(min(1.0, seconds / 40))
    return sizes


def growth(sizes: list[int]) -> int:
    """Median of the last quarter over that of the second; the first is warm-up."""
    quarter = max(1, len(sizes) // 4)
    return int(statistics.median(sizes[-quarter:]) - statistics.median(sizes[quarter : 2 * quarter]))


async def soak(server: Served, http: str, seconds: float, *, seed: int, num_users: int) -> str:
    """Load it, at both doors, for so long and check what must hold; figures, in words.

    Raises:
        AssertionError: it does not.
    """
    run = Soak(seed, server.url, http)
    processes = {
        "supervisor": psutil.Process(server.process.pid),
        "engine": server.part("engine"),
        "gateway": server.part("gateway"),
    }
    kinds = [run.browser if i % 3 == 2 else run.user for i in range(num_users)]
    users = [asyncio.create_task(kind(i)) for i, kind in enumerate(kinds)]
    watching = asyncio.create_task(watch(processes, seconds))
    await asyncio.wait({watching, *users}, return_when=asyncio.FIRST_COMPLETED)
    run.is_over = True
    sizes = await watching
    await asyncio.gather(*users)  # raises what a user met
    async with pagewire_client.connect(server.url) as client, asyncio.timeout(20):
        while (stats := await client.stats())["kv_blocks_used"] or stats["sequences_running"]:
            await asyncio.sleep(0.2)
        assert stats["sequences_waiting"] == 0
        assert stats["gateway_streams"] == 0
    grown = {name: growth(samples) for name, samples in sizes.items()}
    assert max(grown.values()) < GROWTH_BYTES, grown
    assert not [line for line in server.lines if "level=error" in line], server.lines
    megabytes = ", ".join(
        f"{name} {sizes[name][-1] / 2**20:.1f} MiB ({grown[name] / 2**20:+.2f})" for name in processes
    )
    return f"{dict(run.ends)}, {run.num_tokens} tokens checked; {megabytes}"


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    address = free_address()
    async with served(*OPTIONS, "--http", address, has_text=True) as server:
        print(await soak(server, f"http://{address}", given.seconds, seed=given.seed, num_users=given.users))
        assert await server.stop() == 0
        assert server.left_over() == []
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
