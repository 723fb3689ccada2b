"""From the body of a request to what the gateway is asked for; every refusal names its field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pagewire.config import HttpConfig
from pagewire.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from pagewire.gateway.http.schema import Bias, ChatRequest, CompletionRequest, Message, Sampling
from pagewire_transport.codec import convert, refusal_of
from pagewire_transport.columns import pack_token_ids
from pagewire_transport.messages import ChatMessage
from pagewire_transport.params import MAX_LOGIT_BIAS, SamplingParams

COMPLETION_TOKENS: Final = 16
"""`max_tokens` of a completion that does not say: OpenAI's default, which programs count on. A chat gets all the room."""

_SEED_BITS: Final = 2**63 - 1


def chat_params(body: ChatRequest, limits: HttpConfig) -> SamplingParams:
    """What a chat asks of sampling.

    Raises:
        InvalidRequest: a value out of range, or two that contradict each other.
        UnsupportedFeature: a field that changes the answer and cannot be honoured.
    """
    _refuse_tools(body)
    _refuse_response_format(body.response_format)
    if body.modalities not in (None, [], ["text"]):
        raise UnsupportedFeature("this server gives text only", field="modalities")
    if body.audio is not None:
        raise UnsupportedFeature("this server gives text only", field="audio")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("needs logprobs to be true", field="top_logprobs")
    max_tokens, name = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        if max_tokens is not None and max_tokens != body.max_completion_tokens:
            raise InvalidRequest("contradicts max_tokens; give one of them", field="max_completion_tokens")
        max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _check_most(logprobs, limits.max_logprobs, "top_logprobs")
    return _params(body, limits, max_tokens, logprobs, {"max_tokens": name, "logprobs": "top_logprobs"})


def completion_params(body: CompletionRequest, limits: HttpConfig) -> SamplingParams:
    """What a completion asks of sampling; with `echo`, log-probabilities of the prompt too.

    Raises:
        InvalidRequest, UnsupportedFeature: as `chat_params`.
    """
    _refuse_response_format(body.response_format)
    if body.best_of not in (None, body.n or 1):
        raise UnsupportedFeature("must equal n: the best of several is not chosen here", field="best_of")
    if body.suffix:
        raise UnsupportedFeature("text before a suffix cannot be filled in here", field="suffix")
    _check_most(body.logprobs, limits.max_logprobs, "logprobs")
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.logprobs if body.echo else None
    return _params(body, limits, max_tokens, body.logprobs, {"prompt_logprobs": "logprobs"}, prompt_logprobs)


