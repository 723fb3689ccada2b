"""Streams that outlive their connections: who may resume which, and for how long.

                     lost                        grace over
    read by a reader ───▶ orphan: generates on ──────────────▶ cancelled, forgotten
        ▲  │   ▲            │
        │  │   └─ resume ───┤
        │  │ all was sent   │
        │  ▼                │
        │ told: kept in case the last words were lost ───────▶ forgotten
        └─ resume ──────────┘                      grace over

An orphan goes on generating: most clients are back within a second, and what they would wait for is then there. A reader
that says goodbye leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from pagewire.config import ServerConfig
from pagewire.engine.delivery import Delivery
from pagewire.engine.streams import Reader, Stream
from pagewire.errors import UnknownStream
from pagewire.keeping import Keeper, is_same_key

_LEAST_TICK_S: Final = 0.005
_MOST_TICK_S: Final = 1.0


class Survivors:
    """All streams that can be resumed, by request id. Made and used on one loop.

    Args:
        delivery: has the streams.
        config: how long, how many and how much.
    """

    def __init__(self, delivery: Delivery, config: ServerConfig) -> None:
        self._delivery = delivery
        self._streams: dict[str, Stream] = {}
        self.grace_ms = config.resume_grace_ms
        limits = {
            "grace_ms": config.resume_grace_ms,
            "max_num": config.max_kept_streams,
            "max_bytes": config.max_kept_bytes,
        }
        self._orphans: Keeper[Stream] = Keeper(give_up=self._cancel, **limits)
        self._told: Keeper[Stream] = Keeper(give_up=self._forget, **limits)
        self._loop = asyncio.get_running_loop()
        self._tick_s = min(max(_LEAST_TICK_S, config.resume_grace_ms * 1e-3 / 4), _MOST_TICK_S)
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def num_orphans(self) -> int:
        """Streams that nobody reads now."""
        return len(self._orphans)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def add(self, stream: Stream) -> None:
        """A stream that can be resumed begins."""
        self._streams[stream.request.request_id] = stream

    def find(self, request_id: str, key: str) -> Stream:
        """The stream, whoever has it.

        Raises:
            UnknownStream: there is none, or the key is another's; which, is not told.
        """
        stream = self._streams.get(request_id)
        if stream is None or not is_same_key(stream.resume_key, key):
            raise UnknownStream("there is no such stream here, or its key is another one", field="request_id")
        return stream

    def on_lost(self, reader: Reader) -> None:
        """A reader is gone without a word; what it read can be resumed."""
        for stream in list(reader.streams.values()):
            if stream.resume_key:
                self._delivery.release(stream)
                self._keep(self._orphans, stream)

    def on_goodbye(self, connection: object) -> None:
        """Whoever read over this connection will not come back: forget what it was told."""
        for stream in [stream for stream in self._told if stream.told_over is connection]:
            self._told.take(stream.request.request_id)
            self._forget(stream)

    def on_over(self, stream: Stream) -> None:
        """It left its reader: all was sent, or it was dropped."""
        if self._streams.get(stream.request.request_id) is not stream:
            return
        if all(choice.is_told for choice in stream.choices):
            self._keep(self._told, stream)
        else:
            self._forget(stream)

    def taken(self, stream: Stream) -> None:
        """A reader has it again."""
        self._orphans.take(stream.request.request_id)
        self._told.take(stream.request.request_id)

    def close(self) -> None:
        """Nobody comes back any more: orphans end."""
        self._orphans.clear()
        self._told.clear()
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    def _keep(self, keeper: Keeper[Stream], stream: Stream) -> None:
        keeper.put(stream.request.request_id, stream, stream.num_kept_bytes, time.monotonic_ns())
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        self._orphans.expire(now_ns)
        self._told.expire(now_ns)
        more = len(self._orphans) or len(self._told)
        self._ticker = self._loop.call_later(self._tick_s, self._tick) if more else None

    def _cancel(self, stream: Stream) -> None:
        self._forget(stream)
        self._delivery.drop(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.request.request_id, None)

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        self._orphans.check_invariants()
        self._told.check_invariants()
        for request_id, stream in self._streams.items():
            assert stream.request.request_id == request_id
            assert (stream.reader is not None) + (request_id in self._orphans) + (request_id in self._told) == 1
        for stream in (*self._orphans, *self._told):
            assert self._streams[stream.request.request_id] is stream
