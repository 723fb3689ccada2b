"""Tokens in JSON: what a token is called, and log-probabilities in the two shapes of OpenAI's API.

JSON is put together as bytes, token by token as they come, so that no answer costs the loop much at once. NaN and −∞ have
no JSON: −9999 stands for them, as in OpenAI's answers (F38).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from pagewire.gateway.columns import LogprobRun
from pagewire_client.text.byte_table import ByteTable
from pagewire_transport.columns import unpack
from pagewire_transport.messages import PromptLogprobs

LOWEST: Final = -9999.0

TokenLogprobs = tuple[int, float, list[tuple[int, float]]]
"""A token, its log-probability, and the most likely tokens in its place."""

_encode = msgspec.json.Encoder().encode


def finite(value: float) -> float:
    """The value, or what stands for one that JSON cannot say."""
    return value if math.isfinite(value) else LOWEST


def token_logprobs(ids: Sequence[int], run: LogprobRun) -> Iterator[TokenLogprobs]:
    """The log-probabilities of `ids`, one after another."""
    top, chosen = run.top, unpack("f", bytes(run.chosen))
    top_ids, top_logprobs = unpack("I", bytes(run.top_ids)), unpack("f", bytes(run.top_logprobs))
    for i, token in enumerate(ids):
        span = slice(i * top, (i + 1) * top)
        yield token, finite(chosen[i]), [(t, finite(p)) for t, p in zip(top_ids[span], top_logprobs[span], strict=True)]


def prompt_token_logprobs(ids: Sequence[int], message: PromptLogprobs) -> Iterator[TokenLogprobs]:
    """Of all tokens of a prompt but the first."""
    run = LogprobRun(
        message.top, *(memoryview(column) for column in (message.chosen, message.top_ids, message.top_logprobs))
    )
    return token_logprobs(ids[1:], run)


class Vocabulary:
    """What tokens are called. Without a byte table (a model without tokenizer), by number."""

    def __init__(self, table: ByteTable | None) -> None:
        self._table = table

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

    def chat_entry(self, one: TokenLogprobs) -> bytes:
        """`{"token", "logprob", "bytes", "top_logprobs"}` of one token."""
        token, logprob, top = one
        alternatives = b",".join(b"{%b}" % self._named(t, p) for t, p in top)
        return b'{%b,"top_logprobs":[%b]}' % (self._named(token, logprob), alternatives)

    def _named(self, token: int, logprob: float) -> bytes:
        return b'"token":%b,"logprob":%b,"bytes":%b' % (
            _encode(self.name(token)),
            _encode(logprob),
            _encode(list(self.piece(token))),
        )


class CompletionLogprobs:
    """The four lists of a completion's `logprobs`, filled token by token and taken out in runs."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._offset = 0
        self._tokens: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._tops: list[bytes] = []
        self._offsets: list[bytes] = []

    def add_first(self, token: int) -> None:
        """The first token of a prompt: nothing precedes it, so it has no probability."""
        self._add(token, b"null", b"null")

    def add(self, one: TokenLogprobs) -> None:
        """One token. It is among its own alternatives, whether or not it is one of the most likely."""
        token, logprob, top = one
        named: dict[str, float] = {}
        for other, value in [*top, (token, logprob)]:
            named.setdefault(self._vocabulary.name(other), value)  # two tokens may have one name: the likelier counts
        self._add(token, _encode(logprob), _encode(named))

    def take(self) -> bytes:
        """What was added since the last call, as JSON."""
        lists = (self._tokens, self._logprobs, self._tops, self._offsets)
        out = b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % tuple(
            b",".join(one) for one in lists
        )
        for one in lists:
            one.clear()
        return out

    def _add(self, token: int, logprob: bytes, top: bytes) -> None:
        self._tokens.append(_encode(self._vocabulary.name(token)))
        self._logprobs.append(logprob)
        self._tops.append(top)
        self._offsets.append(b"%d" % self._offset)
        self._offset += self._vocabulary.num_chars(token)
