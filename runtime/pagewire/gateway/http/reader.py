"""One HTTP request as a client of the gateway's: its streams, and what it is told of them.

The gateway marks streams that have news and calls `flush`, as for every client. Here no message is made of them: what is
pending is handed to the `Answer` of the request, which makes JSON of it.
"""

from __future__ import annotations

from typing import Final, Protocol

import structlog

from pagewire.errors import InternalError, PagewireError, from_code
from pagewire.gateway.client import Client
from pagewire.gateway.http.connection import HttpConnection
from pagewire.gateway.stream import GatewayStream, Piece
from pagewire_transport.messages import Accepted, Done, Finished, PromptLogprobs

_log: Final = structlog.get_logger()


class Answer(Protocol):
    """What becomes of the streams of one request; stream and choice are counted from 0."""

    def accepted(self, stream: int, message: Accepted) -> None:
        """The engine took the stream."""
        ...

    def prompt_logprobs(self, stream: int, message: PromptLogprobs) -> None:
        """Once, before the first piece."""
        ...

    def piece(self, stream: int, choice: int, piece: Piece) -> None:
        """More tokens or text."""
        ...

    def finished(self, stream: int, choice: int, message: Finished) -> None:
        """The choice ended; `message.text` belongs to it."""
        ...

    def done(self, stream: int, message: Done) -> None:
        """All choices of the stream ended."""
        ...

    def failed(self, error: PagewireError) -> None:
        """A stream ended with an error, and with it the request; told once."""
        ...

    def flush(self) -> None:
        """Nothing more comes in this turn of the loop."""
        ...


class HttpReader(Client):
    """The streams of one request."""

    connection: HttpConnection

    def __init__(self, connection: HttpConnection, answer: Answer) -> None:
        super().__init__(connection)
        self._answer = answer
        self._has_failed = False

    def flush(self) -> None:
        """Hand over what there is, unless the connection is blocked: then it is called again when it no longer is."""
        if not self._marked or self.connection.is_blocked:
            return
        marked, self._marked = self._marked, []
        for stream in marked:
            stream.is_marked = False
            if self._has_failed:
                if stream.ending is not None:
                    self.streams.pop(stream.number, None)
                continue
            try:
                self._tell(stream)
            except Exception as error:  # noqa: BLE001  (F7: a fault of ours ends this request, never a turn of the gateway)
                _log.error("answer_failed", client=self.connection.client, exc_info=error)
                self._fail(InternalError(f"{type(error).__name__} while answering"))
        self._answer.flush()

    def _tell(self, stream: GatewayStream) -> None:
        answer, number = self._answer, stream.number
        for message in stream.opening:
            if isinstance(message, Accepted):
                answer.accepted(number, message)
            else:
                answer.prompt_logprobs(number, message)
        stream.opening.clear()
        for index, choice in enumerate(stream.choices):
            piece = choice.pending.take()
            if piece is not None:
                answer.piece(number, index, piece)
            if choice.finished is not None and not choice.was_told:
                choice.was_told = True
                answer.finished(number, index, choice.finished)
        ending = stream.ending
        if ending is None:
            return
        self.streams.pop(number, None)
        if isinstance(ending, Done):
            answer.done(number, ending)
        else:
            self._fail(from_code(ending.code, ending.message, field=ending.field, retry_after_ms=ending.retry_after_ms))

    def _fail(self, error: PagewireError) -> None:
        """Told once; the task of the request then takes its other streams back from the gateway."""
        if not self._has_failed:
            self._has_failed = True
            self._answer.failed(error)
