"""What arrives, and when: traces of others, and loads that are drawn.

Prompts are token ids that are made when a request arrives: a trace says how long they are and, Mooncake's, which of their
512-token blocks are the same as others'. Everything is a function of the file, or of a seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np

from pagewire.errors import ConfigError
from pagewire.request.request import TokenArray

HASH_BLOCK: Final = 512
"""Tokens that one id of Mooncake's traces stands for."""
_MOST_BLOCKS: Final = 2**31 // HASH_BLOCK
_MASK: Final = 2**31 - 1
_MOST_TOKENS: Final = 2**24
"""Of a prompt or an answer: sixteen times what the longest context of today holds."""
_MOST_NS: Final = 2**62


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at_ns: since the beginning.
        number: which of the trace; requests without ids share no prefix with another number.
        prefix_ids: what each 512 tokens of its prompt are, as far as they are known to be shared.
    """

    at_ns: int
    number: int
    num_prompt: int
    num_output: int
    prefix_ids: tuple[int, ...] = ()

    def prompt_ids(self) -> TokenArray:
        """int32 [num_prompt]: equal where blocks of the trace are equal, different everywhere else."""
        if not self.prefix_ids:
            return own_ids(self.number, self.num_prompt)
        first = np.array(self.prefix_ids, np.int64) * HASH_BLOCK
        return np.add.outer(first, np.arange(HASH_BLOCK)).ravel()[: self.num_prompt].astype(np.int32)


def own_ids(number: int, num_tokens: int) -> TokenArray:
    """Tokens that nobody else has: already the first names the request."""
    ids = (np.arange(num_tokens, dtype=np.int64) * 2_654_435_761 + number) & _MASK
    return ids.astype(np.int32)


class Workload(Protocol):
    """Where requests come from."""

    def next_ns(self) -> int | None:
        """When the next one comes; None: none, or none before another ends."""
        ...

    def take(self) -> Arrival:
        """That one."""
        ...

    def ended(self, now_ns: int) -> None:
        """One of its requests ended, or was refused."""
        ...


class Trace:
    """Requests at their own times, whatever became of those before."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = sorted(arrivals, key=lambda arrival: (arrival.at_ns, arrival.number))
        self._next = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    @property
    def end_ns(self) -> int:
        """When the last one comes."""
        return self._arrivals[-1].at_ns if self._arrivals else 0

    def next_ns(self) -> int | None:
        """See `Workload`."""
        return self._arrivals[self._next].at_ns if self._next < len(self._arrivals) else None

    def take(self) -> Arrival:
        """See `Workload`."""
        self._next += 1
        return self._arrivals[self._next - 1]

    def ended(self, now_ns: int) -> None:
        """It does not matter."""


