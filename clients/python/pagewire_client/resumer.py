"""Streams whose connection broke, and how they go on over the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from pagewire_client.state import StreamState
from pagewire_transport.columns import pack
from pagewire_transport.errors import InvalidRequest, PagewireError
from pagewire_transport.messages import Cancel, Finish, Generate, Resume

RESUME_S: Final = 30.0
"""How long a stream waits to be resumed."""
_TIMER_SLACK_S: Final = 0.001

Send = Callable[[Generate | Resume | Cancel | Finish], None]


class Resumer:
    """Used on one loop.

    Args:
        loop: that loop.
        streams: the client's open streams, by number.
        timeout_s: how long a stream waits; 0: not at all.
        send: to the server, or raises.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, streams: dict[int, StreamState], timeout_s: float, send: Send
    ) -> None:
        self._loop = loop
        self._streams = streams
        self._timeout_s = timeout_s
        self._send = send
        self._connection = 0  # even: none; odd: the number of the one that there is
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Nothing is resumed any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def connection_lost(self, error: PagewireError) -> None:
        """Streams that can be resumed wait; the others end with `error`, as do those that wait for too long."""
        self._connection += self._connection % 2
        until = self._loop.time() + self._timeout_s
        for state in list(self._streams.values()):
            can_wait = state.accepted.resume_key if state.accepted is not None else not state.is_cancelled
            if not self._timeout_s or not can_wait:
                self._end(state, error)
            elif state.until is None:
                state.until = until
        self._look_later(error)

    def connected(self) -> None:
        """The server let us in: ask for those that wait."""
        self._connection += 2 if self._connection % 2 else 1
        for state in list(self._streams.values()):
            if state.until is not None:
                self._ask(state)

    def tries_again(self, state: StreamState, error: PagewireError) -> bool:
        """Whether a stream that the server refused is asked for once more: it could not resume it now."""
        delay_s = (error.retry_after_ms or 0) / 1000
        if state.until is None or not delay_s or self._loop.time() + delay_s >= state.until:
            return False
        self._loop.call_later(delay_s, self._ask_again, state, self._connection)
        return True

    def _ask_again(self, state: StreamState, connection: int) -> None:
        if self._connection == connection and self._streams.get(state.number) is state and state.until is not None:
            self._ask(state)

    def _ask(self, state: StreamState) -> None:
        message = state.request  # it was not accepted: it begins anew
        if state.accepted is not None:
            message = Resume(
                stream=state.number,
                request_id=state.accepted.request_id,
                resume_key=state.accepted.resume_key,
                received=packed_counts([choice.received for choice in state.choices]),
            )
        assert message is not None
        try:
            self._send(message)
            for about in state.unanswered:
                self._send(about)
        except PagewireError as error:
            self._end(state, error)

    def _end(self, state: StreamState, error: PagewireError) -> None:
        self._streams.pop(state.number, None)
        state.fail(error)

    def _look_later(self, error: PagewireError) -> None:
        """See whether each is back when its time is over."""
        self.close()
        times = [state.until for state in self._streams.values() if state.until is not None]
        if times:
            self._timer = self._loop.call_at(min(times) + _TIMER_SLACK_S, self._look, error)

    def _look(self, error: PagewireError) -> None:
        now = self._loop.time()
        for state in list(self._streams.values()):
            if state.until is not None and state.until <= now:
                self._end(state, error)
        self._look_later(error)


def packed_counts(counts: Sequence[int]) -> bytes:
    """Tokens received, as `resume` has them.

    Raises:
        InvalidRequest: a count that is none, or no count.
    """
    wrong = InvalidRequest("must hold one count of tokens for each choice", field="received")
    if not counts:
        raise wrong
    try:
        return pack("I", counts)
    except (OverflowError, TypeError):
        raise wrong from None
