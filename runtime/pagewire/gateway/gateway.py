"""The gateway's core: clients' streams on one side, the engine's on the other, text in between. No sockets of its own.

    client ── generate ──▶ prepare (thread pool) ──▶ generate(token ids) ──▶ engine
    client ◀── accepted ───────────────────────────────────── accepted ◀──── engine
    client ◀── tokens, all my streams ◀── text, stop strings ◀── tokens ◀─── engine
    client ◀── finished, done ◀────────────────────── finished, done ◀────── engine

A stream has its client's number towards the client and one of ours towards the engine. It lives in `Client.streams`
until its client was told its end, and in `_upstream` until the engine said its last word; either may come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import structlog

from pagewire.config import ServerConfig
from pagewire.errors import (
    Cancelled,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    PagewireError,
    PromptTooLong,
    ProtocolError,
    SlowReader,
    Unavailable,
    UnknownStream,
    UnsupportedFeature,
)
from pagewire.gateway.asked import asked_in
from pagewire.gateway.client import Client, Peer
from pagewire.gateway.columns import Run, runs
from pagewire.gateway.continuity import Continuity
from pagewire.gateway.lag import Lag
from pagewire.gateway.pace import Pace
from pagewire.gateway.per_key import PerKey
from pagewire.gateway.stream import Choice, GatewayStream
from pagewire.gateway.upstream import Upstream
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.door import refusal
from pagewire_transport.handler import StreamMessage
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    Done,
    Error,
    Finish,
    Finished,
    FromClient,
    FromServer,
    Generate,
    Pause,
    PromptLogprobs,
    Resume,
    Stats,
    Tokens,
    Welcome,
)

_log: Final = structlog.get_logger()

RETRY_AFTER_MS: Final = 1000
_ID_BYTES: Final = 4
_AROUND_PROMPT_BYTES: Final = 16_384
"""More than the largest `params` and `namespace` take."""


class Preparer(Protocol):
    """Turns what a client sent into the prompt's token ids, off the loop."""

    async def prompt_ids(self, request: Generate) -> bytes:
        """uint32 ids, little-endian."""
        ...


