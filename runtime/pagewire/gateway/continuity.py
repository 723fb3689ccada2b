"""How a stream survives the loss of its client, of its engine, or of the gateway before this one.

An engine that ends for a reason says so to each stream before its process is gone: that is its loss, too.

lost         who goes on                                                with
client       the same gateway: `resume`                                 the tokens that it kept
engine       this gateway: `resume` at the engine that is back, or a    prompt and tokens as a prompt: the next token
`generate` with `replay` at another one                    is the one that it would have been
gateway      this gateway: `resume` with `recall` at the engine         the engine's ledger and the stream's memo
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from pagewire.config import ServerConfig
from pagewire.errors import (
    Draining,
    EngineLost,
    PagewireError,
    ProtocolError,
    TakenOver,
    Unavailable,
    UnknownStream,
)
from pagewire.gateway.absence import Absence
from pagewire.gateway.asked import Asked, asked_of
from pagewire.gateway.blame import died_under, leave
from pagewire.gateway.client import Client
from pagewire.gateway.lag import Lag
from pagewire.gateway.per_key import PerKey
from pagewire.gateway.stream import Choice, GatewayStream
from pagewire.gateway.survivors import GatewaySurvivors, counts_of
from pagewire.gateway.upstream import Upstream
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.columns import unpack
from pagewire_transport.door import refusal
from pagewire_transport.messages import Accepted, Done, Error, Finished, Resume, Timings, Usage

_QUARANTINE_S: Final = 1.0
"""So much later than the others begin those under which an engine died before they had a token from it."""
_RETRY_AFTER_MS: Final = 1000
_NO_TIMINGS: Final = Timings(queue_ns=0, first_token_ns=0, total_ns=0)


class Owner(Protocol):
    """What is asked of the gateway."""

    def fail(self, stream: GatewayStream, error: PagewireError) -> None:
        """End it with an error."""
        ...

    def mark(self, stream: GatewayStream) -> None:
        """It has something to send."""
        ...

    def flush(self) -> None:
        """Send what was marked."""
        ...

    def leave_engine(self, stream: GatewayStream) -> None:
        """The engine need not go on with it."""
        ...

    def new_text(self, stops: tuple[str, ...], *, shows_text: bool) -> TextStream | None:
        """The text of one choice, or None where nobody wants it."""
        ...


class Continuity:
    """The gateway's part that is about losses. Used on one loop.

    Args:
        config: of the door.
        upstream: the streams as the engine knows them.
        lag: told of streams whose clients come back.
        owner: the gateway.
        per_key: counts streams that wait for their client.
        on_timeout: told when streams have waited for an engine for too long.
    """

    def __init__(
        self,
        config: ServerConfig,
        upstream: Upstream,
        lag: Lag,
        owner: Owner,
        per_key: PerKey,
        on_timeout: Callable[[], None],
    ) -> None:
        self._upstream = upstream
        self._lag = lag
        self._owner = owner
        self._per_key = per_key
        self.survivors = GatewaySurvivors(config, self._end_orphan)
        self.absence = Absence(config.replay_timeout_ms, on_timeout)
        self._is_closing = False
        self._is_absent = False
        self._is_leaving = False  # the engine that is there said that it ends
        self._reason: PagewireError = EngineLost("no engine is there")

    # ---- the engine --------------------------------------------------------------------------------------------------

    def engine_lost(self, reason: PagewireError) -> None:
        """The engine is gone: what it worked on waits for the next one."""
        self._reason, self._is_absent, self._is_leaving = reason, True, False
        lost = [stream for _, stream in self._upstream]
        self._upstream.forget_all()
        if self.absence.timeout_ms:
            self.absence.begin()
        for stream in lost:
            if stream.ending is not None:
                continue
            stream.is_homeless = False
            leave(stream)
            if stream.recall is not None:  # its client asks again
                self._owner.fail(stream, Unavailable("no engine serves now", retry_after_ms=_RETRY_AFTER_MS))
            elif stream.is_cancelled:  # what the engine was told is lost with it
                self.end_here(stream)
            elif not _can_ask(stream) and died_under(stream):  # the others will ask whether it died or the link broke
                self._owner.fail(stream, reason)
            else:
                self.start(stream)

    def start(self, stream: GatewayStream) -> None:
        """Ask the engine for a stream that is ready for it, or let it wait until there is one."""
        if not self._is_absent and not self._is_leaving:
            self._upstream.start(stream)
        elif self.absence.timeout_ms and not self._is_closing:
            self.absence.begin()
            self.absence.add(stream)
        else:
            self._owner.fail(stream, self._reason)

    def engine_ready(self) -> None:
        """An engine is there: go on."""
        self._is_absent = self._is_leaving = False
        waiting = self.absence.end()
        suspects = [stream for stream in waiting if stream.is_suspect]
        if len(suspects) < len(waiting):
            for stream in suspects:
                self.absence.add(stream)
            self._release_in(_QUARANTINE_S)
        for stream in waiting:
            if stream not in self.absence:
                self._try_to_go_on(stream)

    def _release_in(self, seconds: float) -> None:
        """Go on then with those that wait although there is an engine."""
        asyncio.get_running_loop().call_later(seconds, self._release)

    def _release(self) -> None:
        if not self._is_absent and not self._is_leaving:
            for stream in self.absence.end():
                self._try_to_go_on(stream)
            self._owner.flush()

    def _try_to_go_on(self, stream: GatewayStream) -> None:
        try:
            self._go_on(stream)
        except PagewireError as error:
            self._owner.fail(stream, error)

    def give_up_waiting(self) -> None:
        """No engine came in time, or none will."""
        for stream in self.absence.end():
            self._owner.fail(stream, self._reason)

    def _go_on(self, stream: GatewayStream) -> None:
        if stream.accepted is not None and all(choice.finished is not None for choice in stream.choices):
            self.end_here(stream)
            return
        if _can_ask(stream) and not stream.is_homeless:
            stream.is_resuming = True
            self._upstream.resume(stream)
        else:
            self._upstream.start(stream)
        self._tell_stops(stream)

    def engine_does_not_know(self, stream: GatewayStream) -> None:
        """It is another engine than the one that began the stream.

        Raises:
            PagewireError: the stream cannot go on there.
        """
        stream.is_resuming = False
        if stream.is_cancelled:  # this one was told, and does not know it either
            self.end_here(stream)
            return
        if stream.asked is None or died_under(stream):
            raise self._reason.with_traceback(None)
        stream.is_homeless = True
        self._upstream.start(stream)
        self._tell_stops(stream)

    def _tell_stops(self, stream: GatewayStream) -> None:
        for index, choice in enumerate(stream.choices):
            at = choice.received if choice.finished is not None else choice.asked_end
            if at is not None:
                self._upstream.finish(stream, index, at)

    def end_here(self, stream: GatewayStream) -> None:
        """End it without the engine's last word: choices that go on are cancelled."""
        for index, choice in enumerate(stream.choices):
            if choice.finished is None:
                choice.finished = Finished(
                    stream=stream.number, choice=index, reason="cancelled", num_tokens=choice.received
                )
        stream.ending = self.done_here(stream)
        self._owner.mark(stream)

    def done_here(self, stream: GatewayStream) -> Done:
        """The last word about a stream that does not wait for the engine's."""
        accepted = stream.accepted
        return Done(
            stream=stream.number,
            seed=accepted.seed if accepted is not None else 0,
            usage=Usage(
                prompt=accepted.num_prompt_tokens if accepted is not None else 0,
                completion=stream.num_completion_tokens,
            ),
            timings=_NO_TIMINGS,
        )

    # ---- clients -----------------------------------------------------------------------------------------------------

    def accepted(self, stream: GatewayStream, message: Accepted) -> None:
        """The engine took a stream, for the first time, again, or gave it back."""
        if stream.is_resuming:
            stream.is_resuming, stream.has_moved = False, True  # the connection broke, and not the engine
        stream.is_homeless = False
        if stream.recall is not None:
            self._recalled(stream, message)
        elif stream.accepted is None:
            stream.accepted = message
            if not self.survivors.add(stream):
                message = msgspec.structs.replace(message, resume_key="")
            stream.opening.append(msgspec.structs.replace(message, stream=stream.number))
            self._owner.mark(stream)

    def client_lost(self, client: Client, reason: PagewireError, *, comes_back: bool) -> None:
        """A client is gone; what it may come back for is kept, all else ends."""
        comes_back = comes_back and not self._is_closing
        self.survivors.client_lost(client, comes_back=comes_back)
        for stream in list(client.streams.values()):
            if comes_back:
                self._per_key.orphaned(stream)
                if self.survivors.lose(stream):
                    continue
                self._per_key.found(stream)
            self.survivors.forget(stream)
            if stream.recall is None:  # otherwise its client asks again
                self._owner.leave_engine(stream)
            stream.ending = refusal(reason, stream.number)  # for the state alone: nobody is there to read it
        client.clear()

    def resume(self, client: Client, message: Resume) -> GatewayStream:
        """The stream that a client comes back for, with all that it lacks to be sent.

        Raises:
            UnknownStream: there is none, or the key is another's.
            InvalidRequest: the client has more than there is.
            PagewireError: the engine that may know it cannot be asked.
        """
        stream = self.survivors.find(message)
        if stream is None:
            return self._recall(client, message)
        if stream.asked is not None:
            _check_user(stream.asked, client)
        counts = counts_of(message, stream)
        before, number = stream.owner, stream.number
        if before.streams.get(number) is stream:
            before.release(stream)
            before.connection.send(refusal(TakenOver("it was resumed over another connection"), number))
        self.survivors.taken(stream)
        self._per_key.found(stream)
        stream.owner, stream.number = client, message.stream
        client.take(stream)
        stops = stream.asked.params.stop if stream.asked is not None else ()
        stream.reopen(counts, lambda: self._owner.new_text(stops, shows_text=stream.shows_text))
        self._lag.given(client, stream)
        self._owner.mark(stream)
        return stream

    def _recall(self, client: Client, message: Resume) -> GatewayStream:
        if self._is_absent:
            raise Unavailable("no engine serves now; one is being started", retry_after_ms=_RETRY_AFTER_MS)
        stream = GatewayStream(number=message.stream, owner=client, choices=[], recall=message, resumable=True)
        self._upstream.recall(stream, message)
        client.take(stream)
        return stream

    def _recalled(self, stream: GatewayStream, message: Accepted) -> None:
        """The engine has it: make of it what the gateway that began it had, as far as its client got."""
        try:
            asked = asked_of(message.memo)
            _check_user(asked, stream.owner)
            if len(message.output_ids) != asked.params.n:
                raise ProtocolError("memo and tokens do not fit together")
            stream.asked, stream.shows_text = asked, asked.echo_text
            for packed in message.output_ids:
                choice = Choice(self._owner.new_text(asked.params.stop, shows_text=asked.echo_text))
                choice.ids.extend(unpack("I", packed))
                choice.received = choice.logprobs.start = choice.pending.start = len(choice.ids)
                stream.choices.append(choice)
        except PagewireError as error:
            self._upstream.release(stream)
            self._owner.fail(stream, error)
            return
        stream.recall = None
        stream.owner.take(stream)
        stream.prompt_ids = message.prompt_ids
        stream.accepted = msgspec.structs.replace(message, prompt_ids=b"", output_ids=(), memo=b"")
        self.survivors.add(stream)
        stream.opening.append(msgspec.structs.replace(stream.accepted, stream=stream.number))
        for index, choice in enumerate(stream.choices):
            self._catch_up(stream, index, choice)
        self._owner.mark(stream)

    def _catch_up(self, stream: GatewayStream, index: int, choice: Choice) -> None:
        """Its text so far, which its client has; a stop string that is complete ends it."""
        stop = choice.text.push(choice.ids).stop if choice.text is not None else None
        if stop is not None:
            choice.cut(stop.at)
            choice.finished = Finished(
                stream=stream.number, choice=index, reason="stop", num_tokens=stop.at, stop=stop.stop
            )
            self._upstream.finish(stream, index, stop.at)

    def refused(self, stream: GatewayStream, message: Error) -> bool:
        """The engine refused a stream, or ended it. Whether it goes on all the same."""
        if stream.ending is not None or stream.recall is not None:
            return False
        if stream.is_resuming and message.code == UnknownStream.code:
            try:
                self.engine_does_not_know(stream)
            except PagewireError as error:
                self._owner.fail(stream, error)
            return True
        if self._is_closing or not self.absence.timeout_ms:
            return False
        if message.code in (EngineLost.code, Draining.code):  # it alone was told to stop: the server was not
            leave(stream)
            if message.code == EngineLost.code and died_under(stream):
                return False
            self._is_leaving = stream.is_homeless = True
        elif (stream.is_resuming or stream.is_homeless) and message.retry_after_ms is not None:  # it was begun: no end
            self._release_in(message.retry_after_ms / 1000)
        else:
            return False
        stream.upstream, stream.is_resuming = None, False
        if stream.is_cancelled:
            self.end_here(stream)
        else:
            self.absence.begin()
            self.absence.add(stream)
        return True

    def close(self) -> None:
        """The server shuts down: nobody can come back, no engine will."""
        self._is_closing = True
        self.survivors.close()
        self.give_up_waiting()

    def _end_orphan(self, stream: GatewayStream) -> None:
        self._per_key.found(stream)
        if stream.ending is None:
            self._owner.leave_engine(stream)
            stream.ending = refusal(TakenOver("its client did not come back"), stream.number)  # nobody reads it


def _can_ask(stream: GatewayStream) -> bool:
    """An engine that knows the stream would give it back."""
    return stream.accepted is not None and bool(stream.accepted.resume_key)


def _check_user(asked: Asked, client: Client) -> None:
    """Who has id and key of a stream, and another CURVE key than the one it was asked with, is told what a stranger is (F52).

    Raises:
        UnknownStream: it is another's.
    """
    if asked.user != client.user:
        raise UnknownStream("there is no such stream here, or its key is another one", field="request_id")
