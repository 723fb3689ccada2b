"""The client's ZeroMQ socket on an asyncio loop; see `sockets`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from pagewire_transport.curve import ClientCurve
from pagewire_transport.endpoints import parse
from pagewire_transport.sockets import BATCH, RECEIVE_HWM, LoopSocket, PeerGone

_NOBLOCK: Final = int(zmq.NOBLOCK)
_RCVMORE: Final = int(zmq.RCVMORE)

_WATCHED: Final = int(
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_ZAP_REFUSED: Final = 400


class ClientSocket(LoopSocket):
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
