"""Readers that do not read beside a hundred that do: `python tests/chaos/slow_readers.py`.

Windows without them (A), with the same streams read as they come (C) and with them (B) alternate on one server. In B there are:

    HTTP      a socket with the smallest buffer, which takes one byte a second of a stream of events
    ZeroMQ    a client behind a relay that passes one byte a second on, and which sends its heartbeats all the same
    stopped   a process with open streams of every `on_lag`, which gets SIGSTOP, and SIGCONT when the window is over

What must hold: memory of engine and gateway stays flat; the other streams' gaps between tokens (p99, median of windows) are
within a tenth of those without. An engine on a CPU computes the slow readers' streams as well, a third more, whoever reads them: there it
is within a tenth of those of C. And each slow stream ends with the exact tokens, or an error and the rest by `resume`; the HTTP
connection is cut. Engine: a tiny random model; `--fake`: one without torch, paced by `--latency-us` so that the machine has room.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import zmq
import zmq.asyncio
from tests.chaos import slow_reader_children
from tests.chaos.fake_engine import BLOCK_BYTES
from tests.chaos.rig import FAKE, REAL, Served, served
from tests.chaos.slow_relay import SMALL_BUFFER, Relay, small_socket
from tests.chaos.soak import GROWTH_BYTES
from tests.chaos.survive import free_port

import pagewire_client
from pagewire_transport.codec import decode_server, encode
from pagewire_transport.columns import pack
from pagewire_transport.messages import Accepted, Generate, Hello, Ping
from pagewire_transport.params import SamplingParams

KINDS = ("coalesce", "pause", "cancel") * 4
PERMITTED = 1.1
TINY_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Plan:
    """How long, how many, how quick. `lead_s`: time for the slow readers' buffers to fill before a window begins. `tokens`: of
    each slow stream. `patience_ms`: how long the server waits for readers, of whatever kind.
    """

    rounds: int = 3
    seconds: float = 20.0
    lead_s: float = 8.0
    num_normal: int = 100
    tokens: int = 1000
    latency_us: int = 20_000
    patience_ms: int = 5000
    grace_ms: int = 60_000
    logprobs: int = 20

    def options(self, command: tuple[str, ...]) -> list[str]:
        """Of the server."""
        patience = str(self.patience_ms)
        # As few as it takes: a pool that is still filling with prefixes looks like memory that grows.
        num_blocks = 48 * self.num_normal + 2 * len(KINDS) * (self.tokens // 16 + 4) + 400
        return [
            "--kv-bytes", str(num_blocks * (BLOCK_BYTES if command == FAKE else TINY_BLOCK_BYTES)),
            "--max-rows", str(self.num_normal + 8 + 2 * len(KINDS)),
            "--name", f"latency_us={self.latency_us}", "--deterministic", "--log-level", "warning",
            "--max-lag-tokens", "64", "--max-lag-ms", patience, "--unread-timeout-ms", patience,
            "--slow-reader-timeout-ms", patience, "--heartbeat-timeout-ms", str(2 * self.patience_ms),
            "--resume-grace-ms", str(self.grace_ms),
        ]  # fmt: skip


@dataclass
class Told:
    """What came of it."""

    windows: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {"A": [], "B": [], "C": []})
    sizes: dict[str, list[int]] = field(default_factory=lambda: {"engine": [], "gateway": []})
    most_paused: float = 0.0
    ends: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def grown(self) -> dict[str, float]:
        """MiB from the second window with slow readers to the last; in the first nothing is kept of others before it."""
        _, second, *_, last = self.windows["B"]
        return {name: last[f"{name}_mib"] - second[f"{name}_mib"] for name in self.sizes}

    @property
    def is_flat(self) -> bool:
        """No part grows from window to window."""
        return max(self.grown.values()) * 2**20 < GROWTH_BYTES

    async def window(self, kind: str, normal: asyncio.subprocess.Process, seconds: float) -> None:
        """Gaps of the normal streams for so long, and the memory of both parts meanwhile."""
        assert normal.stdin is not None
        since = {name: len(sizes) for name, sizes in self.sizes.items()}
        normal.stdin.write(b"begin\n")
        await asyncio.sleep(seconds)
        normal.stdin.write(b"end\n")
        figures = await _line(normal)
        for name, sizes in self.sizes.items():
            figures[f"{name}_mib"] = statistics.median(sizes[since[name] :]) / 2**20
        self.windows[kind].append(figures)

    def ratio(self, kind: str) -> float:
        """ITL p99 with slow readers over that of windows of this kind."""
        return self.median("B", "p99") / self.median(kind, "p99")

    def median(self, kind: str, figure: str) -> float:
        """Of the windows of a kind."""
        return statistics.median(window[figure] for window in self.windows[kind])


def request(seed: int) -> list[int]:
    """The prompt of a slow stream."""
    return [1 + seed, 2, 3]


# ---- who reads one byte a second -----------------------------------------------------------------------------------------


async def crawl_http(port: int, plan: Plan, is_over: asyncio.Event) -> str:
    """Take one byte a second until it is over, then what is left; how it ended."""
    loop = asyncio.get_running_loop()
    body = {
        "prompt": request(90),
        "max_tokens": 8 * plan.tokens,
        "n": 8,
        "logprobs": 20,
        "stream": True,
        "ignore_eos": True,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with small_socket() as peer:
        await loop.sock_connect(peer, ("127.0.0.1", port))
        await loop.sock_sendall(peer, head.encode() + data)
        last = b""
        try:
            while data := await loop.sock_recv(peer, 65_536 if is_over.is_set() else 1):
                last = (last + data)[-5:]
                if not is_over.is_set():
                    await asyncio.sleep(1.0)
                elif last == b"0\r\n\r\n":
                    return "complete"
        except ConnectionResetError:  # comes behind what this side of the connection had already
            pass
    return "cut"


class Crawler:
    """A ZeroMQ client behind a slow relay; it never takes the server for lost."""

    def __init__(self, port: int, plan: Plan) -> None:
        self._plan = plan
        self._relay = Relay(port)
        self._context = zmq.asyncio.Context()
        self._peer = self._context.socket(zmq.DEALER)
        self._tasks: list[asyncio.Task[None]] = []
        self.accepted: dict[int, Accepted] = {}

    async def start(self, *, is_slow: bool) -> None:
        """Its streams are accepted, and from now on it crawls, or reads what comes."""
        self._peer.linger, self._peer.rcvhwm, self._peer.rcvbuf = 0, 1, SMALL_BUFFER
        self._peer.connect(self._relay.start())
        await self._peer.send(encode(Hello(client="crawler")))
        for seed, kind in enumerate(KINDS):
            params = SamplingParams(
                max_tokens=self._plan.tokens, seed=seed, ignore_eos=True, logprobs=self._plan.logprobs
            )
            asked = Generate(stream=seed, prompt_ids=pack("I", request(seed)), params=params, on_lag=kind)
            await self._peer.send(encode(asked))
        while len(self.accepted) < len(KINDS):
            message = decode_server(await asyncio.wait_for(self._peer.recv(), 30))
            if isinstance(message, Accepted):
                self.accepted[message.stream] = message
        self._relay.is_slow = is_slow
        self._tasks = [asyncio.create_task(self._ping())]
        if not is_slow:
            self._tasks.append(asyncio.create_task(self._read()))

    async def _ping(self) -> None:
        while True:
            await self._peer.send(encode(Ping()))
            await asyncio.sleep(0.5)

    async def _read(self) -> None:
        while True:
            await self._peer.recv()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._peer.close()
        self._context.term()
        await self._relay.close()

    async def fetch(self, url: str, expected: dict[int, list[int]], told: Told) -> None:
        """What its streams became, over a connection that reads: all tokens, or those until it was too slow."""
        async with pagewire_client.connect(url) as client:
            again = {s: client.resume(a.request_id, a.resume_key, received=[0]) for s, a in self.accepted.items()}
            for seed, stream in again.items():
                result = await stream.result()
                judge("crawler", KINDS[seed], result.finish_reason, result.token_ids, expected[seed], told)


def judge(who: str, kind: str, reason: str, tokens: list[int], wanted: list[int], told: Told) -> None:
    """A slow stream's end must be one of those that its `on_lag` has, and its tokens the right ones."""
    told.ends.append(f"{who}, {kind}: {reason}")
    may = {"length", "cancelled", "slow_reader"} if kind == "cancel" else {"length"}
    if reason not in may:
        told.wrong.append(f"{who}, {kind}: ended with {reason}")
    is_whole = reason == "length"
    if tokens != (wanted if is_whole else wanted[: len(tokens)]) or not tokens:
        told.wrong.append(
            f"{who}, {kind}: {reason} after {len(tokens)} tokens, which are not those of an undisturbed run"
        )


