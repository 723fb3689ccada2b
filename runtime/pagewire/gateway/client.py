"""One client: its streams, and the one place that decides what is sent to it and in which order."""

from __future__ import annotations

from typing import Protocol

from pagewire.gateway.columns import TokensBuilder
from pagewire.gateway.stream import GatewayStream
from pagewire_transport.messages import FromServer


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

    Streams with news are marked; `flush` makes messages of all of them at once: their openings, one `tokens` message
    with everything pending, their endings. While the connection is blocked nothing is made. So what waits is bounded:
    one round of messages (kept by the connection), and for each stream its pending tokens, at most `max_tokens` of them.
    """

    def __init__(self, connection: Peer) -> None:
        self.connection = connection
        self.streams: dict[int, GatewayStream] = {}
        self._marked: list[GatewayStream] = []

    def mark(self, stream: GatewayStream) -> None:
        """`stream` has something to send."""
        if not stream.is_marked:
            stream.is_marked = True
            self._marked.append(stream)

    @property
    def has_news(self) -> bool:
        """Something waits to be sent, here or in the connection."""
        return bool(self._marked) or self.connection.num_unsent > 0

    def flush(self) -> None:
        """Send what there is, unless the connection is blocked: then it is called again when it no longer is."""
        if self._marked and not self.connection.is_blocked:
            marked, self._marked = self._marked, []
            for message in self._compose(marked):
                self.connection.send(message)

    def _compose(self, marked: list[GatewayStream]) -> list[FromServer]:
        builder = TokensBuilder()
        messages: list[FromServer] = []
        endings: list[FromServer] = []
        for stream in marked:
            stream.is_marked = False
            if stream.opening:
                messages += stream.opening
                stream.opening.clear()
            for index, choice in enumerate(stream.choices):
                choice.pending.move_into(builder, stream.number, index, shows_text=stream.shows_text)
                if choice.finished is not None and not choice.was_told:
                    choice.was_told = True
                    endings.append(choice.finished)
            if stream.ending is not None:
                endings.append(stream.ending)
                self.streams.pop(stream.number, None)
        if len(builder):
            messages.append(builder.build())
        return messages + endings
