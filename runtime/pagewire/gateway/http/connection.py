"""The client's side of one HTTP request, as the gateway sees connections: blocked or free.

A response body is written straight to the connection's transport, framed here, from within the gateway's own turn: no
task is woken for a token. Writing through the framework's coroutine was measured beside it, see
`docs/decisions/0004-http-framework.md`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from aiohttp import web

from pagewire_transport.messages import FromServer

_HIGH_WATER: Final = 65_536
"""Bytes that the kernel has not taken; beyond it nothing is made for this reader."""
_SEND_BUFFER: Final = 256 * 2**10
"""Bytes that the kernel is asked to hold; see `pagewire_transport.sockets.SEND_BUFFER`."""
_LOOK_S: Final = 0.005
_SELDOM_S: Final = 0.05
"""How often a blocked connection is looked at: twice as seldom after each look at which nothing had moved, so that a quick
reader is not held up and a stopped one costs nothing. The framework keeps the transport's own call-back to itself.
"""


class HttpConnection:
    """Stands for a connection of the door's.

    Args:
        request: whose answer this is.
        client: for logs.
        patience_s: how long a reader may take nothing before its connection is cut (F18).
        on_writable: told when a blocked connection takes something again.
        on_cut: told when it is cut.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        client: str,
        *,
        patience_s: float,
        on_writable: Callable[[HttpConnection], None],
        on_cut: Callable[[], None],
    ) -> None:
        self.client = client
        self._transport = request.transport
        self._patience_s = patience_s
        self._on_writable = on_writable
        self._on_cut = on_cut
        self._is_chunked = False
        self._is_streaming = False
        self._is_guarded = False
        self._look: asyncio.TimerHandle | None = None
        self._pause_s = _LOOK_S
        self._blocked_at = 0.0
        self._blocked_size = 0

    @property
    def is_blocked(self) -> bool:
        """More waits for the reader than it should; nothing is made for it meanwhile."""
        if not self._is_streaming or self.num_unsent <= _HIGH_WATER:
            return False
        if self._look is None:
            self._watch()
        return True

    @property
    def num_unsent(self) -> int:
        """Bytes that the kernel has not taken."""
        return 0 if self._transport is None or self._transport.is_closing() else self._transport.get_write_buffer_size()

    def send(self, message: FromServer) -> None:
        """Nothing is sent this way: the reader of this connection takes what it has from the streams."""
        raise AssertionError(message)

    def begin(self, response: web.StreamResponse) -> None:
        """The response's head was sent; its body follows through `write`."""
        peer = self._transport.get_extra_info("socket") if self._transport is not None else None
        if peer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._is_chunked = response.chunked
        self._is_streaming = True

    def write(self, data: bytes) -> None:
        """Write a part of the body; dropped where the connection is gone, which its request's task learns by itself."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def guard(self) -> None:
        """From now on the framework writes, and waits for as long as the reader likes: cut it if it stops reading."""
        self._is_guarded = True
        if self._look is None:
            self._watch()

    def close(self) -> None:
        """The request is over."""
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def abort(self) -> None:
        """Cut the connection: the body ends without its end, which every client takes for an error."""
        if self._transport is not None:
            self._transport.abort()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._blocked_at, self._blocked_size = loop.time(), self.num_unsent
        self._pause_s = _LOOK_S if not self._is_guarded else _SELDOM_S
        self._look = loop.call_later(self._pause_s, self._look_again)

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._look = None
        size = self.num_unsent
        if size <= _HIGH_WATER:
            self._on_writable(self)
            if self._is_guarded and self._look is None:
                self._watch()
            return
        if size != self._blocked_size:  # slow, but it reads; or the framework added more
            self._blocked_at, self._blocked_size = loop.time(), size
            self._pause_s = _LOOK_S
        else:
            self._pause_s = min(2 * self._pause_s, _SELDOM_S)
        if loop.time() - self._blocked_at > self._patience_s:
            self._on_cut()
            self.abort()
        else:
            self._look = loop.call_later(self._pause_s, self._look_again)
