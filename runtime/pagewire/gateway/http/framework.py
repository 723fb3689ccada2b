"""aiohttp's low-level server where it would answer by itself: refusals in OpenAI's shape, and no word of its version.

What is overridden is no public part of aiohttp; `tests/http/test_door.py` would notice if it went.
"""

from __future__ import annotations

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
    """Makes `_Handler`s."""

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
