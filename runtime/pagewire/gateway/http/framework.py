"""aiohttp's low-level server where it would answer by itself: refusals in OpenAI's shape, and no word of its version.

What is overridden is no public part of aiohttp; `tests/http/test_door.py` and `test_chat.py` would notice if it went.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from pagewire.errors import InternalError
from pagewire.gateway.http.errors import HttpRefusal, error_response

_GONE: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Request(web.BaseRequest):
    """A request whose answer does not name the software that gives it."""

    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        response.headers.pop("Server", None)


class Server(web.Server):
    """Makes `_Handler`s, and tells of connections that come and go."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        on_made: Callable[[RequestHandler], None],
        on_lost: Callable[[RequestHandler], None],
        **options: Any,
    ) -> None:
        super().__init__(handler, **options)
        self._on_made = on_made
        self._on_lost = on_lost
        self._unheard: dict[RequestHandler, None] = {}

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._on_made(handler)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        self._unheard.pop(handler, None)
        super().connection_lost(handler, exc)
        self._on_lost(handler)

    def hears(self, handler: RequestHandler, *, heard: bool) -> None:
        """Whether what this connection sends is read now, or is more than may wait behind the request being answered."""
        if heard:
            self._unheard.pop(handler, None)
        else:
            self._unheard[handler] = None

    def left_unheard(self) -> list[RequestHandler]:
        """Those whose clients left while nothing of theirs was read: the end stands behind what is not read, so that the
        loop does not see it, and what they asked for would go on for nobody (F15).
        """
        return [handler for handler in self._unheard if _is_gone(handler.transport)]

    def __call__(self) -> RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)


class _Handler(RequestHandler):
    __slots__ = ("_server",)

    def __init__(self, server: Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server

    def _pause_transport_reading(self) -> None:
        super()._pause_transport_reading()
        self._server.hears(self, heard=self.transport is None)

    def _resume_transport_reading(self) -> None:
        super()._resume_transport_reading()
        self._server.hears(self, heard=True)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What cannot be read as a request, or a fault in the framework itself; the connection is closed after it."""
        super().handle_error(request, status, exc, message)  # it raises where an answer has begun already
        if status >= 500:
            response = error_response(InternalError("the request could not be answered"))
        else:
            response = error_response(HttpRefusal(status, _reason(exc, message or ""), code="bad_request"))
        response.force_close()
        return response


def _is_gone(transport: asyncio.BaseTransport | None) -> bool:
    """The other side said its end, or was cut off; the kernel knows, whatever is still to be read."""
    peer = None if transport is None else transport.get_extra_info("socket")
    if peer is None or peer.fileno() < 0:
        return False
    asked = select.poll()
    asked.register(peer.fileno(), select.POLLRDHUP)
    return any(events & _GONE for _, events in asked.poll(0))


def _reason(error: BaseException | None, message: str) -> str:
    if isinstance(error, LineTooLong):
        return "the first line, a header or all headers together are too long"
    if "HTTPS" in message:
        return "this port speaks HTTP without TLS: ask with http://, or through a proxy that ends TLS"
    if "Too many headers" in message:
        return "the request has too many headers"
    return "this is no HTTP request that can be read"
