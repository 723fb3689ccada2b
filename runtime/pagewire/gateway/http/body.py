"""Bodies of requests: read inside limits of size and time, and decoded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from pagewire.config import HttpConfig
from pagewire.errors import InvalidRequest
from pagewire.gateway.http.errors import HttpRefusal
from pagewire_transport.codec import refusal_of

_T = TypeVar("_T")


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


async def read_body(request: web.BaseRequest, kind: type[_T], limits: HttpConfig) -> _T:
    """The body as `kind`.

    Raises:
        HttpRefusal: no JSON by its type, too large, or not here in time.
        InvalidRequest: no JSON, or a field of the wrong type; it is named.
    """
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise HttpRefusal(415, "compressed bodies are not taken", code="unsupported_media_type")
    # A web page of another origin cannot send this type without asking first, and then hears no.
    if request.content_type != "application/json":
        raise HttpRefusal(
            415, "the body must be JSON, with the header Content-Type: application/json", code="unsupported_media_type"
        )
    too_large = HttpRefusal(
        413,
        f"the body has more than {limits.max_body_bytes} bytes",
        code="body_too_large",
        headers={"Connection": "close"},
    )
    if (request.content_length or 0) > limits.max_body_bytes:
        raise too_large
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(limits.body_timeout_ms / 1000):
            data = await request.read()
    except TimeoutError:
        raise HttpRefusal(
            408, "the body did not come in time", code="timeout", headers={"Connection": "close"}
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body is damaged: {error}") from None
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise refusal_of(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}"[:300]) from None
