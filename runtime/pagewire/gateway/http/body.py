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


class _Reading:
    """A body that is being read."""

    __slots__ = ("data", "is_given_up", "timeout")

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self.timeout = timeout
        self.data = bytearray()
        self.is_given_up = False

    def check(self) -> None:
        """Raises Overloaded: it was given up."""
        if self.is_given_up:
            raise Overloaded("too many requests are being read", retry_after_ms=_RETRY_AFTER_MS)


class Bodies:
    """Reads bodies. All that are being read are `max_requests` at most, and may have `_AT_ONCE` times the largest one's
    bytes; beyond that the one that was begun first is given up (F50).

    What counts is what has come, not what was announced, and the newcomer is let in, not refused: else a few who send
    a byte a second, or announce much, would keep everybody out for as long as they like.
    """

    def __init__(self, limits: HttpConfig) -> None:
        self._limits = limits
        self._max_bytes = _AT_ONCE * limits.max_body_bytes
        self._num_bytes = 0
        self._readings: dict[_Reading, None] = {}  # the one begun first is first

    @property
    def num_reading(self) -> int:
        """Bodies that are not here as a whole yet."""
        return len(self._readings)

    async def read(self, request: web.BaseRequest, kind: type[_T]) -> _T:
        """The body as `kind`.

        Raises:
            HttpRefusal: no JSON by its type, too large, or not here in time.
            Overloaded: so many others came meanwhile that this one, which took longest, was given up.
            InvalidRequest: no JSON, or a field of the wrong type; it is named.
        """
        _check_head(request, self._limits.max_body_bytes)
        data = await self._bytes(request)
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            raise refusal_of(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is not JSON: {error}"[:300]) from None

    async def _bytes(self, request: web.BaseRequest) -> bytearray:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        reading = _Reading(asyncio.timeout(self._limits.body_timeout_ms / 1000))
        try:
            async with reading.timeout:
                self._readings[reading] = None
                self._make_room()
                while chunk := await request.content.readany():
                    reading.check()
                    reading.data += chunk
                    self._num_bytes += len(chunk)
                    if len(reading.data) > self._limits.max_body_bytes:
                        raise _too_large(self._limits.max_body_bytes)
                    self._make_room()
                    reading.check()
            reading.check()
        except TimeoutError:
            reading.check()
            raise HttpRefusal(408, "the body did not come in time", code="timeout", headers=_CLOSE) from None
        except RuntimeError:
            if request.protocol.connected:
                raise
            raise ConnectionResetError("the client left") from None  # the framework knows no better word for it
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body is damaged: {error}") from None
        finally:
            self._forget(reading)
        return reading.data

    def _make_room(self) -> None:
        while len(self._readings) > self._limits.max_requests or self._num_bytes > self._max_bytes:
            first = next(iter(self._readings))
            self._forget(first)
            first.is_given_up = True
            first.data = bytearray()
            if not first.timeout.expired():  # else it ends in this turn of the loop by itself
                first.timeout.reschedule(asyncio.get_running_loop().time())

    def _forget(self, reading: _Reading) -> None:
        """It is no longer read. Idempotent."""
        if reading in self._readings:
            del self._readings[reading]
            self._num_bytes -= len(reading.data)

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        assert self._num_bytes == sum(len(reading.data) for reading in self._readings)
        assert self._num_bytes <= self._max_bytes
        assert len(self._readings) <= self._limits.max_requests


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
