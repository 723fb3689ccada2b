"""How long a token takes from the engine's step to the client, beside raw ROUTER and DEALER sockets, at 20,000 tokens a second.

A stub core gives one token to each of 100 streams, 200 times a second. Ten clients in another process have ten streams each.
Steps of the server and rounds of raw sends of the same sizes alternate in blocks, since the speed of a shared machine changes
within seconds. Ours ends when the client has decoded the message, raw when it has the bytes. Both clocks are the system's
monotonic one.
"""

from __future__ import annotations

import array
import asyncio
import struct
import subprocess
import sys
import time

import zmq
from stream import RawRouter, StubCore

from pagewire.config import Config, ServerConfig
from pagewire.engine.server import WireServer
from pagewire_transport.codec import decode_server, encode
from pagewire_transport.columns import pack, unpack
from pagewire_transport.messages import Generate, Hello, Tokens

STREAMS = 100
CONNECTIONS = 10
RATE = 20_000
STEP_S = STREAMS / RATE
BLOCK = 40
_ROW = struct.Struct("<qq")


def read(server_url: str, raw_url: str) -> None:
    """The other process: notes when each message was there, until standard input ends; then writes what it noted."""
    context = zmq.Context()
    poller = zmq.Poller()
    theirs = set()
    for url in (server_url, raw_url):
        for connection in range(CONNECTIONS):
            socket = context.socket(zmq.DEALER)
            socket.rcvhwm = 0
            socket.connect(url)
            if url == raw_url:
                socket.send(b"hello")
                theirs.add(socket)
            else:
                socket.send(encode(Hello()))
                for stream in range(connection, STREAMS, CONNECTIONS):
                    socket.send(encode(Generate(stream=stream, prompt_ids=pack("I", [1]), resumable=False)))
            poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    noted: tuple[array.array, array.array] = (array.array("q"), array.array("q"))  # step, time; of ours, of theirs
    while True:
        for socket, _ in poller.poll():
            if isinstance(socket, int):
                for rows in noted:
                    sys.stdout.buffer.write(_ROW.pack(len(rows), 0) + rows.tobytes())
                return
            frame = socket.recv()
            if socket in theirs:
                noted[1].extend((int.from_bytes(frame[:8], "little"), time.monotonic_ns()))
            else:
                message = decode_server(frame)
                if isinstance(message, Tokens):
                    noted[0].extend((unpack("I", message.starts)[-1], time.monotonic_ns()))


async def measure(num_blocks: int) -> tuple[list[float], list[float], int]:
    """Latencies of ours and of raw messages, microseconds, ascending; bytes of a message."""
    core, raw = StubCore(STREAMS), RawRouter()
    server = WireServer(core, Config(server=ServerConfig(bind="tcp://127.0.0.1:*", heartbeat_timeout_ms=3_600_000)))
    await server.start()
    reader = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, __file__, server.endpoint, raw.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        while len(core.live) < STREAMS:
            await asyncio.sleep(0.01)
        await raw.wait(CONNECTIONS)
        part = STREAMS // CONNECTIONS
        size = len(encode(Tokens(streams=bytes(4 * part), starts=bytes(4 * part), ids=bytes(4 * part))))
        sent: tuple[dict[int, int], dict[int, int]] = ({}, {})
        loop = asyncio.get_running_loop()
        due = loop.time()
        for block in range(2 * num_blocks + 2):  # the first of each is not counted
            for _ in range(BLOCK):
                due = max(due + STEP_S, loop.time())
                await asyncio.sleep(due - loop.time())
                if block % 2:
                    number = len(sent[1])
                    sent[1][number] = time.monotonic_ns()
                    raw.send(number.to_bytes(8, "little") + bytes(size - 8))
                else:
                    number, outcome = core.steps, core.outcome()
                    sent[0][number] = time.monotonic_ns()
                    server.on_outcome(outcome)
        await asyncio.sleep(0.2)
        data, _ = await asyncio.to_thread(reader.communicate, b"x")
        return (*(_latencies(rows, times) for rows, times in zip(_tables(data), sent, strict=True)), size)
    finally:
        reader.kill()
        reader.wait()
        await server.close()
        raw.socket.close()
        raw.context.term()


def _tables(data: bytes) -> tuple[array.array, array.array]:
    tables = []
    for _ in range(2):
        num, _ = _ROW.unpack_from(data)
        rows = array.array("q", data[_ROW.size : _ROW.size + 8 * num])
        data = data[_ROW.size + 8 * num :]
        tables.append(rows)
    return tables[0], tables[1]


def _latencies(rows: array.array, sent: dict[int, int]) -> list[float]:
    """From the first counted step on; every message must have come."""
    found = [
        (when - sent[step]) / 1e3
        for step, when in zip(rows[::2], rows[1::2], strict=True)
        if step in sent and step >= BLOCK
    ]
    assert len(found) == (len(sent) - BLOCK) * CONNECTIONS, "messages are missing, or came together: the reader lagged"
    return sorted(found)


def percentile(values: list[float], share: float) -> float:
    """Of ascending values."""
    return values[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    read(sys.argv[1], sys.argv[2])
