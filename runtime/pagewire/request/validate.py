"""What a request may ask of this model: the checks that types alone cannot state, and the defaults that depend on it.

Every refusal names its field. What passes here can be sampled and scheduled without another look (F43, F44, F47).

How long an output may get. Prompt and output together have `max_model_len` places.

    max_tokens not given    all the room that the prompt leaves
    0                       no token; taken even where the prompt leaves no room (prompt log-probabilities, cache warming)
    1 … room                so many
    more than the room      refused: whoever names a number counts on it. Cutting it down silently, as some engines do,
                            turns a wrong number into an answer that ends in the middle of a sentence.
    a prompt without room   refused as too long, unless max_tokens is 0 and the prompt itself fits
"""

from __future__ import annotations

import msgspec

from pagewire.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from pagewire_transport.codec import convert
from pagewire_transport.params import SamplingParams


def validate(
    params: SamplingParams, *, vocab_size: int, num_prompt: int, max_model_len: int, stop_allowed: bool
) -> SamplingParams:
    """`params` with `max_tokens` resolved.

    Args:
        params: may be made by hand: types and ranges are checked again here, since a struct's constructor does not.
        vocab_size: token ids are below it.
        num_prompt: prompt tokens.
        max_model_len: places for prompt and output together.
        stop_allowed: this door has text, in which stop strings can be found.

    Raises:
        InvalidRequest: a value of the wrong type or out of range; NaN and infinity are out of every range.
        PromptTooLong: the prompt leaves no room.
        UnsupportedFeature: stop strings, at a door that has no text.
    """
    params = _checked_types(params)
    if params.stop and not stop_allowed:
        raise UnsupportedFeature("stop strings need text; this engine knows token ids only", field="params.stop")
    for token_id in params.logit_bias:
        _check_token(token_id, f"params.logit_bias[{token_id}]", vocab_size)
    for i, token_id in enumerate(params.stop_token_ids):
        _check_token(token_id, f"params.stop_token_ids[{i}]", vocab_size)
    max_tokens = _resolved_max_tokens(params.max_tokens, num_prompt, max_model_len)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"must be at most max_tokens, {max_tokens}, is {params.min_tokens}", field="params.min_tokens"
        )
    return msgspec.structs.replace(params, max_tokens=max_tokens)


def _checked_types(params: SamplingParams) -> SamplingParams:
    try:
        return convert(msgspec.structs.asdict(params), SamplingParams)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field=f"params.{error.field}") from None


def _check_token(token_id: int, field: str, vocab_size: int) -> None:
    if token_id >= vocab_size:
        raise InvalidRequest(f"must name a token below the vocabulary size, {vocab_size}, is {token_id}", field=field)


def _resolved_max_tokens(asked: int | None, num_prompt: int, max_model_len: int) -> int:
    if num_prompt == 0:
        raise InvalidRequest("must hold at least one token", field="prompt_ids")
    room = max_model_len - num_prompt
    if room < 0 or (room == 0 and asked != 0):
        raise PromptTooLong(
            f"{num_prompt} tokens leave no room: prompt and output together may have {max_model_len}",
            field="prompt_ids",
        )
    if asked is None:
        return room
    if asked > room:
        raise InvalidRequest(
            f"must be at most {room} for a prompt of {num_prompt} tokens"
            f" (prompt and output together may have {max_model_len}), is {asked}",
            field="params.max_tokens",
        )
    return asked
