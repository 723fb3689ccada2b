"""The JSON of answers: `chat.completion` and `text_completion`, whole or in chunks.

A shape holds what each choice has to say. Streamed, that is taken out after every turn (`chunk`); else it stays until
`whole`. So both say the same, log-probabilities included (F38).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from pagewire.gateway.columns import LogprobRun
from pagewire.gateway.http.tokens import CompletionLogprobs, Vocabulary
from pagewire.gateway.stream import Piece
from pagewire_transport.messages import Usage

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Heading:
    """What every answer and chunk of a request begins with.

    Attributes:
        id: of the request.
        created: seconds since 1970.
        model: as it is served.
        has_logprobs: they were asked for.
        tells_usage: the stream's last chunk tells it, and the others say null.
    """

    id: str
    created: int
    model: str
    has_logprobs: bool
    tells_usage: bool = False

    def json(self, kind: str) -> bytes:
        """The beginning of an object, up to its choices."""
        return b'{"id":%b,"object":"%b","created":%d,"model":%b,"choices":' % (
            _encode(self.id),
            kind.encode(),
            self.created,
            _encode(self.model),
        )


class Shape(Protocol):
    """Of one request; `index` counts the choices of all its streams."""

    def prompt_logprobs(self, indices: Sequence[int], start: int, run: LogprobRun) -> None:
        """Take those of the prompt that these choices have in common, from its token `start`."""
        ...

    def add(self, index: int, piece: Piece) -> None:
        """Take tokens and text."""
        ...

    def add_text(self, index: int, text: str) -> None:
        """Take text that had been held back."""
        ...

    def chunk(self, index: int) -> bytes | None:
        """What was taken since the last chunk; None: nothing that can be shown."""
        ...

    def end(self, index: int, reason: str) -> bytes:
        """The choice's last chunk; `whole` needs it too."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The chunk that tells usage."""
        ...

    def whole(self, usage: Usage) -> bytes:
        """The answer in one piece."""
        ...


@dataclass(slots=True)
class _ChatChoice:
    texts: list[str] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    has_role: bool = False
    reason: bytes = b"null"


class ChatShape:
    """Answers of `/v1/chat/completions`.

    The role comes with the first text and not before it, so that a first chunk means a first token (F22).
    """

    def __init__(self, heading: Heading, num_choices: int, vocabulary: Vocabulary) -> None:
        self._heading = heading
        self._vocabulary = vocabulary
        self._choices = [_ChatChoice() for _ in range(num_choices)]
        self._begin: Final = heading.json("chat.completion.chunk")
        self._close: Final = b',"usage":null}' if heading.tells_usage else b"}"

    def prompt_logprobs(self, indices: Sequence[int], start: int, run: LogprobRun) -> None:
        """Chats do not show them."""
        raise AssertionError((indices, start, run))

    def add(self, index: int, piece: Piece) -> None:
        choice = self._choices[index]
        if piece.text:
            choice.texts.append(piece.text)
        if piece.logprobs is not None:
            choice.entries += self._vocabulary.chat_entries(piece.ids, piece.logprobs)

    def add_text(self, index: int, text: str) -> None:
        self._choices[index].texts.append(text)

    def chunk(self, index: int) -> bytes | None:
        choice = self._choices[index]
        if not choice.texts and not choice.entries:
            return None
        text = choice.texts[0] if len(choice.texts) == 1 else "".join(choice.texts)
        role = b"" if choice.has_role else b'"role":"assistant",'
        choice.has_role = True
        out = b'%b[{"index":%d,"delta":{%b"content":%b},"logprobs":%b,"finish_reason":null}]%b' % (
            self._begin,
            index,
            role,
            _encode(text),
            self._logprobs(choice),
            self._close,
        )
        choice.texts.clear()
        choice.entries.clear()
        return out

    def end(self, index: int, reason: str) -> bytes:
        choice = self._choices[index]
        choice.reason = _encode(reason)
        delta = b"" if choice.has_role else b'"role":"assistant","content":""'
        return b'%b[{"index":%d,"delta":{%b},"logprobs":null,"finish_reason":%b}]%b' % (
            self._begin,
            index,
            delta,
            choice.reason,
            self._close,
        )

    def usage(self, usage: Usage) -> bytes:
        return b'%b[],"usage":%b}' % (self._begin, usage_json(usage))

    def whole(self, usage: Usage) -> bytes:
        choices = b",".join(
            b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":%b,"finish_reason":%b}'
            % (index, _encode("".join(choice.texts)), self._logprobs(choice), choice.reason)
            for index, choice in enumerate(self._choices)
        )
        return b'%b[%b],"usage":%b}' % (self._heading.json("chat.completion"), choices, usage_json(usage))

    def _logprobs(self, choice: _ChatChoice) -> bytes:
        if not self._heading.has_logprobs:
            return b"null"
        return b'{"content":[%b],"refusal":null}' % b",".join(choice.entries)


