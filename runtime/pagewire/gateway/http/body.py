"""Bodies of requests: read inside limits of size and time, and decoded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from pagewire.config import HttpConfig
from pagewire.errors import InvalidRequest, Overloaded
from pagewire.gateway.http.errors import HttpRefusal
from pagewire_transport.codec import refusal_of

_T = TypeVar("_T")

_AT_ONCE: Final = 16
_RETRY_AFTER_MS: Final = 1000
_CLOSE: Final = {"Connection": "close"}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        name: for logs.
        namespace: of the prefix cache: each key has its own, so that no caller can tell by its answer's timing what
            another one asked (F33). Without keys there is one.
    """

    name: str = "http"
    namespace: str = ""


class Bodies:
    """Reads bodies. All that are being read at once may have `_AT_ONCE` times the largest one's bytes (F50)."""

    def __init__(self, limits: HttpConfig) -> None:
        self._limits = limits
        self._room = _AT_ONCE * limits.max_body_bytes

    async def read(self, request: web.BaseRequest, kind: type[_T]) -> _T:
        """The body as `kind`.

        Raises:
            HttpRefusal: no JSON by its type, too large, or not here in time.
            Overloaded: too many others are being read.
            InvalidRequest: no JSON, or a field of the wrong type; it is named.
        """
        most = self._limits.max_body_bytes
        _check_head(request, most)
        size = most if request.content_length is None else request.content_length
        if size > self._room:
            raise Overloaded("too many large requests are being read", retry_after_ms=_RETRY_AFTER_MS)
        self._room -= size
        try:
            data = await self._bytes(request)
        finally:
            self._room += size
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            raise refusal_of(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}"[:300]) from None

    async def _bytes(self, request: web.BaseRequest) -> bytes:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._limits.body_timeout_ms / 1000):
                return await request.read()
        except TimeoutError:
            raise HttpRefusal(408, "the body did not come in time", code="timeout", headers=_CLOSE) from None
        except web.HTTPRequestEntityTooLarge:
            raise _too_large(self._limits.max_body_bytes) from None
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body is damaged: {error}") from None


def _check_head(request: web.BaseRequest, most: int) -> None:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise HttpRefusal(415, "compressed bodies are not taken", code="unsupported_media_type")
    # A web page of another origin cannot send this type without asking first, and then hears no.
    if request.content_type != "application/json":
        raise HttpRefusal(
            415, "the body must be JSON, with the header Content-Type: application/json", code="unsupported_media_type"
        )
    if (request.content_length or 0) > most:
        raise _too_large(most)


def _too_large(most: int) -> HttpRefusal:
    return HttpRefusal(413, f"the body has more than {most} bytes", code="body_too_large", headers=_CLOSE)
