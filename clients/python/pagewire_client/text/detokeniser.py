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

    __slots__ = ("_begun", "_held", "_pieces", "_texts")

    def __init__(self, table: ByteTable, *, skip_special: bool = True) -> None:
        self._pieces = table.visible if skip_special else table.pieces
        self._texts = table.visible_texts if skip_special else table.texts
        self._held = b""  # bytes of the character that is incomplete
        self._begun = not table.strips_space  # if not: the first byte is to come, and goes if it is a space

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens (ids ≥ 0); the text that they complete, which may be empty.

        Ids that the table does not have are rows that pad the model's vocabulary: they have no text.
        """
        # Nearly every push is one token of whole characters, with none incomplete before it.
        if len(token_ids) == 1 and not self._held and self._begun:
            try:
                text = self._texts[token_ids[0]]
            except IndexError:
                return ""
            if text is not None:
                return text
        return self._push_bytes(token_ids)

    def _push_bytes(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        try:
            data = pieces[token_ids[0]] if len(token_ids) == 1 else b"".join([pieces[i] for i in token_ids])
        except IndexError:
            data = b"".join([pieces[i] for i in token_ids if i < len(pieces)])
        if not self._begun and data:
            self._begun = True
            data = data.removeprefix(b" ")
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
        return self._held, self._begun

    def tokens_until(self, mark: Mark, token_ids: Sequence[int], num_chars: int) -> int:
        """How many of `token_ids`, pushed at `mark`, it takes to complete the first `num_chars` ≥ 1 characters.

        Decodes the tokens again, one by one. It runs once a stream, when a stop string was found: counting at each
        token of each stream would cost more than the decode itself.
        """
        replay = object.__new__(Detokeniser)
        replay._pieces, replay._texts = self._pieces, self._texts
        replay._held, replay._begun = mark
        done = 0
        for count, token in enumerate(token_ids, 1):
            done += len(replay.push((token,)))
            if done >= num_chars:
                return count
        return len(token_ids)


Mark = tuple[bytes, bool]