@dataclass(slots=True)
class _CompletionChoice:
    logprobs: CompletionLogprobs
    texts: list[str] = field(default_factory=list)
    has_news: bool = False
    reason: bytes = b"null"


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answer begins with."""

    ids: list[int]
    text: str


class CompletionShape:
    """Answers of `/v1/completions`.

    Args:
        heading: of the request.
        echoes: of each choice, the prompt that its text begins with; None: it begins with what was generated.
        vocabulary: names of tokens.
    """

    def __init__(self, heading: Heading, echoes: list[Echo | None], vocabulary: Vocabulary) -> None:
        self._heading = heading
        self._echoes = echoes
        self._vocabulary = vocabulary
        self._choices = [_CompletionChoice(CompletionLogprobs(vocabulary)) for _ in echoes]
        self._begin: Final = heading.json("text_completion")
        self._close: Final = b',"usage":null}' if heading.tells_usage else b"}"
        for choice, echo in zip(self._choices, echoes, strict=True):
            if echo is not None:
                choice.has_news = True
                choice.texts.append(echo.text)
                if heading.has_logprobs:
                    choice.logprobs.add_first(echo.ids[0])

    def prompt_logprobs(self, indices: Sequence[int], start: int, run: LogprobRun) -> None:
        echo = self._echoes[indices[0]]
        assert echo is not None, "they are asked for with `echo` only"
        entries = self._vocabulary.completion_entries(echo.ids[start : start + len(run.chosen) // 4], run)
        for index in indices:
            self._choices[index].has_news = True
            self._choices[index].logprobs.add(entries)

    def add(self, index: int, piece: Piece) -> None:
        choice = self._choices[index]
        if piece.text:
            choice.has_news = True
            choice.texts.append(piece.text)
        if piece.logprobs is not None:
            choice.has_news = True
            choice.logprobs.add(self._vocabulary.completion_entries(piece.ids, piece.logprobs))

    def add_text(self, index: int, text: str) -> None:
        self._choices[index].has_news = True
        self._choices[index].texts.append(text)

    def chunk(self, index: int) -> bytes | None:
        choice = self._choices[index]
        if not choice.has_news:
            return None
        choice.has_news = False
        out = b"%b[%b]%b" % (self._begin, self._choice(index, choice), self._close)
        choice.texts.clear()
        return out

    def end(self, index: int, reason: str) -> bytes:
        self._choices[index].reason = _encode(reason)
        return b'%b[{"index":%d,"text":"","logprobs":null,"finish_reason":%b}]%b' % (
            self._begin,
            index,
            self._choices[index].reason,
            self._close,
        )

    def usage(self, usage: Usage) -> bytes:
        return b'%b[],"usage":%b}' % (self._begin, usage_json(usage))

    def whole(self, usage: Usage) -> bytes:
        choices = b",".join(self._choice(index, choice) for index, choice in enumerate(self._choices))
        return b'%b[%b],"usage":%b}' % (self._begin, choices, usage_json(usage))

    def _choice(self, index: int, choice: _CompletionChoice) -> bytes:
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            _encode("".join(choice.texts)),
            choice.logprobs.take() if self._heading.has_logprobs else b"null",
            choice.reason,
        )


def usage_json(usage: Usage) -> bytes:
    """Tokens, by OpenAI's names."""
    return _encode(
        {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
    )
