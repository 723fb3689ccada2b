"""aiohttp's low-level server where it would answer by itself: refusals in OpenAI's shape, and no word of its version.

What is overridden is no public part of aiohttp; `tests/http/test_door.py` would notice if it went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from pagewire.errors import InternalError
from pagewire.gateway.http.errors import HttpRefusal, error_response


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

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._on_made(handler)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._on_lost(handler)

    def __call__(self) -> RequestHandler:
        return _Handler(self, loop=self._loop, **self._kwargs)


class _Handler(RequestHandler):
    __slots__ = ()

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


def _reason(error: BaseException | None, message: str) -> str:
    if isinstance(error, LineTooLong):
        return "the first line, a header or all headers together are too long"
    if "HTTPS" in message:
        return "this port speaks HTTP without TLS: ask with http://, or through a proxy that ends TLS"
    if "Too many headers" in message:
        return "the request has too many headers"
    return "this is no HTTP request that can be read"
