"""Tokens in JSON: what a token is called, and log-probabilities in the two shapes of OpenAI's API.

An answer may hold half a million log-probabilities, so each must cost next to nothing: the JSON around a number is made
once for each token of the vocabulary and kept, a run's numbers are encoded in one call, and both are joined. NaN and −∞
have no JSON: −9999 stands for them, as in OpenAI's answers (F38).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from pagewire.gateway.columns import LogprobRun
from pagewire_client.text.byte_table import ByteTable
from pagewire_transport.columns import unpack

_LOWEST: Final = b"-9999.0"

_T = TypeVar("_T")

_encode = msgspec.json.Encoder().encode


class _Kept(dict[int, _T], Generic[_T]):
    """A value for each token that came up so far: as many as the vocabulary has tokens at most."""

    def __init__(self, make: Callable[[int], _T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> _T:
        value = self[token] = self._make(token)
        return value


class CompletionEntries(NamedTuple):
    """JSON of a run of tokens for the four lists of a completion's `logprobs`."""

    tokens: list[bytes]
    logprobs: list[bytes]
    tops: list[bytes]
    num_chars: list[int]


class Vocabulary:
    """What tokens are called. Without a byte table (a model without tokenizer), by number."""

    def __init__(self, table: ByteTable | None) -> None:
        self._table = table
        self._names = _Kept(lambda token: _encode(self.name(token)))
        self._keys = _Kept(lambda token: b",%b:" % self._names[token])
        self._heads = _Kept(self._head)
        self._num_chars = _Kept(self.num_chars)

    def piece(self, token: int) -> bytes:
        """The token's bytes."""
        table = self._table
        if table is None:
            return b"token_id:%d" % token
        return table.pieces[token] if token < len(table) else b""

    def name(self, token: int) -> str:
        r"""The token as text; `bytes:\xe2\x82` for a part of a character, as OpenAI's API writes it."""
        piece = self.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def num_chars(self, token: int) -> int:
        """Length of its text, for offsets; a part of a character counts where its first byte is."""
        return sum(1 for byte in self.piece(token) if byte & 0xC0 != 0x80)

    def text(self, ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens included."""
        return b"".join(map(self.piece, ids)).decode("utf-8", "replace")

    def chat_entries(self, ids: Sequence[int], run: LogprobRun) -> list[bytes]:
        """`{"token", "bytes", "logprob", "top_logprobs"}` of each token."""
        heads, chosen, top = self._heads, _numbers(run.chosen), run.top
        if not top:
            return [b'%b%b,"top_logprobs":[]}' % (heads[t][2:], p) for t, p in zip(ids, chosen, strict=True)]
        pairs = _pairs(heads, run)
        return [
            b'%b%b,"top_logprobs":[%b}]}'
            % (heads[token][2:], chosen[i], b"".join(pairs[2 * top * i : 2 * top * (i + 1)])[2:])
            for i, token in enumerate(ids)
        ]

    def completion_entries(self, ids: Sequence[int], run: LogprobRun) -> CompletionEntries:
        """Of each token. It is among its own alternatives, whether or not it is one of the most likely."""
        keys, chosen, top = self._keys, _numbers(run.chosen), run.top
        pairs = _pairs(keys, run)
        tops: list[bytes] = []
        for i, token in enumerate(ids):
            mine = pairs[2 * top * i : 2 * top * (i + 1)]
            names, own = mine[0::2], keys[token]
            if own not in names:
                mine += (own, chosen[i])
                names.append(own)
            if len(set(names)) < len(names):  # two tokens may have one name: the likelier counts
                mine = [part for pair in dict(zip(names[::-1], mine[::-2], strict=True)).items() for part in pair]
            tops.append(b"{%b}" % b"".join(mine)[1:])
        return CompletionEntries(
            list(map(self._names.__getitem__, ids)), chosen, tops, list(map(self._num_chars.__getitem__, ids))
        )

    def _head(self, token: int) -> bytes:
        """What stands before a log-probability in a chat: the end of the one before, and all else of its own."""
        return b'},{"token":%b,"bytes":%b,"logprob":' % (self._names[token], _encode(list(self.piece(token))))


def _numbers(column: memoryview) -> list[bytes]:
    """float32 as JSON."""
    if not column:
        return []
    text = _encode(unpack("f", bytes(column)).tolist())[1:-1]
    return text.replace(b"null", _LOWEST).split(b",")


def _pairs(before: _Kept[bytes], run: LogprobRun) -> list[bytes]:
    """What stands before it and its log-probability, for one alternative after the other."""
    values = _numbers(run.top_logprobs)
    pairs = [b""] * (2 * len(values))
    pairs[0::2] = map(before.__getitem__, unpack("I", bytes(run.top_ids)))
    pairs[1::2] = values
    return pairs


class CompletionLogprobs:
    """The four lists of a completion's `logprobs`, filled run by run and taken out in chunks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._offset = 0
        self._tokens: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._tops: list[bytes] = []
        self._offsets: list[bytes] = []

    def add_first(self, token: int) -> None:
        """The first token of a prompt: nothing precedes it, so it has no probability."""
        name = _encode(self._vocabulary.name(token))
        self.add(CompletionEntries([name], [b"null"], [b"null"], [self._vocabulary.num_chars(token)]))

    def add(self, entries: CompletionEntries) -> None:
        """One run."""
        self._tokens += entries.tokens
        self._logprobs += entries.logprobs
        self._tops += entries.tops
        *offsets, self._offset = accumulate(entries.num_chars, initial=self._offset)
        self._offsets += [b"%d" % offset for offset in offsets]

    def take(self) -> bytes:
        """What was added since the last call, as JSON."""
        lists = (self._tokens, self._logprobs, self._tops, self._offsets)
        out = b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % tuple(
            b",".join(one) for one in lists
        )
        for one in lists:
            one.clear()
        return out
