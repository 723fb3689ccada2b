"""What a check is: a name, a function over raw connections, and an outcome."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec

from pagewire_transport.client_socket import ClientSocket
from pagewire_transport.codec import MAX_REPLY_BYTES, decode_server, encode
from pagewire_transport.curve import ClientCurve
from pagewire_transport.errors import ProtocolError
from pagewire_transport.messages import Error, FromClient, FromServer, Hello, Ping, Pong, Welcome

_T = TypeVar("_T", bound=FromServer)
_WHILE_LISTENING: Final = 2**62
"""Nonce of the pings of who waits; their pongs are nobody's business."""


class CheckError(Exception):
    """The server does not do what the protocol says."""


class SkipCheck(Exception):  # noqa: N818
    """This server has nothing to check here; the text says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one check. `why` says what was wrong, or why there was nothing to check."""

    name: str
    verdict: Literal["ok", "FAIL", "skip"]
    why: str = ""


def frame(**fields: Any) -> bytes:
    """Any map as a frame of version 1."""
    return b"\1" + msgspec.msgpack.encode(fields)


class Peer:
    """One raw connection. Frames come in the order in which they were sent."""

    def __init__(self, url: str, curve: ClientCurve | None, timeout_s: float) -> None:
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._timeout_s = timeout_s
        self._nonces = itertools.count(1)
        self._heartbeat_s = timeout_s
        self._ping_at = 0.0
        self._socket = ClientSocket(
            url,
            on_frame=self._frames.put_nowait,
            on_change=lambda: None,
            on_disconnect=lambda: None,
            curve=curve,
            max_message_bytes=MAX_REPLY_BYTES,
        )

    def send(self, message: FromClient | bytes) -> None:
        """A message, or any bytes."""
        if not self._socket.try_send(message if isinstance(message, bytes) else encode(message)):
            raise CheckError("the server takes no frames any more")

    def send_parts(self, parts: list[bytes]) -> None:
        """A message of several frames."""
        self._socket._socket.send_multipart(parts)

    async def receive(self) -> FromServer:
        """The next message.

        Raises:
            CheckError: none came in time, or it is none of the protocol.
        """
        message = await self.try_receive(self._timeout_s)
        if message is None:
            raise CheckError(f"nothing came within {self._timeout_s:g} s")
        return message

    async def try_receive(self, timeout_s: float) -> FromServer | None:
        """The same; None if nothing came."""
        while True:
            try:
                data = await asyncio.wait_for(self._frames.get(), timeout_s)
            except TimeoutError:
                return None
            try:
                message = decode_server(data)
            except ProtocolError as error:
                raise CheckError(f"the server sent what is no message: {error} ({data[:40].hex(' ')} …)") from None
            if not (isinstance(message, Pong) and message.nonce == _WHILE_LISTENING):
                return message

    async def listen(self) -> FromServer:
        """As `receive`, and pings meanwhile: a server that is slow must not take its listener for lost."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout_s
        while (now := loop.time()) < until:
            if now >= self._ping_at:
                self.send(Ping(nonce=_WHILE_LISTENING))
                self._ping_at = now + self._heartbeat_s
            message = await self.try_receive(min(until, self._ping_at) - now)
            if message is not None:
                return message
        raise CheckError(f"nothing came within {self._timeout_s:g} s")

    async def expect(self, kind: type[_T]) -> _T:
        """The next message, which is of this kind."""
        message = await self.receive()
        if not isinstance(message, kind):
            raise CheckError(f"a `{kind.__struct_config__.tag}` was due, and there came {message}")
        return message

    async def expect_error(self, code: str, *, field: str | None = None, stream: int | None = None) -> Error:
        """The next message, which is this error."""
        error = await self.expect(Error)
        wanted = (code, field, stream)
        if (error.code, error.field, error.stream) != wanted:
            raise CheckError(f"an error with (code, field, stream) = {wanted} was due, and there came {error}")
        return error

    async def hello(self) -> Welcome:
        """Say it, and be let in."""
        self.send(Hello(client="pagewire wire-check"))
        welcome = await self.expect(Welcome)
        self._heartbeat_s = welcome.heartbeat_ms * 1e-3
        self._ping_at = asyncio.get_running_loop().time() + self._heartbeat_s
        return welcome

    async def is_alive(self) -> None:
        """The connection is still served, and nothing unexpected is on its way."""
        nonce = next(self._nonces)
        self.send(Ping(nonce=nonce))
        message = await self.receive()
        if not isinstance(message, Pong) or message.nonce != nonce:
            raise CheckError(f"a `pong` was due, and there came {message}")

    def close(self) -> None:
        """Break the connection, without a goodbye."""
        self._socket.abandon()


class Bench:
    """What a check gets: connections to the server, which are closed behind it."""

    def __init__(self, url: str, curve: ClientCurve | None, timeout_s: float, patience_s: float) -> None:
        self._url, self._curve = url, curve
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self._peers: list[Peer] = []

    def stranger(self) -> Peer:
        """A connection over which nothing was said."""
        peer = Peer(self._url, self._curve, self.timeout_s)
        self._peers.append(peer)
        return peer

    async def peer(self) -> Peer:
        """A connection that was let in."""
        peer = self.stranger()
        await peer.hello()
        return peer

    async def welcomed(self) -> tuple[Peer, Welcome]:
        """The same, and what the server says of itself."""
        peer = self.stranger()
        return peer, await peer.hello()

    def close(self) -> None:
        """Break every connection."""
        while self._peers:
            self._peers.pop().close()


Check = Callable[[Bench], Awaitable[None]]
