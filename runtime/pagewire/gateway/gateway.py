"""The gateway's core: clients' streams on one side, the engine's on the other, text in between. No sockets of its own.

    client ── generate ──▶ prepare (thread pool) ──▶ generate(token ids) ──▶ engine
    client ◀── accepted ───────────────────────────────────── accepted ◀──── engine
    client ◀── tokens, all my streams ◀── text, stop strings ◀── tokens ◀─── engine
    client ◀── finished, done ◀────────────────────── finished, done ◀────── engine

A stream has its client's number towards the client and one of ours towards the engine. It lives in `Connection.streams`
until its client was told its end, and in `_upstream` until the engine said its last word; either may come first.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from typing import Final, Protocol

import msgspec
import structlog

from pagewire.errors import (
    Draining,
    EngineFailed,
    InternalError,
    InvalidRequest,
    Overloaded,
    PagewireError,
    UnknownStream,
)
from pagewire.gateway.columns import Run, runs
from pagewire.gateway.connection import Connection, refusal
from pagewire.gateway.stream import Choice, GatewayStream
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.messages import (
    MAX_STREAM,
    Accepted,
    Cancel,
    Done,
    Error,
    Finish,
    Finished,
    FromClient,
    FromServer,
    Generate,
    PromptLogprobs,
    Timings,
    Tokens,
    Usage,
)

_log: Final = structlog.get_logger()

RETRY_AFTER_MS: Final = 1000


class Preparer(Protocol):
    """Turns what a client sent into the prompt's token ids, off the loop."""

    async def prompt_ids(self, request: Generate) -> bytes:
        """uint32 ids, little-endian."""
        ...


