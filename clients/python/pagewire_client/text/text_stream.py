"""The text of one stream: detokenised, and ended at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagewire_client.text.byte_table import ByteTable
from pagewire_client.text.detokeniser import Detokeniser
from pagewire_client.text.stop_matcher import StopMatch, StopMatcher


class Stop(msgspec.Struct, frozen=True, gc=False):
    """Which stop string ended a stream, and how many generated tokens stay: up to the one that completes the string."""

    stop: str
    at: int


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """Text that may be shown, and the stop string if the stream ends here."""

    text: str
    stop: Stop | None = None


class TextStream:
    """Composes `Detokeniser` and `StopMatcher` for one continuation.

    Texts joined, `flush()` included, equal `ByteTable.decode` of all tokens up to the start of the stop string that is
    complete first, at any flush interval. Memory: three bytes and the longest stop.
    """

    __slots__ = ("_detokeniser", "_include_stop", "_matcher", "_num_tokens", "_stop")

    def __init__(
        self, table: ByteTable, stops: tuple[str, ...] = (), *, skip_special: bool = True, include_stop: bool = False
    ) -> None:
        self._detokeniser = Detokeniser(table, skip_special=skip_special)
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._stop: Stop | None = None
        self._num_tokens = 0  # counted where there are stop strings only

    @property
    def stop(self) -> Stop | None:
        """The stop string that was found."""
        return self._stop

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens. Once `stop` is set, the stream is over: later tokens have no text."""
        detokeniser, matcher = self._detokeniser, self._matcher
        if matcher is None:
            return TextDelta(detokeniser.push(token_ids))
        if self._stop is not None:
            return TextDelta("", self._stop)
        before = self._num_tokens
        self._num_tokens += len(token_ids)
        mark = detokeniser.mark()
        text, match = matcher.push(detokeniser.push(token_ids))
        if match is None:
            return TextDelta(text)
        return self._ended(text, match, before + detokeniser.tokens_until(mark, token_ids, match.end))

    def flush(self) -> TextDelta:
        """The end of the tokens: what was held back. A stop that an incomplete character completes counts as well."""
        if self._stop is not None:
            return TextDelta("", self._stop)
        text = self._detokeniser.flush()
        if self._matcher is None:
            return TextDelta(text)
        text, match = self._matcher.push(text)
        if match is None:
            return TextDelta(text + self._matcher.flush())
        return self._ended(text, match, self._num_tokens)

    def _ended(self, text: str, match: StopMatch, at: int) -> TextDelta:
        self._stop = Stop(match.stop, at)
        return TextDelta(text + match.stop if self._include_stop else text, self._stop)
