"""The same client without `async`: plain iterators over a loop in a thread of its own.

>>> with connect() as client:                                            # doctest: +SKIP
...     for chunk in client.generate("Once upon", max_tokens=64):
...         print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from pagewire_client.client import Client as AsyncClient
from pagewire_client.client import connect as connect_async
from pagewire_client.result import Chunk, Result
from pagewire_client.resumer import RESUME_S
from pagewire_client.stream import Stream as AsyncStream
from pagewire_transport.messages import ChatMessage, Welcome

_T = TypeVar("_T")


class Stream:
    """A running request: chunks by `for`, the whole by `result()`. May be used from any thread, one at a time.

    Leaving a `with` block, `close`, and dropping the last reference cancel it on the server.
    """

    def __init__(self, stream: AsyncStream, loop: _LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def request_id(self) -> str | None:
        """See `pagewire_client.Stream`."""
        return self._stream.request_id

    @property
    def resume_key(self) -> str | None:
        """See `pagewire_client.Stream`."""
        return self._stream.resume_key

    @property
    def received(self) -> list[int]:
        """See `pagewire_client.Stream`."""
        return self._stream.received

    @property
    def seed(self) -> int | None:
        """See `pagewire_client.Stream`."""
        return self._stream.seed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        """The next chunk.

        Raises:
            PagewireError: the request was refused or failed, after all chunks that came before.
        """
        try:
            return self._loop.run(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def result(self) -> Result:
        """Wait for the end; see `pagewire_client.Stream`.

        Raises:
            PagewireError: the request was refused or failed.
        """
        return self._loop.run(self._stream.result())

    def cancel(self) -> None:
        """Ask the server to end it. What comes until then can be read. Idempotent."""
        self._loop.call(self._stream.cancel)

    def finish(self, at: int, choice: int = 0) -> None:
        """End a choice as stopped after its first `at` tokens."""
        self._loop.call(lambda: self._stream.finish(at, choice))

    def close(self) -> None:
        """Cancel, and read no more. Idempotent."""
        self._loop.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A connection to a server; see `connect`."""

    def __init__(self, url: str | None, timeout_s: float | None, resume_timeout_s: float, name: str) -> None:
        self._loop = _LoopThread()
        self._context = connect_async(url, timeout_s=timeout_s, resume_timeout_s=resume_timeout_s, name=name)
        try:
            self._client: AsyncClient = self._loop.run(_entered(self._context))
        except BaseException:
            self._loop.close()
            raise

    @property
    def url(self) -> str:
        """Of the server."""
        return self._client.url

    @property
    def info(self) -> Welcome:
        """Who serves what, under which limits."""
        return self._client.info

    def generate(self, prompt: str | Iterable[int], **options: Any) -> Stream:
        """Start a stream; arguments and errors are those of `pagewire_client.Client.generate`."""
        return self._started(lambda: self._client.generate(prompt, **options))

    def chat(self, messages: Sequence[Mapping[str, str] | ChatMessage], **options: Any) -> Stream:
        """Start a stream that answers a conversation; see `pagewire_client.Client.chat`."""
        return self._started(lambda: self._client.chat(messages, **options))

    def resume(self, request_id: str, resume_key: str, *, received: Sequence[int] = (0,)) -> Stream:
        """Go on with a stream that another client began; see `pagewire_client.Client.resume`."""
        return self._started(lambda: self._client.resume(request_id, resume_key, received=received))

    def stats(self, timeout_s: float = 5.0) -> dict[str, float]:
        """Counters and gauges of the server.

        Raises:
            ConnectionLost: it did not answer in time.
        """
        return self._loop.run(self._client.stats(timeout_s))

    def close(self) -> None:
        """Say goodbye: the server cancels what is open. Idempotent."""
        if self._loop.is_open:
            try:
                self._loop.run(self._context.__aexit__(None, None, None))
            finally:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _started(self, start: Callable[[], AsyncStream]) -> Stream:
        return Stream(self._loop.call(start), self._loop)


def connect(
    url: str | None = None,
    *,
    timeout_s: float | None = None,
    resume_timeout_s: float = RESUME_S,
    name: str = "pagewire-python",
) -> Client:
    """Connect; use it in a `with` block, or close it. Arguments and errors are those of `pagewire_client.connect`."""
    return Client(url, timeout_s, resume_timeout_s, name)


async def _entered(context: Any) -> AsyncClient:
    client: AsyncClient = await context.__aenter__()
    return client


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagewire client", daemon=True)
        self._thread.start()
        self.is_open = True

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for `work`; whatever interrupts the wait ends it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], _T]) -> _T:
        """Its value, computed on the loop."""

        async def work() -> _T:
            return function()

        return self.run(work())

    def close(self) -> None:
        """End the loop and its thread. Idempotent."""
        if self.is_open:
            self.is_open = False
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
