"""Streams that outlive their connections: kept here, served by `Delivery`. See `pagewire.keeping` for their states.

An orphan goes on generating: most clients are back within a second, and what they would wait for is then there. A reader
that says goodbye leaves nothing behind.

While no connection is there, as between two gateways, nobody can come back, and no grace time passes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from pagewire.config import ServerConfig
from pagewire.engine.delivery import Delivery
from pagewire.engine.streams import Reader, Stream
from pagewire.errors import InvalidRequest, UnknownStream
from pagewire.keeping import GraceClock, Limits, Survivors
from pagewire_transport.messages import Resume

_LEAST_TICK_S: Final = 0.005
_MOST_TICK_S: Final = 1.0
_COUNT_BYTES: Final = 4


class EngineSurvivors:
    """All streams that can be resumed, by request id. Made and used on one loop.

    Args:
        delivery: has the streams.
        config: how long, how many and how much.
        is_anybody: some connection is there now.
    """

    def __init__(self, delivery: Delivery, config: ServerConfig, is_anybody: Callable[[], bool]) -> None:
        self._delivery = delivery
        self._is_anybody = is_anybody
        self._clock = GraceClock(config.replay_timeout_ms)
        self.grace_ms = config.resume_grace_ms
        limits = Limits(config.resume_grace_ms, config.max_kept_streams, config.max_kept_bytes)
        self._streams: Survivors[Stream] = Survivors(limits, delivery.drop, _dissolve)
        self._loop = asyncio.get_running_loop()
        self._tick_s = min(max(_LEAST_TICK_S, config.resume_grace_ms * 1e-3 / 4), _MOST_TICK_S)
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def num_orphans(self) -> int:
        """Streams that nobody reads now."""
        return self._streams.num_orphans

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def add(self, stream: Stream) -> None:
        """A stream that can be resumed begins."""
        self._streams.add(stream.request.request_id, stream.resume_key, stream)

    def find(self, request_id: str, key: str) -> Stream:
        """The stream, whoever has it.

        Raises:
            UnknownStream: there is none, or the key is another's; which, is not told.
        """
        stream = self._streams.find(request_id, key)
        if stream is None:
            raise UnknownStream("there is no such stream here, or its key is another one", field="request_id")
        return stream

    def on_lost(self, reader: Reader) -> None:
        """A reader is gone without a word; what it read can be resumed."""
        self._streams.lost(reader)
        now_ns = self._now_ns()
        for stream in list(reader.streams.values()):
            if stream.resume_key:
                self._delivery.release(stream)
                self._streams.lose(stream.request.request_id, stream.num_kept_bytes, now_ns)
                self._look_later()

    def on_goodbye(self, reader: Reader) -> None:
        """A reader will not come back: forget what it was told."""
        self._streams.farewell(reader)

    def on_over(self, stream: Stream, reader: Reader) -> None:
        """It left its reader: all was sent, or it was dropped."""
        name = stream.request.request_id
        if not self._streams.has(name, stream):
            stream.dissolve()
            return
        if all(choice.is_told for choice in stream.choices):
            self._streams.tell(name, reader, stream.num_kept_bytes, self._now_ns())
            self._look_later()
        else:
            self._streams.forget(name)

    def taken(self, stream: Stream) -> None:
        """A reader has it again."""
        self._streams.take(stream.request.request_id)

    def close(self) -> None:
        """Nobody comes back any more: orphans end."""
        self._streams.clear()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    def _now_ns(self) -> int:
        return self._clock.look(time.monotonic_ns(), is_anybody=self._is_anybody())

    def _look_later(self) -> None:
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        self._streams.expire(self._now_ns())
        if self._streams.is_keeping:
            self._look_later()

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        self._streams.check_invariants()
        for stream in self._streams.orphans:
            assert stream.reader is None


def _dissolve(stream: Stream) -> None:
    """The stream cannot be resumed any more; one that still has a reader goes on until it is over."""
    if stream.reader is None:
        stream.dissolve()


def counts_of(message: Resume, stream: Stream) -> list[int]:
    """How many tokens of each choice the client has.

    Raises:
        InvalidRequest: they are not one number a choice, or more than there are.
        UnknownStream: log-probabilities of what it lacks are not here.
    """
    num = len(stream.choices)
    if len(message.received) not in (0, _COUNT_BYTES * num):
        raise InvalidRequest(f"must hold one number for each of n, {num}", field="received")
    received = np.frombuffer(message.received, "<u4").tolist() if message.received else [0] * num
    for choice, count in zip(stream.choices, received, strict=True):
        have = choice.sequence.num_output
        if count > have and choice.sequence.is_live:
            raise InvalidRequest(f"says {count} tokens of choice {choice.index}, which has {have}", field="received")
        if count < choice.kept_from and stream.request.params.logprobs is not None:
            raise UnknownStream("log-probabilities before this index are lost", field="request_id")
    return [min(count, c.sequence.num_output) for c, count in zip(stream.choices, received, strict=True)]
