"""From token ids to text, a few tokens at a time."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from pagewire_client.text.byte_table import ByteTable


class Detokeniser:
    """Incremental decode of one stream.

    Whatever the sizes of the pushes, the texts joined, `flush()` included, equal `ByteTable.decode` of all tokens.
    A character whose bytes are not all there is held back; held are at most three bytes.

        tokens   … │ E2 82 │ AC 20 │ F0 9F │ flush
        text     … │       │ "€ "  │       │ U+FFFD
    """

    __slots__ = ("_held", "_strip", "_table", "num_tokens")

    def __init__(self, table: ByteTable, *, skip_special: bool = True) -> None:
        self._table = table.visible if skip_special else table.pieces
        self._held = b""  # bytes of the character that is incomplete
        self._strip = table.strips_space  # the first byte is still to come, and goes if it is a space
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens (ids ≥ 0); the text that they complete, which may be empty.

        Ids that the table does not have are rows that pad the model's vocabulary: they count and have no text.
        """
        table = self._table
        self.num_tokens += len(token_ids)
        try:
            data = b"".join([table[i] for i in token_ids])
        except IndexError:
            data = b"".join([table[i] for i in token_ids if i < len(table)])
        if self._strip and data:
            self._strip = False
            if data[0] == 0x20:
                data = data[1:]
        if self._held:
            data = self._held + data
        # Stateful decode: stops before a sequence that more bytes could complete, replaces what none could.
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        """The end of the stream: an incomplete character becomes U+FFFD."""
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return text

    def mark(self) -> Mark:
        """The state before a push, for `tokens_until`."""
        return self._held, self._strip

    def tokens_until(self, mark: Mark, token_ids: Sequence[int], num_chars: int) -> int:
        """How many of `token_ids`, pushed at `mark`, it takes to complete the first `num_chars` ≥ 1 characters.

        Decodes the tokens again, one by one. It runs once a stream, when a stop string was found: counting at each
        token of each stream would cost more than the decode itself.
        """
        replay = object.__new__(Detokeniser)
        replay._table, replay.num_tokens = self._table, 0
        replay._held, replay._strip = mark
        done = 0
        for count, token in enumerate(token_ids, 1):
            done += len(replay.push((token,)))
            if done >= num_chars:
                return count
        return len(token_ids)


Mark = tuple[bytes, bool]
