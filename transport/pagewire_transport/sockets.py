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
import time
from collections.abc import Callable
from typing import Final

import zmq
from zmq.backend import Socket as Backend

from pagewire_transport.curve import USER, ServerCurve, ZapHandler
from pagewire_transport.endpoints import Binding, bind
from pagewire_transport.errors import ConfigError, ConnectionLost
from pagewire_transport.strangers import Strangers
from pagewire_transport.wires import Wires

BATCH: Final = 64
"""Frames taken in one round of the loop."""

SEND_HWM: Final = 128
"""Frames that libzmq holds for one peer beyond what the kernel takes. A tokens frame has a few KiB."""
RECEIVE_HWM: Final = 32
SEND_BUFFER: Final = 256 * 2**10
"""Bytes that the kernel is asked to hold for one peer of a server. Left to itself it holds 2.6 MB over the loopback: a peer that
reads nothing would be noticed ten thousands of tokens late, and a thousand of them would take gigabytes (F18)."""

LOOK_EVERY_S: Final = 1e-3
"""Between two looks at the socket that only a send gave reason for."""

_BACKLOG: Final = 1024
"""Connections that the kernel holds until libzmq's thread takes them; its own 100 are gone in a moment when many come at once."""

LINGER_MS: Final = 500
"""At close, time for what was sent and is not with the kernel yet."""

_POLLIN: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
_SNDMORE: Final = int(zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)


class PeerGone(ConnectionLost):
    """The peer's connection no longer exists."""


class LoopSocket:
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


class ServerSocket(LoopSocket):
    """A ROUTER: many peers, each named by the identity that libzmq gives its connection.

    Bounded: at most `send_hwm` + `receive_hwm` frames a peer wait inside, and no call ever waits for a peer (F8).

    Args:
        url: see `endpoints`; the real one is in the attribute.
        on_frame: takes (peer, frame); must not raise. A message of more than one part is passed on as an empty frame.
        on_change: called after activity: a peer for which `try_send` was False may take a frame again.
        strangers: counts connections that have not said hello, and says whom to cut.
        handshake_ms: time for ZeroMQ's own handshake.
        curve: keys, and who may connect; without them public addresses are refused.
        now_ns: the clock for strangers.

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
        strangers: Strangers,
        handshake_ms: int,
        curve: ServerCurve | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(zmq.ROUTER, max_message_bytes, send_hwm, receive_hwm)
        self.user = ""
        """With keys: the public key by whose connection the frame came that `on_frame` is told of."""
        self.is_strange = False
        """The connection by which that frame came is not known as its peer's (yet): see `welcomed`."""
        self._source = -1
        self._strangers = strangers
        self._now_ns = now_ns
        self._zap: ZapHandler | None = None
        self._on_frame = on_frame
        self._on_change = on_change
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDBUF, SEND_BUFFER)
        # A peer that restarts under an identity of its own choice takes it over; its `hello` starts it anew (F12).
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, handshake_ms)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._wires = Wires(self._context, self._socket, strangers, now_ns)
        try:
            if curve is not None:
                self._zap = ZapHandler(self._context, curve.allowed.name_of)
                curve.set_options(self._socket)
            self._binding: Binding = bind(self._socket, url, has_keys=curve is not None)
        except ConfigError:
            self._is_open = False
            self._wires.close()
            if self._zap is not None:
                self._zap.close()
            self._socket.close(linger=0)
            self._context.term()
            raise
        self.url = self._binding.url
        self._wires.bound(self.url)
        self._watch()

    def welcomed(self, peer: bytes) -> None:
        """`peer`, whose frame `on_frame` is just being told of, is no stranger any more."""
        self._wires.look()  # it may have come a moment ago
        self._strangers.welcomed(self._source, peer)

    def refused(self) -> None:
        """Whose frame `on_frame` is just being told of was asked to try again: a stranger still, with new patience."""
        self._strangers.refused(self._source, self._now_ns())

    def lost(self, peer: bytes) -> None:
        """`peer` is a stranger again. Idempotent."""
        self._wires.left(peer)

    def cut_strangers(self) -> None:
        """End the connections of those that were strangers for too long. To be called now and then."""
        self._wires.cut_overdue()

    @property
    def num_closed(self) -> int:
        """Connections that came and went, those of strangers that were cut among them."""
        return self._wires.num_closed

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
        self.is_strange, self._source = not self._strangers.knows(peer), -1
        if (self._zap is not None or self.is_strange) and self._get(_RCVMORE):
            message = self._socket.recv(zmq.NOBLOCK, copy=False)
            self._source, frame = _source(message), message.bytes
            if self._zap is not None:
                self.user = str(message.get(USER))
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
        self._wires.close()
        super()._close_socket(linger_ms)

    def _ended(self) -> None:
        self._binding.release()


def _source(message: zmq.Frame) -> int:
    """The descriptor of the connection that it came by; -1 where libzmq does not know (any more)."""
    try:
        return int(message.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
