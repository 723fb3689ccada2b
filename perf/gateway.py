"""What the HTTP door streams: server-sent events a second and CPU of an event, beside the bare framework in the same run.

A stub engine gives one token to each stream a turn, through `Gateway.on_engine`, as the engine's link would: so an event
here is the engine's message read, text made of it, JSON and the write. The bare framework sends events of the same size
that are made already. Readers are raw sockets in another process; CPU is that of the serving process over what it sent.

Log-probabilities, 16 choices with 20 alternatives a token, are a case of their own: streamed to a reader that keeps up, then
to one that stops until all is there and reads again. A turn is one round of the loop, in CPU time of its thread: what others
wait for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time

import http_frameworks
import uvloop
from report import Report

from pagewire.config import HttpConfig, ServerConfig
from pagewire.gateway.gateway import Gateway
from pagewire.gateway.http.connection import HttpConnection
from pagewire.gateway.http.server import HttpServer
from pagewire.gateway.preparation import Preparation
from pagewire.text.text_model import TextModel
from pagewire_client.text.byte_table import ByteTable
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.columns import pack
from pagewire_transport.messages import (
    Accepted,
    Done,
    Finished,
    Generate,
    LogprobColumns,
    Timings,
    Tokens,
    Usage,
    Welcome,
)

ROUNDS = 3
SECONDS = 1.5
CHOICES, STEPS, TOP = 16, 1500, 20
TABLE = ByteTable(tuple(b" %03d" % i for i in range(1000)))
MAX_LEN = 2**30
WELCOME = Welcome(
    version=1, role="engine", server="stub", model="m", vocab_size=1000, max_model_len=MAX_LEN, max_streams=9999,
    max_message_bytes=2**24, heartbeat_ms=1000, heartbeat_timeout_ms=10_000,
)  # fmt: skip


class StubEngine:
    """Takes every request; `turn` gives one token to each stream whose reader took what it had."""

    def __init__(self):
        self.gateway: Gateway | None = None
        self.streams: list[int] = []
        self.starts: list[int] = []

    def send(self, message):
        if isinstance(message, Generate):
            self.streams.append(message.stream)
            self.starts.append(0)
            accepted = Accepted(
                stream=message.stream, request_id="r", seed=1, num_prompt_tokens=1, max_tokens=MAX_LEN - 2
            )
            asyncio.get_running_loop().call_soon(self.gateway.on_engine, accepted)

    def turn(self, connections: list[HttpConnection]) -> int:
        """The floor of `http_frameworks` does the same; what waits would be put together into fewer, longer events."""
        free = [i for i, connection in enumerate(connections) if not connection.num_unsent]
        if free:
            streams, starts = self.streams, self.starts
            tokens = Tokens(
                streams=pack("I", [streams[i] for i in free]),
                starts=pack("I", [starts[i] for i in free]),
                ids=pack("I", [(starts[i] * 7 + i) % 1000 for i in free]),
            )
            for i in free:
                starts[i] += 1
            self.gateway.on_engine(tokens)
        return len(free)


async def open_server(port: int, engine: StubEngine) -> Gateway:
    """Serve on `port` what `engine` says."""
    text = TextModel(
        tokenizer=None, byte_table=TABLE, prefix_ids=(), suffix_ids=(), bos_id=None, eos_ids=(), chat_renderer=None
    )
    preparation = Preparation(encode=lambda text: [1], encode_chat=lambda messages, variables: [1])
    gateway = Gateway(
        ServerConfig(),
        to_engine=engine.send,
        engine_moves=lambda: True,
        preparer=preparation,
        text_stream=lambda stops: TextStream(TABLE, stops),
    )
    engine.gateway = gateway
    gateway.engine_ready(WELCOME)
    config = HttpConfig(address=f"127.0.0.1:{port}", slow_reader_timeout_ms=600_000)
    server = HttpServer(config, gateway=gateway, preparation=preparation, text=text)
    await server.start()
    print("open", flush=True)
    return gateway


async def serve(streams: int, port: int) -> None:
    engine = StubEngine()
    gateway = await open_server(port, engine)
    while len(engine.streams) < streams:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    connections = [client.connection for client in gateway._clients.values()]

    async def turns(seconds: float) -> int:
        num, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            num += engine.turn(connections)
            await asyncio.sleep(0)
        return num

    await turns(0.5)
    cpu, begun = time.process_time(), time.perf_counter()
    num = await turns(SECONDS)
    figures = {"events": num, "cpu": time.process_time() - cpu, "wall": time.perf_counter() - begun}
    print(json.dumps(figures), flush=True)


def logprob_tokens(stream: int, step: int) -> Tokens:
    """One token for each choice, with its alternatives."""
    ids = [(step * 7 + choice) % 1000 for choice in range(CHOICES)]
    return Tokens(
        streams=pack("I", [stream] * CHOICES),
        choices=pack("H", range(CHOICES)),
        starts=pack("I", [step] * CHOICES),
        ids=pack("I", ids),
        logprobs=LogprobColumns(
            entries=pack("I", range(CHOICES)),
            top=bytes([TOP]) * CHOICES,
            chosen=pack("f", [-0.1 * (1 + one % 7) for one in ids]),
            top_ids=pack("I", [(one + k) % 1000 for one in ids for k in range(TOP)]),
            top_logprobs=pack("f", [-0.1 * (1 + one % 7) - k / 3 for one in ids for k in range(TOP)]),
        ),
    )


async def serve_logprobs(port: int) -> None:
    """A reader that keeps up, then one that stops; tells of each when it has all."""
    engine = StubEngine()
    gateway = await open_server(port, engine)
    is_over = False
    turns: list[float] = []

    async def watch() -> None:
        while not is_over:
            begun = time.thread_time()
            await asyncio.sleep(0)
            turns.append(time.thread_time() - begun)

    for number in (0, 1):
        while len(engine.streams) <= number:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        stream = engine.streams[number]
        messages = [logprob_tokens(stream, step) for step in range(STEPS)]
        is_over = False
        turns.clear()
        cpu, watching = time.process_time(), asyncio.create_task(watch())
        for message in messages:
            gateway.on_engine(message)
            await asyncio.sleep(0)
        for choice in range(CHOICES):
            gateway.on_engine(Finished(stream=stream, choice=choice, reason="length", num_tokens=STEPS))
        usage, timings = Usage(prompt=1, completion=CHOICES * STEPS), Timings(queue_ns=0, first_token_ns=0, total_ns=0)
        gateway.on_engine(Done(stream=stream, seed=1, usage=usage, timings=timings))
        if number == 1:
            print("generated", flush=True)
        begun = time.perf_counter()
        while gateway.num_streams:
            await asyncio.sleep(0.001)
        is_over = True
        await watching
        figures = {"cpu": time.process_time() - cpu, "turn": max(turns), "wall": time.perf_counter() - begun}
        print(json.dumps(figures), flush=True)


def measure_logprobs() -> list[dict[str, float]]:
    """Both readers' figures."""
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": CHOICES}
    figures = []
    with started("--serve-logprobs") as (child, port):
        for is_stopped in (False, True):
            with http_post(port, {**body, "logprobs": True, "top_logprobs": TOP}) as one:
                if is_stopped:
                    assert child.stdout.readline() == "generated\n"
                    time.sleep(0.2)
                stop = threading.Event()
                reader = threading.Thread(target=http_frameworks.read_all, args=([one], stop))
                reader.start()
                figures.append(json.loads(child.stdout.readline()))
                stop.set()
                reader.join()
    return figures


