"""Open streams as the engine's wire server holds them.

What is looked at in every step lies in arrays indexed by the sequences' slots; what happens once a stream is in objects.

    generated tokens of one sequence
    ├── sent ──────────────┼── not sent: in the ledger only ──┤
    0                      cursor                             num_output

A reader that is slow has cursors that lag and nothing else (F18): no queue grows for it. When its connection takes
something again, one message is made of the slices behind all its cursors. Log-probabilities cannot be read from the
ledger again; those of a choice that wants them are kept with it, at most `max_tokens` of them.

A stream whose reader was lost goes on without one, and a reader that resumes it says where its cursors are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pagewire.engine.packing import FrameTemplate, KeptLogprob, f32, u16, u32
from pagewire.errors import PagewireError
from pagewire.request.request import Request
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import Int32Array, PromptLogprobRows
from pagewire_transport.codec import encode
from pagewire_transport.connection import Connection
from pagewire_transport.messages import Accepted, Done, Finished, OnLag, PromptLogprobs, Timings, Tokens, Usage

NO_READER: Final = -1
NO_SLOT: Final = -1
UNLIMITED: Final = 2**31 - 1

_ID_BYTES: Final = 4
_LOGPROB_BYTES: Final = 200
"""Of one token's, the objects around it counted in."""
_STREAM_BYTES: Final = 4096