class Gateway:
    """Carries streams between clients and one engine. It is the handler behind the gateway's `Door`.

    Args:
        config: of the door.
        to_engine: hands a message to the engine's link, which keeps it if it cannot be sent now, or raises.
        engine_moves: the engine's heartbeat says that tokens move.
        engine_halts: why it says that they do not.
        preparer: tokenises and renders.
        text_stream: makes the text of one choice, given its stop strings; None: this model has no text here, only ids.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        to_engine: Callable[[FromClient], None],
        engine_moves: Callable[[], bool],
        preparer: Preparer,
        text_stream: Callable[[tuple[str, ...]], TextStream] | None,
        engine_halts: Callable[[], str] = lambda: "",
    ) -> None:
        self._config = config
        self._engine_moves = engine_moves
        self._engine_halts = engine_halts
        self._preparer = preparer
        self._text_stream = text_stream
        self._clients: dict[Peer, Client] = {}
        self.pace = Pace()
        self._upstream = Upstream(to_engine)
        self._lag = Lag(config, self._upstream.pause, self._end_slow)
        self._per_key = PerKey(config.max_streams_per_key)
        self._continuity = Continuity(config, self._upstream, self._lag, self, self._per_key, self._engine_missed)
        self._preparing: dict[GatewayStream, asyncio.Task[None]] = {}
        self._touched: dict[Client, None] = {}
        self._refusing: PagewireError | None = Unavailable(
            "the server is still starting", retry_after_ms=RETRY_AFTER_MS
        )
        self._engine: Welcome | None = None
        self._engine_stats: dict[str, float] = {}
        self._num_requests = 0

    # ---- state --------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """New streams are taken."""
        return self._refusing is None and self._engine_moves()

    @property
    def unready(self) -> str:
        """Why not; for people."""
        if self._refusing is not None:
            return self._refusing.message
        return self._engine_halts() or "the engine does not say that tokens move"

    @property
    def has_engine(self) -> bool:
        """An engine answered, once."""
        return self._engine is not None

    @property
    def engine(self) -> Welcome | None:
        """What the engine said about itself; None before it answered."""
        return self._engine

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the engine serves; 0 before it answered."""
        return self._engine.max_model_len if self._engine is not None else 0

    @property
    def num_streams(self) -> int:
        """Streams whose clients have not been sent their end."""
        return sum(len(client.streams) for client in self._clients.values())

    @property
    def has_news(self) -> bool:
        """Some client has something waiting that its connection did not take."""
        return any(client.has_news for client in self._clients.values())

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        for client in self._clients.values():
            client.check_invariants()
            for number, stream in client.streams.items():
                assert stream.number == number
                assert stream.owner is client
                self._check_is_somewhere(stream)
        for stream in self._continuity.survivors.orphans:
            self._check_is_somewhere(stream)
        self._per_key.check_invariants(self._clients.values(), self._continuity.survivors.orphans)
        self._continuity.survivors.check_invariants()
        for number, stream in self._upstream:
            assert stream.upstream == number
        for stream in self._preparing:
            assert stream.upstream is None
        assert not self._touched, "somebody forgot to flush"

    def _check_is_somewhere(self, stream: GatewayStream) -> None:
        places = (stream in self._upstream, stream in self._preparing, stream in self._continuity.absence)
        assert any(places) or stream.ending is not None, stream

    def engine_ready(self, engine: Welcome) -> None:
        """The engine answered, for the first time or again; streams are taken from now on."""
        self._engine = engine
        if not isinstance(self._refusing, Draining):
            self._refusing = None
        self._continuity.engine_ready()
        self.flush()

    def attach(self, client: Client) -> None:
        """Take a client that does not come through the door. From now on it is as any other, until `on_lost`."""
        self._clients[client.connection] = client

    def ask_stats(self) -> None:
        """Ask the engine for its counters; the answer is in `stats` when it has come."""
        self._upstream.ask_stats()

    def engine_lost(self, error: PagewireError) -> None:
        """The engine is gone: streams wait for the next one, new ones are refused until it answers.

        Those that wait for too long, or saw several engines die, end with `error`.
        """
        if not isinstance(self._refusing, Draining):
            self._refusing = Unavailable("no engine serves now; one is being started", retry_after_ms=RETRY_AFTER_MS)
        self._continuity.engine_lost(error)
        self.flush()

    def _engine_missed(self) -> None:
        self._continuity.give_up_waiting()
        self.flush()

    def drain(self) -> None:
        """From now on new streams are refused; the open ones go on, those without a client or an engine end."""
        self._refusing = Draining("the server is shutting down", retry_after_ms=RETRY_AFTER_MS)
        self._continuity.close()
        self.flush()

    def end_draining(self) -> None:
        """The time to drain is over: streams that are still open end with `draining`."""
        assert self._refusing is not None, "drain first"
        self._fail_all(self._refusing)

    def _fail_all(self, error: PagewireError) -> None:
        """End every open stream with `error`."""
        for client in self._clients.values():
            for stream in list(client.streams.values()):
                self.fail(stream, error)
        self.flush()

    # ---- the door's handler -------------------------------------------------------------------------------------------

    def welcome(self) -> Welcome:
        """The answer to a client's hello: the engine's, under this door's limits."""
        if self._engine is None or isinstance(self._refusing, Draining):
            assert self._refusing is not None
            raise self._refusing.with_traceback(None)
        return msgspec.structs.replace(
            self._engine,
            role="gateway",
            max_streams=self._config.max_streams_per_connection,
            max_message_bytes=self._config.max_message_bytes,
            heartbeat_ms=self._config.heartbeat_ms,
            heartbeat_timeout_ms=self._config.heartbeat_timeout_ms,
        )

    def on_message(self, connection: Peer, message: StreamMessage) -> None:
        """Take one message of a client.

        Raises:
            PagewireError: it is refused; the door says so.
        """
        client = self._clients.get(connection)
        if client is None:
            client = self._clients[connection] = Client(
                connection, self.pace, self._continuity.survivors.told, self._lag
            )
            self._per_key.came(client)
        try:
            if isinstance(message, Generate):
                self._generate(client, message)
            elif isinstance(message, Resume):
                self._resume(client, message)
            elif isinstance(message, Cancel):
                self._cancel(self._owned(client, message.stream))
            elif isinstance(message, Pause):
                stream = self._owned(client, message.stream)
                stream.is_paused = message.paused
                self._upstream.pause(stream)
            else:
                self._finish(self._owned(client, message.stream), message)
        finally:
            self.flush()

    def has_stream(self, connection: Peer, stream: int) -> bool:
        client = self._clients.get(connection)
        return client is not None and stream in client.streams

    def on_writable(self, connection: Peer) -> None:
        client = self._clients.get(connection)
        if client is not None:
            client.flush()

    def on_lost(self, connection: Peer, reason: PagewireError) -> None:
        """A client is gone: its streams are kept for a while. One that said goodbye comes not back: they are cancelled."""
        client = self._clients.pop(connection, None)
        if client is None:
            return
        if client.streams:
            _log.info("client_lost", client=connection.client, streams=len(client.streams), reason=str(reason))
        self._continuity.client_lost(client, reason, comes_back=not isinstance(reason, Cancelled | ProtocolError))
        self._per_key.left(client)

    def stats(self) -> dict[str, float]:
        """The gateway's own, now, and the engine's as it last told them (`ask_stats`)."""
        return {
            **self._engine_stats,
            "gateway_connections": len(self._clients),
            "gateway_streams": self.num_streams,
            "gateway_orphans": len(self._continuity.survivors.orphans),
            "gateway_prompts_waiting": len(self._preparing),
            "gateway_requests_total": self._num_requests,
        }

    # ---- from clients -------------------------------------------------------------------------------------------------

    def _owned(self, client: Client, number: int) -> GatewayStream:
        stream = client.streams.get(number)
        if stream is None:
            raise UnknownStream(f"{number} is no open stream of this connection", field="stream")
        return stream

    def _generate(self, client: Client, message: Generate) -> None:
        self._check_room(client, message.stream)
        self._per_key.check(client)
        if self._refusing is not None:
            raise self._refusing.with_traceback(None)  # raised again and again it would collect tracebacks
        field = _prompt_field(message)
        stops = message.params.stop
        stream = GatewayStream(
            number=message.stream,
            owner=client,
            choices=[Choice(self.new_text(stops, shows_text=message.echo_text)) for _ in range(message.params.n)],
            asked=asked_in(message, field, client.share, client.user),
            shows_text=message.echo_text,
            resumable=message.resumable,
        )
        self._num_requests += 1
        client.take(stream)
        if message.prompt_ids is not None:
            self._start(stream, message.prompt_ids)
        else:
            task = asyncio.create_task(self._prepare(stream, message))
            self._preparing[stream] = task

    def _check_room(self, client: Client, number: int) -> None:
        if number in client.streams:
            raise InvalidRequest(f"{number} is in use on this connection", field="stream")
        if len(client.streams) >= self._config.max_streams_per_connection:
            raise Overloaded(
                f"this connection has {self._config.max_streams_per_connection} open streams, no more are allowed",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def _resume(self, client: Client, message: Resume) -> None:
        self._check_room(client, message.stream)
        if message.recall:
            raise UnsupportedFeature("is for gateways, at an engine", field="recall")
        if isinstance(self._refusing, Draining):
            raise self._refusing.with_traceback(None)
        self._continuity.resume(client, message)

    def new_text(self, stops: tuple[str, ...], *, shows_text: bool) -> TextStream | None:
        """The text of one choice, or None where nobody wants it."""
        if self._text_stream is not None:
            return self._text_stream(stops) if shows_text or stops else None
        if stops:
            raise UnsupportedFeature(
                "this model has no tokenizer here, so stop strings cannot be found", field="params.stop"
            )
        return None

    async def _prepare(self, stream: GatewayStream, message: Generate) -> None:
        try:
            prompt_ids = await self._preparer.prompt_ids(message)
        except PagewireError as error:
            self._preparing.pop(stream, None)
            self.fail(stream, error)
        except Exception as error:  # noqa: BLE001  (F7: a fault of ours ends this request, never the process)
            self._preparing.pop(stream, None)
            self._fault(stream, error, "preparing the prompt")
        else:
            if self._preparing.pop(stream, None) is not None:
                self._start(stream, prompt_ids)
        self.flush()

    def _start(self, stream: GatewayStream, prompt_ids: bytes) -> None:
        stream.prompt_ids = prompt_ids
        try:
            self._check_size(prompt_ids, stream.prompt_field)
            self._continuity.start(stream)
        except PagewireError as error:
            self.fail(stream, error)

    def _check_size(self, prompt_ids: bytes, field: str) -> None:
        """What the engine's door would refuse unread counts as an offence there, and too many of those end the one
        connection that carries everybody's streams.
        """
        assert self._engine is not None, "streams are taken once it answered"
        most = min(self._engine.max_model_len, (self._engine.max_message_bytes - _AROUND_PROMPT_BYTES) // _ID_BYTES)
        if len(prompt_ids) > most * _ID_BYTES:
            raise PromptTooLong(
                f"{len(prompt_ids) // _ID_BYTES} tokens leave no room: prompt and output together may have {most}",
                field=field,
            )

    def _cancel(self, stream: GatewayStream) -> None:
        if stream.ending is not None:
            return
        stream.is_cancelled = True
        if stream.upstream is not None:
            self._upstream.cancel(stream)
            return
        self.leave_engine(stream)
        self._continuity.end_here(stream)

    def _finish(self, stream: GatewayStream, message: Finish) -> None:
        """The client found a stop by itself; the engine answers with `finished`."""
        if message.choice >= max(1, len(stream.choices)):
            raise InvalidRequest(f"must be below n, {len(stream.choices)}", field="choice")
        if stream in self._continuity.absence:
            choice = stream.choices[message.choice]
            if choice.finished is None:
                choice.cut(min(message.at, choice.received))
                choice.finished = Finished(
                    stream=stream.number, choice=message.choice, reason="stop", num_tokens=choice.received
                )
                self.mark(stream)
            return
        if stream.upstream is None:
            raise InvalidRequest("the stream has no tokens yet", field="at")
        if not stream.choices:
            self._upstream.finish(stream, message.choice, message.at)
        elif stream.choices[message.choice].finished is None:
            stream.choices[message.choice].asked_end = message.at
            self._upstream.finish(stream, message.choice, message.at)

    # ---- from the engine ----------------------------------------------------------------------------------------------

    def on_engine(self, message: FromServer) -> None:
        """Take one message of the engine, and send every client what it means for it, in one message where possible."""
        if isinstance(message, Tokens):
            for run in runs(message):
                stream = self._upstream.get(run.stream)
                if stream is not None and stream.ending is None:
                    self._take(stream, run)
        elif isinstance(message, Accepted | PromptLogprobs | Finished | Done):
            stream = self._upstream.get(message.stream)
            if isinstance(message, Done):
                self._upstream.forget(message.stream)
            if stream is not None and stream.ending is None:
                self._tell(stream, message)
        elif isinstance(message, Error):
            self._engine_refused(message)
        elif isinstance(message, Stats):
            self._engine_stats = message.values
        self.flush()

    def _take(self, stream: GatewayStream, run: Run) -> None:
        """Tokens of one choice: text is made of them, and a stop string ends it."""
        try:
            found_stop = stream.take(run)
            stream.has_moved = True
        except Exception as error:  # noqa: BLE001  (F7)
            self._fault(stream, error, "making text of tokens")
            return
        if found_stop:
            self._upstream.finish(stream, run.choice, stream.choices[run.choice].received)
        self.mark(stream)

    def _tell(self, stream: GatewayStream, message: Accepted | PromptLogprobs | Finished | Done) -> None:
        if isinstance(message, Accepted):
            try:
                self._continuity.accepted(stream, message)
            except Exception as error:  # noqa: BLE001  (F7)
                self._fault(stream, error, "going on with a stream")
            return
        if isinstance(message, PromptLogprobs):
            if stream.prompt_logprobs is None:
                stream.prompt_logprobs = message if stream.resumable else None
                stream.opening.append(msgspec.structs.replace(message, stream=stream.number))
        elif isinstance(message, Finished):
            try:
                stream.end(message)
            except Exception as error:  # noqa: BLE001  (F7)
                self._fault(stream, error, "ending a text")
                return
        else:
            usage = msgspec.structs.replace(message.usage, completion=stream.num_completion_tokens)
            stream.ending = msgspec.structs.replace(message, stream=stream.number, usage=usage)
        self.mark(stream)

    def _engine_refused(self, message: Error) -> None:
        stream = self._upstream.forget(message.stream)
        if stream is None:
            if message.code == "unknown_stream":
                return  # a `cancel` or `finish` crossed the stream's end on the way
            _log.warning("engine_error", code=message.code, message=message.message, field=message.field)
            return
        if self._continuity.refused(stream, message):
            return
        if stream.ending is None:
            field = stream.prompt_field if message.field == "prompt_ids" else message.field
            stream.ending = msgspec.structs.replace(message, stream=stream.number, field=field)
            self.mark(stream)

    # ---- ends ---------------------------------------------------------------------------------------------------------

    def fail(self, stream: GatewayStream, error: PagewireError) -> None:
        """The one way out of a stream that ends with an error: the engine drops it, its client is told."""
        if stream.ending is None:
            self.leave_engine(stream)
            stream.ending = refusal(error, stream.number)
            self.mark(stream)

    def _end_slow(self, stream: GatewayStream) -> None:
        """Its client is too slow. It is told so ahead of what it has not read, which a resume fetches."""
        client, number = stream.owner, stream.number
        try:
            for index, choice in enumerate(stream.choices):
                stream.end(Finished(stream=number, choice=index, reason="cancelled", num_tokens=choice.received))
        except Exception as error:  # noqa: BLE001  (F7)
            self._fault(stream, error, "ending a text")
            return
        self.leave_engine(stream)
        client.release(stream)
        stream.ending = self._continuity.done_here(stream)
        self._continuity.survivors.told(client, stream)
        rest = "; resume it for the rest of what was generated" if stream.owner is not client else ""
        client.connection.send(refusal(SlowReader(f"its tokens were not read in time{rest}", field="on_lag"), number))

    def _fault(self, stream: GatewayStream, error: Exception, doing: str) -> None:
        """An exception of our own code: it ends this stream and no other (F7)."""
        _log.error("stream_failed", doing=doing, exc_info=error)
        self.fail(stream, InternalError(f"{type(error).__name__} while {doing}"))

    def leave_engine(self, stream: GatewayStream) -> None:
        """Nothing more is wanted of the engine for this stream; in every state, also twice."""
        task = self._preparing.pop(stream, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        self._continuity.absence.remove(stream)
        if stream.ending is None:
            self._upstream.cancel(stream)

    def mark(self, stream: GatewayStream) -> None:
        """It has something to send."""
        stream.owner.mark(stream)
        self._touched[stream.owner] = None

    def flush(self) -> None:
        """Send what is new to every client that can take it; the others are told when their connections are free."""
        touched, self._touched = self._touched, {}
        for client in touched:
            client.flush()


def _prompt_field(message: Generate) -> str:
    """The one of `prompt`, `messages` and `prompt_ids` that is given, checked for emptiness (F42)."""
    if message.replay is not None or message.memo:
        field = "memo" if message.replay is None else "replay"
        raise UnsupportedFeature("is for gateways, at an engine", field=field)
    if message.client:
        raise UnsupportedFeature("is for gateways, at an engine", field="client")
    given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(message, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"give exactly one of prompt, messages and prompt_ids, not {' and '.join(given) or 'none'}",
            field=given[-1] if given else "prompt",
        )
    if not getattr(message, given[0]):
        raise InvalidRequest("must not be empty", field=given[0])
    return given[0]