class ClosedLoop:
    """`streams` requests open at any time until `until_ns`.

    Args:
        streams: clients.
        until_ns: none is sent from then on.
        spread_ns: the first requests come in this time, evenly.
        lengths: (prompt, output) tokens, in the order in which they are sent; endless.
        think_ns: between the end of a request and the next of the same client.
    """

    def __init__(
        self, lengths: Iterator[tuple[int, int]], streams: int, until_ns: int, think_ns: int = 0, spread_ns: int = 0
    ) -> None:
        self._lengths = lengths
        self._until_ns = until_ns
        self._think_ns = think_ns
        self._due = [i * spread_ns // streams for i in range(streams)]
        self._number = 0

    def next_ns(self) -> int | None:
        """See `Workload`."""
        return self._due[0] if self._due else None

    def take(self) -> Arrival:
        """See `Workload`."""
        at_ns = heapq.heappop(self._due)
        num_prompt, num_output = next(self._lengths)
        self._number += 1
        return Arrival(at_ns, self._number, num_prompt, num_output)

    def ended(self, now_ns: int) -> None:
        """The client sends its next."""
        if now_ns + self._think_ns < self._until_ns:
            heapq.heappush(self._due, now_ns + self._think_ns)


def chat_lengths(rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """(prompt, output) tokens of chat turns without end: log-normal, about 290 and 230 on average."""
    while True:
        prompt, output = rng.lognormal(np.log(220), 0.75), rng.lognormal(np.log(200), 0.55)
        yield int(min(2048, max(16, prompt))), int(min(1024, max(16, output)))


def poisson(lengths: Iterator[tuple[int, int]], rate: float, seconds: float, rng: np.random.Generator) -> Trace:
    """`rate` requests a second for `seconds`."""
    arrivals: list[Arrival] = []
    at = 0.0
    while (at := at + float(rng.exponential(1 / rate))) < seconds:
        num_prompt, num_output = next(lengths)
        arrivals.append(Arrival(int(at * 1e9), len(arrivals), num_prompt, num_output))
    return Trace(arrivals)


# ---- files ---------------------------------------------------------------------------------------------------------------


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_MOONCAKE: Final = msgspec.json.Decoder(_MooncakeLine)


def read_trace(path: Path, *, speed: float = 1.0, max_requests: int = 0) -> Trace:
    """A trace file: `.csv` as of Azure (TIMESTAMP, ContextTokens, GeneratedTokens), else Mooncake's JSON lines.

    Args:
        path: where it lies.
        speed: 2: everything arrives in half the time.
        max_requests: only the first so many; 0: all.

    Raises:
        ConfigError: it cannot be read, or a line is not as it should be; the message names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="trace") from None
    if path.suffix == ".csv":
        read, lines = _azure_line, lines[1:]
    else:
        read = _mooncake_line
    arrivals: list[Arrival] = []
    first_ns = 0
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        if max_requests and len(arrivals) == max_requests:
            break
        try:
            arrival = read(number, line)
        except (ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise ConfigError(f"request {number + 1} of {path}: {error}", field="trace") from None
        if not arrivals:
            first_ns = arrival.at_ns
        at_ns = int((arrival.at_ns - first_ns) / speed)
        arrivals.append(Arrival(max(0, at_ns), number, arrival.num_prompt, arrival.num_output, arrival.prefix_ids))
    if not arrivals:
        raise ConfigError(f"{path} holds no request", field="trace")
    return Trace(arrivals)


def _mooncake_line(number: int, line: bytes) -> Arrival:
    """Timestamps are milliseconds."""
    entry = _MOONCAKE.decode(line)
    ids = entry.hash_ids
    if ids and len(ids) * HASH_BLOCK < entry.input_length:
        raise ValueError(f"{len(ids)} block ids for {entry.input_length} tokens")
    if ids and not 0 <= min(ids) <= max(ids) < _MOST_BLOCKS:
        raise ValueError(f"a block id is not between 0 and {_MOST_BLOCKS - 1}")
    return _arrival(int(entry.timestamp * 1e6), number, entry.input_length, entry.output_length, ids)


def _azure_line(number: int, line: bytes) -> Arrival:
    """`2023-11-16 18:15:46.6805900,374,44`."""
    when, num_prompt, num_output = line.decode("utf-8").strip().split(",")
    whole, _, part = when.partition(".")
    # The fraction has seven digits, one more than `datetime` reads; UTC for all, so that no clock change comes between.
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    at_ns = seconds * 1_000_000_000 + int(part[:9].ljust(9, "0"))
    return _arrival(at_ns, number, int(num_prompt), int(num_output), ())


def _arrival(at_ns: int, number: int, num_prompt: int, num_output: int, ids: tuple[int, ...]) -> Arrival:
    if not 1 <= num_prompt <= _MOST_TOKENS or not 0 <= num_output <= _MOST_TOKENS:
        raise ValueError(f"{num_prompt} prompt and {num_output} output tokens")
    if not 0 <= at_ns <= _MOST_NS:
        raise ValueError("its time is no time of our era")
    return Arrival(at_ns, number, num_prompt, max(1, num_output), ids)
