"""The engine's door: who may ask for what. What goes back is `Delivery`'s."""

from __future__ import annotations

import asyncio
import secrets
from importlib.metadata import version
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import structlog

from pagewire.config import Config
from pagewire.curve_keys import server_curve
from pagewire.engine.admission import Admission
from pagewire.engine.delivery import Delivery
from pagewire.engine.lag import LagLimits
from pagewire.engine.packing import u32
from pagewire.engine.streams import Choice, PromptLogprobStore, Reader, Stream
from pagewire.engine.survivors import EngineSurvivors, counts_of
from pagewire.errors import (
    Cancelled,
    Draining,
    InvalidRequest,
    Overloaded,
    PagewireError,
    ProtocolError,
    TakenOver,
    UnknownStream,
    UnsupportedFeature,
)
from pagewire.request.request import Namespace, Request, TokenArray, Wishes
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.sequence import Sequence
from pagewire.worker.interface import WorkerShape
from pagewire_transport.connection import Connection
from pagewire_transport.door import Door, refusal
from pagewire_transport.endpoints import default_endpoint
from pagewire_transport.handler import DoorLimits, StreamMessage
from pagewire_transport.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Generate,
    Pause,
    Resume,
    Welcome,
)

_SERVER: Final = f"pagewire {version('pagewire')}"
"""Found once: it is read from a file, which takes longer than all the rest of a welcome."""
_RETRY_AFTER_MS: Final = 1000
_KEY_BYTES: Final = 16
_FLUSH_S: Final = 0.5
_TAKEN_S: Final = 0.05
"""From the last words to the end of the socket: what a reader has not taken by then beyond its high-water mark, its libzmq drops."""
_POLL_S: Final = 0.002


class HasShape(Protocol):
    """A loaded worker."""

    @property
    def shape(self) -> WorkerShape: ...


class HasMaxLen(Protocol):
    """Knows the longest sequence that can be served."""

    max_len: int


