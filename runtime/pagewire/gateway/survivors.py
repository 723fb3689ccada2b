"""Streams of the gateway that outlive their clients' connections. See `pagewire.keeping` for their states."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from pagewire.config import ServerConfig
from pagewire.errors import InvalidRequest, UnknownStream
from pagewire.gateway.client import Client
from pagewire.gateway.pace import Pace
from pagewire.gateway.stream import GatewayStream
from pagewire.keeping import Limits, Survivors
from pagewire_transport.columns import unpack
from pagewire_transport.messages import FromServer, Resume

_TICKS_A_GRACE: Final = 4
_LEAST_TICK_S: Final = 0.005
_MOST_TICK_S: Final = 1.0
_COUNT_BYTES: Final = 4


class _Nowhere:
    """The connection of those who have none."""

    client = "nobody"
    is_blocked = True
    num_unsent = 0

    def send(self, message: FromServer) -> None:
        """It goes nowhere."""


class Nobody(Client):
    """Whose streams are those that lost their client: told nothing, owed everything."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), Pace())

    def mark(self, stream: GatewayStream) -> None:
        """What there is to say is found when somebody resumes it."""


class GatewaySurvivors:
    """All streams that can be resumed, by request id. Used on one loop.

    Args:
        config: how long, how many and how much.
        end: ends a stream whose client did not come back.
    """

    def __init__(self, config: ServerConfig, end: Callable[[GatewayStream], None]) -> None:
        limits = Limits(config.resume_grace_ms, config.max_kept_streams, config.max_kept_bytes)
        self._streams: Survivors[GatewayStream] = Survivors(limits, end)
        self._nobody = Nobody()
        grace_s = config.resume_grace_ms * 1e-3
        self._tick_s = min(max(_LEAST_TICK_S, grace_s / _TICKS_A_GRACE), _MOST_TICK_S)
        self._is_off = config.resume_grace_ms == 0
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def orphans(self) -> list[GatewayStream]:
        """Streams that nobody reads now."""
        return self._streams.orphans

    def add(self, stream: GatewayStream) -> bool:
        """The engine took it. False: it cannot be resumed here."""
        accepted = stream.accepted
        if self._is_off or accepted is None or not accepted.resume_key or accepted.request_id in self._streams:
            return False
        self._streams.add(accepted.request_id, accepted.resume_key, stream)
        return True

    def find(self, message: Resume) -> GatewayStream | None:
        """The stream. None: it is not known here; the engine may know it.

        Raises:
            UnknownStream: the key is another's.
        """
        stream = self._streams.find(message.request_id, message.resume_key)
        if stream is None and message.request_id in self._streams:
            raise UnknownStream("there is no such stream here, or its key is another one", field="request_id")
        return stream

    def lose(self, stream: GatewayStream) -> bool:
        """Its client is gone. False: it cannot be resumed, and ends."""
        if not self._has(stream):
            return False
        stream.owner.release(stream)
        stream.owner = self._nobody
        self._streams.lose(stream.request_id, stream.num_kept_bytes, time.monotonic_ns())
        self._look_later()
        return True

    def told(self, client: Client, stream: GatewayStream) -> None:
        """All of it was sent."""
        if self._has(stream):
            stream.owner = self._nobody
            self._streams.tell(stream.request_id, client, stream.num_kept_bytes, time.monotonic_ns())
            self._look_later()

    def taken(self, stream: GatewayStream) -> None:
        """A client has it again."""
        self._streams.take(stream.request_id)

    def client_lost(self, client: Client, *, comes_back: bool) -> None:
        """What it was told is forgotten, unless it may come back."""
        if comes_back:
            self._streams.lost(client)
        else:
            self._streams.farewell(client)

    def forget(self, stream: GatewayStream) -> None:
        """It cannot be resumed any more. Idempotent."""
        if self._has(stream):
            self._streams.forget(stream.request_id)

    def close(self) -> None:
        """Nobody comes back any more."""
        self._streams.clear()

    def _has(self, stream: GatewayStream) -> bool:
        return stream.accepted is not None and self._streams.has(stream.request_id, stream)

    def _look_later(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        self._streams.expire(time.monotonic_ns())
        if self._streams.is_keeping:
            self._look_later()

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        self._streams.check_invariants()
        assert all(stream.owner is self._nobody for stream in self._streams.orphans)


def counts_of(message: Resume, stream: GatewayStream) -> Sequence[int]:
    """How many tokens of each choice the client has.

    Raises:
        InvalidRequest: they are not one number a choice, or more than there are.
        UnknownStream: log-probabilities of what it lacks are not here.
    """
    num = len(stream.choices)
    if len(message.received) not in (0, _COUNT_BYTES * num):
        raise InvalidRequest(f"must hold one number for each of n, {num}", field="received")
    counts = list(unpack("I", message.received)) if message.received else [0] * num
    for index, (choice, count) in enumerate(zip(stream.choices, counts, strict=True)):
        if count > choice.received and choice.finished is None:
            have = choice.received
            raise InvalidRequest(f"says {count} tokens of choice {index}, which has {have}", field="received")
        if count < choice.logprobs.start and stream.wants_logprobs:
            raise UnknownStream("log-probabilities before this index are lost", field="request_id")
    return [min(count, choice.received) for choice, count in zip(stream.choices, counts, strict=True)]
