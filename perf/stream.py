"""What streaming costs the engine: CPU of its thread per streamed token, beside raw ROUTER messages of the same sizes.

A stub core gives one token to each of 512 streams a step, at full speed. The readers are raw DEALER sockets in another
process, so that their work is not counted. Steps of the server and rounds of raw sends alternate in blocks, since the
speed of a shared machine changes within seconds; figures are medians of thread CPU time, the loop's turn included. Latencies: see
`stream_latency.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import uvloop
import zmq
from report import Report

from pagewire.clock import MonotonicClock
from pagewire.config import Config, ServerConfig
from pagewire.engine.admission import Admission
from pagewire.engine.server import WireServer
from pagewire.scheduler.outcome import StepOutcome
from pagewire.worker.interface import WorkerShape
from pagewire_transport.codec import encode
from pagewire_transport.columns import pack
from pagewire_transport.messages import Generate, Hello, Tokens

STREAMS = 512
BLOCK = 50
MAX_LEN = 2**30


class StubSequence:
    """As much of a sequence as the server looks at; every one has as many tokens as there were steps."""

    finish_reason = error = stop = None

    def __init__(self, core, request, slot):
        self.core, self.request, self.slot = core, request, slot

    @property
    def num_output(self):
        return self.core.steps


class StubCore:
    def __init__(self, num_streams=STREAMS):
        self._num_streams = num_streams
        shape = WorkerShape(
            num_blocks=2,
            block_size=16,
            max_rows=num_streams,
            max_model_len=MAX_LEN,
            vocab_size=128_256,
            eos_ids=(),
            kv_bytes=0,
        )
        self.worker = SimpleNamespace(shape=shape)
        self.scheduler = SimpleNamespace(max_len=MAX_LEN)
        self.health = SimpleNamespace(ready=True)
        self.admission = Admission(vocab_size=shape.vocab_size, max_len=MAX_LEN, clock=MonotonicClock())
        self.sinks = []
        self.steps = 0
        self.live = []
        self._slots = itertools.count()
        self._rows = (
            np.random.default_rng(1).permutation(num_streams).astype(np.int32)
        )  # a batch's rows are in no order
        self._ids = np.random.default_rng(2).integers(0, shape.vocab_size, num_streams, dtype=np.int32)

    def submit(self, request):
        self.live.append(StubSequence(self, request, next(self._slots)))
        return self.live[-1:]

    def cancel(self, _sequence):
        return False

    def finish_at(self, _sequence, _at):
        return False

    def output(self, _sequence, start=0, stop=None):
        return np.zeros(stop - start, np.int32)

    def stats(self):
        return {}

    def outcome(self):
        outcome = StepOutcome(
            self.steps,
            slots=self._rows.copy(),
            starts=np.full(self._num_streams, self.steps, np.int32),
            counts=np.ones(self._num_streams, np.int32),
            token_ids=self._ids,
            samples=np.arange(self._num_streams, dtype=np.int32),
        )
        self.steps += 1
        return outcome


def read(server_url: str, raw_url: str, num_connections: int) -> None:
    """The other process: connects, asks for streams, reads everything for ever."""
    context = zmq.Context()
    poller = zmq.Poller()
    sockets = []
    for url in (server_url, raw_url):
        for connection in range(num_connections):
            socket = context.socket(zmq.DEALER)
            socket.rcvhwm = 0
            socket.connect(url)
            if url == raw_url:
                socket.send(b"hello")
            else:
                socket.send(encode(Hello()))
                for stream in range(connection, STREAMS, num_connections):
                    socket.send(encode(Generate(stream=stream, prompt_ids=pack("I", [1]))))
            poller.register(socket, zmq.POLLIN)
            sockets.append(socket)
    while True:
        for socket, _ in poller.poll():
            while True:
                try:
                    socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break


class RawRouter:
    """The probe: the same number of messages of the same size, sent with nothing around it."""

    def __init__(self):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("tcp://127.0.0.1:*")
        self.url = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peers = []

    async def wait(self, num_connections):
        while len(self.peers) < num_connections:
            try:
                self.peers.append(self.socket.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                await asyncio.sleep(0.001)

    def send(self, frame):
        send = self.socket.send
        for peer in self.peers:
            send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            send(frame, zmq.NOBLOCK)


async def measure(num_connections: int, num_steps: int) -> tuple[float, float, float, int]:
    """Median CPU seconds of a step of the server, of one after a join or leave, of a round of raw sends; message bytes."""
    core, raw = StubCore(), RawRouter()
    server = WireServer(core, Config(server=ServerConfig(bind="tcp://127.0.0.1:*", heartbeat_timeout_ms=3_600_000)))
    await server.start()
    # Not multiprocessing: it would fork libzmq's threads away or pickle its arguments.
    reader = subprocess.Popen([sys.executable, __file__, "--read", server.endpoint, raw.url, str(num_connections)])  # noqa: ASYNC220
    try:
        while len(core.live) < STREAMS:
            await asyncio.sleep(0.01)
        await raw.wait(num_connections)
        part = STREAMS // num_connections
        frame = encode(Tokens(streams=bytes(4 * part), starts=bytes(4 * part), ids=bytes(4 * part)))
        ours, changed, theirs = [], [], []

        def after_a_change(outcome):
            server._delivery._table.version += 1
            server.on_outcome(outcome)

        for block in range(-2, num_steps // BLOCK):
            for times, act in (
                (ours, server.on_outcome),
                (changed, after_a_change),
                (theirs, lambda _: raw.send(frame)),
            ):
                await asyncio.sleep(0.03)  # the reader catches up
                for _ in range(BLOCK):
                    given = None if times is theirs else core.outcome()
                    begun = time.thread_time_ns()
                    act(given)
                    await asyncio.sleep(0)
                    if block >= 0:
                        times.append(time.thread_time_ns() - begun)
        readers = server._readers.values()
        assert not any(one.is_behind for one in readers), "the reader lagged: this measured another path"
        step, changed_step, sends = (statistics.median(times) * 1e-9 for times in (ours, changed, theirs))
        return step, changed_step, sends, len(frame)
    finally:
        reader.kill()
        reader.wait()
        await server.close()
        raw.socket.close()
        raw.context.term()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    Report.arguments(parser)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--blocks", type=int, default=60, help="of 0.2 s, for latencies")
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read(given.read[0], given.read[1], int(given.read[2]))
        return
    report = Report("stream", as_json=given.json)
    for num_connections in (1, 64):
        case = f"512 streams, {num_connections} connection{'s' if num_connections > 1 else ''}"
        step, changed, raw, size = uvloop.run(measure(num_connections, given.steps))
        report.add(case, "message_size", size, "B")
        report.add(case, "cpu_per_step", step * 1e6, "µs")
        report.add(case, "cpu_per_step_after_join", changed * 1e6, "µs")
        report.add(case, "cpu_per_token", step / STREAMS * 1e9, "ns")
        report.add(case, "cpu_per_raw_message", raw / num_connections * 1e6, "µs")
        if num_connections == 1:
            report.add(case, "cpu_ratio", step / raw)
        else:
            report.add(case, "cpu_per_message", step / num_connections * 1e6, "µs")
            report.add(case, "cpu_per_message_ratio", step / raw)
    latency(report, given.blocks)
    report.finish()


def latency(report: Report, num_blocks: int) -> None:
    from stream_latency import measure as measure_latency
    from stream_latency import percentile

    case = "20,000 tokens a second"
    ours, raw, size = uvloop.run(measure_latency(num_blocks))
    report.add(case, "message_size", size, "B")
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        report.add(case, f"latency_{name}", percentile(ours, share), "µs")
        report.add(case, f"raw_latency_{name}", percentile(raw, share), "µs")
        report.add(case, f"latency_{name}_ratio", percentile(ours, share) / percentile(raw, share))


if __name__ == "__main__":
    main()
