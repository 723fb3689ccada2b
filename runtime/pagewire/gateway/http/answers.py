"""What becomes of a request's streams: one JSON object at the end, or server-sent events as tokens come."""

from __future__ import annotations

import asyncio
from typing import Final

from pagewire.errors import PagewireError
from pagewire.gateway.columns import LogprobRun
from pagewire.gateway.http.connection import HttpConnection
from pagewire.gateway.http.errors import error_body, param_of
from pagewire.gateway.http.meters import RequestMeter
from pagewire.gateway.http.shapes import Shape
from pagewire.gateway.stream import Piece
from pagewire_transport.messages import Accepted, Done, Finished, Usage

DONE_EVENT: Final = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One server-sent event; JSON has no line breaks that would need care."""
    return b"data: %b\n\n" % data


class WholeAnswer:
    """Collects; memory is bounded by `max_tokens` of each choice.

    Args:
        shape: makes JSON.
        num_streams: of the request; each has `n` choices.
        n: choices of a stream.
        meter: of the request.
        length_field: what the client named `max_tokens` by.

    Attributes:
        opened: done when the engine took every stream, or one failed.
        over: done when all streams ended, or one failed.
        error: why it failed.
        usage: of all streams.
    """

    def __init__(
        self, shape: Shape, *, num_streams: int, n: int, meter: RequestMeter, length_field: str = "max_tokens"
    ) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.error: PagewireError | None = None
        self.usage = Usage(prompt=0, completion=0)
        self._shape = shape
        self._n = n
        self._length_field = length_field
        self._meter = meter
        self._num_unopened = self._num_open = num_streams

    def accepted(self, stream: int, message: Accepted) -> None:
        del stream, message
        self._num_unopened -= 1
        if not self._num_unopened:
            _resolve(self.opened)

    def prompt_logprobs(self, stream: int, start: int, run: LogprobRun, *, is_last: bool) -> None:
        indices = range(stream * self._n, (stream + 1) * self._n)
        self._shape.prompt_logprobs(indices, start, run)
        if not is_last:  # the last of them come with the first token
            for index in indices:
                self._told(index)

    def piece(self, stream: int, choice: int, piece: Piece) -> None:
        index = stream * self._n + choice
        if piece.ids:
            self._meter.on_tokens(index, len(piece.ids))
        self._shape.add(index, piece)
        self._told(index)

    def finished(self, stream: int, choice: int, message: Finished) -> None:
        index = stream * self._n + choice
        self._meter.on_finished(message.reason)
        if message.text:
            self._shape.add_text(index, message.text)
        self._told(index)
        self._ended(self._shape.end(index, message.reason))

    def done(self, stream: int, message: Done) -> None:
        del stream
        self._meter.on_done(message)
        usage = self.usage
        self.usage = Usage(
            prompt=usage.prompt + message.usage.prompt,
            completion=usage.completion + message.usage.completion,
            cached=usage.cached + message.usage.cached,
        )
        self._num_open -= 1
        if not self._num_open:
            self._meter.on_over()
            self._close()

    def failed(self, error: PagewireError) -> None:
        if param_of(error.field) == "max_tokens":
            error.field = self._length_field
        self.error = error
        self._close()

    def flush(self) -> None:
        """What comes waits for the end."""

    def check(self) -> None:
        """Raises what a stream failed with, if one did."""
        if self.error is not None:
            raise self.error

    def whole(self) -> bytes:
        """The answer, when all streams ended."""
        return self._shape.whole(self.usage)

    def _told(self, index: int) -> None:
        """A choice has more to say."""

    def _ended(self, chunk: bytes) -> None:
        """A choice ended."""

    def _close(self) -> None:
        _resolve(self.opened)
        _resolve(self.over)


class StreamedAnswer(WholeAnswer):
    """Writes an event for each piece, all of one turn of the loop at once.

    Until `begin`, which follows within a turn of the loop of `opened`, events wait here.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_streams: int,
        n: int,
        meter: RequestMeter,
        length_field: str = "max_tokens",
        connection: HttpConnection,
        tells_usage: bool,
    ) -> None:
        super().__init__(shape, num_streams=num_streams, n=n, meter=meter, length_field=length_field)
        self._connection = connection
        self._tells_usage = tells_usage
        self._events: list[bytes] = []
        self._has_begun = False

    def begin(self) -> None:
        """The head of the response was sent."""
        self._has_begun = True
        self.flush()

    def flush(self) -> None:
        if self._has_begun and self._events:
            events = self._events
            self._connection.write(events[0] if len(events) == 1 else b"".join(events))
            events.clear()

    def _told(self, index: int) -> None:
        chunk = self._shape.chunk(index)
        if chunk is not None:
            self._events.append(b"data: %b\n\n" % chunk)

    def _ended(self, chunk: bytes) -> None:
        self._events.append(event(chunk))

    def _close(self) -> None:
        if self.error is not None:
            self._events.append(event(error_body(self.error)))
        else:
            if self._tells_usage:
                self._events.append(event(self._shape.usage(self.usage)))
            self._events.append(DONE_EVENT)
        if self._has_begun:
            self.flush()
        super()._close()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
