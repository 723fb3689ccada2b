"""The gateway's connection to its engine: the same protocol that clients speak, raw messages on it.

Lost means: the connection broke (libzmq says so at once), or nothing came for the engine's heartbeat timeout. A lost link
stays lost; the supervisor decides what follows.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from pagewire.errors import ConnectionLost, PagewireError, from_code
from pagewire_transport import codec
from pagewire_transport.messages import (
    Error,
    FromClient,
    FromServer,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Welcome,
)
from pagewire_transport.sockets import ClientSocket, PeerGone

_log: Final = structlog.get_logger()


class EngineLink:
    """A connection to one engine.

    What cannot be sent at once is kept in order and sent as soon as the socket takes it. That is bounded by what the
    clients' streams can ask for: one `generate`, some `finish`, one `cancel` each.

    Args:
        url: where the engine listens; it need not listen yet.
        on_message: takes every message but greetings and heartbeats.
        on_lost: called once, with the reason.
        max_message_bytes: of the engine's messages.
    """

    def __init__(
        self,
        url: str,
        *,
        on_message: Callable[[FromServer], None],
        on_lost: Callable[[ConnectionLost], None],
        max_message_bytes: int = codec.MAX_REPLY_BYTES,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._unsent: deque[bytes] = deque()
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._heartbeat: asyncio.Task[None] | None = None
        self._is_lost = False
        self._is_ready = False
        self._heard = time.monotonic()
        self._socket = ClientSocket(
            url,
            on_frame=self._on_frame,
            on_change=self._flush,
            on_disconnect=lambda: self._lose("the connection to the engine broke"),
            max_message_bytes=max_message_bytes,
        )

    @property
    def is_ready(self) -> bool:
        """The engine is there, and its last heartbeat said that tokens move."""
        return self._is_ready and not self._is_lost

    async def connect(self, client: str) -> Welcome:
        """Greet the engine, wait for its answer, and keep the connection alive from then on.

        Raises:
            PagewireError: it refuses us, or the connection broke.
        """
        self.send(Hello(client=client))
        welcome = await self._welcome
        self._is_ready = True
        self._heartbeat = asyncio.create_task(self._beat(welcome), name="heartbeat to the engine")
        return welcome

    def send(self, message: FromClient) -> None:
        """Send, now or as soon as the socket takes it. To a lost engine nothing is sent."""
        if not self._is_lost:
            self._unsent.append(codec.encode(message))
            self._flush()

    async def close(self) -> None:
        """Say goodbye and close. Idempotent."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
            self._heartbeat = None
        self.send(Goodbye())
        self._is_lost = True
        self._welcome.cancel()
        await self._socket.close()

    def _flush(self) -> None:
        try:
            while self._unsent and self._socket.try_send(self._unsent[0]):
                self._unsent.popleft()
        except PeerGone:
            self._lose("the connection to the engine is closed")

    def _on_frame(self, frame: bytes) -> None:
        self._heard = time.monotonic()
        try:
            message = codec.decode_server(frame)
        except PagewireError as error:
            _log.error("engine_sent_no_message", error=str(error))
            return
        if isinstance(message, Pong):
            self._is_ready = message.ready
        elif not self._welcome.done():
            self._greeted(message)
        else:
            self._on_message(message)

    def _greeted(self, message: FromServer) -> None:
        if isinstance(message, Welcome):
            self._welcome.set_result(message)
        elif isinstance(message, Error):
            self._welcome.set_exception(from_code(message.code, message.message, field=message.field))

    async def _beat(self, welcome: Welcome) -> None:
        nonce = 0
        while not self._is_lost:
            nonce += 1
            self.send(Ping(nonce=nonce))
            await asyncio.sleep(welcome.heartbeat_ms / 1000)
            silence = time.monotonic() - self._heard
            if silence > welcome.heartbeat_timeout_ms / 1000:
                self._lose(f"the engine said nothing for {silence:.1f} s")

    def _lose(self, reason: str) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._unsent.clear()
        error = ConnectionLost(reason)
        if not self._welcome.done():
            self._welcome.set_exception(error)
        self._on_lost(error)