# ---- a run ---------------------------------------------------------------------------------------------------------------


async def undisturbed(url: str, plan: Plan) -> dict[int, list[int]]:
    """The tokens of the slow streams where somebody reads them."""
    async with pagewire_client.connect(url) as client:
        streams = [
            client.generate(request(seed), max_tokens=plan.tokens, seed=seed, ignore_eos=True)
            for seed in range(len(KINDS))
        ]
        return {seed: (await stream.result()).token_ids for seed, stream in enumerate(streams)}


async def watch(server: Served, told: Told) -> None:
    """Sample the memory of both parts, and how many sequences are paused."""
    parts = {name: server.part(name) for name in told.sizes}
    async with pagewire_client.connect(server.url) as client:
        while True:
            for name, part in parts.items():
                told.sizes[name].append(part.memory_info().rss)
            told.most_paused = max(told.most_paused, (await client.stats(60))["sequences_paused"])
            await asyncio.sleep(0.25)


async def _line(process: asyncio.subprocess.Process) -> dict:
    assert process.stdout is not None
    return json.loads(await asyncio.wait_for(process.stdout.readline(), 120))


async def with_streams_read(
    server: Served, http: int, plan: Plan, normal: asyncio.subprocess.Process, told: Told
) -> None:
    """A window with the streams of slow readers, and readers that are not slow."""
    asked = json.dumps([request(seed) for seed in range(len(KINDS))])
    brisk = await slow_reader_children.start(
        "stopped", server.url, asked, json.dumps(KINDS), str(plan.tokens), str(plan.logprobs)
    )
    is_over = asyncio.Event()
    is_over.set()
    crawler = Crawler(int(server.url.rsplit(":", 1)[1]), plan)
    reading = asyncio.create_task(crawl_http(http, plan, is_over))
    try:
        await crawler.start(is_slow=False)
        assert await _line(brisk) == "open"
        await told.window("C", normal, plan.seconds)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await crawler.close()
        await slow_reader_children.end(brisk)
    await asyncio.sleep(plan.lead_s)  # the server lets go of what nobody reads any more