def chat_messages(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """The turns as templates take them: content is text, parts of text are joined by line breaks.

    Raises:
        UnsupportedFeature: a part that is no text, or calls of tools.
        InvalidRequest: no content.
    """
    return tuple(_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def completion_prompts(raw: msgspec.Raw, limits: HttpConfig, max_model_len: int) -> list[str | bytes]:
    """The prompts of a completion, each a text, or token ids as uint32.

    Raises:
        InvalidRequest: none, too many, or something that is neither.
        PromptTooLong: more ids than the model takes; none of them was looked at.
    """
    prompt = _decoded_prompt(raw, limits.max_prompts)
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("must not be empty", field="prompt")
    if _is_id(prompt[0]):
        return [_ids(prompt, "prompt", max_model_len)]
    if len(prompt) > limits.max_prompts:
        raise _too_many(len(prompt), limits.max_prompts)
    return [one if isinstance(one, str) else _ids(one, f"prompt[{i}]", max_model_len) for i, one in enumerate(prompt)]


def _decoded_prompt(raw: msgspec.Raw, max_prompts: int) -> str | list[Any]:
    """A text or a list. Millions of small lists are counted and refused instead of made (F50)."""
    data = bytes(raw)
    num_lists = data.count(b"[") - 1
    if num_lists > max_prompts and b'"' not in data:
        raise _too_many(num_lists, max_prompts)
    kind: Any = str | list[Any] if num_lists <= max_prompts else str | list[str]  # brackets may be part of a text
    try:
        prompt: str | list[Any] = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("must be text or token ids", field="prompt") from None
    return prompt


def _too_many(num_prompts: int, max_prompts: int) -> InvalidRequest:
    return InvalidRequest(f"holds {num_prompts} prompts; at most {max_prompts} are taken", field="prompt")


def check_stream(body: Sampling) -> bool:
    """Whether the answer is streamed.

    Raises:
        InvalidRequest: `stream_options` without `stream`.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("is for streams only; set stream to true", field="stream_options")
    return bool(body.stream)


def _params(
    body: Sampling,
    limits: HttpConfig,
    max_tokens: int | None,
    logprobs: int | None,
    names: dict[str, str],
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > limits.max_stop:
        raise InvalidRequest(f"has {len(stop)} strings; at most {limits.max_stop} are taken", field="stop")
    _check_most(body.n, limits.max_n, "n")
    given: dict[str, object | None] = {
        "max_tokens": max_tokens,
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": _bias(body.logit_bias),
        "seed": None if body.seed is None else body.seed & _SEED_BITS,  # OpenAI's are signed
        "n": body.n,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "stop": tuple(stop),
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
    }
    try:
        return convert({name: value for name, value in given.items() if value is not None}, SamplingParams)
    except InvalidRequest as error:
        field = error.field or ""
        raise InvalidRequest(error.message, field=names.get(field, field) or None) from None


def _bias(raw: msgspec.Raw) -> dict[int, float] | None:
    data = bytes(raw)
    num_entries = data.count(b",") + 1  # a key with a comma is no id
    if num_entries > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"has {num_entries} entries; at most {MAX_LOGIT_BIAS} are taken", field="logit_bias")
    try:
        bias = msgspec.json.decode(data, type=Bias | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(refusal_of(str(error)).message, field="logit_bias") from None
    if bias is None:
        return None
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError:
        raise InvalidRequest("must be numbers by token id", field="logit_bias") from None


def _check_most(value: int | None, most: int, field: str) -> None:
    if value is not None and value > most:
        raise InvalidRequest(f"must be at most {most}, is {value}", field=field)


def _refuse_tools(body: ChatRequest) -> None:
    for name in ("tools", "functions"):
        if getattr(body, name):
            raise UnsupportedFeature("calling tools is not supported", field=name)
    for name in ("tool_choice", "function_call"):
        if getattr(body, name) not in (None, "none", "auto"):
            raise UnsupportedFeature("calling tools is not supported", field=name)


def _refuse_response_format(asked: dict[str, Any] | None) -> None:
    if asked is not None and asked.get("type") != "text":
        raise UnsupportedFeature("only text is supported", field="response_format")


def _chat_message(message: Message, where: str) -> ChatMessage:
    if message.tool_calls:
        raise UnsupportedFeature("calling tools is not supported", field=f"{where}.tool_calls")
    content = message.content
    if content is None:
        raise InvalidRequest("is missing", field=f"{where}.content")
    if not isinstance(content, str):
        for i, part in enumerate(content):
            if part.type != "text":
                raise UnsupportedFeature("only parts of type text are supported", field=f"{where}.content[{i}]")
            if part.text is None:
                raise InvalidRequest("is missing", field=f"{where}.content[{i}].text")
        content = "\n".join(part.text or "" for part in content)
    # `developer` is what OpenAI's SDK calls the system's turn now; templates know the old name.
    return ChatMessage(role="system" if message.role == "developer" else message.role, content=content)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_num_tokens(num_tokens: int, max_model_len: int, field: str) -> None:
    """Before each of them is looked at: the largest body holds four million, a second of the loop's time (F50).

    Raises:
        PromptTooLong: no sequence of this model has so many.
    """
    if num_tokens > max_model_len:
        raise PromptTooLong(f"{num_tokens} tokens leave no room: a sequence may have {max_model_len}", field=field)


def _ids(value: object, field: str, max_model_len: int) -> bytes:
    if isinstance(value, list):
        check_num_tokens(len(value), max_model_len, field)
    if not isinstance(value, list) or not all(map(_is_id, value)):
        raise InvalidRequest("must be text or token ids", field=field)
    if not value:
        raise InvalidRequest("must not be empty", field=field)
    return pack_token_ids(value, field)
