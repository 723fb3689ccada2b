"""What a request may ask of sampling: one struct, its limits stated as types, decoded and checked in one pass."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_N = 16
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_BYTES)]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """How the next token is chosen and when a sequence ends.

    Order of operations on a row of logits, float32 throughout: logit bias → repetition, then presence and frequency
    penalties → min_tokens mask → temperature → top-k → top-p → min-p → Gumbel noise (Philox) → argmax.
    Log-probabilities are those of the model's own distribution: log-softmax of the raw logits, before all of the above.

    `temperature=0` is greedy. `top_k=0` and `top_p=1`, `min_p=0` switch the filters off. `seed=None` draws one at
    admission; the final result says which. `max_tokens=None` means: as many as fit. `n` continuations use seeds
    seed, seed + 1, … and equal what n single requests with those seeds give.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    """Generated at most; none: as many as fit."""
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """No stop is taken before so many tokens."""
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    """0 is greedy."""
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Only the likeliest tokens that together reach this probability."""
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Only tokens at least this likely, relative to the likeliest."""
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=100.0)] = 1.0
    """Above 1: tokens of prompt and output become less likely."""
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """Subtracted from the logits of tokens that were generated."""
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    """Subtracted for each time that a token was generated."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]], msgspec.Meta(max_length=MAX_LOGIT_BIAS)
    ] = {}
    """Token id to what is added to its logit."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    """Repeats the same draw; none: one is drawn, and `accepted` says which."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] = 1
    """Continuations of the one prompt, numbered from 0 as choices."""
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Log-probabilities. None: none. 0: of the chosen token. k: of the chosen token and the k most likely."""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """The same for the prompt's tokens, in one `prompt_logprobs`."""
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=MAX_STOP_STRINGS)] = ()
    """Texts that end a continuation; gateway only."""
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    """Tokens that end a continuation."""
    ignore_eos: bool = False
    """Go on after the model's own end."""
