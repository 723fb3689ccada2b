"""A door: what engine and gateway share towards their clients. Who is connected, who is alive, who misbehaves.

    stranger ── hello ──▶ connection ── generate, cancel, … ──────▶ handler
       │                      │  silent, gone, goodbye, hello again, too many offences, reads no replies
       │ anything else        ▼
       ▼                   lost: `handler.on_lost`, once, whatever the reason
    refused; ignored for a while after too many offences

A stranger that does not say hello in time, or is one of too many, is cut (`strangers`); so is a connection that was lost and
does not begin anew. Bounded (F11, F18): connections, of all and of each key, strangers, remembered offenders, and frames
that a peer does not take.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from pagewire_transport.codec import decode_client, encode, stream_to_refuse
from pagewire_transport.connection import Connection
from pagewire_transport.curve import ServerCurve
from pagewire_transport.errors import (
    Cancelled,
    ConnectionLost,
    InternalError,
    Overloaded,
    PagewireError,
    ProtocolError,
    SlowReader,
    Unauthorized,
    VersionMismatch,
)
from pagewire_transport.files import Files
from pagewire_transport.handler import Admin, DoorLimits, Handler, StreamMessage
from pagewire_transport.limits import Limits
from pagewire_transport.messages import (
    PROTOCOL_VERSION,
    AdminDone,
    Drain,
    Error,
    FromServer,
    Generate,
    GetFile,
    GetLoad,
    GetStats,
    Goodbye,
    Hello,
    Load,
    Ping,
    Pong,
    Reload,
    Resume,
    Stats,
)
from pagewire_transport.offenders import Offenders
from pagewire_transport.sockets import PeerGone, ServerSocket
from pagewire_transport.strangers import Strangers
from pagewire_transport.tally import Tally

HELLO_FIRST: Final = "hello"
"""`field` of the refusal that tells a client that it is not (or no longer) known here."""

_RETRIES_A_ROUND: Final = 32
_RETRY_AFTER_MS: Final = 1000


class Door:
    """Listens, keeps connections, hands messages to the handler. Made on a running loop.

    Args:
        url: where to listen; `url` is the real address.
        handler: what stands behind it.
        limits: see there.
        on_fault: told of exceptions of our own code: (what was being done, the exception).
        files: what `get_file` serves.
        admin: takes `drain` and `reload`; None: they are refused here.
        curve: keys, and who may connect; without them only ipc and loopback are.
        now_ns: the clock for heartbeats.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(
        self,
        url: str,
        *,
        handler: Handler,
        limits: DoorLimits,
        on_fault: Callable[[str, Exception], None],
        files: Files | None = None,
        admin: Admin | None = None,
        curve: ServerCurve | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._on_fault = on_fault
        self._files = files or Files()
        self._admin = admin
        self._curve = curve
        self._now_ns = now_ns
        self._loop = asyncio.get_running_loop()
        self._connections: dict[bytes, Connection] = {}
        self._blocked: dict[Connection, None] = {}
        self._offenders = Offenders(limits.max_offences)
        self._of_key = Tally()
        self._retry: asyncio.TimerHandle | None = None
        self._socket = ServerSocket(
            url,
            on_frame=self._on_frame,
            on_change=self._on_change,
            max_message_bytes=limits.max_message_bytes,
            strangers=Strangers(max_num=limits.max_strangers, timeout_ms=limits.hello_timeout_ms),
            handshake_ms=limits.hello_timeout_ms,
            curve=curve,
            now_ns=now_ns,
        )
        self.url = self._socket.url
        self._tick_ns = max(min(limits.heartbeat_timeout_ms, limits.hello_timeout_ms) * 1_000_000 // 4, 5_000_000)
        self._ticked_ns = now_ns()
        self._ticker = self._loop.call_later(self._tick_ns * 1e-9, self._tick)

    @property
    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [connection for connection in self._connections.values() if connection.is_open]

    @property
    def num_closed(self) -> int:
        """Connections of libzmq's, strangers among them, that came and went since the start."""
        return self._socket.num_closed

    async def close(self) -> None:
        """Send what was sent, stop listening, free the address. The handler is not told of the connections' end."""
        self._ticker.cancel()
        if self._retry is not None:
            self._retry.cancel()
        for connection in self._connections.values():
            connection.flush()
            connection.is_open = False
        self._connections.clear()
        self._blocked.clear()
        await self._socket.close()

    @property
    def num_connections(self) -> int:
        """Peers that were welcomed and are not lost."""
        return len(self._connections)

    def check_keys(self) -> None:
        """Lose whose key was taken off the list. Done several times in `heartbeat_timeout_ms`, and when asked."""
        if self._curve is not None:
            for connection in list(self._connections.values()):
                if not self._may_stay(connection.user):
                    self._lose(connection, Unauthorized("its key was taken off the list"))

    def _may_stay(self, user: str) -> bool:
        return self._curve is None or self._curve.allowed.name_of(user) is not None

    # ---- to peers ----------------------------------------------------------------------------------------------------

    def try_send(self, connection: Connection, frame: bytes) -> bool:
        """For `Connection`. A peer that turns out to be gone is lost in the next round, not under the caller's feet."""
        if not connection.is_open:
            return False
        try:
            return self._socket.try_send(connection.peer, frame)
        except PeerGone as gone:
            self._lose_soon(connection, gone)
            return False

    def keep(self, connection: Connection, frame: bytes, unsent: deque[bytes]) -> None:
        """For `Connection`."""
        if not connection.is_open:
            return
        if len(unsent) >= self._limits.max_unsent:
            self._lose_soon(connection, Overloaded(f"the peer left {len(unsent)} replies unread"))
            return
        if not unsent:
            connection.blocked_ns = self._now_ns()
        unsent.append(frame)
        self._blocked[connection] = None

    def _on_change(self) -> None:
        """Peers may take frames again. A few are tried each round: a thousand stopped ones must not hold up the loop."""
        if not self._blocked or self._retry is not None:
            return
        for _ in range(min(len(self._blocked), _RETRIES_A_ROUND)):
            connection = next(iter(self._blocked))
            del self._blocked[connection]
            if not connection.is_open:
                continue
            waiting = connection.num_unsent
            if connection.flush():
                self._guarded(connection, "going on with a connection", self._handler.on_writable, connection)
            else:
                self._blocked[connection] = None
                if connection.num_unsent < waiting:
                    connection.blocked_ns = self._now_ns()
        if len(self._blocked) > _RETRIES_A_ROUND:
            self._retry = self._loop.call_later(0.002, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._on_change()

    # ---- from peers --------------------------------------------------------------------------------------------------

    def _on_frame(self, peer: bytes, frame: bytes) -> None:
        connection = self._connections.get(peer)
        try:
            if connection is None:
                self._take_of_stranger(peer, frame)
            elif connection.is_open:
                connection.heard_ns = self._now_ns()
                if self._socket.is_strange:
                    self._socket.welcomed(peer)
                self._take(connection, frame)
        except Exception as error:  # noqa: BLE001  (nothing that a peer sends gets out of the loop: F11)
            self._on_fault("taking a frame", error)

    def _take(self, connection: Connection, frame: bytes) -> None:
        try:
            message = decode_client(frame, self._limits.max_message_bytes)
        except PagewireError as error:
            stream = stream_to_refuse(frame)
            self._refuse(connection, error, stream)
            if isinstance(error, ProtocolError):
                connection.offences += 1
                if connection.offences >= self._limits.max_offences:
                    self._offenders.ignore(connection.peer, self._now_ns())
                    self._lose(connection, ProtocolError("too many messages that are none"))
            return
        if isinstance(message, StreamMessage):
            stream = message.stream if isinstance(message, Generate | Resume) else None
            try:
                self._handler.on_message(connection, message)
            except PagewireError as error:
                self._refuse(connection, error, stream)
            except Exception as error:  # noqa: BLE001  (F7: a fault of ours ends this request, never the process)
                self._on_fault(f"taking a {type(message).__name__}", error)
                self._refuse(connection, InternalError(f"{type(error).__name__} while taking the message"), stream)
        elif isinstance(message, Ping):
            is_ready = self._handler.is_ready
            reason = "" if is_ready else self._handler.unready
            connection.try_send(Pong(nonce=message.nonce, ready=is_ready, reason=reason))
        elif isinstance(message, GetStats | GetLoad | GetFile | Drain | Reload):
            try:
                if connection.is_blocked:  # else a peer that asks and does not read would make us keep the answers
                    raise Overloaded("read the answers first", retry_after_ms=_RETRY_AFTER_MS)
                connection.send(self._answer(message))
            except PagewireError as error:
                self._refuse(connection, error, None)
        elif isinstance(message, Goodbye):
            self._lose(connection, Cancelled("the client said goodbye"))
        else:
            # Another process under the same identity, or a client that gave its streams up: it starts anew (F12).
            self._lose(connection, ConnectionLost("the client said hello again"))
            self._greet(connection.peer, message)

    def _answer(self, message: GetStats | GetLoad | GetFile | Drain | Reload) -> FromServer:
        """What needs no stream.

        Raises:
            PagewireError: it is refused.
        """
        if isinstance(message, GetFile):
            return self._files.piece(message)
        if isinstance(message, GetStats | GetLoad):
            stats = self._handler.stats()
            return (
                Stats(values=stats) if isinstance(message, GetStats) else _load(stats, is_ready=self._handler.is_ready)
            )
        if self._admin is None:
            raise Unauthorized("taken at the server's admin socket only", field="t")
        if isinstance(message, Drain):
            return AdminDone(what="drain", message=self._admin.drain())
        return AdminDone(what="reload", message=self._admin.reload())

    def _refuse(self, connection: Connection, error: PagewireError, stream: int | None) -> None:
        if stream is not None and self._handler.has_stream(connection, stream):
            stream = None
        connection.send(refusal(error, stream))

    def _take_of_stranger(self, peer: bytes, frame: bytes) -> None:
        if self._offenders.is_ignored(peer, self._now_ns()):
            return
        try:
            message = decode_client(frame, self._limits.max_message_bytes)
            if isinstance(message, Hello):
                self._greet(peer, message)
                return
            raise ProtocolError("this connection is not known here: say hello first", field=HELLO_FIRST)
        except PagewireError as error:
            self._answer_stranger(peer, refusal(error, stream_to_refuse(frame)))
        self._offenders.offended(peer, self._now_ns())

    def _greet(self, peer: bytes, hello: Hello) -> None:
        try:
            if not self._may_stay(self._socket.user):  # libzmq let it connect before it was taken off the list
                raise Unauthorized("this key is not on the list any more")
            if PROTOCOL_VERSION not in hello.versions:
                raise VersionMismatch(f"spoken here: version {PROTOCOL_VERSION}", field="versions")
            if len(self._connections) >= self._limits.max_connections:
                raise Overloaded(
                    f"{self._limits.max_connections} connections are open, no more are allowed",
                    retry_after_ms=_RETRY_AFTER_MS,
                )
            most = self._limits.max_connections_per_key
            if self._socket.user and self._of_key.of(self._socket.user) >= most:
                raise Overloaded(
                    f"this key has {most} connections, no more are allowed", retry_after_ms=_RETRY_AFTER_MS
                )
            welcome = msgspec.structs.replace(
                self._handler.welcome(),
                limits=Limits(max_offences=self._limits.max_offences),
                files=self._files.infos,
            )
        except PagewireError as error:
            self._answer_stranger(peer, refusal(error, None))
            if error.retry_after_ms is not None:
                self._socket.refused()
            return
        self._offenders.forgive(peer)
        connection = Connection(self, peer, hello.client, self._now_ns(), self._socket.user)
        self._connections[peer] = connection
        self._of_key.add(connection.user)
        self._socket.welcomed(peer)
        connection.send(welcome)

    def _answer_stranger(self, peer: bytes, message: FromServer) -> None:
        try:
            self._socket.try_send(peer, encode(message))
        except PeerGone:
            return

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _lose_soon(self, connection: Connection, reason: PagewireError) -> None:
        connection.is_open = False
        self._loop.call_soon(self._lose, connection, reason)

    def _lose(self, connection: Connection, reason: PagewireError) -> None:
        """The one way out of a connection. Idempotent."""
        if self._connections.get(connection.peer) is not connection:
            return
        connection.is_open = False
        del self._connections[connection.peer]
        self._of_key.remove(connection.user)
        self._blocked.pop(connection, None)
        self._socket.lost(connection.peer)
        self._guarded(connection, "ending a connection", self._handler.on_lost, connection, reason)

    def _tick(self) -> None:
        """Find the silent, and those that read nothing. After a tick that comes late (the process was stopped, the machine slept) nobody is judged:
        what the peers sent meanwhile is still in the socket.
        """
        now_ns = self._now_ns()
        is_late = now_ns - self._ticked_ns > 2 * self._tick_ns
        self._ticked_ns = now_ns
        self._ticker = self._loop.call_later(self._tick_ns * 1e-9, self._tick)
        if is_late:
            return
        self._socket.cut_strangers()
        timeout_ms = self._limits.heartbeat_timeout_ms
        for connection in list(self._connections.values()):
            if now_ns - connection.heard_ns > timeout_ms * 1_000_000:
                self._lose(connection, ConnectionLost(f"the client was silent for {timeout_ms} ms"))
        unread_ms = self._limits.unread_timeout_ms
        for connection in list(self._blocked) if unread_ms else ():
            if connection.num_unsent and now_ns - connection.blocked_ns > unread_ms * 1_000_000:
                self._lose(connection, SlowReader(f"the client read nothing for {unread_ms} ms"))
        self.check_keys()
        self._offenders.expire(now_ns)
        self._on_change()

    def _guarded(
        self, connection: Connection, doing: str, call: Callable[..., None], *arguments: Connection | PagewireError
    ) -> None:
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001  (a fault of one connection's handling is no other's)
            self._on_fault(f"{doing} ({connection.client})", error)


def refusal(error: PagewireError, stream: int | None) -> Error:
    """The message that tells a client about `error`; with `stream`, that stream is over."""
    return Error(
        code=error.code,
        message=error.message,
        stream=stream,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        predicted_ttft_ms=error.predicted_ttft_ms,
    )


def _load(stats: dict[str, float], *, is_ready: bool) -> Load:
    def of(*names: str) -> int:
        return int(sum(stats.get(name, 0.0) for name in names))

    return Load(
        ready=is_ready,
        running=of("sequences_running"),
        waiting=of("sequences_waiting", "gateway_prompts_waiting"),
        kv_blocks=of("kv_blocks"),
        kv_blocks_used=of("kv_blocks_used"),
    )
