"""A gateway between a list of clients' messages and a scripted engine, without sockets."""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict

from pagewire.config import ServerConfig
from pagewire.errors import ConnectionLost, PagewireError
from pagewire.gateway.gateway import Gateway
from pagewire.gateway.preparation import Preparation
from pagewire_client.text.byte_table import ByteTable
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.door import refusal
from pagewire_transport.messages import (
    Accepted,
    Done,
    Finished,
    Generate,
    LogprobColumns,
    Resume,
    Timings,
    Tokens,
    Usage,
    Welcome,
)
from pagewire_transport.params import SamplingParams

BYTES = ByteTable(tuple(bytes([i]) for i in range(256)))
"""Token i is byte i: ids of a text are its UTF-8 bytes."""


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def tokens(*entries, logprobs=None) -> Tokens:
    """entries: (stream, choice, start, ids)."""
    return Tokens(
        streams=array("I", [entry[0] for entry in entries]).tobytes(),
        choices=array("H", [entry[1] for entry in entries]).tobytes(),
        starts=array("I", [entry[2] for entry in entries]).tobytes(),
        counts=array("H", [len(entry[3]) for entry in entries]).tobytes(),
        ids=array("I", [i for entry in entries for i in entry[3]]).tobytes(),
        logprobs=logprobs,
    )


def logprob_columns(num_tokens: int, top: int, entries: int = 1) -> LogprobColumns:
    """Of a message with so many tokens in so many entries."""
    return LogprobColumns(
        entries=array("I", range(entries)).tobytes(),
        top=bytes([top]) * entries,
        chosen=array("f", [-1.0]).tobytes() * num_tokens,
        top_ids=array("I", range(top)).tobytes() * num_tokens,
        top_logprobs=array("f", [-float(k) for k in range(top)]).tobytes() * num_tokens,
    )


def done(stream: int, completion: int = 0) -> Done:
    timings = Timings(queue_ns=1, first_token_ns=2, total_ns=3)
    return Done(stream=stream, seed=5, usage=Usage(prompt=4, completion=completion, cached=2), timings=timings)


def accepted(stream: int) -> Accepted:
    return Accepted(stream=stream, request_id=f"r{stream}", seed=5, num_prompt_tokens=4, max_tokens=99)


WELCOME = Welcome(
    version=1,
    role="engine",
    server="test",
    model="bytes",
    vocab_size=256,
    max_model_len=1000,
    max_streams=99,
    max_message_bytes=2**20,
    heartbeat_ms=1,
    heartbeat_timeout_ms=2,
)


class FakeConnection:
    """Stands for the door's: what was sent, and whether the peer takes anything."""

    def __init__(self):
        self.client = "test"
        self.sent: list[object] = []
        self.kept: list[object] = []
        self.is_deaf = False

    @property
    def is_blocked(self) -> bool:
        return bool(self.kept)

    @property
    def num_unsent(self) -> int:
        return len(self.kept)

    def send(self, message):
        (self.kept if self.kept or self.is_deaf else self.sent).append(message)


class Bench:
    """The gateway under test behind a fake door, and what it sent."""

    def __init__(self, **options):
        self.engine: list[object] = []
        self.connections: dict[object, FakeConnection] = defaultdict(FakeConnection)
        self.engine_moves = True
        self.make_text = lambda stops: TextStream(BYTES, stops)
        server = options.pop("server", {})
        self.preparation = Preparation(
            encode=options.pop("encode", ids_of),
            encode_chat=lambda messages, kwargs: ids_of("|".join(message.content for message in messages)),
            **options,
        )
        self.gateway = Gateway(
            ServerConfig(max_streams_per_connection=4, **server),
            to_engine=self.engine.append,
            engine_moves=lambda: self.engine_moves,
            preparer=self.preparation,
            text_stream=lambda stops: self.make_text(stops),  # noqa: PLW0108  (looked up late: tests replace it)
        )
        self.gateway.engine_ready(WELCOME)

    @property
    def sent(self):
        return {peer: connection.sent for peer, connection in self.connections.items()}

    def client(self, peer, message):
        """One message of a client, refused as the door refuses."""
        connection = self.connections[peer]
        try:
            self.gateway.on_message(connection, message)
        except PagewireError as error:
            stream = message.stream if isinstance(message, Generate | Resume) else None
            if stream is not None and self.gateway.has_stream(connection, stream):
                stream = None
            connection.send(refusal(error, stream))
        self.gateway.check_invariants()

    def lose(self, peer):
        self.gateway.on_lost(self.connections[peer], ConnectionLost("test"))
        self.gateway.check_invariants()

    def deafen(self, peer):
        """The peer takes nothing from now on."""
        self.connections[peer].is_deaf = True

    def listen(self, peer):
        """The peer takes everything again."""
        connection = self.connections[peer]
        connection.is_deaf = False
        connection.sent += connection.kept
        connection.kept.clear()
        self.gateway.on_writable(connection)

    async def caught_up(self, peer):
        """Wait until the peer, which takes everything, was given all that it is owed."""
        while self.gateway._clients[self.connections[peer]].has_news:
            await asyncio.sleep(0)
            self.gateway.check_invariants()

    def from_engine(self, *messages):
        for message in messages:
            self.gateway.on_engine(message)
            self.gateway.check_invariants()

    def start(self, peer="a", stream=7, *, prompt="hi", params=None, **fields) -> int:
        """Generate from ids, and accept; the number towards the engine."""
        fields.setdefault("params", SamplingParams(**(params or {})))
        self.client(peer, Generate(stream=stream, prompt_ids=array("I", ids_of(prompt)).tobytes(), **fields))
        number = self.engine[-1].stream
        self.from_engine(accepted(number))
        return number

    def text(self, peer="a", stream=7, choice=0) -> str:
        """All text that the client has, tokens and endings together."""
        out = ""
        for message in self.connections[peer].sent:
            if isinstance(message, Tokens):
                for entry, number in enumerate(memoryview(message.streams).cast("I")):
                    choices = memoryview(message.choices).cast("H") if message.choices else None
                    if number == stream and (choices[entry] if choices else 0) == choice and message.texts:
                        out += message.texts[entry]
            elif isinstance(message, Finished) and (message.stream, message.choice) == (stream, choice):
                out += message.text
        return out

    def of(self, kind, peer="a") -> list:
        return [message for message in self.connections[peer].sent if isinstance(message, kind)]

    def to_engine(self, kind) -> list:
        return [message for message in self.engine if isinstance(message, kind)]

    async def settle(self):
        """Wait until no prompt is being prepared."""
        while self.gateway._preparing:
            await asyncio.sleep(0.001)
