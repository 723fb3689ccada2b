"""Bodies of requests as OpenAI's API has them, with the extensions that other servers have made common.

Unknown fields are ignored: the SDKs send more with every release (`store`, `metadata`, `service_tier`, …), and a client
that works elsewhere must work here. What changes the answer and cannot be honoured is refused by name instead
(`parameters`). Ranges are those of `SamplingParams`, said here too so that the OpenAPI document knows them; what a server
is configured to take may be less.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from pagewire_transport.messages import Milliseconds
from pagewire_transport.params import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    StopString,
    TokenId,
)

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Top = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Ids = Annotated[list[TokenId], msgspec.Meta(max_length=2**22)]
Bias = Annotated[
    dict[str, Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]], msgspec.Meta(max_length=MAX_LOGIT_BIAS)
]
Scalar = str | int | float | bool | None
NULL: Final = msgspec.Raw(b"null")


def _raw(*kinds: Any) -> msgspec.Meta:
    """Of a field that is decoded once its size was looked at (`parameters`): a body of eight million bytes holds millions
    of small objects, which are a second of the loop's time (F50). The OpenAPI document says the kinds.
    """
    return msgspec.Meta(extra_json_schema={"anyOf": [msgspec.json.schema(kind) for kind in kinds]})


RawBias = Annotated[msgspec.Raw, _raw(Bias, None)]
RawPrompt = Annotated[msgspec.Raw, _raw(str, list[str], Ids, list[Ids])]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a stream is told."""

    include_usage: bool | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and completions share."""

    model: str | None = None
    """The name that `/v1/models` tells; the one model there is, where it is left out."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    """Extension. 0 and -1: off."""
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """Extension."""
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: RawBias = msgspec.field(default_factory=lambda: NULL)
    """By token id."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] | None = None
    """Extension."""
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    """Extension."""
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    """Extension."""
    ignore_eos: bool | None = None
    """Extension."""
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] | None = None
    """Extension. Higher runs first, from -100 to 100."""
    ttft_ms: Milliseconds | None = None
    """Extension. Wanted time to the first token; if it cannot be kept, 429 at once. 0: whenever."""
    itl_ms: Milliseconds | None = None
    """Extension. Wanted time between two tokens, likewise."""
    deadline_ms: Milliseconds | None = None
    """Extension. Beyond this time the answer ends with an error."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content; parts of type `text` alone can be read here."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    tool_calls: list[Any] | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=16_384)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], msgspec.Meta(max_length=64)] | None = None
    """Extension. Variables of the chat template."""
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: RawPrompt
    """A text, several texts, token ids, or several lists of token ids."""
    logprobs: Top | None = None
    echo: bool | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=16_384)] | None = None
    add_special_tokens: bool = True
    """BOS and what else the model wants around a plain prompt."""
    chat_template_kwargs: Annotated[dict[str, Scalar], msgspec.Meta(max_length=64)] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Ids
