"""ZeroMQ sockets on an asyncio loop, without zmq.asyncio: plain calls that never wait.

A ZeroMQ socket has a file descriptor that says "something changed", once: it is edge-triggered, and any call on the
socket (a send, too) may swallow the edge. So after activity the socket's own state is looked at again: by one callback
however many calls there were, in the next round of the loop, or a millisecond later if it was looked at within the last
one (a look costs 6 µs, as much as a send). What arrives is taken in bounded batches, so that a flood from one peer leaves
the loop its turns.

zmq.asyncio was measured at 250 µs a message against 177 (it makes a future for each call, and looks at the socket after
every one).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import zmq
from zmq.backend import Socket as Backend
from zmq.utils.monitor import parse_monitor_message

from pagewire_transport.curve import USER, ClientCurve, ServerCurve, ZapHandler
from pagewire_transport.endpoints import Binding, bind, parse
from pagewire_transport.errors import ConfigError, ConnectionLost

BATCH: Final = 64
"""Frames taken in one round of the loop."""

SEND_HWM: Final = 128
"""Frames that libzmq holds for one peer beyond what the kernel takes. A tokens frame has a few KiB."""
RECEIVE_HWM: Final = 32

LOOK_EVERY_S: Final = 1e-3
"""Between two looks at the socket that only a send gave reason for."""

LINGER_MS: Final = 500
"""At close, time for what was sent and is not with the kernel yet."""

_POLLIN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_SNDMORE: Final = int(zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)

_WATCHED: Final = int(
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_ZAP_REFUSED: Final = 400


class PeerGone(ConnectionLost):
    """The peer's connection no longer exists."""


class _LoopSocket:
    """What both sockets share: the watch on the descriptor, and the end.

    Args:
        on_change: called after each round of activity; peers that could take nothing may be able to again.
    """

    def __init__(self, kind: int, max_message_bytes: int, send_hwm: int, receive_hwm: int) -> None:
        self._loop = asyncio.get_running_loop()
        # A context of its own, so that closing can wait for this socket alone, and no fork or library shares it.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(kind)
        self._is_open = True
        self._is_round_due = self._is_more_due = False
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, send_hwm)
        self._socket.setsockopt(zmq.RCVHWM, receive_hwm)
        # A frame of up to twice the limit is answered with an error; beyond that libzmq cuts the connection unread.
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_message_bytes)
        # The compiled methods themselves: the wrappers around them take a third of a small send's time.
        self._send: Callable[..., None] = Backend.send.__get__(self._socket)
        self._receive: Callable[[int], bytes] = Backend.recv.__get__(self._socket)
        self._get: Callable[[int], int] = Backend.get.__get__(self._socket)
        self._looked_s = 0.0

    @property
    def is_open(self) -> bool:
        """`close` was not called."""
        return self._is_open

    def _watch(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._round)
        self._due()

    def _due(self) -> None:
        """Look at the socket soon: the edge may have been swallowed."""
        if self._is_round_due or not self._is_open:
            return
        self._is_round_due = True
        if self._loop.time() - self._looked_s < LOOK_EVERY_S:
            self._loop.call_later(LOOK_EVERY_S, self._round)
        else:
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        if not self._is_open:
            return
        self._is_round_due = False
        if self._is_more_due:  # it will look at everything
            return
        self._looked_s = self._loop.time()
        self.receive_now()
        if self._is_open:
            self._changed()

    def receive_now(self, limit: int = BATCH) -> int:
        """Take what has arrived, `limit` frames at most; how many there were."""
        for count in range(limit):
            if not self._is_open or not self._get(_EVENTS) & _POLLIN:
                return count
            try:
                self._take()
            except zmq.Again:
                return count
        # One continuation and no more: were one added for each reason to look, a flood would have several rounds in each
        # turn of the loop, then more, until nothing else has its turn.
        if not self._is_more_due:
            self._is_more_due = True
            self._loop.call_soon(self._go_on)
        return limit

    def _go_on(self) -> None:
        self._is_more_due = False
        self._round()

    def _take(self) -> None:
        raise NotImplementedError

    def _changed(self) -> None:
        raise NotImplementedError

    async def close(self, linger_ms: int = LINGER_MS) -> None:
        """Send what was sent, `linger_ms` at most, and free everything. Idempotent."""
        if self._is_open:
            self._close_socket(linger_ms)
            # Waits for the lingering frames and for libzmq's threads: not for a loop to do.
            await self._loop.run_in_executor(None, self._context.term)
            self._ended()

    def abandon(self) -> None:
        """Close without waiting and drop what was not sent; for a connection that is known to be dead."""
        if self._is_open:
            self._close_socket(0)
            self._context.term()  # nothing lingers: a millisecond

    def _close_socket(self, linger_ms: int) -> None:
        self._is_open = False
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=linger_ms)

    def _ended(self) -> None:
        pass


