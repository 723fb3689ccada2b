"""A link: the client's side of a door. One server, one connection at a time, watched and replaced when it breaks.

    pause ──▶ new socket ── hello ──▶ waiting ── welcome ──▶ welcomed ── ping … pong
      ▲           │ not connected         │                       │
      ├───────────┘                       │                       │
      └────────────── `on_lost` ──────────┴───────────────────────┘
                       disconnected, silent for `heartbeat_timeout_ms`, or not known to the server any more

Each connection has a socket of its own, so that nothing of an old connection reaches the streams of a new one. What is
sent before `welcome` follows the hello on the same connection: the order is kept, nobody needs to wait. The pause is none
after a connection that was good (`Backoff`).

A hello is said again only where the one before was refused. Said twice in one breath, as over a network that stalls, it would
be answered twice, and the second answer means that all which was asked after the first is lost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from pagewire_transport.backoff import LONGEST_S, Backoff
from pagewire_transport.client_socket import ClientSocket
from pagewire_transport.codec import MAX_REPLY_BYTES, decode_server, encode
from pagewire_transport.curve import ClientCurve
from pagewire_transport.door import HELLO_FIRST, refusal
from pagewire_transport.errors import (
    ConfigError,
    ConnectionLost,
    Overloaded,
    PagewireError,
    ProtocolError,
    Unauthorized,
    from_code,
)
from pagewire_transport.messages import Error, FromClient, FromServer, Goodbye, Hello, Ping, Pong, Welcome

_DEFAULT_HEARTBEAT_MS: Final = 1000
_DEFAULT_TIMEOUT_MS: Final = 10_000
"""Until the server says what it wants."""

_STEADY_S: Final = 1.0
"""A connection that the server kept for so long was good."""
_FAILURES: Final = 4
"""Handshakes of a server that never let us in that fail without a reason in a row, after which that is taken for a refusal."""

MAX_UNSENT_BYTES: Final = 64 * 2**20
"""What waits for a server that takes nothing; beyond that `send` refuses."""


class Link:
    """Made on a running loop; connects by itself and stays connected until `close`.

    Args:
        url: of the server.
        client: free text for the server's logs.
        on_message: takes every message but `welcome` and `pong`; must not raise.
        on_lost: told why a connection broke: nothing more comes for what was asked over it. A new one is being made.
        on_welcome: told of every welcome: of the first connection, and of each that was made after one broke.
        curve: keys, for a server that asks for them.
        longest_pause_s: between two attempts to connect.
        now_ns: the clock for heartbeats.
        chance: uniform in [0, 1), for the pauses.

    Raises:
        ConfigError: the URL is no endpoint, or `client` no text.
    """

    def __init__(
        self,
        url: str,
        *,
        client: str,
        on_message: Callable[[FromServer], None],
        on_lost: Callable[[PagewireError], None],
        on_welcome: Callable[[Welcome], None] = lambda welcome: None,  # noqa: ARG005
        max_reply_bytes: int = MAX_REPLY_BYTES,
        curve: ClientCurve | None = None,
        longest_pause_s: float = LONGEST_S,
        now_ns: Callable[[], int] = time.monotonic_ns,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.url = url
        self.welcome: Welcome | None = None
        """What the server said of itself; None while there is no connection."""
        self.unready = ""
        """Why it is not, as that said."""
        self.is_server_ready = False
        """What the server's last `pong` said, true from its welcome on; False while there is no connection."""
        try:  # before there is a socket, which would be left behind
            self._hello = encode(Hello(client=client))
        except UnicodeEncodeError:
            raise ConfigError("must be text in Unicode without lone surrogates", field="name") from None
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_welcome = on_welcome
        self._max_reply_bytes = max_reply_bytes
        self._curve = curve
        self._now_ns = now_ns
        self._loop = asyncio.get_running_loop()
        self._refusal: PagewireError | None = None
        self._unsent: deque[bytes] = deque()
        self._num_unsent_bytes = 0
        self._waiters: list[asyncio.Future[Welcome]] = []
        self._heartbeat_ms = _DEFAULT_HEARTBEAT_MS
        self._timeout_ms = _DEFAULT_TIMEOUT_MS
        self._is_open = True
        self._backoff = Backoff(longest_pause_s, chance)
        self._pause: asyncio.TimerHandle | None = None
        self._num_failed = 0
        self._was_welcomed = False
        self._welcomed_ns = 0
        self._is_greeting = False
        self._backoff.next_s()  # the first attempt
        self._socket = self._connect()
        self._ticker = self._loop.call_later(self._heartbeat_ms * 1e-3, self._tick)

    async def wait_welcome(self, timeout_s: float, *, is_patient: bool = False) -> Welcome:
        """Wait until the server let us in.

        Args:
            timeout_s: in all.
            is_patient: a refusal that says when to try again (the server starts, or is full) is not the end: we say hello
                again until there is no time left.

        Raises:
            ConnectionLost: nobody answered in time.
            PagewireError: the server refused us, as its error says.
        """
        end = self._loop.time() + timeout_s
        while self.welcome is None:
            refusal = self._refusal
            if refusal is not None and not (is_patient and refusal.retry_after_ms is not None):
                raise refusal
            waiter: asyncio.Future[Welcome] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                return await asyncio.wait_for(waiter, end - self._loop.time())
            except TimeoutError:
                nobody = ConnectionLost(f"no server answers at {self.url} after {timeout_s:g} s: is it running?")
                raise (refusal or nobody) from None
            except PagewireError as error:
                if error is not self._refusal:
                    raise
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self.welcome

    def send(self, message: FromClient) -> None:
        """Send; keep it while the server takes nothing.

        Raises:
            ConnectionLost: the link is closed.
            Overloaded: too much is kept already.
            PagewireError: the server refused to let us in.
        """
        if not self._is_open:
            raise ConnectionLost("the link is closed")
        if self._refusal is not None:
            raise self._refusal
        frame = encode(message)
        if self._unsent or not self._try_send(frame):
            if self._num_unsent_bytes + len(frame) > MAX_UNSENT_BYTES:
                raise Overloaded("the server takes no messages now", retry_after_ms=self._timeout_ms)
            self._unsent.append(frame)
            self._num_unsent_bytes += len(frame)

    async def close(self) -> None:
        """Say goodbye and free the socket. `on_lost` is not called. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._ticker.cancel()
        if self._pause is not None:
            self._pause.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(ConnectionLost("the link was closed"))
        if self.welcome is not None and not self._unsent:
            self._try_send(encode(Goodbye()))
        # Without a welcome there is nobody to wait for.
        await (self._socket.close() if self.welcome is not None else self._socket.close(0))

    # ---- one connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> ClientSocket:
        self._heard_ns = self._now_ns()
        socket = ClientSocket(
            self.url,
            on_frame=self._on_frame,
            on_change=self._on_change,
            on_disconnect=self._on_disconnect,
            on_connect=self._on_connect,
            on_failed=self._on_failed,
            on_denied=self._on_denied,
            curve=self._curve,
            max_message_bytes=self._max_reply_bytes,
            retry_ms=self._backoff.own_retries_ms(),
        )
        self._is_greeting = False
        return socket

    def _connect_later(self) -> None:
        """Give the socket up and make another, after a pause where there were attempts in vain."""
        self._socket.abandon()
        pause_s = self._backoff.next_s()
        if pause_s > 0:
            self._pause = self._loop.call_later(pause_s, self._connect_now)
        else:
            self._connect_now()

    def _connect_now(self) -> None:
        self._pause = None
        self._socket = self._connect()

    def _try_send(self, frame: bytes) -> bool:
        return self._socket.is_open and self._socket.is_connected and self._socket.try_send(frame)

    def _greet(self) -> None:
        self._is_greeting = self._try_send(self._hello)

    def _on_connect(self) -> None:
        self._num_failed = 0
        self._heard_ns = self._now_ns()
        self._greet()
        self._on_change()

    def _on_failed(self) -> None:
        """What was not sent yet waits for the next attempt."""
        self._num_failed += 1
        if self._num_failed >= _FAILURES and not self._was_welcomed:
            self._on_denied(self._socket.why_failed)
        else:
            self._connect_later()

    def _lost(self, reason: PagewireError) -> None:
        """Give the connection up and make another."""
        if self.welcome is not None and self._now_ns() - self._welcomed_ns >= _STEADY_S * 1e9:
            self._backoff.reset()
        self._unsent.clear()
        self._num_unsent_bytes = 0
        self.welcome = None
        self.is_server_ready = False
        self._refusal = None
        self._connect_later()
        self._on_lost(reason)

    def _on_disconnect(self) -> None:
        self._lost(ConnectionLost(f"the connection to {self.url} broke"))

    def _on_denied(self, reason: str) -> None:
        """The server does not let us connect; it is tried again with the next heartbeat."""
        self._socket.abandon()
        self._num_failed = 0
        self._unsent.clear()
        self._num_unsent_bytes = 0
        denied = Unauthorized(f"the server at {self.url} does not let us in: {reason}")
        self._refuse(denied)
        self._on_lost(denied)  # what was sent behind the hello will never be answered

    def _on_change(self) -> None:
        while self._unsent and self._try_send(self._unsent[0]):
            self._num_unsent_bytes -= len(self._unsent.popleft())

    def _on_frame(self, frame: bytes) -> None:
        self._heard_ns = self._now_ns()
        try:
            message = decode_server(frame, self._max_reply_bytes)
        except ProtocolError as error:
            # What it said is unknown: tokens may be among it. No stream of this connection can be trusted any more.
            self._lost(ConnectionLost(f"the server sent what is no message: {error}"))
            return
        if isinstance(message, Pong):
            self.is_server_ready, self.unready = message.ready, message.reason
            return
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, Error) and (self.welcome is None or message.field == HELLO_FIRST):
            self._refused(message)
        else:
            self._on_message(message)

    def _welcomed(self, message: Welcome) -> None:
        if self.welcome is not None:
            self._lost(ConnectionLost(f"the server at {self.url} began this connection anew"))
            return
        self.welcome = message
        self._was_welcomed, self._is_greeting = True, False
        self._welcomed_ns = self._now_ns()
        self.is_server_ready, self.unready = True, ""
        self._refusal = None
        self._heartbeat_ms, self._timeout_ms = message.heartbeat_ms, message.heartbeat_timeout_ms
        self._ticker.cancel()
        self._ticker = self._loop.call_later(self._heartbeat_ms * 1e-3, self._tick)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(message)
        self._on_welcome(message)

    def _refused(self, message: Error) -> None:
        if message.field == HELLO_FIRST and self.welcome is not None:
            self._lost(ConnectionLost(f"the server at {self.url} was restarted or gave this connection up"))
            return
        if message.field == HELLO_FIRST:
            if message.stream is not None:  # it followed a hello that was refused, and fares as that did
                unknown = ConnectionLost(f"the server at {self.url} did not know this connection yet")
                self._on_message(refusal(self._refusal or unknown, message.stream))
            return
        self._is_greeting = False
        self._refuse(
            from_code(message.code, message.message, field=message.field, retry_after_ms=message.retry_after_ms)
        )

    def _refuse(self, refusal: PagewireError) -> None:
        """We are not let in; whoever waits for that is told."""
        self._refusal = refusal
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(refusal)

    def _tick(self) -> None:
        """Say that we live; find out whether the server does."""
        self._ticker = self._loop.call_later(self._heartbeat_ms * 1e-3, self._tick)
        if not self._socket.is_open:
            if self._pause is None:  # denied: try again
                self._socket = self._connect()
            return
        if self._is_silent():
            self._socket.receive_now()  # this loop may have been held up, and the server's words wait in the socket
            if self._is_silent():
                self._lost(ConnectionLost(f"the server at {self.url} was silent for {self._timeout_ms} ms"))
                return
        if self.welcome is not None:
            if not self._unsent:
                self._try_send(encode(Ping()))
        elif self._refusal is not None and not self._is_greeting:
            self._greet()

    def _is_silent(self) -> bool:
        return self._now_ns() - self._heard_ns > self._timeout_ms * 1_000_000