@contextlib.contextmanager
def started(*arguments: str):
    """This script in a process of its own, serving at a free port: the process and the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, __file__, *arguments, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield child, port
    finally:
        child.kill()
        child.wait()


def http_post(port: int, body: dict) -> socket.socket:
    """A request for a chat, sent."""
    data = json.dumps(body).encode()
    one = socket.create_connection(("127.0.0.1", port))
    one.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(data)
        + data
    )
    return one


def measure(streams: int) -> dict[str, float]:
    """One run of the gateway in a process of its own."""
    sockets: list[socket.socket] = []
    stop = threading.Event()
    with started("--serve", str(streams)) as (child, port):
        try:
            for _ in range(streams):
                sockets.append(http_post(port, {"messages": [{"role": "user", "content": "x"}], "stream": True}))
            reader = threading.Thread(target=http_frameworks.read_all, args=(sockets, stop))
            reader.start()
            figures = json.loads(child.stdout.readline())
            stop.set()
            reader.join()
            return figures
        finally:
            stop.set()
            for one in sockets:
                one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--serve", nargs=2, type=int, metavar=("STREAMS", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--serve-logprobs", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--logprobs", action="store_true", help="the case of log-probabilities alone")
    Report.arguments(parser)
    args = parser.parse_args()
    if args.serve_logprobs:
        uvloop.run(serve_logprobs(args.serve_logprobs))
        return
    if args.serve:
        uvloop.run(serve(*args.serve))
        return
    report = Report("gateway")
    for streams in () if args.logprobs else (64, 256):
        runs: dict[str, list[dict[str, float]]] = {"gateway": [], "aiohttp": [], "floor": []}
        for _ in range(ROUNDS):  # in turns, since a shared machine's speed changes
            runs["gateway"].append(measure(streams))
            for name in ("aiohttp", "floor"):
                runs[name].append(http_frameworks.measure(name, streams))
        cpu = {name: statistics.median(r["cpu"] / r["events"] for r in of) * 1e6 for name, of in runs.items()}
        case = f"{streams} streams"
        report.add(case, "events_per_s", statistics.median(r["events"] / r["wall"] for r in runs["gateway"]), "1/s")
        report.add(case, "cpu_per_event", cpu["gateway"], "µs")
        report.add(case, "framework_cpu_per_event", cpu["aiohttp"], "µs")
        report.add(case, "floor_cpu_per_event", cpu["floor"], "µs")
        report.add(case, "cpu_ratio", cpu["gateway"] / cpu["aiohttp"])
    readers = [measure_logprobs() for _ in range(ROUNDS)]
    num_logprobs = CHOICES * STEPS * (1 + TOP)
    for number, case in enumerate(("log-probabilities", "log-probabilities, reader stops")):
        of = [run[number] for run in readers]
        report.add(case, "cpu", statistics.median(one["cpu"] for one in of), "s")
        report.add(case, "cpu_per_logprob", statistics.median(one["cpu"] for one in of) / num_logprobs * 1e6, "µs")
        report.add(case, "longest_turn", statistics.median(one["turn"] for one in of) * 1e3, "ms")
        if number:
            report.add(case, "catching_up", statistics.median(one["wall"] for one in of), "s")
    report.finish()


if __name__ == "__main__":
    main()
