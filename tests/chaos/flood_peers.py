"""The other side of `flood.py`, a process of its own: thousands of connections that want nothing, opened as fast as can be.

    python tests/chaos/flood_peers.py --door tcp --kind silent --address tcp://127.0.0.1:5570 --num 10000 --hold 5

Each says the opening of its kind, once, and holds on; those of a dripping kind say a little more each second. Prints, as JSON,
how many were open, and how many of them the server had closed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import select
import socket
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import zmq

from pagewire.child import allow_many_files
from pagewire_transport.codec import encode
from pagewire_transport.curve import ClientCurve
from pagewire_transport.messages import Hello

HAND_IN_HAND = 512
"""Connections that are being opened at once."""
GIVE_UP_S = 20.0
DRIP_S = 1.0


def _greeting(mechanism: bytes) -> bytes:
    """ZMTP 3.0: signature, version, mechanism, no server, filler."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def _frame(flags: int, body: bytes) -> bytes:
    assert len(body) < 256
    return bytes((flags, len(body))) + body


_READY = _frame(4, b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER")
_NULL = _greeting(b"NULL")
_CURVE = _greeting(b"CURVE")
_CURVE_HELLO = _frame(4, b"\x05HELLO\x01\0" + bytes(72) + b"k" * 32 + bytes(8) + b"b" * 80)

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

ZMTP = {
    "silent": b"",
    "half a greeting": _NULL[:11],
    "half a handshake": _NULL + _READY[:9],
    "half a curve handshake": _CURVE + _CURVE_HELLO[:90],
    "a false curve handshake": _CURVE + _CURVE_HELLO,
    "no hello": _NULL + _READY,
    "hello and no more": _NULL + _READY,
    "half a frame": _NULL + _READY,
    "half of a large handshake": _NULL + b"\x06" + (2**24).to_bytes(8, "big") + b"x" * 60_000,
}
SECONDS = {
    "hello and no more": _frame(0, encode(Hello(client="flood"))),
    "half a frame": b"\x02" + (2**20).to_bytes(8, "big") + b"x" * 60_000,
}
"""What is said once the server has shaken hands: sent before, it would be taken for a part of the handshake."""

HTTP = {
    "silent": b"",
    "headers byte by byte": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ",
    "a body that never ends": _POST + b"Content-Length: 4000\r\n\r\n{",
    "a chunked body that never ends": _POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    "keep-alive": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
DRIPS = {
    "headers byte by byte": b"a",
    "a body that never ends": b" ",
    "a chunked body that never ends": b"1\r\n \r\n",
    "half of a large handshake": b"x" * 100_000,
}
KEYED = "hello and no more, with a key"

KINDS = {
    "tcp": ["silent", "half a greeting", "half a handshake", "no hello", "hello and no more", "half a frame", "half of a large handshake"],
    "ipc": ["silent", "half a handshake", "no hello", "hello and no more", "half a frame"],
    "curve": ["silent", "half a greeting", "half a curve handshake", "a false curve handshake", "half a handshake", KEYED],
    "http": list(HTTP),
}  # fmt: skip
"""By door."""


class Flood:
    """Raw connections to one address."""

    def __init__(self, address: str, opening: bytes, second: bytes, drip: bytes) -> None:
        scheme, _, rest = address.partition("://")
        host, _, port = rest.rpartition(":")
        self._family, self._where = (
            (socket.AF_UNIX, rest) if scheme == "ipc" else (socket.AF_INET, (host, int(port.rstrip("/"))))
        )
        self._opening, self._second, self._drip = opening, second, drip
        self._heard: dict[int, int] = {}
        self._connecting: dict[int, tuple[socket.socket, float]] = {}
        self._poller = select.epoll()
        self.open: dict[int, socket.socket] = {}
        self.num_closed = self.num_failed = 0

    def run(self, num: int, hold_s: float) -> dict[str, float]:
        """Open `num`, hold on for `hold_s`; figures."""
        began, left = time.monotonic(), num
        while left or self._connecting:
            while left and len(self._connecting) < HAND_IN_HAND and self._begin():
                left -= 1
            self._look(0.01)
        seconds = time.monotonic() - began
        until, drip_at = time.monotonic() + hold_s, time.monotonic() + DRIP_S
        while time.monotonic() < until:
            self._look(0.05)
            if self._drip and time.monotonic() > drip_at:
                drip_at += DRIP_S
                for number in list(self.open):
                    self._say(number, self._drip)
        figures = {"opened": num - self.num_failed, "failed": self.num_failed, "open_s": round(seconds, 2)}
        figures["closed_by_server"] = self.num_closed
        for one in self.open.values():
            one.close()
        return figures

    def _begin(self) -> bool:
        """Begin one; False: the listener takes no more at this moment."""
        one = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        code = one.connect_ex(self._where)
        if code == errno.EAGAIN:  # ipc with a full backlog
            one.close()
            return False
        if code not in (0, errno.EINPROGRESS):
            self.num_failed += 1
            one.close()
            return True
        self._connecting[one.fileno()] = (one, time.monotonic())
        self._poller.register(one.fileno(), select.EPOLLOUT)
        return True

    def _look(self, timeout_s: float) -> None:
        for number, event in self._poller.poll(timeout_s, 2048):
            if number in self._connecting:
                one, _ = self._connecting.pop(number)
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self.num_failed += 1
                    self._poller.unregister(number)
                    one.close()
                    continue
                self.open[number] = one
                self._heard[number] = 0
                self._poller.modify(number, select.EPOLLIN)
                if self._opening:
                    self._say(number, self._opening)
            elif number in self.open:
                self._hear(number, event)
        now = time.monotonic()
        for number, (one, since) in (
            list(self._connecting.items()) if timeout_s > 0.01 or len(self._connecting) < 64 else ()
        ):
            if now - since > GIVE_UP_S:
                self.num_failed += 1
                del self._connecting[number]
                self._poller.unregister(number)
                one.close()

    def _say(self, number: int, data: bytes) -> None:
        try:
            self.open[number].send(data)
        except BlockingIOError:
            return
        except OSError:
            self._closed(number)

    def _hear(self, number: int, event: int) -> None:
        try:
            data = self.open[number].recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or event & (select.EPOLLERR | select.EPOLLHUP):
            self._closed(number)
            return
        before, self._heard[number] = self._heard[number], self._heard[number] + len(data)
        if self._second and before <= len(_NULL) < self._heard[number]:
            self._say(number, self._second)

    def _closed(self, number: int) -> None:
        self.num_closed += 1
        with contextlib.suppress(OSError):
            self._poller.unregister(number)
        self.open.pop(number).close()
        del self._heard[number]


def with_keys(address: str, server_key: str, key_file: str, num: int, hold_s: float) -> dict[str, float]:
    """As `Flood.run`, by libzmq: connections of somebody whose key is on the list, who says hello and never again a word."""
    curve, context = ClientCurve.load(server_key, key_file), zmq.Context()
    context.max_sockets = num + 10
    began, peers = time.monotonic(), []
    for _ in range(num):
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        peer.reconnect_ivl = -1
        curve.set_options(peer)
        peer.connect(address)
        peer.send(encode(Hello(client="flood")))
        peers.append(peer)
    seconds = time.monotonic() - began
    time.sleep(hold_s)
    for peer in peers:
        peer.close()
    context.term()
    return {"opened": num, "failed": 0, "open_s": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=KINDS, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--hold", type=float, default=5.0)
    parser.add_argument("--server-key", default="")
    parser.add_argument("--key-file", default="")
    given = parser.parse_args()
    allow_many_files()
    if given.kind == KEYED:
        figures = with_keys(given.address, given.server_key, given.key_file, given.num, given.hold)
    else:
        opening = (HTTP if given.door == "http" else ZMTP)[given.kind]
        second = SECONDS.get(given.kind, b"") if given.door != "http" else b""
        figures = Flood(given.address, opening, second, DRIPS.get(given.kind, b"")).run(given.num, given.hold)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
