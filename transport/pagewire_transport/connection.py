"""One client of a door: frames in the order of the calls, and what the peer does not take now."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from pagewire_transport.codec import encode
from pagewire_transport.messages import FromServer


class Sender(Protocol):
    """The door, as a connection sees it."""

    def try_send(self, connection: Connection, frame: bytes) -> bool:
        """Hand a frame to the peer; False: it takes nothing now, or is lost."""
        ...

    def keep(self, connection: Connection, frame: bytes, unsent: deque[bytes]) -> None:
        """Keep a frame that the peer did not take."""
        ...


class Connection:
    """One client that said hello.

    Frames go out in the order of the calls. One that the peer does not take now is kept, and `is_blocked` is true until
    it is gone; whoever streams through the connection makes nothing new meanwhile.
    """

    __slots__ = ("_door", "_unsent", "blocked_ns", "client", "heard_ns", "is_open", "offences", "peer", "user")

    def __init__(self, door: Sender, peer: bytes, client: str, heard_ns: int, user: str = "") -> None:
        self._door = door
        self._unsent: deque[bytes] = deque()
        self.peer = peer
        self.client = client
        self.heard_ns = heard_ns
        self.blocked_ns = 0
        """When a frame began to wait here, or one of those that wait was taken."""
        self.offences = 0
        self.is_open = True
        self.user = user
        """The public key that it connected with; "" where there are no keys."""

    @property
    def is_blocked(self) -> bool:
        """The peer takes nothing now; `Handler.on_writable` tells when it does. Also true once it is lost."""
        return bool(self._unsent) or not self.is_open

    @property
    def num_unsent(self) -> int:
        """Frames that wait here."""
        return len(self._unsent)

    def try_send(self, message: FromServer) -> bool:
        """Send, or do nothing and return False: the peer takes nothing now, or is lost. Never raises."""
        return not self.is_blocked and self._door.try_send(self, encode(message))

    def send(self, message: FromServer) -> None:
        """Send; keep it if the peer takes nothing now. Never raises."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """As `send`, of an encoded message."""
        if self._unsent or not self._door.try_send(self, frame):
            self._door.keep(self, frame, self._unsent)

    def flush(self) -> bool:
        """Send what is kept; whether it is all gone."""
        unsent = self._unsent
        while unsent:
            if not self._door.try_send(self, unsent[0]):
                return False
            unsent.popleft()
        return True
