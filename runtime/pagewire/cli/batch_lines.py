"""One line of a batch: the request that it asks for, and the record that answers it.

Three ways to write a request:

    {"prompt": "Once upon", "max_tokens": 20}                 text, or a list of token ids (also as `prompt_ids`)
    {"id": "q1", "messages": [{"role": …, "content": …}]}     a chat; `template_kwargs` as in the Python client
    {"custom_id": …, "method": "POST", "url": "/v1/chat/completions" or "/v1/completions", "body": {…}}

Sampling parameters stand beside the prompt, or in an object `params`. The third way is that of OpenAI's batches; its
answers have the shape of theirs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pagewire.errors import InvalidRequest, PagewireError
from pagewire_client import Result
from pagewire_client.result import TokenLogprob
from pagewire_transport.params import SamplingParams

_SOURCES: Final = ("prompt", "prompt_ids", "messages")
_PARAMS: Final = frozenset(field.name for field in msgspec.structs.fields(SamplingParams))
_OWN: Final = frozenset({*_SOURCES, "id", "custom_id", "params", "template_kwargs", *_PARAMS})
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_LOWEST: Final = -9999.0
_IGNORED: Final = frozenset({"model", "user", "metadata", "store"})
"""Of an OpenAI body: they choose nothing here."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that a line holds.

    Attributes:
        source: the keyword by which `generate` or `chat` takes it: `prompt` or `messages`.
        value: text, token ids or turns.
        params: of sampling, and `template_kwargs`.
        label: what the line calls itself, under the key `id` or `custom_id`.
        openai_url: the endpoint, for a line in OpenAI's form; else "".
    """

    source: str
    value: Any
    params: dict[str, Any]
    label: dict[str, Any]
    openai_url: str = ""


def parse_line(line: bytes) -> Asked:
    """The request in a line.

    Raises:
        InvalidRequest: it is none; `field` names what is wrong.
    """
    values = _object(line)
    if "body" in values:
        return _openai(values)
    label: dict[str, Any] = {name: values[name] for name in ("id", "custom_id") if name in values}
    for name in values:
        if name not in _OWN:
            raise InvalidRequest("is not known; prompts, messages, ids and sampling parameters are", field=name)
    params = values.get("params", {})
    if not isinstance(params, dict):
        raise InvalidRequest("must be an object", field="params")
    for name in params:
        if name not in _PARAMS:
            raise InvalidRequest("is no sampling parameter", field=f"params.{name}")
    rest = {name: value for name, value in values.items() if name in _PARAMS or name == "template_kwargs"}
    return _asked(values, {**params, **rest}, label)


def label_of(line: bytes) -> dict[str, Any]:
    """What a line calls itself, as far as it can be read: a bad line is answered under its name, too."""
    try:
        values = _object(line)
    except InvalidRequest:
        return {}
    return {name: values[name] for name in ("id", "custom_id") if name in values}


def answered(asked: Asked, result: Result, model: str) -> dict[str, Any]:
    """The record of an answer, without its line number."""
    if asked.openai_url:
        return {
            **asked.label,
            "response": {"status_code": 200, "body": _openai_body(asked, result, model)},
            "error": None,
        }
    choices = [
        {"text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason}
        | ({"stop": choice.stop} if choice.stop is not None else {})
        | ({"logprobs": [_logprob(token) for token in choice.logprobs]} if choice.logprobs is not None else {})
        for choice in result.choices
    ]
    usage = msgspec.to_builtins(result.usage)
    record = {**asked.label, "choices": choices, "usage": usage, "seed": result.seed}
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = [_logprob(token) for token in result.prompt_logprobs]
    return record


def refused(label: Mapping[str, Any], error: PagewireError, *, is_openai: bool = False) -> dict[str, Any]:
    """The record of an error."""
    said = {"code": error.code, "message": error.message, "field": error.field}
    return {**label, **({"response": None} if is_openai else {}), "error": said}


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"is no JSON: {error}", field="line") from None
    if not isinstance(values, dict):
        raise InvalidRequest(f"must be a JSON object, is {type(values).__name__}", field="line")
    return values


def _asked(values: Mapping[str, Any], params: dict[str, Any], label: dict[str, Any], url: str = "") -> Asked:
    given = [name for name in _SOURCES if name in values]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "has no prompt"
        raise InvalidRequest(f"{what}; give one of {', '.join(_SOURCES)}", field=given[1] if given else "prompt")
    (source,) = given
    value = values[source]
    if source == "prompt_ids" and not isinstance(value, list):
        raise InvalidRequest("must be a list of token ids", field="prompt_ids")
    if isinstance(params.get("logit_bias"), dict):  # JSON knows no other keys than text
        params = {**params, "logit_bias": {_number(key): bias for key, bias in params["logit_bias"].items()}}
    if source != "messages" and "template_kwargs" in params:
        raise InvalidRequest("is for messages", field="template_kwargs")
    return Asked("messages" if source == "messages" else "prompt", value, params, label, url)


# ---- OpenAI's form ---------------------------------------------------------------------------------------------------


def _openai(values: Mapping[str, Any]) -> Asked:
    label: dict[str, Any] = {name: values[name] for name in ("custom_id", "id") if name in values}
    url, body = values.get("url"), values["body"]
    if url not in (_CHAT, _TEXT):
        raise InvalidRequest(f"must be {_CHAT} or {_TEXT}, is {url!r}", field="url")
    if not isinstance(body, dict):
        raise InvalidRequest("must be an object", field="body")
    source = "messages" if url == _CHAT else "prompt"
    params = {name: value for name, value in body.items() if name not in (source, *_IGNORED) and value is not None}
    if params.pop("stream", False):
        raise InvalidRequest("a batch does not stream", field="body.stream")
    if url == _CHAT:
        if "max_completion_tokens" in params:
            params["max_tokens"] = params.pop("max_completion_tokens")
        top = params.pop("top_logprobs", 0)
        if params.pop("logprobs", False):
            params["logprobs"] = top
    for name in params:
        if name not in _PARAMS and name != "template_kwargs":
            raise InvalidRequest("is not supported", field=f"body.{name}")
    if source not in body:
        raise InvalidRequest("is missing", field=f"body.{source}")
    return _asked({source: body[source]}, params, label, url)


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdecimal() else text


def _openai_body(asked: Asked, result: Result, model: str) -> dict[str, Any]:
    """As HTTP answers: programs that read the one read the other."""
    is_chat = asked.openai_url == _CHAT
    choices = []
    for index, choice in enumerate(result.choices):
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        text = {"message": message} if is_chat else {"text": choice.text}
        logprobs = None
        if choice.logprobs is not None:
            logprobs = (_chat_logprobs if is_chat else _text_logprobs)(choice.token_ids, choice.logprobs)
        choices.append({"index": index, **text, "logprobs": logprobs, "finish_reason": choice.finish_reason})
    prompt, completion = result.usage.prompt, result.usage.completion
    return {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + result.request_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": result.usage.cached},
        },
    }


def _chat_logprobs(ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {**_chat_entry(token, entry.logprob), "top_logprobs": [_chat_entry(*pair) for pair in entry.top]}
        for token, entry in zip(ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": _name(token), "bytes": None, "logprob": _finite(logprob)}


def _text_logprobs(ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "tokens": [_name(token) for token in ids],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [{_name(token): _finite(value) for token, value in entry.top} for entry in logprobs],
        "text_offset": None,
    }


def _name(token: int) -> str:
    """As HTTP has it for a model without a tokenizer: results tell tokens by their ids."""
    return f"token_id:{token}"


def _finite(logprob: float) -> float:
    """As over HTTP: JSON knows neither -∞ nor NaN."""
    return max(_LOWEST, logprob)  # in this order, of which NaN is not the larger


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.to_builtins(token)
    return out
