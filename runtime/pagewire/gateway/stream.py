"""A stream as the gateway holds it: whose it is, its text so far, and what its client has not been sent yet.

    tokens that the engine generated for one choice
    ├── sent to the client ──┼── pending (ids, text, log-probabilities) ──┤
                           start                                       received

A client that reads slowly has more pending and nothing else: pending is one run of ids and one text a choice, however
many engine messages it came in, and is bounded by `max_tokens`. There is no queue of messages (F18).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from pagewire.errors import InternalError
from pagewire.gateway.asked import Asked
from pagewire.gateway.columns import LogprobRun, Run, TokensBuilder
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.messages import Accepted, Done, Error, Finished, OnLag, PromptLogprobs, Resume

if TYPE_CHECKING:
    from pagewire.gateway.client import Client

_ID_BYTES: Final = 4
_STREAM_BYTES: Final = 4096
_LONGEST_PUSH: Final = 256
"""Tokens that text is made of at once; see `Pending`."""
_LONGEST_RUN: Final = 65_535
"""`counts` of a `tokens` message are uint16."""


class Piece(NamedTuple):
    """A run of tokens of one choice with what belongs to it; what `Pending` holds, taken out."""

    start: int
    ids: array[int]
    text: str
    logprobs: LogprobRun | None


@dataclass(slots=True)
class Pending:
    """What one choice has to send: a run of tokens, the text that they complete, their log-probabilities.

    One object for the choice's life, emptied by each `move_into`: this runs for every token of every stream. What a
    slow reader is owed is taken in parts: `most` counts tokens and log-probabilities alike. Parts end where a delivery of
    the engine ended, since the text belongs to the whole of it: whoever has k tokens has the text that they give, and a
    resume goes on from there.
    """

    start: int = 0
    ids: array[int] = field(default_factory=lambda: array("I"))
    texts: list[str] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)
    """For each text, how many of `ids` there were with the tokens that completed it."""
    solid: list[tuple[int, int]] = field(default_factory=list)
    """Deliveries of several tokens, as places in `ids`: begin and end."""
    top: int = -1
    """Alternatives a token; −1: no log-probabilities."""
    chosen: bytearray = field(default_factory=bytearray)
    top_ids: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)

    @property
    def is_empty(self) -> bool:
        """Nothing has to be sent. There may be text without ids: that before a stop string whose tokens do not count."""
        return not self.ids and not self.texts

    def add(self, ids: memoryview, text: str, logprobs: LogprobRun | None) -> None:
        """Append tokens; log-probabilities of more than these do not count."""
        self.ids.extend(ids)
        if len(ids) > 1:
            self.solid.append((len(self.ids) - len(ids), len(self.ids)))
        if text:
            self.texts.append(text)
            self.text_ends.append(len(self.ids))
        if logprobs is not None:
            self.top = logprobs.top
            size = 4 * len(ids)
            self.chosen += logprobs.chosen[:size]
            self.top_ids += logprobs.top_ids[: size * logprobs.top]
            self.top_logprobs += logprobs.top_logprobs[: size * logprobs.top]

    def move_into(self, builder: TokensBuilder, stream: int, choice: int, most: int, *, shows_text: bool) -> int:
        """Append it to a message, or a part with about `most` values; how many it were. Nothing if `most` is not above 0."""
        if most <= 0:
            return 0
        count, width = len(self.ids), self.top + 2
        if count * width > most or count > _LONGEST_RUN:
            piece = self._part(min(-(-most // width), _LONGEST_RUN))
            text = piece.text if shows_text else ""
            builder.add(stream, choice, piece.start, piece.ids, text, piece.logprobs)
            return len(piece.ids) * width
        texts = self.texts
        text = "".join(texts) if texts and shows_text else ""
        if count or text:
            builder.add(stream, choice, self.start, self.ids, text, self._logprobs())
        self.start += count
        del self.ids[:]
        if texts:
            texts.clear()
            self.text_ends.clear()
        if self.solid:
            self.solid.clear()
        if self.top >= 0:
            self.chosen, self.top_ids, self.top_logprobs = bytearray(), bytearray(), bytearray()
        return count * width

    def take(self, most: int) -> Piece | None:
        """As `move_into`, for a reader in this process that needs no message. None: there is nothing."""
        ids, texts = self.ids, self.texts
        count, width = len(ids), self.top + 2
        if most <= 0 or (not count and not texts):
            return None
        if count * width > most:
            return self._part(-(-most // width))
        piece = Piece(self.start, ids, "".join(texts), self._logprobs())
        self.start += count
        self.ids = array("I")
        if texts:
            texts.clear()
            self.text_ends.clear()
        if self.solid:
            self.solid.clear()
        if self.top >= 0:
            self.chosen, self.top_ids, self.top_logprobs = bytearray(), bytearray(), bytearray()
        return piece

    def _part(self, count: int) -> Piece:
        """About the first `count` tokens with the text that they complete."""
        for begin, end in self.solid:
            if begin < count < end:
                count = begin or end
                break
        self.solid = [(begin - count, end - count) for begin, end in self.solid if end > count]
        num_texts = bisect_right(self.text_ends, count)
        wide = 4 * max(self.top, 0) * count
        logprobs = None
        if self.top >= 0:
            logprobs = LogprobRun(
                self.top,
                memoryview(self.chosen[: 4 * count]),
                memoryview(self.top_ids[:wide]),
                memoryview(self.top_logprobs[:wide]),
            )
        piece = Piece(self.start, self.ids[:count], "".join(self.texts[:num_texts]), logprobs)
        self.start += count
        del self.ids[:count], self.texts[:num_texts]
        self.text_ends = [end - count for end in self.text_ends[num_texts:]]
        del self.chosen[: 4 * count], self.top_ids[:wide], self.top_logprobs[:wide]
        return piece

    def _logprobs(self) -> LogprobRun | None:
        if self.top < 0:
            return None
        return LogprobRun(self.top, memoryview(self.chosen), memoryview(self.top_ids), memoryview(self.top_logprobs))


@dataclass(slots=True)
class Choice:
    """One continuation of a stream.

    Attributes:
        text: turns ids into text and watches for stop strings; None where the client does that itself.
        received: tokens taken from the engine; those behind a stop string do not count.
        finished: the client's last message about this choice, to be sent after its pending tokens. Once it is set,
            nothing more is taken from the engine for this choice.
        asked_end: where its client ended it, as the engine was told; another one is told again.
        was_told: `finished` was handed over for sending.
        ids: all tokens that count, sent or pending: for those who resume the stream, and for another engine.
        logprobs: theirs, as if pending; from `logprobs.start` on.
    """

    text: TextStream | None
    received: int = 0
    pending: Pending = field(default_factory=Pending)
    finished: Finished | None = None
    asked_end: int | None = None
    was_told: bool = False
    ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: Pending = field(default_factory=Pending)

    def cut(self, at: int) -> None:
        """Tokens from `at` on do not count."""
        self.received = at
        del self.ids[at:]

    def rewind(self, received: int, text: TextStream | None) -> None:
        """Its reader has `received` tokens and the text that they give: all that follows is pending again.

        Args:
            received: at most as many as there are.
            text: new, with the same stop strings; None: there is no text.
        """
        self.pending = Pending(start=received)
        self.was_told = False
        if text is not None:
            text.push(self.ids[:received])
            self.text = text
        width = 4 * max(self.logprobs.top, 0)
        for at in range(received, len(self.ids), _LONGEST_PUSH):
            ids = self.ids[at : at + _LONGEST_PUSH]
            first, last = at - self.logprobs.start, at + len(ids) - self.logprobs.start
            logprobs = None
            if self.logprobs.top >= 0:
                logprobs = LogprobRun(
                    self.logprobs.top,
                    memoryview(self.logprobs.chosen[4 * first : 4 * last]),
                    memoryview(self.logprobs.top_ids[width * first : width * last]),
                    memoryview(self.logprobs.top_logprobs[width * first : width * last]),
                )
            self.pending.add(memoryview(ids), text.push(ids).text if text is not None else "", logprobs)


@dataclass(slots=True, eq=False)
class GatewayStream:
    """One stream of one client, or of one that was lost.

    Attributes:
        number: the client's number of the stream.
        owner: whose it is.
        choices: one for each of `n`.
        asked: what for; None while that is recalled from the engine.
        resumable: its client may come back for it.
        prompt_ids: once they are prepared.
        upstream: the number towards the engine; None while the prompt is prepared or an engine is waited for.
        accepted: what the engine said first; its ids and keys are the client's as well.
        prompt_logprobs: likewise.
        recall: the `resume` that the engine is to answer, since this gateway does not know the stream.
        is_resuming: the engine was asked whether it still has it.
        is_homeless: no engine has it any more, and none has taken it again.
        is_cancelled: by its client.
        is_paused: by its client; whoever resumes it goes on with it.
        is_held: paused since its client lags; see `Lag`.
        owed: tokens of a choice that were pending when its client came back: they are not held against it.
        num_deaths: engines that died under it, one after another, before it got far.
        num_at_death: its tokens when the last of them did.
        has_moved: it got a token from this engine.
        was_idle: nothing was to be generated for it when the last engine was lost.
        is_suspect: the last engine died before it got a token from it.
        opening: `accepted`, then `prompt_logprobs`, until they are sent.
        num_prompt_told: tokens of the prompt whose log-probabilities were taken out of `opening` already.
        ending: the last message to the client, when all else is sent. Once it is set, the stream is over for the
            client, and only the engine's last word about `upstream` is waited for.
        is_marked: its connection knows that it has something to send.
    """

    number: int
    owner: Client
    choices: list[Choice]
    asked: Asked | None = None
    shows_text: bool = True
    resumable: bool = False
    prompt_ids: bytes = b""
    upstream: int | None = None
    accepted: Accepted | None = None
    prompt_logprobs: PromptLogprobs | None = None
    recall: Resume | None = None
    is_resuming: bool = False
    is_homeless: bool = False
    is_cancelled: bool = False
    is_paused: bool = False
    is_held: bool = False
    owed: int = 0
    num_deaths: int = 0
    num_at_death: int = 0
    has_moved: bool = False
    was_idle: bool = False
    is_suspect: bool = False
    opening: list[Accepted | PromptLogprobs] = field(default_factory=list)
    num_prompt_told: int = 0
    ending: Done | Error | None = None
    is_marked: bool = False

    @property
    def prompt_field(self) -> str:
        """What the client named its prompt by; an engine's complaint about `prompt_ids` is about this."""
        return self.asked.prompt_field if self.asked is not None else "prompt_ids"

    @property
    def on_lag(self) -> OnLag:
        """What its client wants to happen when it lags."""
        return self.asked.on_lag if self.asked is not None else "coalesce"

    @property
    def is_idle(self) -> bool:
        """Nothing is to be generated for it now."""
        return self.is_paused or self.is_held

    @property
    def lag(self) -> int:
        """Tokens that wait for its client, of that choice which has most and goes on."""
        return max((len(choice.pending.ids) for choice in self.choices if choice.finished is None), default=0)

    @property
    def request_id(self) -> str:
        """Of a stream that was accepted."""
        assert self.accepted is not None
        return self.accepted.request_id

    @property
    def wants_logprobs(self) -> bool:
        """They belong to its tokens."""
        return self.asked is not None and self.asked.params.logprobs is not None

    @property
    def num_kept_bytes(self) -> int:
        """About what keeping it takes, once all its tokens are there."""
        assert self.accepted is not None
        params = self.asked.params if self.asked is not None else None
        each = _ID_BYTES
        if params is not None and params.logprobs is not None:
            each += _ID_BYTES * (1 + 2 * params.logprobs)
        prompt = len(self.prompt_ids)
        if self.prompt_logprobs is not None:
            prompt += prompt * (1 + 2 * self.prompt_logprobs.top)
        is_over = self.ending is not None
        outputs = sum(c.received if is_over else self.accepted.max_tokens for c in self.choices)
        return _STREAM_BYTES + prompt + each * outputs

    def reopen(self, received: Sequence[int], new_text: Callable[[], TextStream | None]) -> None:
        """Whoever resumes it has `received` tokens of each choice; all else is to be sent."""
        assert self.accepted is not None
        for choice, count in zip(self.choices, received, strict=True):
            choice.rewind(count, new_text())
            if choice.finished is not None:
                choice.finished = msgspec.structs.replace(choice.finished, stream=self.number)
        self.opening = [msgspec.structs.replace(self.accepted, stream=self.number)]
        self.num_prompt_told = 0
        if self.prompt_logprobs is not None and not any(received):
            self.opening.append(msgspec.structs.replace(self.prompt_logprobs, stream=self.number))
        if self.ending is not None:
            self.ending = msgspec.structs.replace(self.ending, stream=self.number)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that reached the client or are pending, over all choices: what usage counts."""
        return sum(choice.received for choice in self.choices)

    def take(self, run: Run) -> bool:
        """Add tokens to their choice. True: they complete a stop string, and the choice is finished at that token.

        Raises:
            InternalError: tokens are missing or come twice.
        """
        choice = self.choices[run.choice]
        if choice.finished is not None:
            return False  # generated before the engine knew of the stop string
        if run.start != choice.received:
            raise InternalError(f"tokens from {run.start} follow {choice.received} tokens")
        if len(run.ids) > _LONGEST_PUSH:
            return any(self.take(part) for part in run.parts(_LONGEST_PUSH))
        ids, text = run.ids, ""
        if choice.text is not None:
            delta = choice.text.push(ids)
            text, stop = delta.text, delta.stop
            if stop is not None:
                ids = ids[: stop.at - choice.received]  # log-probabilities of the others are never sent either
                choice.finished = Finished(
                    stream=self.number, choice=run.choice, reason="stop", num_tokens=stop.at, stop=stop.stop
                )
        choice.received += len(ids)
        choice.ids.extend(ids)
        choice.pending.add(ids, text, run.logprobs)
        if run.logprobs is not None and self.resumable:
            choice.logprobs.add(ids, "", run.logprobs)
        return choice.finished is not None

    def end(self, message: Finished) -> None:
        """The engine ended a choice: what its text held back goes out with the end."""
        choice = self.choices[message.choice]
        if choice.finished is not None:
            return  # a stop string ended it first
        choice.cut(message.num_tokens)
        choice.finished = msgspec.structs.replace(message, stream=self.number)
        if choice.text is None:
            return
        rest = choice.text.flush()
        text, stop = rest.text, rest.stop
        if stop is not None:  # the replacement of an incomplete character completes a stop string
            choice.cut(stop.at)
            choice.finished = msgspec.structs.replace(
                choice.finished, reason="stop", stop=stop.stop, num_tokens=stop.at
            )
        if self.shows_text and text:
            choice.finished = msgspec.structs.replace(choice.finished, text=text)
