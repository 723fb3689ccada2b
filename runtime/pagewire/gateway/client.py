"""One client: its streams, and the one place that decides what is sent to it and in which order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import ClassVar, Final, Protocol

from pagewire.gateway.columns import TokensBuilder
from pagewire.gateway.lag import Lag
from pagewire.gateway.pace import Pace
from pagewire.gateway.stream import GatewayStream
from pagewire_transport.messages import FromServer

_NUMBERS: Final = itertools.count(1)


class Peer(Protocol):
    """Where messages to a client go: a connection of the door's, or whatever stands for one."""

    @property
    def client(self) -> str:
        """Who it is, for logs."""
        ...

    @property
    def is_blocked(self) -> bool:
        """It takes nothing now; `Gateway.on_writable` is called when it does again."""
        ...

    @property
    def num_unsent(self) -> int:
        """What it took and has not sent yet."""
        ...

    def send(self, message: FromServer) -> None:
        """Send, or keep."""
        ...


class Client:
    """What a client has been promised and not been sent.

    Streams with news are marked; `flush` makes messages of them at once: their openings, one `tokens` message with what
    is pending, their endings. While the connection is blocked nothing is made, and in one turn of the loop no more than
    `pace` allows. So what waits is bounded: one round of messages (kept by the connection), and for each stream its
    pending tokens, at most `max_tokens` of them.
    """

    values_a_unit: ClassVar[int] = 32
    """Tokens and log-probabilities for one unit of the pace: in a message they are copied, as bytes."""

    def __init__(
        self,
        connection: Peer,
        pace: Pace,
        on_told: Callable[[Client, GatewayStream], None] | None = None,
        lag: Lag | None = None,
    ) -> None:
        self.connection = connection
        self.share = f"client-{next(_NUMBERS)}"
        """Whose share of the service its streams are, where their namespace does not say."""
        self._on_told = on_told
        self.streams: dict[int, GatewayStream] = {}
        self.minding: dict[GatewayStream, None] = {}  # these three: see `Laggard`
        self.watched: dict[GatewayStream, None] = {}
        self.blocked_ns = 0
        self._lag = lag
        self._pace = pace
        self._marked: list[GatewayStream] = []

    @property
    def user(self) -> str:
        """The CURVE key that it connected with; "" where there are no keys, and over HTTP."""
        return str(getattr(self.connection, "user", ""))

    def take(self, stream: GatewayStream) -> None:
        """It is this client's from now on; said again once it is known what it asks for."""
        self.streams[stream.number] = stream
        if stream.on_lag != "coalesce":
            self.minding[stream] = None

    def mark(self, stream: GatewayStream) -> None:
        """`stream` has something to send."""
        if not stream.is_marked:
            stream.is_marked = True
            self._marked.append(stream)

    @property
    def has_news(self) -> bool:
        """Something waits to be sent, here or in the connection."""
        return bool(self._marked) or self.connection.num_unsent > 0

    def release(self, stream: GatewayStream) -> None:
        """It is this client's no more. Idempotent."""
        if self.streams.get(stream.number) is stream:
            self._forget(stream)
        if stream.is_marked:
            stream.is_marked = False
            self._marked.remove(stream)

    def _forget(self, stream: GatewayStream) -> None:
        self.streams.pop(stream.number, None)
        self.minding.pop(stream, None)
        self.watched.pop(stream, None)

    def clear(self) -> None:
        """Nobody is there to be told anything."""
        self.streams.clear()
        self.minding.clear()
        self.watched.clear()
        self._marked.clear()

    def flush(self) -> None:
        """Send what there is, unless the connection is blocked: then it is called again when it no longer is. What the
        pace does not allow now follows in the next turn of the loop.
        """
        if not self._marked:
            self.blocked_ns = 0
            return
        if self.connection.is_blocked:
            if self.minding and self._lag is not None:
                self._lag.blocked(self)
            return
        self.blocked_ns = 0
        share = self._pace.share
        if share:
            spent = self._hand_over(share * self.values_a_unit)
            self._pace.spend(-(-spent // self.values_a_unit))
            if self.watched and self._lag is not None:
                self._lag.moved(self)
        if self._marked:
            self._pace.wait(self)

    def check_invariants(self) -> None:
        """Who is owed something, and could take it, waits for a turn."""
        assert {stream for stream in self.streams.values() if stream.is_marked} == set(self._marked)
        assert not self._marked or self.connection.is_blocked or self in self._pace
        mine = set(self.streams.values())
        assert set(self.minding) == {stream for stream in mine if stream.on_lag != "coalesce"}
        assert {stream for stream in mine if stream.is_held or stream.owed} == set(self.watched)

    def _hand_over(self, most: int) -> int:
        """Send about `most` values; how many it were. Streams that have more stay marked, last in the order."""
        builder = TokensBuilder()
        messages: list[FromServer] = []
        endings: list[FromServer] = []
        told: list[GatewayStream] = []
        spent = 0
        marked, self._marked = self._marked, []
        for at, stream in enumerate(marked):
            if spent >= most:
                self._marked = marked[at:] + self._marked
                break
            if stream.opening:
                messages += stream.opening
                stream.opening.clear()
            is_all = True
            for index, choice in enumerate(stream.choices):
                pending = choice.pending
                spent += pending.move_into(builder, stream.number, index, most - spent, shows_text=stream.shows_text)
                if not pending.is_empty:
                    is_all = False
                elif choice.finished is not None and not choice.was_told:
                    choice.was_told = True
                    endings.append(choice.finished)
            if not is_all:
                self._marked.append(stream)
                continue
            stream.is_marked = False
            if stream.ending is not None:
                endings.append(stream.ending)
                told.append(stream)
                self._forget(stream)
        if len(builder):
            messages.append(builder.build())
        for message in messages + endings:
            self.connection.send(message)
        if self._on_told is not None:
            for stream in told:
                self._on_told(self, stream)
        return spent
