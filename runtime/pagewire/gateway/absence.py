"""Streams that wait for an engine, while there is none: bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from pagewire.gateway.stream import GatewayStream


class Absence:
    """The streams that the next engine goes on with.

    Args:
        timeout_ms: how long they wait; 0: not at all.
        give_up: told when that is over; it takes the streams out.
    """

    def __init__(self, timeout_ms: int, give_up: Callable[[], None]) -> None:
        self.timeout_ms = timeout_ms
        self._give_up = give_up
        self._streams: dict[GatewayStream, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, stream: GatewayStream) -> bool:
        return stream in self._streams

    def __iter__(self) -> Iterator[GatewayStream]:
        return iter(self._streams)

    def begin(self) -> None:
        """The engine is gone; the time runs from now on. Looking for it in vain is no new beginning."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.timeout_ms * 1e-3, self._give_up)

    def add(self, stream: GatewayStream) -> None:
        """It waits."""
        self._streams[stream] = None

    def remove(self, stream: GatewayStream) -> None:
        """It waits no more. Idempotent."""
        self._streams.pop(stream, None)

    def end(self) -> list[GatewayStream]:
        """An engine is there, or none will be: who waited."""
        self._stop()
        streams, self._streams = list(self._streams), {}
        return streams

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
