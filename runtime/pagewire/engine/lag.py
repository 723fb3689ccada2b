"""What is done about a stream whose reader lags, where its request asks for more than being late (`on_lag`).

    generated tokens of one choice
    ├── sent ──────────────┼── lag ──┤
    0                      cursor    num_output

    coalesce   nothing: what was not sent stays in the ledger
    pause      lag > most ──▶ held: not planned any more ── lag ≤ most / 2 ──▶ goes on
    cancel     lag > most, or the connection took nothing for `patience_ms` ──▶ ends with `slow_reader`

A reader that comes back is owed what was generated meanwhile: that is not held against it, so `cancel` counts from there.
Who keeps up costs nothing: only those parts of an outcome that could not be sent are looked at, as whole arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pagewire.config import ServerConfig
from pagewire.engine.streams import NO_SLOT, UNLIMITED, Choice, Reader, Stream, StreamTable
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import Int32Array

_MS: Final = 1_000_000


class LagLimits(NamedTuple):
    """When a reader is too slow.

    Attributes:
        max_tokens: of one choice, generated and not handed to the connection.
        patience_ms: how long a connection may take nothing while tokens wait; 0: as long as it likes.
    """

    max_tokens: int
    patience_ms: int

    @classmethod
    def of(cls, config: ServerConfig) -> LagLimits:
        """As configured."""
        return cls(config.max_lag_tokens, config.max_lag_ms)


class Pausing(Protocol):
    """What is asked of the core."""

    def pause(self, sequence: Sequence) -> None:
        """Plan it no more. Idempotent."""
        ...

    def resume(self, sequence: Sequence) -> None:
        """Undo `pause`. Idempotent."""
        ...


class Lag:
    """Holds and ends streams whose readers lag. A client's own pause is kept beside it: neither undoes the other.

    Args:
        core: pauses sequences.
        table: has the cursors.
        limits: see there.
        end: ends a stream whose reader is too slow.
        now_ns: the clock.
    """

    def __init__(
        self,
        core: Pausing,
        table: StreamTable,
        limits: LagLimits,
        end: Callable[[Stream, Reader], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._core = core
        self._table = table
        self._most = limits.max_tokens
        self._enough = limits.max_tokens // 2
        self._patience_ns = limits.patience_ms * _MS
        self._end = end
        self._now_ns = now_ns

    def begin(self, choice: Choice) -> None:
        """It has a row of the table and a reader, which is owed nothing yet."""
        if choice.stream.on_lag != "coalesce":
            self._table.set_most_lag(choice, self._most)

    def pause(self, stream: Stream, *, paused: bool) -> None:
        """Its client wants nothing to be generated, or wants it again."""
        stream.is_paused = paused
        for choice in stream.choices:
            self._apply(choice)

    def fell_behind(self, reader: Reader) -> None:
        """The reader is served from its cursors from now on. Idempotent."""
        if not reader.is_behind:
            reader.is_behind = True
            reader.moved_ns = self._now_ns()

    def look(self, reader: Reader, slots: Int32Array, until: Int32Array) -> None:
        """These choices of a reader that is behind have tokens up to `until` now."""
        table = self._table
        over = until - table.sent[slots] > table.most_lag[slots]
        slow: dict[Stream, None] = {}
        if over.any():
            self._exceeded(reader, slots[over], slow)
        if self._patience_ns:
            now_ns = self._now_ns()
            if now_ns - reader.moved_ns > self._patience_ns:
                reader.moved_ns = now_ns
                slow |= dict.fromkeys(self._waiting(reader))
        for stream in slow:
            self._end(stream, reader)

    def _exceeded(self, reader: Reader, slots: npt.NDArray[np.int32], slow: dict[Stream, None]) -> None:
        for slot in slots.tolist():
            choice = self._table.choices[slot]
            assert choice is not None
            if choice.stream.on_lag == "cancel":
                slow[choice.stream] = None
            else:
                self._hold(choice, reader)

    def _waiting(self, reader: Reader) -> list[Stream]:
        """Streams that end where their reader takes nothing, of which something waits."""
        return [
            stream
            for stream in reader.streams.values()
            if stream.on_lag == "cancel"
            and any(choice.sequence.is_live and self._lag_of(choice) > 0 for choice in stream.choices)
        ]

    def moved(self, reader: Reader) -> None:
        """Cursors of a reader that is behind moved, or reached the end."""
        reader.moved_ns = self._now_ns()
        for choice in list(reader.watched):
            if choice.slot == NO_SLOT or self._lag_of(choice) <= self._enough:
                self._settle(choice, reader)

    def given(self, choice: Choice, reader: Reader) -> None:
        """A reader has it that says what it has got; whatever paused it before does so no more."""
        lag = self._lag_of(choice)
        is_slow = choice.slot != NO_SLOT and lag > self._enough
        if choice.stream.on_lag == "cancel" and is_slow:
            reader.watched[choice] = None
            self._table.set_most_lag(choice, lag + self._most)
        elif choice.stream.on_lag == "pause" and is_slow and lag > self._most:
            self._hold(choice, reader)
        else:
            self._settle(choice, reader)
        self._apply(choice)

    def _hold(self, choice: Choice, reader: Reader) -> None:
        reader.watched[choice] = None
        choice.is_held = True
        self._table.set_most_lag(choice, UNLIMITED)
        self._apply(choice)

    def _settle(self, choice: Choice, reader: Reader) -> None:
        """Its reader has caught up: the ordinary limit, and tokens again."""
        reader.watched.pop(choice, None)
        self.begin(choice)
        if choice.is_held:
            choice.is_held = False
            self._apply(choice)

    def _apply(self, choice: Choice) -> None:
        act = self._core.pause if choice.is_held or choice.stream.is_paused else self._core.resume
        act(choice.sequence)

    def _lag_of(self, choice: Choice) -> int:
        return choice.sequence.num_output - self._table.sent_of(choice)

    def check_invariants(self, reader: Reader) -> None:
        """What must hold between any two events."""
        for choice in reader.watched:
            assert choice.stream.reader is reader
            assert choice.stream.on_lag != "coalesce"
            assert reader.is_behind or choice.slot == NO_SLOT
        for stream in reader.streams.values():
            for choice in stream.choices:
                assert not choice.is_held or choice in reader.watched
                if choice.sequence.is_live:
                    assert choice.sequence.is_paused == (choice.is_held or stream.is_paused)
                if choice.slot != NO_SLOT and stream.on_lag == "coalesce":
                    assert self._table.most_lag[choice.slot] == UNLIMITED
