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

from pagewire.engine.packing import LateRun, OutcomeColumns, keep_logprob, late_tokens
from pagewire.engine.streams import Choice, Entries, Part, Reader, Stream, StreamTable
from pagewire.errors import InternalError
from pagewire.request.request import TokenArray
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import PromptLogprobRows
from pagewire_transport.codec import encode
from pagewire_transport.connection import Connection
from pagewire_transport.door import refusal

_LATE_TOKENS: Final = 16_384
"""Tokens in a message made from cursors: 64 KiB, so that what libzmq holds for a slow reader stays small."""
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


class Delivery:
    """Readers, their streams, and what each was sent. Made and used on one loop.

    Args:
        ledger: holds the tokens.
        on_fault: told of exceptions of our own code: (what was being done, the exception).
    """

    def __init__(self, ledger: Ledger, on_fault: Callable[[str, Exception], None]) -> None:
        self._ledger = ledger
        self._on_fault = on_fault
        self._loop = asyncio.get_running_loop()
        self._table = StreamTable()
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
        """Its connection is gone: its streams are cancelled."""
        self._by_index[reader.index] = None
        self._free_indices.append(reader.index)
        self._drop_streams(reader)

    def add(self, stream: Stream) -> None:
        """A stream that starts; its first tokens come with a later outcome."""
        stream.reader.streams[stream.number] = stream
        for choice in stream.choices:
            self._table.add(choice)

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Send what a step brought, to everybody who can take it now. Never raises for one reader's sake."""
        for sequence, rows in outcome.prompt_logprobs:
            self._add_prompt_logprobs(sequence, rows)
        if outcome.slots.size:
            self._deliver(outcome)
        touched: dict[Reader, None] = {}
        for sequence in outcome.ended:
            choice = self._table.find(sequence)
            if choice is not None:
                self._table.remove(choice)
                reader = choice.stream.reader
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
            self._fall_behind(outcome, part, layout.entries(part))

    def _fall_behind(self, outcome: StepOutcome, part: Part, entries: Entries) -> None:
        """Leave a reader's cursors where they are, keep what the ledger does not hold, serve it when it can take it."""
        reader = part.reader
        reader.is_behind = True
        rows = outcome.logprobs
        if rows is not None:
            is_mine = np.zeros(outcome.slots.size, np.bool_)
            is_mine[entries] = True
            begins = np.cumsum(rows.top) - rows.top
            for row in np.flatnonzero(is_mine[rows.samples]).tolist():
                choice = self._table.choices[int(outcome.slots[rows.samples[row]])]
                assert choice is not None
                choice.kept.append(keep_logprob(rows, row, int(begins[row])))
        self._serve_soon(reader)

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
                else:
                    reader.is_behind = False
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
        most = min(max(1, _LATE_TOKENS // max(1, len(lagging))), _LONGEST_RUN)
        runs = []
        for choice, sent in lagging[:_LATE_TOKENS]:
            until = min(choice.sequence.num_output, sent + most)
            ids = self._ledger.output(choice.sequence, sent, until)
            wants = choice.stream.request.params.logprobs is not None
            kept = [choice.kept.popleft() for _ in range(until - sent)] if wants else []
            runs.append(LateRun(choice.stream.number, choice.index, sent, ids, kept))
            self._table.set_sent(choice, until)
        return runs

    def _tell_end(self, choice: Choice) -> None:
        """A choice ended and all its tokens are sent: say so, and close the stream with its last choice."""
        stream, sequence = choice.stream, choice.sequence
        connection = stream.reader.connection
        choice.kept.clear()
        stream.num_told += 1
        if sequence.finish_reason == "error" and stream.error is None:
            stream.error = sequence.error or InternalError("the request failed")
            for other in stream.choices:
                self._ledger.cancel(other.sequence)
        elif stream.error is None:
            connection.send(stream.finished(choice))
        if stream.num_told == len(stream.choices):
            del stream.reader.streams[stream.number]
            if stream.error is not None:
                connection.send(refusal(stream.error, stream.number))
            else:
                connection.send(stream.done())

    def _fault(self, reader: Reader, cause: Exception) -> None:
        """Our own code failed about one reader: its streams end, since it may have missed tokens."""
        self._on_fault("sending tokens", cause)
        error = InternalError(f"{type(cause).__name__} while sending tokens")
        for number in reader.streams:
            reader.connection.send(refusal(error, number))
        self._drop_streams(reader)
        reader.is_behind = False

    def _drop_streams(self, reader: Reader) -> None:
        for stream in reader.streams.values():
            for choice in stream.choices:
                self._table.remove(choice)
                self._ledger.cancel(choice.sequence)
        reader.streams.clear()
        reader.ended.clear()

    def _add_prompt_logprobs(self, sequence: Sequence, rows: PromptLogprobRows) -> None:
        choice = self._table.find(sequence)
        if choice is None or choice.stream.prompt_logprobs is None:
            return
        try:
            choice.stream.prompt_logprobs.add(rows)
            self.tell_prompt_logprobs(choice.stream)
        except Exception as error:  # noqa: BLE001  (as in `_deliver`)
            self._fault(choice.stream.reader, error)

    def tell_prompt_logprobs(self, stream: Stream) -> None:
        """Send them once they are complete."""
        store = stream.prompt_logprobs
        if store is not None and store.is_complete:
            stream.prompt_logprobs = None
            stream.reader.connection.send(store.message(stream.number))

    def check_invariants(self, readers: Iterable[Reader]) -> None:
        """What must hold between any two events; `readers` are all that there are."""
        for reader in readers:
            assert self._by_index[reader.index] is reader
            assert all(choice.stream.number in reader.streams for choice in reader.ended)
            for number, stream in reader.streams.items():
                assert stream.number == number
                assert stream.num_told < len(stream.choices)
                for choice in stream.choices:
                    if choice.slot >= 0:
                        assert self._table.choices[choice.slot] is choice
                        assert self._table.reader[choice.slot] == reader.index
        rows = [choice for choice in self._table.choices if choice is not None]
        assert all(choice.stream.number in choice.stream.reader.streams for choice in rows)
        assert int((self._table.reader >= 0).sum()) == len(rows)
