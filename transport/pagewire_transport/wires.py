"""What libzmq does not offer: to know which connections a listening socket has accepted, and to end one of them.

Its monitor tells the file descriptor of each connection that comes and goes, and each message that of the connection it
came by. A connection ends when its socket is shut down, as if the other side had closed it: libzmq then frees all that
belongs to it. Rejected: an authentication handler (ZAP), which is asked only after a handshake, and so never about those
who say nothing; `ZMQ_HANDSHAKE_IVL` alone, which leaves those alone that shook hands; a listener of our own before libzmq's, which
would copy every byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

import zmq

from pagewire_transport.endpoints import parse
from pagewire_transport.strangers import Strangers, Wire

BATCH: Final = 256
"""Events taken in one round of the loop."""

_LOOK_S: Final = 0.1
"""Between two looks at how much strangers have sent, while there are any."""
_MUCH: Final = 64 * 2**10
"""Bytes of a stranger; a handshake and a hello have a few hundred. libzmq would keep what is announced as one frame of its handshake, up to
twice the largest message, of everybody who can connect."""
_RECEIVED: Final = struct.Struct("=128xQ")
"""`tcpi_bytes_received` of Linux's `tcp_info`."""

_EVENTS: Final = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_EVENT: Final = struct.Struct("=HI")
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: what was not sent is dropped, so that no peer that takes nothing keeps it in the kernel."""


class Wires:
    """Watches the connections of one listening socket, and cuts those that `Strangers` says. Made on a running loop.

    Args:
        context: of the socket.
        listening: the socket, not bound yet.
        strangers: who is to be cut.
        now_ns: the clock.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: zmq.Socket[bytes],
        strangers: Strangers,
        now_ns: Callable[[], int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._strangers = strangers
        self._now_ns = now_ns
        self._is_open = True
        self._is_more_due = False
        self._here: int | str = ""
        self._looking: asyncio.TimerHandle | None = None
        self._talkers: set[Wire] = set()
        self.num_closed = 0
        """Connections that came and went."""
        address = f"inproc://wires-{secrets.token_hex(8)}"
        listening.monitor(address, _EVENTS)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        # Without a limit: libzmq's thread would wait for us with a lock held that closing needs. What comes is bounded by how
        # fast that thread can accept, and is taken a batch in each turn of the loop.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)
        self._loop.add_reader(self._events.fileno(), self.look)
        self._loop.call_soon(self.look)  # its descriptor stays silent until it was found empty once

    def bound(self, url: str) -> None:
        """The socket listens there."""
        endpoint = parse(url)
        self._here = endpoint.path or endpoint.port

    def left(self, peer: bytes) -> None:
        """The door has lost `peer`."""
        too_many = self._strangers.left(peer, self._now_ns())
        if too_many is not None:
            self._cut(too_many)

    def look(self) -> None:
        """Take what libzmq has told, a batch at most; more is taken in the next round."""
        for _ in range(BATCH):
            if not self._is_open:
                return
            try:
                event, _ = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._note(*_EVENT.unpack(event))
        if not self._is_more_due:
            self._is_more_due = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_more_due = False
        self.look()

    def _note(self, event: int, number: int) -> None:
        if event != _ACCEPTED:
            self.num_closed += 1
            self._strangers.closed(number)
            return
        try:
            inode = os.fstat(number).st_ino
        except OSError:  # gone again; that is told next
            return
        too_many = self._strangers.accepted(number, inode, self._now_ns())
        if too_many is not None:
            self._cut(too_many)
        if self._looking is None and isinstance(self._here, int) and sys.platform == "linux":
            self._looking = self._loop.call_later(_LOOK_S, self._look_at_sizes)

    def _look_at_sizes(self) -> None:
        """Cut strangers that say far more than a hello. On a socket file only its owner could.

        At the second look: requests may follow a hello at once, and this loop may have been held up since they came.
        """
        self._looking = self._loop.call_later(_LOOK_S, self._look_at_sizes) if len(self._strangers) else None
        before, self._talkers = self._talkers, {w for w in self._strangers if _num_received(w.number) > _MUCH}
        known = before & self._talkers
        self._talkers -= known
        self._strangers.give_up(known)
        for wire in known:
            self._cut(wire)

    def cut_overdue(self) -> None:
        """Cut those whose time is over."""
        self.look()
        for wire in self._strangers.overdue(self._now_ns()):
            self._cut(wire)

    def _cut(self, wire: Wire) -> None:
        """End the connection, if it still is the one that is meant.

        libzmq may close it at any moment, and the number may then be another's. A copy of the descriptor keeps what it
        stands for, and that is compared before anything is done to it: the socket, and that it was accepted here.
        """
        try:
            copy = os.dup(wire.number)
        except OSError as error:
            if error.errno != errno.EMFILE:  # EBADF: it is gone
                return
            copy = -1  # all descriptors are in use, by those that are to be cut: then without a copy
        number = wire.number if copy < 0 else copy
        try:
            if os.fstat(number).st_ino == wire.inode:
                _shut(number, self._here)
        except OSError:
            pass
        finally:
            if copy >= 0:
                os.close(copy)

    def close(self) -> None:
        """Before the socket is closed. Idempotent."""
        if self._is_open:
            self._is_open = False
            if self._looking is not None:
                self._looking.cancel()
            self._loop.remove_reader(self._events.fileno())
            with contextlib.suppress(zmq.ZMQError):
                self._listening.disable_monitor()
            self._events.close(linger=0)


def _num_received(number: int) -> int:
    """Bytes that came over a TCP connection; 0 if there is none under this number (any more)."""
    try:
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=number)
    except OSError:
        return 0
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return int(_RECEIVED.unpack(info)[0]) if len(info) == _RECEIVED.size else 0
    except OSError:
        return 0
    finally:
        one.detach()


def _shut(number: int, here: int | str) -> None:
    """Shut a socket down that was accepted `here`, at a port or a path.

    Raises:
        OSError: it is none, or not connected.
    """
    one: Any = socket.socket(fileno=number)
    try:
        name = one.getsockname()
        if (name[1] if isinstance(name, tuple) else name) == here:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.shutdown(socket.SHUT_RDWR)
    finally:
        one.detach()