class Gateway:
    """Carries streams between clients and one engine.

    Args:
        to_client: hands a message for a peer to the socket; False: it cannot take it now, `flush` is tried again.
        to_engine: hands a message to the engine's link, which keeps it if it cannot be sent now.
        preparer: tokenises and renders.
        text_stream: makes the text of one choice, given its stop strings.
        max_streams: open streams of one connection.
    """

    def __init__(
        self,
        *,
        to_client: Callable[[Hashable, FromServer], bool],
        to_engine: Callable[[FromClient], None],
        preparer: Preparer,
        text_stream: Callable[[tuple[str, ...]], TextStream],
        max_streams: int,
    ) -> None:
        self._to_client = to_client
        self._to_engine = to_engine
        self._preparer = preparer
        self._text_stream = text_stream
        self._max_streams = max_streams
        self._connections: dict[Hashable, Connection] = {}
        self._upstream: dict[int, tuple[Connection, GatewayStream]] = {}
        self._numbers = itertools.cycle(range(1, MAX_STREAM + 1))
        self._preparing: dict[GatewayStream, asyncio.Task[None]] = {}
        self._touched: dict[Connection, None] = {}
        self._refusing: PagewireError | None = EngineFailed("the engine is not connected yet")

    # ---- state --------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """New streams are taken."""
        return self._refusing is None

    @property
    def num_streams(self) -> int:
        """Streams whose clients have not been told their end."""
        return sum(len(connection.streams) for connection in self._connections.values())

    @property
    def has_news(self) -> bool:
        """Some client has something waiting that its socket did not take."""
        return bool(self._touched)

    def check_invariants(self) -> None:
        """What must hold between any two events."""
        for connection in self._connections.values():
            for number, stream in connection.streams.items():
                assert stream.number == number
                waits_for_engine = stream.upstream in self._upstream
                assert waits_for_engine or stream in self._preparing or stream.ending is not None, stream
        for number, (_, stream) in self._upstream.items():
            assert stream.upstream == number
        for stream in self._preparing:
            assert stream.upstream is None

    def engine_ready(self) -> None:
        """The engine answered; streams are taken from now on."""
        if not isinstance(self._refusing, Draining):
            self._refusing = None

    def engine_lost(self, error: PagewireError) -> None:
        """The engine is gone: every stream ends with `error`, new ones are refused with it."""
        if not isinstance(self._refusing, Draining):
            self._refusing = error
        self._upstream.clear()
        self.fail_all(error)

    def drain(self) -> None:
        """From now on new streams are refused; the open ones go on."""
        self._refusing = Draining("the server is shutting down", retry_after_ms=RETRY_AFTER_MS)

    def fail_all(self, error: PagewireError) -> None:
        """End every open stream with `error`."""
        for connection in self._connections.values():
            for stream in list(connection.streams.values()):
                self._fail(connection, stream, error)
        self.flush()

    # ---- from clients -------------------------------------------------------------------------------------------------

    def on_client(self, peer: Hashable, message: Generate | Cancel | Finish) -> None:
        """Take one message of a client; every refusal is answered."""
        connection = self._connections.get(peer)
        if connection is None:
            connection = Connection(lambda reply: self._to_client(peer, reply))
            self._connections[peer] = connection
        try:
            if isinstance(message, Generate):
                self._generate(connection, message)
            elif isinstance(message, Cancel):
                self._cancel(connection, self._owned(connection, message.stream))
            else:
                self._finish(self._owned(connection, message.stream), message)
        except PagewireError as error:
            names_own = isinstance(message, Generate) and message.stream not in connection.streams
            connection.say(refusal(error, message.stream if names_own else None))
        self._touched[connection] = None
        self.flush()

    def client_lost(self, peer: Hashable) -> None:
        """A client is gone, or said goodbye: its streams are cancelled at once. Idempotent."""
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        self._touched.pop(connection, None)
        for stream in list(connection.streams.values()):
            self._leave_engine(stream)
            stream.ending = refusal(PagewireError("the client is gone"), stream.number)  # nobody will read it
        connection.streams.clear()

    def _owned(self, connection: Connection, number: int) -> GatewayStream:
        stream = connection.streams.get(number)
        if stream is None:
            raise UnknownStream(f"{number} is no open stream of this connection", field="stream")
        return stream

    def _generate(self, connection: Connection, message: Generate) -> None:
        if message.stream in connection.streams:
            raise InvalidRequest(f"{message.stream} is in use on this connection", field="stream")
        if self._refusing is not None:
            raise self._refusing
        if len(connection.streams) >= self._max_streams:
            raise Overloaded(
                f"this connection has {self._max_streams} open streams, no more are allowed",
                retry_after_ms=RETRY_AFTER_MS,
            )
        prompt_field = _prompt_field(message)
        needs_text = message.echo_text or message.params.stop
        stream = GatewayStream(
            number=message.stream,
            choices=[
                Choice(self._text_stream(message.params.stop) if needs_text else None) for _ in range(message.params.n)
            ],
            shows_text=message.echo_text,
            prompt_field=prompt_field,
        )
        connection.streams[message.stream] = stream
        if message.prompt_ids is not None:
            self._start(connection, stream, message, message.prompt_ids)
        else:
            task = asyncio.create_task(self._prepare(connection, stream, message))
            self._preparing[stream] = task

    async def _prepare(self, connection: Connection, stream: GatewayStream, message: Generate) -> None:
        try:
            prompt_ids = await self._preparer.prompt_ids(message)
        except PagewireError as error:
            self._preparing.pop(stream, None)
            self._fail(connection, stream, error)
        except Exception as error:  # noqa: BLE001  (F7: a fault of ours ends this request, never the process)
            self._preparing.pop(stream, None)
            self._fault(connection, stream, error, "preparing the prompt")
        else:
            if self._preparing.pop(stream, None) is not None:
                self._start(connection, stream, message, prompt_ids)
        self.flush()

    def _start(self, connection: Connection, stream: GatewayStream, message: Generate, prompt_ids: bytes) -> None:
        number = next(number for number in self._numbers if number not in self._upstream)
        stream.upstream = number
        self._upstream[number] = (connection, stream)
        self._to_engine(
            Generate(
                stream=number,
                prompt_ids=prompt_ids,
                params=msgspec.structs.replace(message.params, stop=()),
                priority=message.priority,
                namespace=message.namespace,
            )
        )

    def _cancel(self, connection: Connection, stream: GatewayStream) -> None:
        if stream.ending is not None:
            return
        if stream.upstream is not None:
            self._to_engine(Cancel(stream=stream.upstream))
            return
        self._leave_engine(stream)
        for index, choice in enumerate(stream.choices):
            choice.finished = Finished(stream=stream.number, choice=index, reason="cancelled", num_tokens=0)
        nothing = Timings(queue_ns=0, first_token_ns=0, total_ns=0)
        stream.ending = Done(stream=stream.number, seed=0, usage=Usage(prompt=0, completion=0), timings=nothing)
        self._mark(connection, stream)

    def _finish(self, stream: GatewayStream, message: Finish) -> None:
        """The client found a stop by itself; the engine answers with `finished`."""
        if message.choice >= len(stream.choices):
            raise InvalidRequest(f"must be below n, {len(stream.choices)}", field="choice")
        if stream.upstream is None:
            raise InvalidRequest("the stream has no tokens yet", field="at")
        if stream.choices[message.choice].finished is None:
            self._to_engine(Finish(stream=stream.upstream, choice=message.choice, at=message.at))

    # ---- from the engine ----------------------------------------------------------------------------------------------

    def on_engine(self, message: FromServer) -> None:
        """Take one message of the engine, and send every client what it means for it, in one message where possible."""
        if isinstance(message, Tokens):
            for run in runs(message):
                known = self._upstream.get(run.stream)
                if known is not None and known[1].ending is None:
                    self._take(*known, run)
        elif isinstance(message, Accepted | PromptLogprobs | Finished | Done):
            known = self._upstream.get(message.stream)
            if isinstance(message, Done):
                self._upstream.pop(message.stream, None)
            if known is not None and known[1].ending is None:
                self._tell(*known, message)
        elif isinstance(message, Error):
            self._engine_refused(message)
        self.flush()

    def _take(self, connection: Connection, stream: GatewayStream, run: Run) -> None:
        """Tokens of one choice: text is made of them, and a stop string ends it."""
        try:
            choice = stream.choices[run.choice]
            if choice.finished is not None:
                return
            if run.start != choice.received:
                raise InternalError(f"tokens from {run.start} follow {choice.received} tokens")  # noqa: TRY301
            found_stop = _grow(stream, run, choice)
        except Exception as error:  # noqa: BLE001  (F7)
            self._fault(connection, stream, error, "making text of tokens")
            return
        if found_stop:
            self._to_engine(Finish(stream=run.stream, choice=run.choice, at=choice.received))
        self._mark(connection, stream)

    def _tell(
        self, connection: Connection, stream: GatewayStream, message: Accepted | PromptLogprobs | Finished | Done
    ) -> None:
        if isinstance(message, Accepted | PromptLogprobs):
            stream.opening.append(msgspec.structs.replace(message, stream=stream.number))
        elif isinstance(message, Finished):
            try:
                _end(stream, message)
            except Exception as error:  # noqa: BLE001  (F7)
                self._fault(connection, stream, error, "ending a text")
                return
        else:
            usage = msgspec.structs.replace(message.usage, completion=stream.num_completion_tokens)
            stream.ending = msgspec.structs.replace(message, stream=stream.number, usage=usage)
        self._mark(connection, stream)

    def _engine_refused(self, message: Error) -> None:
        known = self._upstream.pop(message.stream, None) if message.stream is not None else None
        if known is None:
            _log.warning("engine_error", code=message.code, message=message.message, field=message.field)
            return
        connection, stream = known
        if stream.ending is None:
            field = stream.prompt_field if message.field == "prompt_ids" else message.field
            stream.ending = msgspec.structs.replace(message, stream=stream.number, field=field)
            self._mark(connection, stream)

    # ---- ends ---------------------------------------------------------------------------------------------------------

    def _fail(self, connection: Connection, stream: GatewayStream, error: Exception) -> None:
        """The one way out of a stream that ends with an error: the engine drops it, its client is told."""
        if stream.ending is None:
            self._leave_engine(stream)
            stream.ending = refusal(error, stream.number)
            self._mark(connection, stream)

    def _fault(self, connection: Connection, stream: GatewayStream, error: Exception, doing: str) -> None:
        """An exception of our own code: it ends this stream and no other (F7)."""
        _log.error("stream_failed", doing=doing, exc_info=error)
        self._fail(connection, stream, InternalError(f"{type(error).__name__} while {doing}"))

    def _leave_engine(self, stream: GatewayStream) -> None:
        """Nothing more is wanted of the engine for this stream; in every state, also twice."""
        task = self._preparing.pop(stream, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if stream.upstream in self._upstream and stream.ending is None:
            self._to_engine(Cancel(stream=stream.upstream))

    def _mark(self, connection: Connection, stream: GatewayStream) -> None:
        connection.mark(stream)
        self._touched[connection] = None

    def flush(self) -> None:
        """Send what waits to every client that can take it; the others stay for the next time."""
        for connection in list(self._touched):
            if connection.flush():
                self._touched.pop(connection, None)


def _prompt_field(message: Generate) -> str:
    """The one of `prompt`, `messages` and `prompt_ids` that is given, checked for emptiness (F42)."""
    given = [name for name in ("prompt", "messages", "prompt_ids") if getattr(message, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"give exactly one of prompt, messages and prompt_ids, not {' and '.join(given) or 'none'}",
            field=given[-1] if given else "prompt",
        )
    if not getattr(message, given[0]):
        raise InvalidRequest("must not be empty", field=given[0])
    return given[0]


def _grow(stream: GatewayStream, run: Run, choice: Choice) -> bool:
    """Add a run to its choice; True: it completes a stop string, and the choice is finished at that token."""
    ids, text = run.ids, ""
    if choice.text is not None:
        delta = choice.text.push(ids)
        text = delta.text
        if delta.stop is not None:
            count = delta.stop.at - choice.received
            ids = ids[:count]  # log-probabilities of the tokens behind are never sent: runs are as long as their ids
            choice.finished = Finished(
                stream=stream.number,
                choice=run.choice,
                reason="stop",
                num_tokens=choice.received + count,
                stop=delta.stop.stop,
            )
    choice.received += len(ids)
    choice.pending.add(ids, text, run.logprobs)
    return choice.finished is not None


def _end(stream: GatewayStream, message: Finished) -> None:
    """The engine ended a choice: what the text held back goes out with it."""
    choice = stream.choices[message.choice]
    if choice.finished is not None:
        return  # a stop string ended it first
    choice.received = message.num_tokens
    choice.finished = msgspec.structs.replace(message, stream=stream.number)
    if choice.text is None:
        return
    rest = choice.text.flush()
    if rest.stop is not None:  # the replacement of an incomplete character completes a stop string
        choice.received = rest.stop.at
        choice.finished = msgspec.structs.replace(
            choice.finished, reason="stop", stop=rest.stop.stop, num_tokens=rest.stop.at
        )
    if stream.shows_text and rest.text:
        choice.finished = msgspec.structs.replace(choice.finished, text=rest.text)
