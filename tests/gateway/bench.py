"""A gateway between a list of clients' messages and a scripted engine, without sockets."""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict

from pagewire.gateway.gateway import Gateway
from pagewire.gateway.preparation import Preparation
from pagewire_client.text.byte_table import ByteTable
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.messages import (
    Accepted,
    Done,
    Finished,
    Generate,
    Timings,
    Tokens,
    Usage,
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


def done(stream: int, completion: int = 0) -> Done:
    timings = Timings(queue_ns=1, first_token_ns=2, total_ns=3)
    return Done(stream=stream, seed=5, usage=Usage(prompt=4, completion=completion, cached=2), timings=timings)


def accepted(stream: int) -> Accepted:
    return Accepted(stream=stream, request_id=f"r{stream}", seed=5, num_prompt_tokens=4, max_tokens=99)


class Bench:
    """The gateway under test, what it sent, and what sockets refuse."""

    def __init__(self, **options):
        self.engine: list[object] = []
        self.sent: dict[object, list[object]] = defaultdict(list)
        self.deaf: set[object] = set()
        self.make_text = lambda stops: TextStream(BYTES, stops)
        self.preparation = Preparation(
            encode=options.pop("encode", ids_of),
            encode_chat=lambda messages, kwargs: ids_of("|".join(message.content for message in messages)),
            **options,
        )
        self.gateway = Gateway(
            to_client=self._to_client,
            to_engine=self.engine.append,
            preparer=self.preparation,
            text_stream=lambda stops: self.make_text(stops),  # noqa: PLW0108  (looked up late: tests replace it)
            max_streams=4,
        )
        self.gateway.engine_ready()

    def _to_client(self, peer, message) -> bool:
        if peer in self.deaf:
            return False
        self.sent[peer].append(message)
        return True

    def client(self, peer, message):
        self.gateway.on_client(peer, message)
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
        for message in self.sent[peer]:
            if isinstance(message, Tokens):
                for entry, number in enumerate(memoryview(message.streams).cast("I")):
                    choices = memoryview(message.choices).cast("H") if message.choices else None
                    if number == stream and (choices[entry] if choices else 0) == choice and message.texts:
                        out += message.texts[entry]
            elif isinstance(message, Finished) and (message.stream, message.choice) == (stream, choice):
                out += message.text
        return out

    def of(self, kind, peer="a") -> list:
        return [message for message in self.sent[peer] if isinstance(message, kind)]

    def to_engine(self, kind) -> list:
        return [message for message in self.engine if isinstance(message, kind)]

    async def settle(self):
        """Wait until no prompt is being prepared."""
        while self.gateway._preparing:
            await asyncio.sleep(0.001)
