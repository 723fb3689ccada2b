"""The short form of `fuzz.py`: both doors in this process, with every fault of ours counted (F11)."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests.fuzz.mutate import Mutator
from tests.gateway.bench import BYTES
from tests.server.bench import RawPeer, serve, until
from tests.server.fake_core import tokens

import pagewire_client
from pagewire.config import ServerConfig
from pagewire.gateway.gateway import Gateway
from pagewire.gateway.preparation import Preparation
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.codec import encode
from pagewire_transport.door import Door
from pagewire_transport.handler import DoorLimits
from pagewire_transport.link import Link
from pagewire_transport.messages import Hello

FRAMES = 3000
A_CONNECTION = 25


@contextlib.asynccontextmanager
async def gateway_before(engine_url):
    """A gateway's door in front of an engine: (url, the gateway, its faults)."""
    faults = []
    preparation = Preparation(
        encode=lambda text: list(text.encode())[:100],
        encode_chat=lambda turns, _: list("".join(turn.content for turn in turns).encode())[:100],
    )
    gateway = Gateway(
        ServerConfig(),
        to_engine=lambda message: link.send(message),  # noqa: PLW0108  (it is made below)
        engine_moves=lambda: link.is_server_ready,
        preparer=preparation,
        text_stream=lambda stops: TextStream(BYTES, stops),
    )
    link = Link(
        engine_url,
        client="gateway",
        on_message=gateway.on_engine,
        on_lost=lambda error: faults.append(("the engine's door dropped the gateway", error)),
        on_welcome=gateway.engine_ready,
    )
    await link.wait_welcome(5)
    door = Door(
        "ipc://*", handler=gateway, limits=DoorLimits(), on_fault=lambda doing, error: faults.append((doing, error))
    )
    try:
        yield door, gateway, faults
    finally:
        preparation.close()
        await door.close()
        await link.close()


async def throw(url, source, num):
    """So many frames, over one connection after the other; what comes back must be messages."""
    while num > 0:
        with RawPeer(url) as peer:
            if source.random.random() < 0.95:
                peer.send(encode(Hello()))
            for _ in range(min(num, A_CONNECTION)):
                if source.random.random() < 0.02:
                    peer.socket.send_multipart(source.parts())
                else:
                    peer.send(source.frame())
                num -= 1
            await asyncio.sleep(0.001)
            if source.random.random() < 0.9:
                await peer.read_all(0.003)


async def stream_all_the_time(url, seen, stop):
    """A neighbour: every stream has exactly its tokens."""
    async with pagewire_client.connect(url, timeout_s=5) as client:
        seed = 0
        while not stop.is_set():
            seed += 1
            stream = client.generate([1, 2, 3], max_tokens=20, seed=seed, ignore_eos=True, priority=100)
            assert list((await stream.result()).token_ids) == tokens(seed, 20)
            seen.append(seed)


@pytest.mark.parametrize("which", ["engine", "gateway"])
async def test_a_few_thousand_frames_harm_nobody(which):
    source, seen, stop = Mutator(11), [], asyncio.Event()
    async with serve(heartbeat_timeout_ms=60_000) as engine, contextlib.AsyncExitStack() as stack:
        door, gateway, faults = engine._door, None, engine.faults
        if which == "gateway":
            door, gateway, faults = await stack.enter_async_context(gateway_before(engine.endpoint))
        running = asyncio.create_task(engine.core.run(0.0005))
        neighbour = asyncio.create_task(stream_all_the_time(door.url, seen, stop))
        await throw(door.url, source, FRAMES)
        stop.set()
        await neighbour
        assert len(seen) > 3
        for connection in door.connections:  # those that broke off; a heartbeat would find them
            door._lose(connection, ConnectionError)
        await until(lambda: not door.connections)
        engine.check_invariants()
        if gateway is not None:
            gateway.check_invariants()
            assert gateway.num_streams == 0
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert faults == engine.faults == []
        assert door._offenders.num <= 1024
