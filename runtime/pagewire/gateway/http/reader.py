"""One HTTP request as a client of the gateway's: its streams, and what it is told of them.

The gateway marks streams that have news and calls `flush`, as for every client. Here no message is made of them: what is
pending is handed to the `Answer` of the request, which makes JSON of it.
"""

from __future__ import annotations

from typing import ClassVar, Final, Protocol

import structlog

from pagewire.errors import InternalError, PagewireError, from_code
from pagewire.gateway.client import Client
from pagewire.gateway.columns import LogprobRun
from pagewire.gateway.http.connection import HttpConnection
from pagewire.gateway.pace import Pace
from pagewire.gateway.stream import GatewayStream, Piece
from pagewire_transport.messages import Accepted, Done, Finished

_log: Final = structlog.get_logger()


class Answer(Protocol):
    """What becomes of the streams of one request; stream and choice are counted from 0."""

    def accepted(self, stream: int, message: Accepted) -> None:
        """The engine took the stream."""
        ...

    def prompt_logprobs(self, stream: int, start: int, run: LogprobRun, *, is_last: bool) -> None:
        """Of the prompt's tokens from `start`; in order, before the first piece."""
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
    values_a_unit: ClassVar[int] = 1

    def __init__(self, connection: HttpConnection, pace: Pace, answer: Answer) -> None:
        super().__init__(connection, pace)
        self.share = connection.client
        self._answer = answer
        self._has_failed = False

    def _hand_over(self, most: int) -> int:
        spent = 0
        marked, self._marked = self._marked, []
        for at, stream in enumerate(marked):
            if spent >= most:
                self._marked = marked[at:] + self._marked
                break
            stream.is_marked = False
            if self._has_failed:
                if stream.ending is not None:
                    self.streams.pop(stream.number, None)
                continue
            try:
                spent += self._tell(stream, most - spent)
            except Exception as error:  # noqa: BLE001  (F7: a fault of ours ends this request, never a turn of the gateway)
                _log.error("answer_failed", client=self.connection.client, exc_info=error)
                self._fail(InternalError(f"{type(error).__name__} while answering"))
        self._answer.flush()
        return spent

    def _tell(self, stream: GatewayStream, most: int) -> int:
        """Hand over about `most` values; how many it were. A stream that has more is marked again."""
        answer, number = self._answer, stream.number
        spent = self._open(stream, most) if stream.opening else 0
        is_all = not stream.opening
        for index, choice in enumerate(stream.choices if is_all else ()):
            piece = choice.pending.take(most - spent)
            if piece is not None:
                spent += len(piece.ids) * (1 if piece.logprobs is None else 1 + piece.logprobs.top)
                answer.piece(number, index, piece)
            if not choice.pending.is_empty:
                is_all = False
            elif choice.finished is not None and not choice.was_told:
                choice.was_told = True
                answer.finished(number, index, choice.finished)
        ending = stream.ending
        if not is_all:
            self.mark(stream)
        elif ending is not None:
            self.streams.pop(number, None)
            if isinstance(ending, Done):
                answer.done(number, ending)
            else:
                retry = ending.retry_after_ms
                self._fail(
                    from_code(
                        ending.code,
                        ending.message,
                        field=ending.field,
                        retry_after_ms=retry,
                        predicted_ttft_ms=ending.predicted_ttft_ms,
                    )
                )
        return spent

    def _open(self, stream: GatewayStream, most: int) -> int:
        """As `_tell`, of what comes before the first token."""
        answer, opening, spent = self._answer, stream.opening, 0
        while opening and spent < most:
            message = opening[0]
            if isinstance(message, Accepted):
                answer.accepted(stream.number, message)
                opening.pop(0)
                continue
            width, first = 1 + message.top, stream.num_prompt_told
            last = min(first + -(-(most - spent) // width), len(message.chosen) // 4)
            wide = slice(4 * message.top * first, 4 * message.top * last)
            run = LogprobRun(
                message.top,
                memoryview(message.chosen)[4 * first : 4 * last],
                memoryview(message.top_ids)[wide],
                memoryview(message.top_logprobs)[wide],
            )
            is_last = 4 * last >= len(message.chosen)
            answer.prompt_logprobs(stream.number, 1 + first, run, is_last=is_last)  # the first token has none
            stream.num_prompt_told = last
            spent += (last - first) * width
            if is_last:
                opening.pop(0)
        return spent

    def _fail(self, error: PagewireError) -> None:
        """Told once; the task of the request then takes its other streams back from the gateway."""
        if not self._has_failed:
            self._has_failed = True
            self._answer.failed(error)
