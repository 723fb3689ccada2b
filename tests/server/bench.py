"""A wire server over a fake core, and a client that speaks raw messages."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import zmq
from tests.server.fake_core import FakeCore

from pagewire.config import Config, ServerConfig
from pagewire.engine.server import WireServer
from pagewire_transport.codec import decode_server, encode
from pagewire_transport.columns import pack, unpack
from pagewire_transport.messages import Generate, Hello, Tokens, Welcome
from pagewire_transport.params import SamplingParams


@asynccontextmanager
async def serve(core=None, **config):
    config.setdefault("bind", "ipc://*")
    server = WireServer(core or FakeCore(), Config(server=ServerConfig(**config)))
    faults = []
    server._log = type("Log", (), {"error": lambda _, event, **kw: faults.append(kw), "info": lambda *_, **__: None})()
    await server.start()
    server.core = server._core
    server.faults = faults
    try:
        yield server
        server.check_invariants()
    finally:
        await server.close()


class RawPeer:
    """A DEALER that sends what it is told, and reads only when told."""

    def __init__(self, url, *, identity=None, receive_hwm=1000, reconnects=True):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = 0  # its sends must not wait: the server runs on the same loop
        self.socket.rcvhwm = receive_hwm
        if not reconnects:
            self.socket.reconnect_ivl = -1
        if identity is not None:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(url)

    def send(self, message):
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    async def read(self, timeout=2.0):
        """The next message."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                return decode_server(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError from None
                await asyncio.sleep(0.001)

    async def read_all(self, quiet=0.05):
        """Everything until nothing comes for `quiet` seconds."""
        messages = []
        try:
            while True:
                messages.append(await self.read(quiet))
        except TimeoutError:
            return messages

    async def hello(self):
        self.send(Hello(client="raw"))
        welcome = await self.read()
        assert isinstance(welcome, Welcome), welcome
        return self

    async def generate(self, stream, **params):
        params.setdefault("max_tokens", 10)
        self.send(Generate(stream=stream, prompt_ids=pack("I", [1, 2, 3]), params=SamplingParams(**params)))

    def close(self):
        self.socket.close(0)
        self.context.term()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def entries(message: Tokens):
    """(stream, choice, start, ids) of each entry."""
    streams, starts, ids = (unpack("I", column) for column in (message.streams, message.starts, message.ids))
    counts = unpack("H", message.counts) if message.counts else [1] * len(streams)
    choices = unpack("H", message.choices) if message.choices else [0] * len(streams)
    at = 0
    for stream, choice, start, count in zip(streams, choices, starts, counts, strict=True):
        yield stream, choice, start, list(ids[at : at + count])
        at += count
    assert at == len(ids)


async def until(condition, timeout=5.0):
    deadline = asyncio.get_running_loop().time() + timeout
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "timed out"
        await asyncio.sleep(0.001)