Entries = slice | npt.NDArray[np.intp]


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a stream.

    Attributes:
        slot: of its row in the table; NO_SLOT once it was reported as ended, since slots are reused from then on.
        sent: its cursor, from then on; before, the cursor is in the table.
        kept: log-probabilities of its tokens, from index `kept_from` on.
        has_ended: that was reported, and its slot may be another's.
        is_told: its reader was told its end.
        is_held: paused since its reader lags; see `Lag`.
    """

    stream: Stream
    index: int
    sequence: Sequence
    slot: int
    sent: int = 0
    kept: list[KeptLogprob] = field(default_factory=list)
    kept_from: int = 0
    has_ended: bool = False
    is_told: bool = False
    is_held: bool = False


@dataclass(slots=True, eq=False)
class Stream:
    """One request of one reader, or of none for now. It is over when all choices were told.

    Attributes:
        resume_key: by which another connection may take it; "" if none may.
        memo: for who recalls it.
        on_lag: what happens where its reader lags.
        is_paused: by its client; whoever resumes it goes on with it.
        is_prompt_told: its reader has the prompt's log-probabilities.
    """

    number: int
    reader: Reader | None
    request: Request
    choices: list[Choice] = field(default_factory=list)
    resume_key: str = ""
    memo: bytes = b""
    on_lag: OnLag = "coalesce"
    is_paused: bool = False
    error: PagewireError | None = None
    """Of the first choice that failed; it ends the stream, and the other choices."""
    prompt_logprobs: PromptLogprobStore | None = None
    is_prompt_told: bool = False

    def dissolve(self) -> None:
        """It is known no more: it and its choices forget each other.

        They live as long as the collector takes for old, and it looks at the old practically never (`tame_collector`).
        """
        self.choices = []

    @property
    def num_told(self) -> int:
        """Choices whose end was told."""
        return sum(choice.is_told for choice in self.choices)

    @property
    def num_kept_bytes(self) -> int:
        """About what keeping it takes, once all its tokens are there."""
        request, params = self.request, self.request.params
        outputs = sum(c.sequence.num_output if c.has_ended else request.max_tokens for c in self.choices)
        each = _ID_BYTES + (0 if params.logprobs is None else _LOGPROB_BYTES + 2 * _ID_BYTES * params.logprobs)
        prompt = _ID_BYTES * int(request.prompt_ids.size)
        if params.prompt_logprobs is not None:
            prompt += prompt * (1 + 2 * params.prompt_logprobs)
        return _STREAM_BYTES + prompt + each * outputs + len(self.memo)

    def accepted(self) -> Accepted:
        """The answer to `generate`, and to `resume`."""
        return Accepted(
            stream=self.number,
            request_id=self.request.request_id,
            seed=self.request.seed,
            num_prompt_tokens=int(self.request.prompt_ids.size),
            max_tokens=self.request.max_tokens,
            resume_key=self.resume_key,
        )

    def finished(self, choice: Choice) -> Finished:
        """The end of one choice."""
        sequence = choice.sequence
        assert sequence.finish_reason is not None
        return Finished(
            stream=self.number,
            choice=choice.index,
            reason=sequence.finish_reason,
            num_tokens=sequence.num_output,
            stop=sequence.stop,
        )

    def done(self) -> Done:
        """The end of the stream."""
        sequences = [choice.sequence for choice in self.choices]
        arrival_ns = self.request.arrival_ns
        ended_ns = max((s.finished_ns for s in sequences if s.finished_ns is not None), default=arrival_ns)
        scheduled_ns = min(
            (s.first_scheduled_ns for s in sequences if s.first_scheduled_ns is not None), default=ended_ns
        )
        first_ns = min((s.first_token_ns for s in sequences if s.first_token_ns is not None), default=arrival_ns)
        return Done(
            stream=self.number,
            seed=self.request.seed,
            usage=Usage(
                prompt=int(self.request.prompt_ids.size),
                completion=sum(s.num_output for s in sequences),
                cached=max(s.num_cached for s in sequences),
            ),
            timings=Timings(
                queue_ns=scheduled_ns - arrival_ns,
                first_token_ns=first_ns - arrival_ns,
                total_ns=ended_ns - arrival_ns,
                num_preemptions=sum(s.num_preemptions for s in sequences),
            ),
        )


@dataclass(slots=True, eq=False)
class Reader:
    """One connection and its streams.

    Attributes:
        index: small int, by which the table names it.
        is_behind: some cursor lags. While it is set, nothing is sent from an outcome: all comes from the cursors.
        ended: choices that ended and were not told.
        is_due: it will be served in the next round of the loop.
        moved_ns: while it is behind: when it fell behind, or was last sent something from the cursors.
        watched: choices that are held, or owe their reader more than usual since it came back.
    """

    connection: Connection
    index: int
    streams: dict[int, Stream] = field(default_factory=dict)
    is_behind: bool = False
    ended: dict[Choice, None] = field(default_factory=dict)
    is_due: bool = False
    moved_ns: int = 0
    watched: dict[Choice, None] = field(default_factory=dict)


class PromptLogprobStore:
    """Collects the log-probabilities of a prompt, which come in chunks, until all P − 1 are there."""

    def __init__(self, num_prompt: int, top: int) -> None:
        self._top = top
        self._missing = num_prompt - 1
        self._chosen = np.zeros(num_prompt - 1, np.float32)
        self._top_ids = np.zeros((num_prompt - 1, top), np.int32)
        self._top_logprobs = np.zeros((num_prompt - 1, top), np.float32)

    @property
    def is_complete(self) -> bool:
        return self._missing <= 0

    def add(self, rows: PromptLogprobRows) -> None:
        """The next rows; each row comes once."""
        part = slice(rows.start, rows.start + rows.chosen.size)
        self._chosen[part] = rows.chosen
        self._top_ids[part] = rows.top_ids[:, : self._top]
        self._top_logprobs[part] = rows.top_logprobs[:, : self._top]
        self._missing -= rows.chosen.size

    def message(self, stream: int) -> PromptLogprobs:
        return PromptLogprobs(
            stream=stream,
            top=self._top,
            chosen=f32(self._chosen),
            top_ids=u32(self._top_ids),
            top_logprobs=f32(self._top_logprobs),
        )


@dataclass(slots=True)
class Part:
    """What one reader gets of an outcome: entries `begin` … `end` − 1 of the layout's order."""

    reader: Reader
    begin: int
    end: int
    streams: bytes
    choices: bytes
    template: FrameTemplate | None = None
    """Made when the layout is met a second time: until then it would cost more than it saves."""

    def frame(self, starts: bytes, ids: bytes) -> bytes:
        """The part's `tokens` frame, one token an entry, from the columns of the whole outcome."""
        mine = slice(4 * self.begin, 4 * self.end)
        if self.template is None:
            return encode(Tokens(streams=self.streams, starts=starts[mine], ids=ids[mine], choices=self.choices))
        return self.template.fill(starts[mine], ids[mine])


@dataclass(slots=True)
class Layout:
    """How the entries of an outcome fall to readers. The same from step to step while nobody joins or leaves.

    Attributes:
        key: the entries' slots, as bytes: comparing those is several times faster than comparing arrays.
        cursors: while set, the entries' cursors, as bytes, in place of the table's. It is what the next outcome's `starts`
            must be if nobody lags.
        ones: counts of an outcome with one token an entry, as bytes.
        order: entries sorted by reader; None where all are of one.
    """

    key: bytes
    version: int
    slots: Int32Array
    cursors: bytes | None
    ones: bytes
    order: npt.NDArray[np.intp] | None
    parts: list[Part]
    is_repeated: bool = False

    def entries(self, part: Part) -> Entries:
        """The part's entries, as an index into the outcome's arrays."""
        return slice(part.begin, part.end) if self.order is None else self.order[part.begin : part.end]


