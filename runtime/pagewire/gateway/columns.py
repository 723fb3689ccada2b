"""Packed columns of `tokens` messages, read entry by entry and built from what is pending.

Plain `memoryview` and `array`: for the few dozen entries of a message numpy costs more than it saves.
Log-probabilities are passed on as the bytes that they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagewire.errors import ProtocolError
from pagewire_transport.columns import pack, unpack
from pagewire_transport.messages import LogprobColumns, Tokens


@dataclass(frozen=True, slots=True)
class LogprobRun:
    """Log-probabilities of one run of tokens, as bytes: `top` alternatives a token."""

    top: int
    chosen: memoryview  # float32 × tokens
    top_ids: memoryview  # uint32 × tokens × top
    top_logprobs: memoryview  # float32 × tokens × top

    def part(self, first: int, last: int) -> LogprobRun:
        """Those of tokens `first` … `last` − 1."""
        wide = slice(4 * self.top * first, 4 * self.top * last)
        return LogprobRun(self.top, self.chosen[4 * first : 4 * last], self.top_ids[wide], self.top_logprobs[wide])


class Run(NamedTuple):
    """One entry of a `tokens` message."""

    stream: int
    choice: int
    start: int
    ids: memoryview
    logprobs: LogprobRun | None

    def parts(self, size: int) -> Iterator[Run]:
        """The same in runs of at most `size` tokens."""
        for at in range(0, len(self.ids), size):
            ids = self.ids[at : at + size]
            logprobs = self.logprobs.part(at, at + len(ids)) if self.logprobs is not None else None
            yield Run(self.stream, self.choice, self.start + at, ids, logprobs)


def runs(message: Tokens) -> Iterator[Run]:
    """The entries of a message, in order.

    Raises:
        ProtocolError: the columns do not fit together.
    """
    streams = unpack("I", message.streams)
    starts = unpack("I", message.starts)
    ids = unpack("I", message.ids)
    counts: Sequence[int] = unpack("H", message.counts) if message.counts else (1,) * len(streams)
    choices: Sequence[int] = unpack("H", message.choices) if message.choices else (0,) * len(streams)
    if not len(streams) == len(starts) == len(counts) == len(choices) or sum(counts) != len(ids):
        raise ProtocolError("the columns of a tokens message differ in length")
    logprobs = _logprob_runs(message.logprobs, counts) if message.logprobs is not None else {}
    position = 0
    for entry, stream in enumerate(streams):
        end = position + counts[entry]
        yield Run(stream, choices[entry], starts[entry], ids[position:end], logprobs.get(entry))
        position = end


def _logprob_runs(columns: LogprobColumns, counts: Sequence[int]) -> dict[int, LogprobRun]:
    chosen, top_ids, top_logprobs = (
        memoryview(column) for column in (columns.chosen, columns.top_ids, columns.top_logprobs)
    )
    found: dict[int, LogprobRun] = {}
    at = at_top = 0
    for entry, top in zip(unpack("I", columns.entries), columns.top, strict=True):
        end, end_top = at + 4 * counts[entry], at_top + 4 * counts[entry] * top
        found[entry] = LogprobRun(top, chosen[at:end], top_ids[at_top:end_top], top_logprobs[at_top:end_top])
        at, at_top = end, end_top
    return found


class TokensBuilder:
    """Collects runs of several streams and makes them one `tokens` message."""

    def __init__(self) -> None:
        self._streams: list[int] = []
        self._choices: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        self._ids = array("I")
        self._texts: list[str] = []
        self._entries: list[int] = []
        self._top = bytearray()
        self._chosen = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()

    def __len__(self) -> int:
        return len(self._streams)

    def add(
        self, stream: int, choice: int, start: int, ids: array[int], text: str, logprobs: LogprobRun | None
    ) -> None:
        """Append one run of at most 65,535 tokens; `ids` may be empty where only text became known."""
        if logprobs is not None:
            self._entries.append(len(self._streams))
            self._top.append(logprobs.top)
            self._chosen += logprobs.chosen
            self._top_ids += logprobs.top_ids
            self._top_logprobs += logprobs.top_logprobs
        self._streams.append(stream)
        self._choices.append(choice)
        self._starts.append(start)
        self._counts.append(len(ids))
        self._ids.extend(ids)
        self._texts.append(text)

    def build(self) -> Tokens:
        """The message. Columns that hold nothing but their default are left out, as are texts if there are none."""
        logprobs = LogprobColumns(
            entries=pack("I", self._entries),
            top=bytes(self._top),
            chosen=bytes(self._chosen),
            top_ids=bytes(self._top_ids),
            top_logprobs=bytes(self._top_logprobs),
        )
        return Tokens(
            streams=pack("I", self._streams),
            starts=pack("I", self._starts),
            ids=pack("I", self._ids),
            counts=b"" if all(count == 1 for count in self._counts) else pack("H", self._counts),
            choices=pack("H", self._choices) if any(self._choices) else b"",
            texts=tuple(self._texts) if any(self._texts) else (),
            logprobs=logprobs if self._entries else None,
        )
