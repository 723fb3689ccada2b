"""How many streams each CURVE key has open: over all its connections, and those that wait for a client to come back.

`max_streams_per_connection` alone bounds nobody who connects more than once, or who breaks off and connects again while
what was asked for goes on for the time of its grace.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagewire.errors import Overloaded
from pagewire.gateway.client import Client
from pagewire.gateway.stream import GatewayStream
from pagewire_transport.tally import Tally

_RETRY_AFTER_MS = 1000


class PerKey:
    """Who has no key, as behind the HTTP door and on this machine, is not counted.

    `check` costs a sum over the key's connections, the rest O(1).

    Args:
        most: streams of one key.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._clients: dict[str, dict[Client, None]] = {}
        self._orphans: set[GatewayStream] = set()
        self._orphans_of = Tally()

    def came(self, client: Client) -> None:
        """A client is there."""
        if client.user:
            self._clients.setdefault(client.user, {})[client] = None

    def left(self, client: Client) -> None:
        """It is gone; its streams were told of, where they wait for it."""
        clients = self._clients.get(client.user)
        if clients is not None:
            clients.pop(client, None)
            if not clients:
                del self._clients[client.user]

    def orphaned(self, stream: GatewayStream) -> None:
        """The stream waits for its client."""
        if _user(stream):
            self._orphans.add(stream)
            self._orphans_of.add(_user(stream))

    def found(self, stream: GatewayStream) -> None:
        """It waits no more: it has a client again, or is over. Idempotent."""
        if stream in self._orphans:
            self._orphans.remove(stream)
            self._orphans_of.remove(_user(stream))

    def of(self, user: str) -> int:
        """Open streams of a key."""
        return sum(len(client.streams) for client in self._clients.get(user, ())) + self._orphans_of.of(user)

    def check(self, client: Client) -> None:
        """One more may be opened.

        Raises:
            Overloaded: the key has as many as it may have.
        """
        if client.user and self.of(client.user) >= self._most:
            raise Overloaded(
                f"this key has {self._most} open streams over all its connections, no more are allowed",
                field="stream",
                retry_after_ms=_RETRY_AFTER_MS,
            )

    def check_invariants(self, clients: Iterable[Client], orphans: Iterable[GatewayStream]) -> None:
        """It counts what there is."""
        assert {client for known in self._clients.values() for client in known} == {
            client for client in clients if client.user
        }
        assert self._orphans == {stream for stream in orphans if _user(stream)}


def _user(stream: GatewayStream) -> str:
    return stream.asked.user if stream.asked is not None else ""