class StreamTable:
    """The arrays. Grows by doubling; `version` changes with every change of membership."""

    def __init__(self, capacity: int = 64) -> None:
        self.reader = np.full(capacity, NO_READER, np.int32)
        self.stream = np.zeros(capacity, np.uint32)
        self.choice = np.zeros(capacity, np.uint16)
        self.most_lag = np.full(capacity, UNLIMITED, np.int32)
        """Tokens that may wait for its reader until something is done about it, by slot; see `Lag`."""
        self.choices: list[Choice | None] = [None] * capacity
        self.version = 0
        self._sent = np.zeros(capacity, np.int32)
        nothing = np.empty(0, np.int32)
        self._layout = Layout(b"", 0, nothing, None, b"", None, [])

    @property
    def sent(self) -> Int32Array:
        """The cursors, by slot."""
        layout = self._layout
        if layout.cursors is not None:
            self._sent[layout.slots] = np.frombuffer(layout.cursors, np.int32)
            layout.cursors = None
        return self._sent

    def add(self, choice: Choice) -> None:
        """Take the row `choice.slot`, whose last owner has ended."""
        slot = choice.slot
        self._reach(slot)
        reader = choice.stream.reader
        self.reader[slot] = reader.index if reader is not None else NO_READER
        self.stream[slot] = choice.stream.number
        self.choice[slot] = choice.index
        self.most_lag[slot] = UNLIMITED
        self.sent[slot] = choice.sent
        self.choices[slot] = choice
        self.version += 1

    def move(self, choice: Choice) -> None:
        """Its stream has another reader, or none."""
        if choice.slot != NO_SLOT:
            reader = choice.stream.reader
            self.reader[choice.slot] = reader.index if reader is not None else NO_READER
            self.stream[choice.slot] = choice.stream.number
            self.version += 1

    def remove(self, choice: Choice) -> None:
        """Leave the row; the cursor moves into the object. Idempotent."""
        slot = choice.slot
        if slot == NO_SLOT:
            return
        choice.sent, choice.slot = int(self.sent[slot]), NO_SLOT
        self.reader[slot] = NO_READER
        self.choices[slot] = None
        self.version += 1

    def find(self, sequence: Sequence) -> Choice | None:
        """The choice of a live sequence; None if it is nobody's here (another sink's, or its reader is gone)."""
        choice = self.choices[sequence.slot] if sequence.slot < len(self.choices) else None
        return choice if choice is not None and choice.sequence is sequence else None

    def sent_of(self, choice: Choice) -> int:
        """The cursor."""
        return choice.sent if choice.slot == NO_SLOT else int(self.sent[choice.slot])

    def set_sent(self, choice: Choice, sent: int) -> None:
        """Move the cursor."""
        if choice.slot == NO_SLOT:
            choice.sent = sent
        else:
            self.sent[choice.slot] = sent

    def set_most_lag(self, choice: Choice, most: int) -> None:
        """How far its reader may lag; nothing for one that ended."""
        if choice.slot != NO_SLOT:
            self.most_lag[choice.slot] = min(most, UNLIMITED)

    def layout(self, slots: Int32Array, readers: list[Reader | None]) -> Layout:
        """How entries with these slots fall to `readers` (by index)."""
        key = slots.tobytes()
        last = self._layout
        if last.key == key and last.version == self.version:
            if not last.is_repeated:
                last.is_repeated = True
                for part in last.parts:
                    part.template = FrameTemplate(part.streams, part.choices)
            return last
        if not slots.size:
            return Layout(key, self.version, slots, None, b"", None, [])
        self._reach(int(slots.max()))
        indices, order, in_order, begins = self.reader[slots], None, slots, [0]
        if (indices != indices[0]).any():
            order = np.argsort(indices, kind="stable")
            in_order, indices = slots[order], indices[order]
            begins += (np.flatnonzero(indices[1:] != indices[:-1]) + 1).tolist()
        streams, numbers = u32(self.stream[in_order]), self.choice[in_order]
        choices = u16(numbers) if numbers.any() else b""
        parts = []
        for begin, end in zip(begins, [*begins[1:], slots.size], strict=True):
            index = int(indices[begin])
            reader = readers[index] if index != NO_READER else None
            if reader is not None:
                parts.append(Part(reader, begin, end, streams[4 * begin : 4 * end], choices[2 * begin : 2 * end]))
        cursors = self.sent[slots].tobytes()  # first: it settles the last layout's
        ones = last.ones if len(last.ones) == len(key) else np.ones(slots.size, np.int32).tobytes()
        self._layout = Layout(key, self.version, slots.copy(), cursors, ones, order, parts)
        return self._layout

    def _reach(self, slot: int) -> None:
        have = len(self.choices)
        if slot < have:
            return
        more = max(have, slot + 1 - have)
        self.reader = np.concatenate([self.reader, np.full(more, NO_READER, np.int32)])
        self.stream = np.concatenate([self.stream, np.zeros(more, np.uint32)])
        self.choice = np.concatenate([self.choice, np.zeros(more, np.uint16)])
        self.most_lag = np.concatenate([self.most_lag, np.full(more, UNLIMITED, np.int32)])
        self._sent = np.concatenate([self.sent, np.zeros(more, np.int32)])
        self.choices.extend([None] * more)
