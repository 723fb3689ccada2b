"""What is done about a stream whose client lags, where it asks for more than being late (`on_lag`): the gateway's part.

    tokens taken from the engine for one choice
    ├── sent to the client ──┼── pending: the lag ──┤
                                                    received

    coalesce   nothing: what is pending waits
    pause      lag > most ──▶ held: the engine is told to pause it ── lag ≤ most / 2 ──▶ to go on
    cancel     lag > most, or the connection took nothing for `max_lag_ms` ──▶ ends with `slow_reader`

The engine's door does the same with its cursors (`engine/lag.py`); the gateway reads everybody's tokens, so there no
stream lags. Only clients whose connections are blocked are looked at, and of their streams those alone that ask for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from pagewire.config import ServerConfig
from pagewire.gateway.stream import GatewayStream

_MS: Final = 1_000_000


class Laggard(Protocol):
    """A client, as far as its lag goes.

    Attributes:
        minding: its streams that ask for more than being late.
        watched: those of them that are held, or owed it more than usual when it came back.
        blocked_ns: since when its connection takes nothing while something waits; 0: it takes.
    """

    minding: dict[GatewayStream, None]
    watched: dict[GatewayStream, None]
    blocked_ns: int


class Lag:
    """Holds and ends streams of slow clients. A client's own pause is kept beside it: neither undoes the other.

    Args:
        config: `max_lag_tokens` and `max_lag_ms`.
        tell: tells the engine whether a stream is paused now.
        end: ends a stream whose client is too slow.
        now_ns: the clock.
    """

    def __init__(
        self,
        config: ServerConfig,
        tell: Callable[[GatewayStream], None],
        end: Callable[[GatewayStream], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._most = config.max_lag_tokens
        self._enough = config.max_lag_tokens // 2
        self._patience_ns = config.max_lag_ms * _MS
        self._tell = tell
        self._end = end
        self._now_ns = now_ns

    def blocked(self, client: Laggard) -> None:
        """More is pending for a client that takes nothing now."""
        now_ns = self._now_ns()
        client.blocked_ns = client.blocked_ns or now_ns
        is_over = 0 < self._patience_ns < now_ns - client.blocked_ns
        if is_over:
            client.blocked_ns = now_ns
        for stream in list(client.minding):
            lag = 0 if stream.is_held else stream.lag
            if stream.on_lag == "cancel":
                if lag > self._most + stream.owed or (is_over and lag):
                    self._end(stream)
            elif lag > self._most:
                self._hold(client, stream)

    def moved(self, client: Laggard) -> None:
        """The client was sent what it took."""
        for stream in list(client.watched):
            if stream.lag <= self._enough:
                self._settle(client, stream)

    def given(self, client: Laggard, stream: GatewayStream) -> None:
        """A client has it that says what it has got; whatever paused it before does so no more."""
        lag, was_idle = stream.lag, stream.is_idle
        stream.is_paused = stream.is_held = False
        if stream.on_lag == "cancel" and lag > self._enough:
            client.watched[stream] = None
            stream.owed = lag
        elif stream.on_lag == "pause" and lag > self._most:
            self._hold(client, stream)
        else:
            self._settle(client, stream)
        if was_idle and not stream.is_held:
            self._tell(stream)

    def _hold(self, client: Laggard, stream: GatewayStream) -> None:
        client.watched[stream] = None
        stream.is_held = True
        self._tell(stream)

    def _settle(self, client: Laggard, stream: GatewayStream) -> None:
        """Its client has caught up: the ordinary limit, and tokens again."""
        client.watched.pop(stream, None)
        stream.owed = 0
        if stream.is_held:
            stream.is_held = False
            self._tell(stream)
