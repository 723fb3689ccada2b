"""What a door is told: its limits, and who stands behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagewire_transport.codec import MAX_MESSAGE_BYTES
from pagewire_transport.connection import Connection
from pagewire_transport.errors import PagewireError
from pagewire_transport.messages import Cancel, Finish, Generate, Pause, Resume, Welcome

StreamMessage = Generate | Resume | Cancel | Finish | Pause
"""What a handler takes."""


@dataclass(frozen=True, slots=True)
class DoorLimits:
    """What peers may do."""

    max_connections: int = 1024
    max_connections_per_key: int = 256
    """Of one CURVE key."""
    max_strangers: int = 1024
    """Connections that have not said hello; beyond it the one that waits longest is cut."""
    hello_timeout_ms: int = 10_000
    """How long a connection may be one of them."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    heartbeat_ms: int = 1000
    heartbeat_timeout_ms: int = 10_000
    max_offences: int = 8
    """Malformed messages, after which the peer is dropped and ignored for a minute."""
    max_unsent: int = 10_000
    """Replies that a connection does not take, after which it is dropped. Tokens are not among them: see the handlers."""
    unread_timeout_ms: int = 30_000
    """A connection that takes nothing for so long, while something waits for it, is lost, heartbeats or not; 0: never."""


class Handler(Protocol):
    """What stands behind a door. All are plain calls on the loop."""

    def welcome(self) -> Welcome:
        """The answer to a hello.

        Raises:
            PagewireError: nobody is let in now.
        """
        ...

    def on_message(self, connection: Connection, message: StreamMessage) -> None:
        """Take a message.

        Raises:
            PagewireError: it is refused; the door tells the client.
        """
        ...

    def has_stream(self, connection: Connection, stream: int) -> bool:
        """The stream is open, so that a refusal must not seem to end it."""
        ...

    def on_writable(self, connection: Connection) -> None:
        """The connection was blocked and no longer is."""
        ...

    def on_lost(self, connection: Connection, reason: PagewireError) -> None:
        """The connection is over; nothing can be sent to it. Once for each connection."""
        ...

    def stats(self) -> dict[str, float]:
        """For `get_stats` and `get_load`."""
        ...

    @property
    def is_ready(self) -> bool:
        """For `pong`: new streams would be taken."""
        ...

    @property
    def unready(self) -> str:
        """For `pong`: why not. Asked only where they would not."""
        ...


class Admin(Protocol):
    """What the owner of a server may do, at a door that only he can reach."""

    def drain(self) -> str:
        """Begin to stop; what to tell of it."""
        ...

    def reload(self) -> str:
        """Read the files of keys again; what to tell of it.

        Raises:
            PagewireError: one of them is damaged.
        """
        ...