class ServerSocket(_LoopSocket):
    """A ROUTER: many peers, each named by the identity that libzmq gives its connection.

    Bounded: at most `send_hwm` + `receive_hwm` frames a peer wait inside, and no call ever waits for a peer (F8).

    Args:
        url: see `endpoints`; the real one is in the attribute.
        on_frame: takes (peer, frame); must not raise. A message of more than one part is passed on as an empty frame.
        on_change: called after activity: a peer for which `try_send` was False may take a frame again.
        curve: keys, and who may connect; without them public addresses are refused.

    Raises:
        ConfigError: the address cannot be had.
    """

    def __init__(
        self,
        url: str,
        *,
        on_frame: Callable[[bytes, bytes], None],
        on_change: Callable[[], None],
        max_message_bytes: int,
        send_hwm: int = SEND_HWM,
        receive_hwm: int = RECEIVE_HWM,
        curve: ServerCurve | None = None,
    ) -> None:
        super().__init__(zmq.ROUTER, max_message_bytes, send_hwm, receive_hwm)
        self.user = ""
        """With keys: the public key by whose connection the frame came that `on_frame` is told of."""
        self._zap: ZapHandler | None = None
        self._on_frame = on_frame
        self._on_change = on_change
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer that restarts under an identity of its own choice takes it over; its `hello` starts it anew (F12).
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            if curve is not None:
                self._zap = ZapHandler(self._context, curve.allowed.name_of)
                curve.set_options(self._socket)
            self._binding: Binding = bind(self._socket, url, has_keys=curve is not None)
        except ConfigError:
            self._is_open = False
            if self._zap is not None:
                self._zap.close()
            self._socket.close(linger=0)
            self._context.term()
            raise
        self.url = self._binding.url
        self._watch()

    def try_send(self, peer: bytes, frame: bytes) -> bool:
        """Hand a frame over for `peer`. False: it has as many waiting as may wait; `on_change` tells when to try again.

        Raises:
            PeerGone: it is not connected (any more).
        """
        if not self._is_open:
            raise PeerGone("the socket is closed")
        if not self._is_round_due:
            self._due()
        try:
            self._send(peer, _NOBLOCK | _SNDMORE)
            self._send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise PeerGone(f"the peer is not connected: {error.strerror}") from None
        return True

    def _take(self) -> None:
        peer = self._receive(_NOBLOCK)
        if self._zap is not None and self._get(_RCVMORE):
            message = self._socket.recv(zmq.NOBLOCK, copy=False)
            self.user, frame = str(message.get(USER)), message.bytes
        else:
            frame = self._receive(_NOBLOCK) if self._get(_RCVMORE) else b""
        while self._get(_RCVMORE):
            frame = b""
            self._receive(_NOBLOCK)
        self._on_frame(peer, frame)

    def _changed(self) -> None:
        self._on_change()

    def abandon(self) -> None:
        """Close without waiting, and let go of the address."""
        super().abandon()
        self._ended()

    def _close_socket(self, linger_ms: int) -> None:
        if self._zap is not None:
            self._zap.close()
        super()._close_socket(linger_ms)

    def _ended(self) -> None:
        self._binding.release()


