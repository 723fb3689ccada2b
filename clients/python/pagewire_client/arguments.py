"""What callers of `generate` and `chat` give, as a request. A complaint names the argument as the caller knows it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pagewire_transport.codec import convert
from pagewire_transport.columns import pack_token_ids
from pagewire_transport.errors import InvalidRequest
from pagewire_transport.messages import ChatMessage, Generate
from pagewire_transport.params import SamplingParams

_WISHES: Final = ("ttft_ms", "itl_ms", "deadline_ms")


def prompt_source(prompt: str | Iterable[int]) -> dict[str, Any]:
    """The fields of a request for a prompt: text or token ids.

    Raises:
        InvalidRequest: it is neither.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    # Bytes are iterable, too, and would be taken for the memory of an array.
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidRequest(f"must be text or token ids, not {type(prompt).__name__}", field="prompt")
    return {"prompt_ids": pack_token_ids(prompt)}


def chat_source(
    messages: Sequence[Mapping[str, str] | ChatMessage], template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The fields of a request for a conversation.

    Raises:
        InvalidRequest: the messages are no list of turns, or the variables no mapping.
    """
    shape = 'a list of {"role": …, "content": …}'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest(f"must be {shape}, not {type(messages).__name__}", field="messages")
    if not isinstance(template_kwargs or {}, Mapping):
        raise InvalidRequest(f"must be a dict, not {type(template_kwargs).__name__}", field="template_kwargs")
    turns = []
    for index, turn in enumerate(messages):
        if not isinstance(turn, Mapping | ChatMessage):
            raise InvalidRequest(f"must be one of {shape}, is {type(turn).__name__}", field=f"messages[{index}]")
        turns.append(turn if isinstance(turn, ChatMessage) else dict(turn))
    return {"messages": turns, "template_kwargs": dict(template_kwargs or {})}


def wishes(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is about time, as fields of a request, and the rest."""
    asked = {name: value for name, value in params.items() if name in _WISHES and value is not None}
    for name, value in asked.items():
        if isinstance(value, float) and math.isnan(value):
            raise InvalidRequest("is NaN; give a number", field=name)
    return asked, {name: value for name, value in params.items() if name not in _WISHES}


def sampling_params(params: dict[str, Any]) -> SamplingParams:
    """Parameters as given; a single stop string counts as a list of one.

    Raises:
        InvalidRequest: an unknown name or a bad value.
    """
    if isinstance(params.get("stop"), str):
        params = {**params, "stop": (params["stop"],)}
    for name, value in params.items():
        if isinstance(value, float) and math.isnan(value):  # the general complaint would only state the limits
            raise InvalidRequest("is NaN; give a number", field=name)
    return convert(params, SamplingParams)


def prompt_size(message: Generate) -> tuple[str, int]:
    """Which field of the request holds its prompt, and how many bytes that takes, about.

    Raises:
        InvalidRequest: a text has lone surrogates, as bytes that are not UTF-8 become on a command line.
    """
    for field, text in _other_texts(message):
        _num_bytes(text, field)
    if message.prompt_ids is not None:
        return "prompt_ids", len(message.prompt_ids)
    if message.prompt is not None:
        return "prompt", _num_bytes(message.prompt, "prompt")
    return "messages", sum(
        _num_bytes(turn.content, f"messages[{index}].content") + _num_bytes(turn.role, f"messages[{index}].role") + 32
        for index, turn in enumerate(message.messages or ())
    )


def _other_texts(message: Generate) -> Iterator[tuple[str, str]]:
    yield "namespace", message.namespace
    for index, text in enumerate(message.params.stop):
        yield f"stop[{index}]", text
    for name, value in message.template_kwargs.items():
        yield "template_kwargs", name
        if isinstance(value, str):
            yield f"template_kwargs.{name}", value


def _num_bytes(text: str, field: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            "must be text in Unicode (UTF-8 on a command line), without lone surrogates", field=field
        ) from None
