"""Tokens of each step to whoever asked for them, at most one message a connection a step.

    outcome of a step ──▶ layout: entries by reader ──▶ per reader: slices of the columns ──▶ one `tokens` message
                                                          │ its connection is blocked, or its cursors lag
                                                          ▼
                                      nothing; later, from the cursors ──▶ one `tokens` message of all it has not got

Nothing here waits. The common path has no Python loop over streams: only over readers.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import numpy as np

from pagewire.engine.lag import Lag, LagLimits
from pagewire.engine.packing import LateRun, OutcomeColumns, keep_logprob, late_tokens
from pagewire.engine.streams import Choice, Part, Reader, Stream, StreamTable
from pagewire.errors import InternalError, SlowReader
from pagewire.request.request import TokenArray
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import LogprobRows, PromptLogprobRows
from pagewire_transport.codec import encode
from pagewire_transport.connection import Connection
from pagewire_transport.door import refusal

_LATE_VALUES: Final = 16_384
"""Values (tokens, log-probabilities and their ids) in a message made from cursors: 64 KiB, so that what libzmq holds for a
slow reader stays small."""
_ENDS_A_ROUND: Final = 64
"""Ends told to one reader in one round of the loop."""
_LONGEST_RUN: Final = 65_535


class Ledger(Protocol):
    """What delivery asks of the core."""

    def output(self, sequence: Sequence, start: int = 0, stop: int | None = None) -> TokenArray:
        """Generated tokens, of a live sequence or one that ended."""
        ...

    def cancel(self, sequence: Sequence) -> bool:
        """End it; reported by an outcome."""
        ...

    def pause(self, sequence: Sequence) -> None:
        """Plan it no more until `resume`."""
        ...

    def resume(self, sequence: Sequence) -> None:
        """Undo `pause`."""
        ...


class Delivery:
    """Readers, their streams, and what each was sent. Made and used on one loop.

    Args:
        ledger: holds the tokens.
        on_fault: told of exceptions of our own code: (what was being done, the exception).
        on_over: told of each stream that has left its reader: all of it was sent, it was dropped, or its reader was too slow.
        limits: of lags.
    """

    def __init__(
        self,
        ledger: Ledger,
        on_fault: Callable[[str, Exception], None],
        on_over: Callable[[Stream, Reader], None],
        limits: LagLimits,
    ) -> None:
        self._ledger = ledger
        self._on_fault = on_fault
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._table = StreamTable()
        self._lag = Lag(ledger, self._table, limits, self._end_slow)
        self._by_index: list[Reader | None] = []
        self._free_indices: list[int] = []

    def add_reader(self, connection: Connection) -> Reader:
        """A connection that has not had streams yet."""
        index = self._free_indices.pop() if self._free_indices else len(self._by_index)
        if index == len(self._by_index):
            self._by_index.append(None)
        reader = self._by_index[index] = Reader(connection, index)
        return reader

    def remove_reader(self, reader: Reader) -> None:
        """Its connection is gone: streams that it still has are cancelled."""
        self._drop_streams(reader)
        self._by_index[reader.index] = None
        self._free_indices.append(reader.index)

    def add(self, stream: Stream) -> None:
        """A stream that starts; its first tokens come with a later outcome."""
        assert stream.reader is not None
        stream.reader.streams[stream.number] = stream
        for choice in stream.choices:
            choice.sent = choice.kept_from = choice.sequence.num_output  # not 0 where another engine began it
            self._table.add(choice)
            self._lag.begin(choice)

    def pause(self, stream: Stream, *, paused: bool) -> None:
        """Its client wants nothing to be generated for it, or wants it again."""
        self._lag.pause(stream, paused=paused)

    def release(self, stream: Stream) -> None:
        """The stream goes on without a reader."""
        reader, stream.reader = stream.reader, None
        if reader is not None:
            reader.streams.pop(stream.number, None)
            for choice in stream.choices:
                reader.ended.pop(choice, None)
                reader.watched.pop(choice, None)
                self._table.move(choice)

    def give(self, stream: Stream, reader: Reader, number: int, received: list[int]) -> None:
        """The stream, which has no reader, gets one, that has `received` tokens of each choice."""
        assert stream.reader is None
        stream.reader, stream.number = reader, number
        reader.streams[number] = stream
        self._lag.fell_behind(reader)
        stream.is_prompt_told = any(received)
        for choice, sent in zip(stream.choices, received, strict=True):
            choice.is_told = False
            self._table.move(choice)
            self._table.set_sent(choice, sent)
            self._lag.given(choice, reader)
            if choice.has_ended:
                reader.ended[choice] = None
        self._serve_soon(reader)

    def drop(self, stream: Stream) -> None:
        """The stream ends; nobody is told."""
        self.release(stream)
        for choice in stream.choices:
            self._table.remove(choice)
            self._ledger.cancel(choice.sequence)

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Send what a step brought, to everybody who can take it now. Never raises for one reader's sake."""
        for sequence, rows in outcome.prompt_logprobs:
            self._add_prompt_logprobs(sequence, rows)
        if outcome.logprobs is not None:
            self._keep_logprobs(outcome, outcome.logprobs)
        if outcome.slots.size:
            self._deliver(outcome)
        touched: dict[Reader, None] = {}
        for sequence in outcome.ended:
            choice = self._table.find(sequence)
            if choice is not None:
                self._table.remove(choice)
                choice.has_ended = True
                reader = choice.stream.reader
                if reader is not None:
                    reader.ended[choice] = None
                    touched[reader] = None
        for reader in touched:
            self.serve(reader)

    def _deliver(self, outcome: StepOutcome) -> None:
        table, slots = self._table, outcome.slots
        layout = table.layout(slots, self._by_index)
        columns = OutcomeColumns(outcome, layout.order, layout.ones)
        starts, ids, is_plain = columns.starts, columns.ids, columns.is_plain
        expected = starts if layout.order is None else outcome.starts.tobytes()
        lags = None if expected == layout.cursors else table.sent[slots] != outcome.starts
        late: list[Part] = []
        for part in layout.parts:
            reader = part.reader
            if (
                reader.is_behind
                or reader.connection.is_blocked
                or (lags is not None and lags[layout.entries(part)].any())
            ):
                late.append(part)
                continue
            try:
                if is_plain:
                    frame = part.frame(starts, ids)
                else:
                    frame = encode(columns.tokens(part.begin, part.end, part.streams, part.choices))
                reader.connection.send_frame(frame)
            except Exception as error:  # noqa: BLE001  (F7: a fault about one reader is nobody else's)
                self._fault(reader, error)
        until = outcome.starts + outcome.counts
        if not late:
            layout.cursors = until.tobytes()
            return
        is_sent = np.ones(slots.size, np.bool_)
        for part in late:
            is_sent[layout.entries(part)] = False
        table.sent[slots[is_sent]] = until[is_sent]
        for part in late:
            # Its cursors stay where they are; it is served when it can take something.
            mine = layout.entries(part)
            self._lag.fell_behind(part.reader)
            try:
                self._lag.look(part.reader, slots[mine], until[mine])
            except Exception as error:  # noqa: BLE001  (as above)
                self._fault(part.reader, error)
            self._serve_soon(part.reader)

    def _keep_logprobs(self, outcome: StepOutcome, rows: LogprobRows) -> None:
        """The ledger does not hold them: a reader that lags, or comes back, gets them from here."""
        begins = (np.cumsum(rows.top) - rows.top).tolist()
        for row, slot in enumerate(outcome.slots[rows.samples].tolist()):
            choice = self._table.choices[slot] if slot < len(self._table.choices) else None
            if choice is not None:
                choice.kept.append(keep_logprob(rows, row, begins[row]))

    # ---- readers that lag, and ends ----------------------------------------------------------------------------------

    def _serve_soon(self, reader: Reader) -> None:
        if not reader.is_due and not reader.connection.is_blocked:
            reader.is_due = True
            self._loop.call_soon(self._serve_due, reader)

    def _serve_due(self, reader: Reader) -> None:
        reader.is_due = False
        self.serve(reader)

    def serve(self, reader: Reader) -> None:
        """One message from the cursors, if any lags, then the ends that have come; the rest in the next round.

        One message a round bounds the time that a long lag takes from everybody else.
        """
        try:
            connection = reader.connection
            if reader.is_behind and not connection.is_blocked:
                runs = self._late_runs(reader)
                if runs:
                    connection.send_frame(encode(late_tokens(runs)))
                    self._serve_soon(reader)
                self._lag.moved(reader)
                reader.is_behind = bool(runs)
            for choice in list(itertools.islice(reader.ended, _ENDS_A_ROUND)):
                if connection.is_blocked:
                    break
                if self._table.sent_of(choice) >= choice.sequence.num_output:
                    del reader.ended[choice]
                    self._tell_end(choice)
            if reader.ended and not reader.is_behind:
                self._serve_soon(reader)
        except Exception as error:  # noqa: BLE001  (as in `_deliver`)
            self._fault(reader, error)

    def _late_runs(self, reader: Reader) -> list[LateRun]:
        """What is behind the reader's cursors, each stream's fair part of a message; moves the cursors."""
        lagging = [
            (choice, sent)
            for stream in reader.streams.values()
            for choice in stream.choices
            if (sent := self._table.sent_of(choice)) < choice.sequence.num_output
        ]
        most = min(max(1, _LATE_VALUES // max(1, len(lagging))), _LONGEST_RUN)
        runs = []
        for choice, sent in lagging[:_LATE_VALUES]:
            top = choice.stream.request.params.logprobs
            until = min(choice.sequence.num_output, sent + max(1, most // (1 if top is None else 2 + 2 * top)))
            ids = self._ledger.output(choice.sequence, sent, until)
            kept = choice.kept[sent - choice.kept_from : until - choice.kept_from] if choice.kept else []
            runs.append(LateRun(choice.stream.number, choice.index, sent, ids, kept))
            self._table.set_sent(choice, until)
        return runs

    def _tell_end(self, choice: Choice) -> None:
        """A choice ended and all its tokens are sent: say so, and close the stream with its last choice."""
        stream, sequence = choice.stream, choice.sequence
        assert stream.reader is not None
        connection = stream.reader.connection
        choice.is_told = True
        if sequence.finish_reason == "error" and stream.error is None:
            stream.error = sequence.error or InternalError("the request failed")
            for other in stream.choices:
                self._ledger.cancel(other.sequence)
        elif stream.error is None:
            connection.send(stream.finished(choice))
        if stream.num_told == len(stream.choices):
            if stream.error is not None:
                connection.send(refusal(stream.error, stream.number))
            else:
                connection.send(stream.done())
            reader = stream.reader
            self.release(stream)
            self._on_over(stream, reader)

    def _end_slow(self, stream: Stream, reader: Reader) -> None:
        """Its reader is too slow. It is told so ahead of the tokens that it lacks, which a resume fetches."""
        number = stream.number
        for choice in stream.choices:
            self._ledger.cancel(choice.sequence)
            choice.is_told = True
        self.release(stream)
        rest = "; resume it for the rest of what was generated" if stream.resume_key else ""
        reader.connection.send(refusal(SlowReader(f"its tokens were not read in time{rest}", field="on_lag"), number))
        self._on_over(stream, reader)

    def _fault(self, reader: Reader, cause: Exception) -> None:
        """Our own code failed about one reader: its streams end, since it may have missed tokens."""
        self._on_fault("sending tokens", cause)
        error = InternalError(f"{type(cause).__name__} while sending tokens")
        for number in reader.streams:
            reader.connection.send(refusal(error, number))
        self._drop_streams(reader)
        reader.is_behind = False

    def _drop_streams(self, reader: Reader) -> None:
        for stream in list(reader.streams.values()):
            self.drop(stream)
            self._on_over(stream, reader)

    def _add_prompt_logprobs(self, sequence: Sequence, rows: PromptLogprobRows) -> None:
        choice = self._table.find(sequence)
        if choice is None or choice.stream.prompt_logprobs is None:
            return
        try:
            choice.stream.prompt_logprobs.add(rows)
            self.tell_prompt_logprobs(choice.stream)
        except Exception as error:  # noqa: BLE001  (as in `_deliver`)
            if choice.stream.reader is not None:
                self._fault(choice.stream.reader, error)

    def tell_prompt_logprobs(self, stream: Stream) -> None:
        """Send them once they are complete."""
        store = stream.prompt_logprobs
        if store is not None and store.is_complete and stream.reader is not None and not stream.is_prompt_told:
            stream.is_prompt_told = True
            stream.reader.connection.send(store.message(stream.number))
            if not stream.resume_key:
                stream.prompt_logprobs = None

    def check_invariants(self, readers: Iterable[Reader]) -> None:
        """What must hold between any two events; `readers` are all that there are."""
        for reader in readers:
            self._lag.check_invariants(reader)
            assert self._by_index[reader.index] is reader
            assert all(choice.stream.number in reader.streams for choice in reader.ended)
            for number, stream in reader.streams.items():
                assert stream.number == number
                assert stream.reader is reader
                assert stream.num_told < len(stream.choices)
                for choice in stream.choices:
                    if choice.slot >= 0:
                        assert self._table.choices[choice.slot] is choice
                        assert self._table.reader[choice.slot] == reader.index
        rows = [choice for choice in self._table.choices if choice is not None]
        read = [(choice, choice.stream.reader) for choice in rows if choice.stream.reader is not None]
        assert all(reader.streams[choice.stream.number] is choice.stream for choice, reader in read)
        assert int((self._table.reader >= 0).sum()) == len(read)
