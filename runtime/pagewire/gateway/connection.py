"""One client's connection: its streams, and the one place that decides what is sent to it and in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pagewire.gateway.columns import TokensBuilder
from pagewire.gateway.stream import GatewayStream
from pagewire_transport.messages import Error, FromServer


class Connection:
    """What a client has been promised and not been sent.

    Streams with news are marked; `flush` makes messages of all of them at once: their openings, one `tokens` message
    with everything pending, their endings. If the socket takes no more, the messages that were made wait in `_unsent`,
    and no others are made before they are gone. So what waits is bounded: one round of messages, and for each stream
    its pending tokens, at most `max_tokens` of them.

    Args:
        send: hands one message to the socket; False: it cannot take it now.
    """

    def __init__(self, send: Callable[[FromServer], bool]) -> None:
        self.streams: dict[int, GatewayStream] = {}
        self._send = send
        self._marked: list[GatewayStream] = []
        self._unsent: deque[FromServer] = deque()

    @property
    def has_news(self) -> bool:
        """Something waits to be sent."""
        return bool(self._unsent or self._marked)

    def say(self, message: FromServer) -> None:
        """Send a message that belongs to no open stream, after what is waiting already."""
        self._unsent.append(message)

    def mark(self, stream: GatewayStream) -> None:
        """`stream` has something to send."""
        if not stream.is_marked:
            stream.is_marked = True
            self._marked.append(stream)

    def flush(self) -> bool:
        """Send what there is. False: the socket takes no more now, try again later."""
        if not self._drain():
            return False
        if self._marked:
            marked, self._marked = self._marked, []
            self._compose(marked)
        return self._drain()

    def _drain(self) -> bool:
        while self._unsent:
            if not self._send(self._unsent[0]):
                return False
            self._unsent.popleft()
        return True

    def _compose(self, marked: list[GatewayStream]) -> None:
        builder = TokensBuilder()
        endings: list[FromServer] = []
        for stream in marked:
            stream.is_marked = False
            self._unsent.extend(stream.opening)
            stream.opening.clear()
            for index, choice in enumerate(stream.choices):
                for start, ids, text, logprobs in choice.take_pending().runs():
                    builder.add(stream.number, index, start, ids, text if stream.shows_text else "", logprobs)
                if choice.finished is not None and not choice.was_told:
                    choice.was_told = True
                    endings.append(choice.finished)
            if stream.ending is not None:
                endings.append(stream.ending)
                self.streams.pop(stream.number, None)
        if len(builder):
            self._unsent.append(builder.build())
        self._unsent.extend(endings)


def refusal(error: Exception, stream: int | None) -> Error:
    """The message that tells a client about `error`; anything that is not of the error tree becomes `internal`."""
    code = getattr(error, "code", "internal")
    message = getattr(error, "message", None) or f"{type(error).__name__} in the gateway"
    return Error(
        code=code,
        message=message,
        stream=stream,
        field=getattr(error, "field", None),
        retry_after_ms=getattr(error, "retry_after_ms", None),
    )
