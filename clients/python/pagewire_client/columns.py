"""Packed columns of `tokens` messages, as runs of tokens with what belongs to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagewire_client.result import TokenLogprob
from pagewire_transport.columns import unpack
from pagewire_transport.errors import ProtocolError
from pagewire_transport.messages import LogprobColumns, Tokens


class Run(NamedTuple):
    """One entry of a message."""

    stream: int
    choice: int
    start: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None


def runs(message: Tokens) -> Iterator[Run]:
    """The entries of a message, in order.

    Raises:
        ProtocolError: the columns do not fit together.
    """
    streams, starts, ids = (unpack("I", column) for column in (message.streams, message.starts, message.ids))
    num = len(streams)
    counts: Sequence[int] = unpack("H", message.counts) if message.counts else (1,) * num
    choices: Sequence[int] = unpack("H", message.choices) if message.choices else (0,) * num
    texts: Sequence[str] = message.texts or ("",) * num
    if not num == len(starts) == len(counts) == len(choices) == len(texts) or sum(counts) != len(ids):
        raise ProtocolError("the columns of a tokens message differ in length")
    logprobs = _logprobs_by_entry(message.logprobs, counts) if message.logprobs is not None else {}
    at = 0
    for entry, (stream, choice, start, count, text) in enumerate(
        zip(streams, choices, starts, counts, texts, strict=True)
    ):
        yield Run(stream, choice, start, tuple(ids[at : at + count]), text, logprobs.get(entry))
        at += count


def _logprobs_by_entry(columns: LogprobColumns, counts: Sequence[int]) -> dict[int, tuple[TokenLogprob, ...]]:
    entries, tops = unpack("I", columns.entries), columns.top
    if len(entries) != len(tops) or any(entry >= len(counts) for entry in entries):
        raise ProtocolError("the columns of log-probabilities differ in length")
    found: dict[int, tuple[TokenLogprob, ...]] = {}
    at = at_top = 0
    for entry, top in zip(entries, tops, strict=True):
        end, end_top = at + 4 * counts[entry], at_top + 4 * counts[entry] * top
        found[entry] = token_logprobs(
            columns.chosen[at:end],
            columns.top_ids[at_top:end_top],
            columns.top_logprobs[at_top:end_top],
            counts[entry],
            top,
        )
        at, at_top = end, end_top
    return found


def token_logprobs(chosen: bytes, top_ids: bytes, top_logprobs: bytes, num: int, top: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of `num` tokens with `top` alternatives each.

    Raises:
        ProtocolError: the columns are of other lengths.
    """
    if len(chosen) != 4 * num or len(top_ids) != 4 * num * top or len(top_logprobs) != len(top_ids):
        raise ProtocolError("the columns of log-probabilities differ in length")
    values, ids, others = unpack("f", chosen), unpack("I", top_ids), unpack("f", top_logprobs)
    return tuple(
        TokenLogprob(values[i], tuple(zip(ids[i * top : (i + 1) * top], others[i * top : (i + 1) * top], strict=True)))
        for i in range(num)
    )