async def with_slow_readers(
    server: Served,
    http: int,
    plan: Plan,
    normal: asyncio.subprocess.Process,
    expected: dict[int, list[int]],
    told: Told,
) -> None:
    """A window with them, and what became of each."""
    port = int(server.url.rsplit(":", 1)[1])
    asked = json.dumps([request(seed) for seed in range(len(KINDS))])
    stopped = await slow_reader_children.start(
        "stopped", server.url, asked, json.dumps(KINDS), str(plan.tokens), str(plan.logprobs)
    )
    is_over = asyncio.Event()
    crawler, crawling = Crawler(port, plan), asyncio.create_task(crawl_http(http, plan, is_over))
    try:
        await crawler.start(is_slow=True)
        assert await _line(stopped) == "open"
        stopped.send_signal(signal.SIGSTOP)
        await asyncio.sleep(plan.lead_s)
        await told.window("B", normal, plan.seconds)
        stopped.send_signal(signal.SIGCONT)
        is_over.set()
        await crawler.close()
        await crawler.fetch(server.url, expected, told)
        for seed, kind in enumerate(KINDS):
            end = await _line(stopped)
            judge("stopped", kind, end["reason"], end["tokens"], expected[seed], told)
        http_end = await asyncio.wait_for(crawling, 30 + plan.patience_ms / 1000)
        told.ends.append(f"HTTP: {http_end}")
        if http_end != "cut":
            told.wrong.append(f"HTTP: {http_end}")
    finally:
        crawling.cancel()
        await slow_reader_children.end(stopped)


async def run(plan: Plan, command: tuple[str, ...]) -> Told:
    """All windows on one server."""
    told, http = Told(), free_port()
    bind = ("--bind", f"tcp://127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{http}")
    async with served(*plan.options(command), *bind, command=command) as server:
        expected = await undisturbed(server.url, plan)
        normal = await slow_reader_children.start("normal", server.url, str(plan.num_normal))
        watching = asyncio.create_task(watch(server, told))
        try:
            assert await _line(normal) == "open"
            for number in range(plan.rounds):
                await told.window("A", normal, plan.seconds)
                await with_streams_read(server, http, plan, normal, told)
                await with_slow_readers(server, http, plan, normal, expected, told)
                report(told, number)
        finally:
            watching.cancel()
            await slow_reader_children.end(normal)
        told.wrong += [line for line in server.lines if "level=error" in line]
        told.wrong += [] if told.most_paused else ["no stream was paused: the readers were not slow enough"]
        assert await server.stop() == 0
    return told


def report(told: Told, number: int) -> None:
    """A line for each round."""
    line = {"round": number + 1, "load": round(os.getloadavg()[0], 1)}
    for kind, windows in told.windows.items():
        line |= {f"{kind}_{name}": round(value, 1) for name, value in windows[-1].items()}
    print(json.dumps(line | {"wrong": len(told.wrong)}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="3 or more, each a window without and one with them")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a window")
    parser.add_argument("--latency-us", type=int, default=20_000, help="of the fake engine's steps")
    parser.add_argument("--fake", action="store_true", help="an engine without torch")
    given = parser.parse_args()
    plan = Plan(rounds=given.rounds, seconds=given.seconds, latency_us=given.latency_us)
    told = asyncio.run(run(plan, FAKE if given.fake else REAL))
    for text in sorted({f"{told.ends.count(end)} × {end}" for end in told.ends}):
        print("   ", text)
    for text in told.wrong:
        print("    wrong:", text)
    figures = {
        f"ITL_{figure}_{kind}_ms": round(told.median(kind, figure), 2) for figure in ("p50", "p99") for kind in "ACB"
    }
    grown = {f"{name}_grown_mib": round(size, 2) for name, size in told.grown.items()}
    ratios = {f"p99_B_to_{kind}": round(told.ratio(kind), 3) for kind in "AC"}
    print(json.dumps(figures | ratios | {"permitted": PERMITTED} | grown))
    return 1 if told.wrong or not told.is_flat or told.ratio("A" if given.fake else "C") > PERMITTED else 0


if __name__ == "__main__":
    sys.exit(main())