class ClientSocket(_LoopSocket):
    """A DEALER connected to one server.

    What is sent before there is a connection waits inside, and is lost with the socket.

    Args:
        on_frame: takes a frame; must not raise.
        on_change: called after activity: `try_send` may succeed again.
        on_connect: there is a connection.
        on_failed: somebody took the connection and closed it before a word was exchanged: a server that is just starting or
            ending, a proxy with nobody behind it, or one that asks for keys (`why_failed`). libzmq would try again at once,
            and for ever; where nobody listens at all it does so by itself, as `retry_ms` says, and this is not called.
        on_disconnect: the connection that was there broke. All that arrived before has been handed to `on_frame`.
            libzmq would connect again by itself, but to the server that is a new peer: make a new socket.
        on_denied: told why the server does not let us connect: keys that are missing, wrong, or not on its list.
        curve: the keys, for a server that asks for them.
        retry_ms: first and longest pause between attempts where nobody listens.

    Raises:
        ConfigError: the URL is no endpoint.
    """

    def __init__(
        self,
        url: str,
        *,
        on_frame: Callable[[bytes], None],
        on_change: Callable[[], None],
        on_disconnect: Callable[[], None],
        on_connect: Callable[[], None] = lambda: None,
        on_failed: Callable[[], None] = lambda: None,
        on_denied: Callable[[str], None] = lambda reason: None,  # noqa: ARG005
        curve: ClientCurve | None = None,
        max_message_bytes: int,
        send_hwm: int = 1024,
        receive_hwm: int = RECEIVE_HWM,
        retry_ms: tuple[int, int] = (50, 2000),
    ) -> None:
        endpoint = parse(url)
        super().__init__(zmq.DEALER, max_message_bytes, send_hwm, receive_hwm)
        self._on_frame = on_frame
        self._on_change = on_change
        self._on_disconnect = on_disconnect
        self._on_connect = on_connect
        self._on_failed = on_failed
        self._on_denied = on_denied
        self.is_connected = False
        self._has_keys = curve is not None
        if curve is not None:
            curve.set_options(self._socket)
        self._socket.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
        self._socket.setsockopt(zmq.RECONNECT_IVL, retry_ms[0])
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, retry_ms[1])
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._loop.add_reader(self._monitor.fileno(), self._look_at_monitor)
        self._loop.call_soon(self._look_at_monitor)  # its descriptor stays silent until it was found empty once
        self._socket.connect(endpoint.url)
        self.url = endpoint.url
        self._watch()

    def try_send(self, frame: bytes) -> bool:
        """Hand a frame over. False: as many wait as may wait; `on_change` tells when to try again.

        Raises:
            PeerGone: the socket was closed.
        """
        if not self._is_open:
            raise PeerGone("the socket is closed")
        self._due()
        try:
            self._send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _take(self) -> None:
        frame = self._receive(_NOBLOCK)
        while self._get(_RCVMORE):
            frame = b""
            self._receive(_NOBLOCK)
        self._on_frame(frame)

    def _changed(self) -> None:
        self._on_change()

    def _look_at_monitor(self) -> None:
        before, is_broken, has_failed = self.is_connected, False, False
        with contextlib.suppress(zmq.Again):
            while self._is_open:
                event = parse_monitor_message(self._monitor.recv_multipart(_NOBLOCK))
                number = int(event["event"])
                if number == _DISCONNECTED:
                    is_broken, has_failed = is_broken or self.is_connected, not self.is_connected
                    self.is_connected = False
                else:
                    self._note(number, int(event["value"]))
        if not self._is_open:
            return
        if is_broken:
            while self._is_open and self.receive_now() == BATCH:
                pass
            if self._is_open:
                self._on_disconnect()
        elif self.is_connected and not before:
            self._on_connect()
        elif has_failed and not self.is_connected:
            self._on_failed()

    def _note(self, event: int, value: int) -> None:
        """What libzmq says of the connection."""
        if event == int(zmq.EVENT_HANDSHAKE_SUCCEEDED):
            self.is_connected = True
        elif event != int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):  # that is followed by a disconnection
            self._on_denied(self._why_denied(event, value))

    def _why_denied(self, event: int, value: int) -> str:
        if event == int(zmq.EVENT_HANDSHAKE_FAILED_AUTH):
            return "our key is not on the server's list" if value == _ZAP_REFUSED else "the server refuses our key"
        return self.why_failed

    @property
    def why_failed(self) -> str:
        """What it means where handshakes fail time after time without a reason."""
        if not self._has_keys:
            return "the server asks for keys (server_key and key_file)"
        return "the server's key is another one, or it has none"

    def _close_socket(self, linger_ms: int) -> None:
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        super()._close_socket(linger_ms)