class HasHealth(Protocol):
    """Whether tokens move."""

    @property
    def ready(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class Core(Protocol):
    """What the server asks of the engine's core; see `pagewire.engine.core.EngineCore`."""

    sinks: list[Any]

    @property
    def worker(self) -> HasShape: ...

    @property
    def admission(self) -> Admission: ...

    @property
    def scheduler(self) -> HasMaxLen: ...

    @property
    def health(self) -> HasHealth: ...

    def submit(self, request: Request) -> list[Sequence]: ...

    def cancel(self, sequence: Sequence) -> bool: ...

    def finish_at(self, sequence: Sequence, at: int) -> bool: ...

    def pause(self, sequence: Sequence) -> None: ...

    def resume(self, sequence: Sequence) -> None: ...

    def output(self, sequence: Sequence, start: int = 0, stop: int | None = None) -> TokenArray: ...

    def stats(self) -> dict[str, float]: ...


class WireServer:
    """A sink of the core and the handler of a `Door`. Made and used on one loop.

    Args:
        core: serves the requests.
        config: section `server`, and the model's name.
    """

    def __init__(self, core: Core, config: Config) -> None:
        self._core = core
        self._config = config
        self._readers: dict[Connection, Reader] = {}
        self._is_draining = False
        self._door: Door | None = None
        self._log = structlog.get_logger("pagewire.engine")
        self._delivery = Delivery(core, self._on_fault, self._on_over, LagLimits.of(config.server))
        self._survivors = EngineSurvivors(
            self._delivery, config.server, lambda: self._door is not None and self._door.num_connections > 0
        )

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be had.
        """
        assert self._door is None, "started twice"
        server = self._config.server
        self._door = Door(
            server.bind or default_endpoint(),
            handler=self,
            limits=DoorLimits(
                max_connections=server.max_connections,
                max_connections_per_key=server.max_connections_per_key,
                max_strangers=server.max_strangers,
                hello_timeout_ms=server.hello_timeout_ms,
                max_message_bytes=server.max_message_bytes,
                heartbeat_ms=server.heartbeat_ms,
                heartbeat_timeout_ms=server.heartbeat_timeout_ms,
                unread_timeout_ms=server.unread_timeout_ms,
            ),
            on_fault=self._on_fault,
            curve=server_curve(server),
        )
        self._core.sinks.append(self)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        assert self._door is not None, "not started"
        return self._door.url

    @property
    def num_streams(self) -> int:
        """Streams whose end was not told."""
        return sum(len(reader.streams) for reader in self._readers.values())

    def drain(self) -> None:
        """From now on new streams are refused; open ones go on, those that nobody reads end."""
        self._is_draining = True
        self._survivors.close()

    async def close(self) -> None:
        """Let what is ready go out, for half a second at most, and stop listening. Idempotent."""
        door, self._door = self._door, None
        if door is None:
            return
        self._is_draining = True
        told = self._has_news()
        deadline = asyncio.get_running_loop().time() + _FLUSH_S
        # Polled, once, at shutdown: an event would be looked after in every step of the server's life.
        while self._has_news() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        if told:
            await asyncio.sleep(_TAKEN_S)
        self._core.sinks.remove(self)
        for reader in self._readers.values():
            self._delivery.remove_reader(reader)
        self._readers.clear()
        self._survivors.close()
        await door.close()

    def _has_news(self) -> bool:
        return any(
            reader.connection.is_open and (reader.is_behind or reader.ended or reader.connection.num_unsent)
            for reader in self._readers.values()
        )

    # ---- for the door ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """New streams would be taken, and tokens move."""
        return not self._is_draining and self._core.health.ready

    @property
    def unready(self) -> str:
        """See `Handler`."""
        return "the engine is shutting down" if self._is_draining else self._core.health.reason

    def welcome(self) -> Welcome:
        """See `Handler`."""
        shape, server = self._core.worker.shape, self._config.server
        return Welcome(
            version=PROTOCOL_VERSION,
            role="engine",
            server=_SERVER,
            model=self._config.model.name or shape.model_name,
            vocab_size=shape.vocab_size,
            max_model_len=self._core.scheduler.max_len,
            max_streams=server.max_streams_per_connection,
            max_message_bytes=server.max_message_bytes,
            heartbeat_ms=server.heartbeat_ms,
            heartbeat_timeout_ms=server.heartbeat_timeout_ms,
            eos_ids=shape.eos_ids,
        )

    def stats(self) -> dict[str, float]:
        """See `Handler`."""
        return self._core.stats()

    def has_stream(self, connection: Connection, stream: int) -> bool:
        """See `Handler`."""
        reader = self._readers.get(connection)
        return reader is not None and stream in reader.streams

    def on_message(self, connection: Connection, message: StreamMessage) -> None:
        """See `Handler`."""
        if isinstance(message, Generate):
            self._generate(connection, message)
            return
        if isinstance(message, Resume):
            self._resume(connection, message)
            return
        stream = self._owned(connection, message.stream)
        if isinstance(message, Cancel):
            for choice in stream.choices:
                self._core.cancel(choice.sequence)
        elif isinstance(message, Pause):
            self._delivery.pause(stream, paused=message.paused)
        elif message.choice >= len(stream.choices):
            raise InvalidRequest(f"must be below n, {len(stream.choices)}", field="choice")
        else:
            self._core.finish_at(stream.choices[message.choice].sequence, message.at)

    def on_writable(self, connection: Connection) -> None:
        """See `Handler`."""
        reader = self._readers.get(connection)
        if reader is not None:
            self._delivery.serve(reader)

    def on_lost(self, connection: Connection, reason: PagewireError) -> None:
        """See `Handler`."""
        reader = self._readers.pop(connection, None)
        if reader is None:
            return
        if reader.streams:
            self._log.info("client_lost", client=connection.client, streams=len(reader.streams), reason=str(reason))
        if isinstance(reason, Cancelled | ProtocolError):
            self._survivors.on_goodbye(reader)
        elif not self._is_draining:
            self._survivors.on_lost(reader)
        self._delivery.remove_reader(reader)

    def _owned(self, connection: Connection, number: int) -> Stream:
        reader = self._readers.get(connection)
        stream = reader.streams.get(number) if reader is not None else None
        if stream is None:
            raise UnknownStream(f"{number} is no open stream of this connection", field="stream")
        return stream

    def _generate(self, connection: Connection, message: Generate) -> None:
        reader = self._reader_for(connection, message.stream)
        if self._is_draining:
            raise Draining("the engine is shutting down", retry_after_ms=_RETRY_AFTER_MS)
        replay = message.replay
        if replay is not None and replay.request_id in self._survivors:
            raise InvalidRequest("a stream of this id is open here", field="replay.request_id")
        request = self._core.admission.admit(
            _prompt_ids(message),
            message.params,
            priority=message.priority,
            namespace=Namespace(tenant=message.namespace),
            replay=replay,
            wishes=Wishes(ttft_ms=message.ttft_ms, itl_ms=message.itl_ms, deadline_ms=message.deadline_ms),
            client=message.client or message.namespace or connection.peer.hex(),
        )
        sequences = self._core.submit(request)
        stream = Stream(message.stream, reader, request, memo=message.memo, on_lag=message.on_lag)
        stream.choices = [Choice(stream, index, s, s.slot) for index, s in enumerate(sequences)]
        if message.resumable and self._survivors.grace_ms:
            stream.resume_key = replay.resume_key if replay is not None else secrets.token_hex(_KEY_BYTES)
            self._survivors.add(stream)
        self._delivery.add(stream)
        connection.send(stream.accepted())
        if request.params.prompt_logprobs is not None:
            stream.prompt_logprobs = PromptLogprobStore(int(request.prompt_ids.size), request.params.prompt_logprobs)
            self._delivery.tell_prompt_logprobs(stream)

    def _resume(self, connection: Connection, message: Resume) -> None:
        reader = self._reader_for(connection, message.stream)
        stream = self._survivors.find(message.request_id, message.resume_key)
        received = counts_of(message, stream)
        before = stream.reader
        if before is not None:
            number = stream.number
            self._delivery.release(stream)
            before.connection.send(refusal(TakenOver("it was resumed over another connection"), number))
        self._survivors.taken(stream)
        stream.is_paused = False  # who comes back may not know that it paused it
        self._delivery.give(stream, reader, message.stream, received)
        accepted = stream.accepted()
        if message.recall:
            outputs = (self._core.output(c.sequence, 0, n) for c, n in zip(stream.choices, received, strict=True))
            accepted = msgspec.structs.replace(
                accepted,
                prompt_ids=u32(stream.request.prompt_ids),
                output_ids=tuple(u32(ids) for ids in outputs),
                memo=stream.memo,
            )
        connection.send(accepted)
        self._delivery.tell_prompt_logprobs(stream)

    def _reader_for(self, connection: Connection, number: int) -> Reader:
        """The connection's reader, which may have one stream more, of this number."""
        reader, limit = self._reader(connection), self._config.server.max_streams_per_connection
        if number in reader.streams:
            raise InvalidRequest(f"{number} is in use on this connection", field="stream")
        if len(reader.streams) >= limit:
            raise Overloaded(
                f"this connection has {limit} open streams, no more are allowed",
                field="stream",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        return reader

    def _reader(self, connection: Connection) -> Reader:
        reader = self._readers.get(connection)
        if reader is None:
            reader = self._readers[connection] = self._delivery.add_reader(connection)
        return reader

    # ---- for the core ------------------------------------------------------------------------------------------------

    def on_outcome(self, outcome: StepOutcome) -> None:
        """See `Sink`."""
        self._delivery.on_outcome(outcome)

    def _on_over(self, stream: Stream, reader: Reader) -> None:
        self._survivors.on_over(stream, reader)

    def _on_fault(self, doing: str, error: Exception) -> None:
        self._log.error("door_fault", doing=doing, exc_info=error)

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        self._delivery.check_invariants(self._readers.values())
        self._survivors.check_invariants()


def _prompt_ids(message: Generate) -> TokenArray:
    """The prompt as an array; text is refused by name.

    Raises:
        UnsupportedFeature: text, which the gateway takes.
        InvalidRequest: no ids, or no whole number of them.
    """
    for field in ("prompt", "messages", "template_kwargs"):
        if getattr(message, field):
            raise UnsupportedFeature("this door takes token ids only; text is the gateway's", field=field)
    if message.prompt_ids is None:
        raise InvalidRequest("is missing", field="prompt_ids")
    if len(message.prompt_ids) % 4:
        raise InvalidRequest(f"has {len(message.prompt_ids)} bytes, not a multiple of 4", field="prompt_ids")
    return np.frombuffer(message.prompt_ids, "<u4")
