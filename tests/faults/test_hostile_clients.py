"""A whole server and clients that mean ill: what one of them does ends at its own streams (F11, F12, F50)."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from tests.cli.test_serve import _served, _tiny

import pagewire_client
from pagewire_transport.codec import MAX_MESSAGE_BYTES, decode_server, encode
from pagewire_transport.messages import Generate, Hello


@pytest.fixture
def temporary():
    path = Path(tempfile.mkdtemp(prefix="pw-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def test_prompts_as_large_as_a_message_end_nobody_elses_stream(temporary):
    """Forwarded, they would be larger than the engine's door takes: eight of those, and it drops the gateway."""
    async with _served(temporary, *_tiny(temporary)) as (_, url), pagewire_client.connect(url) as neighbour:
        stream = neighbour.generate([1, 2, 3], max_tokens=50_000, ignore_eos=True)
        await anext(stream)
        around = len(encode(Generate(stream=1, prompt_ids=bytes(2**20)))) - 2**20
        frame = encode(Generate(stream=1, prompt_ids=bytes(MAX_MESSAGE_BYTES - around)))
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(url)
            await peer.send(encode(Hello()))
            await peer.recv()
            for _ in range(9):
                await peer.send(frame)
                error = decode_server(await asyncio.wait_for(peer.recv(), 10))
                assert (error.code, error.stream, error.field) == ("prompt_too_long", 1, "prompt_ids")
        assert stream._state.error is None
        await stream.aclose()
        assert (await stream.result()).finish_reason == "cancelled", "the engine still has it"
