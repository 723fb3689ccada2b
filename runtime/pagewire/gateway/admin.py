"""The owner's door: the same protocol on a socket that nobody else can connect to; there `drain` and `reload` are taken."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Final

import structlog

from pagewire.config import ServerConfig
from pagewire.errors import PagewireError, UnsupportedFeature
from pagewire.gateway.gateway import Gateway
from pagewire_transport.connection import Connection
from pagewire_transport.door import Door
from pagewire_transport.handler import DoorLimits, StreamMessage
from pagewire_transport.messages import PROTOCOL_VERSION, Welcome

_log: Final = structlog.get_logger()

_SERVER: Final = f"pagewire {version('pagewire')}"
_MAX_CONNECTIONS: Final = 16
_MAX_MESSAGE_BYTES: Final = 65_536


class OwnersDesk:
    """Handler and admin of that door.

    Args:
        config: section `server`.
        gateway: whose state is told.
        stop: asks whoever runs the server to stop it.
        reloads: by what they read: reads a file of keys again and says how many keys it has; may raise `ConfigError`.
    """

    def __init__(
        self,
        config: ServerConfig,
        gateway: Gateway,
        *,
        stop: Callable[[], None],
        reloads: dict[str, Callable[[], int]],
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._stop = stop
        self._reloads = reloads

    def open(self, url: str) -> Door:
        """Listen.

        Raises:
            ConfigError: the address cannot be had.
        """
        limits = DoorLimits(
            max_connections=_MAX_CONNECTIONS,
            max_strangers=_MAX_CONNECTIONS,
            hello_timeout_ms=self._config.hello_timeout_ms,
            max_message_bytes=_MAX_MESSAGE_BYTES,
            heartbeat_ms=self._config.heartbeat_ms,
            heartbeat_timeout_ms=self._config.heartbeat_timeout_ms,
        )
        return Door(url, handler=self, limits=limits, admin=self, on_fault=_on_fault)

    # ---- the admin ---------------------------------------------------------------------------------------------------

    def drain(self) -> str:
        """See `Admin`."""
        _log.info("drain_asked", streams=self._gateway.num_streams)
        self._stop()
        num = self._gateway.num_streams
        if not num:
            return "no stream is open; the server stops now"
        return (
            f"{num} stream{' is' if num == 1 else 's are'} open; they have {self._config.drain_timeout_ms / 1000:g} s"
        )

    def reload(self) -> str:
        """See `Admin`."""
        if not self._reloads:
            return "this server has no files of keys"
        return ", ".join(f"{what}: {reload()} keys" for what, reload in self._reloads.items())

    # ---- the handler -------------------------------------------------------------------------------------------------

    def welcome(self) -> Welcome:
        """See `Handler`. Also while there is no engine, and while the server drains."""
        engine = self._gateway.engine
        return Welcome(
            version=PROTOCOL_VERSION,
            role="gateway",
            server=_SERVER,
            model=engine.model if engine is not None else "",
            vocab_size=engine.vocab_size if engine is not None else 0,
            max_model_len=self._gateway.max_model_len,
            max_streams=0,
            max_message_bytes=_MAX_MESSAGE_BYTES,
            heartbeat_ms=self._config.heartbeat_ms,
            heartbeat_timeout_ms=self._config.heartbeat_timeout_ms,
        )

    def on_message(self, connection: Connection, message: StreamMessage) -> None:
        """See `Handler`."""
        del connection, message
        raise UnsupportedFeature("this is the admin socket; streams are served at the server's address", field="t")

    def has_stream(self, connection: Connection, stream: int) -> bool:
        """See `Handler`."""
        del connection, stream
        return False

    def on_writable(self, connection: Connection) -> None:
        """See `Handler`."""

    def on_lost(self, connection: Connection, reason: PagewireError) -> None:
        """See `Handler`."""

    def stats(self) -> dict[str, float]:
        """See `Handler`."""
        return self._gateway.stats()

    @property
    def is_ready(self) -> bool:
        """See `Handler`."""
        return self._gateway.is_ready

    @property
    def unready(self) -> str:
        """See `Handler`."""
        return self._gateway.unready


def _on_fault(doing: str, error: Exception) -> None:
    _log.error("admin_fault", doing=doing, exc_info=error)
