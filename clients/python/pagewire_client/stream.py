"""The handle of a running request.

Leaving early cancels on the server, however one leaves:

    async for chunk in client.generate("…"):     # `break`, `return` or an exception drops the only reference to the
        if enough(chunk):                        # stream: CPython ends it at once, other interpreters when they
            break                                # collect garbage

    async with client.generate("…") as stream:   # the explicit form, on every interpreter
        async for chunk in stream:
            ...

    stream = client.generate("…")                # a stream with a name outlives a `break` and can be read on;
    await stream.aclose()                        # it ends with `aclose`, or with its last reference

Cancelling the task that waits for a chunk or for the result cancels the stream, too, as it would an async generator.
A generator was rejected for the handle: after `break` it is closed by a hook of the loop, some time later.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from pagewire_client.result import Chunk, Result
from pagewire_client.state import StreamState
from pagewire_transport.errors import PagewireError


class Stream:
    """Chunks by `async for`, the whole by `await result()`; both may be used, in either order.

    The client holds the stream's state and not this handle, so that it notices when the last reference to it is gone.
    What is not read is kept: at most `max_tokens` tokens a choice.
    """

    __slots__ = ("__weakref__", "_loop", "_state")

    def __init__(self, state: StreamState, loop: asyncio.AbstractEventLoop) -> None:
        self._state = state
        self._loop = loop

    @property
    def request_id(self) -> str | None:
        """The server's name for it; None until it was accepted."""
        return self._state.accepted.request_id if self._state.accepted is not None else None

    @property
    def seed(self) -> int | None:
        """The seed in use; None until it was accepted."""
        return self._state.accepted.seed if self._state.accepted is not None else None

    @property
    def resume_key(self) -> str | None:
        """With `request_id`, what `Client.resume` takes; None until it was accepted, "" where it cannot be resumed."""
        return self._state.accepted.resume_key if self._state.accepted is not None else None

    @property
    def received(self) -> list[int]:
        """Tokens of each choice that came, from the first that was generated on: what `Client.resume` takes."""
        return [choice.received for choice in self._state.choices]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            PagewireError: the request was refused or failed, after all chunks that came before.
        """
        state = self._state
        while not state.chunks:
            if state.error is not None and not state.is_closed:
                raise _again(state.error)
            if state.is_over or state.is_closed:
                raise StopAsyncIteration
            await self._changed()
        return state.chunks.popleft()

    async def result(self) -> Result:
        """Wait for the end. A stream that was cancelled has a result, too: what came, with that finish reason.

        Raises:
            PagewireError: the request was refused or failed.
        """
        state = self._state
        while not state.is_over:
            await self._changed()
        if state.error is not None:
            raise _again(state.error)
        return state.result()

    def cancel(self) -> None:
        """Ask the server to end it. What comes until then can be read. Idempotent."""
        self._state.cancel()

    def finish(self, at: int, choice: int = 0) -> None:
        """End a choice as stopped after its first `at` tokens; for those who look for stops in the text themselves."""
        self._state.finish_at(at, choice)

    async def aclose(self) -> None:
        """Cancel, and read no more. Idempotent."""
        self._state.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._state.is_over:
            self._state.abandon()

    async def _changed(self) -> None:
        try:
            await self._state.changed()
        except BaseException:  # the waiting task was cancelled, or is being torn down
            self._state.abandon()
            raise

    def __del__(self) -> None:
        # Any thread, any moment (a collection may run inside a call on the socket): only leave a note for the loop.
        if not self._state.is_over:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._state.abandon)


def _again(error: PagewireError) -> PagewireError:
    """A new one to raise: an exception that is raised twice collects both tracebacks, and keeps their frames alive."""
    return type(error)(
        error.message,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        predicted_ttft_ms=error.predicted_ttft_ms,
    )
