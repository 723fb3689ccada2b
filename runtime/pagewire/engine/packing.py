"""Columns of wire messages from numpy arrays. Little-endian, whatever the machine (there `astype` copies, else not)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pagewire.scheduler.outcome import StepOutcome
from pagewire.step.step import Int32Array, LogprobRows
from pagewire_transport.codec import encode
from pagewire_transport.messages import LogprobColumns, Tokens

_U16: Final = np.dtype("<u2")
_U32: Final = np.dtype("<u4")
_I32: Final = np.dtype("<i4")
_F32: Final = np.dtype("<f4")


def u16(values: npt.NDArray[Any]) -> bytes:
    """As uint16."""
    return values.astype(_U16, copy=False).tobytes()


def u32(values: npt.NDArray[Any]) -> bytes:
    """As uint32; negative values are the caller's error."""
    if values.dtype is _I32 or values.dtype is _U32:
        return values.tobytes()
    return values.astype(_I32 if values.dtype.kind == "i" else _U32, copy=False).tobytes()


def f32(values: npt.NDArray[Any]) -> bytes:
    """As float32."""
    return values.astype(_F32, copy=False).tobytes()


def ragged_take(values: npt.NDArray[Any], counts: Int32Array, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`values` holds runs of `counts` one after another; those of `rows`, in that order, one after another."""
    begins = np.cumsum(counts) - counts
    taken = counts[rows]
    shift = begins[rows] - (np.cumsum(taken) - taken)
    return values[np.repeat(shift, taken) + np.arange(int(taken.sum()))]


def logprob_columns(rows: LogprobRows, selected: npt.NDArray[Any], entries: npt.NDArray[Any]) -> LogprobColumns | None:
    """The `selected` rows (indices) as columns, for the given entries of the message, ascending; None if there are none."""
    if not selected.size:
        return None
    return LogprobColumns(
        entries=u32(entries),
        top=rows.top[selected].astype(np.uint8).tobytes(),
        chosen=f32(rows.chosen[selected]),
        top_ids=u32(ragged_take(rows.top_ids, rows.top, selected)),
        top_logprobs=f32(ragged_take(rows.top_logprobs, rows.top, selected)),
    )


class FrameTemplate:
    """A `tokens` frame of one token for each of the same streams, whose starts and ids alone change from step to step.

    Built from what the codec makes of such a message, and cut where the two columns stand. Filling it in takes 0.4 µs,
    building and encoding the struct 3; a step pays that for every connection.
    """

    __slots__ = ("_head", "_middle", "_tail")

    def __init__(self, streams: bytes, choices: bytes) -> None:
        empty = encode(Tokens(streams=streams, starts=b"", ids=b"", choices=choices))
        tail = encode(Tokens(streams=b"", starts=b"", ids=b"", choices=choices))
        length = len(tail) - len(encode(Tokens(streams=b"", starts=b"", ids=b"")))
        keys = [b"\xa6starts", b"\xa3ids"]
        size = _bin(len(streams))
        self._head = empty[: len(empty) - length - sum(map(len, keys)) - 2 * len(_bin(0))] + keys[0] + size
        self._middle = keys[1] + size
        self._tail = empty[len(empty) - length :]

    def fill(self, starts: bytes, ids: bytes) -> bytes:
        """The frame; both columns are as long as `streams`."""
        return b"".join((self._head, starts, self._middle, ids, self._tail))


def _bin(size: int) -> bytes:
    """MessagePack's head of `size` bytes."""
    if size < 1 << 8:
        return b"\xc4" + size.to_bytes(1, "big")
    return b"\xc5" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xc6" + size.to_bytes(4, "big")


class OutcomeColumns:
    """The columns of an outcome in the order of its layout, packed once; a reader's message is slices of them.

    Args:
        outcome: with at least one entry.
        order: entries sorted by reader; None: as they are.
        ones: what the bytes of `counts` are if each entry has one token.
    """

    __slots__ = ("_counts", "_ends", "_order", "_outcome", "ids", "is_plain", "starts")

    def __init__(self, outcome: StepOutcome, order: npt.NDArray[np.intp] | None, ones: bytes) -> None:
        starts, counts, ids = outcome.starts, outcome.counts, outcome.token_ids
        is_single = counts.tobytes() == ones
        if order is not None:
            ids = ids[order] if is_single else ragged_take(ids, counts, order)
            starts, counts = starts[order], counts[order]
        self._outcome = outcome
        self._order = order
        self.starts = u32(starts)
        self.ids = u32(ids)
        self._counts = b"" if is_single else u16(counts)
        self._ends = None if is_single else [0, *np.cumsum(counts).tolist()]
        self.is_plain = is_single and outcome.logprobs is None
        """One token an entry and nothing else: entry e is bytes 4e … 4e + 3 of both columns, and a template fits."""

    def tokens(self, begin: int, end: int, streams: bytes, choices: bytes) -> Tokens:
        """The message of entries `begin` … `end` − 1, which are of these streams and choices."""
        first, last = (begin, end) if self._ends is None else (self._ends[begin], self._ends[end])
        return Tokens(
            streams=streams,
            starts=self.starts[4 * begin : 4 * end],
            ids=self.ids[4 * first : 4 * last],
            counts=self._counts[2 * begin : 2 * end],
            choices=choices,
            logprobs=None if self._outcome.logprobs is None else self._logprobs(self._outcome.logprobs, begin, end),
        )

    def _logprobs(self, rows: LogprobRows, begin: int, end: int) -> LogprobColumns | None:
        if self._order is None:
            return logprob_columns(rows, np.arange(rows.samples.size), rows.samples)
        position = np.full(self._order.size, -1, np.int32)
        position[self._order[begin:end]] = np.arange(end - begin)
        entries = position[rows.samples]
        selected = np.flatnonzero(entries >= 0)
        selected = selected[np.argsort(entries[selected], kind="stable")]
        return logprob_columns(rows, selected, entries[selected])


class KeptLogprob(NamedTuple):
    """Log-probabilities of one token that could not be sent when they came; the ledger does not hold them."""

    chosen: bytes  # float32
    top_ids: bytes  # uint32 × top
    top_logprobs: bytes  # float32 × top


def keep_logprob(rows: LogprobRows, row: int, begin: int) -> KeptLogprob:
    """Row `row` of `rows`, whose alternatives start at `begin`."""
    end = begin + int(rows.top[row])
    return KeptLogprob(f32(rows.chosen[row : row + 1]), u32(rows.top_ids[begin:end]), f32(rows.top_logprobs[begin:end]))


class LateRun(NamedTuple):
    """Tokens of one choice that were not sent when they came."""

    stream: int
    choice: int
    start: int
    ids: Int32Array
    logprobs: Sequence[KeptLogprob]
    """One a token, or empty."""


def late_tokens(runs: list[LateRun]) -> Tokens:
    """One message of all runs; each has at most 65,535 tokens."""
    told = [(entry, run.logprobs) for entry, run in enumerate(runs) if run.logprobs]
    return Tokens(
        streams=u32(np.array([run.stream for run in runs], np.uint32)),
        starts=u32(np.array([run.start for run in runs], np.int32)),
        ids=u32(np.concatenate([run.ids for run in runs])),
        counts=u16(np.array([run.ids.size for run in runs], np.uint16)),
        choices=u16(np.array([run.choice for run in runs], np.uint16)),
        logprobs=LogprobColumns(
            entries=u32(np.array([entry for entry, _ in told], np.uint32)),
            top=bytes(len(kept[0].top_ids) // 4 for _, kept in told),
            chosen=b"".join(one.chosen for _, kept in told for one in kept),
            top_ids=b"".join(one.top_ids for _, kept in told for one in kept),
            top_logprobs=b"".join(one.top_logprobs for _, kept in told for one in kept),
        )
        if told
        else None,
    )
