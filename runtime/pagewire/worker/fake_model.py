"""A language model for tests: the next token is a hash of all tokens before it and of the seed.

So a token says what the worker really read: one wrong, missing or repeated token anywhere in a sequence's KV, or the
seed of a neighbour, changes everything that follows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from pagewire.step.step import Float32Array, Int32Array
from pagewire_transport.params import SamplingParams

NextToken = Callable[[Int32Array, int], int]
"""(all tokens so far, seed) → the next token id."""
AllowedTokens = npt.NDArray[np.bool_]

_TOP_LOGPROB: Final = -0.25


def hash_tokens(vocab_size: int) -> NextToken:
    """The model of this module's docstring. Every token comes up about equally often, EOS too."""

    def next_token(tokens: Int32Array, seed: int) -> int:
        return zlib.crc32(seed.to_bytes(9, "little"), zlib.crc32(tokens.tobytes())) % vocab_size

    return next_token


def choose(
    model: NextToken,
    tokens: Int32Array,
    seed: int,
    *,
    vocab_size: int,
    forbidden: frozenset[int] = frozenset(),
    allowed: AllowedTokens | None = None,
) -> int:
    """What `model` says, or the next id after it that may be taken."""
    token = model(tokens, seed)
    for _ in range(vocab_size):
        if token not in forbidden and (allowed is None or allowed[token]):
            return token
        token = (token + 1) % vocab_size
    raise AssertionError("every token is masked")


def continuation(
    model: NextToken,
    prompt_ids: Int32Array | list[int],
    params: SamplingParams,
    seed: int,
    *,
    vocab_size: int,
    eos_ids: tuple[int, ...] = (),
) -> list[int]:
    """The output of a sequence that is alone in the world; `params.max_tokens` must be resolved."""
    assert params.max_tokens is not None
    stops = frozenset((*(() if params.ignore_eos else eos_ids), *params.stop_token_ids))
    tokens = list(prompt_ids)
    output: list[int] = []
    while len(output) < params.max_tokens and not (output and output[-1] in stops):
        forbidden = stops if len(output) < params.min_tokens else frozenset()
        history = np.array(tokens + output, np.int32)
        output.append(choose(model, history, seed, vocab_size=vocab_size, forbidden=forbidden))
    return output


def top_logprobs(token: int, num_tops: int, vocab_size: int) -> tuple[float, Int32Array, Float32Array]:
    """Made-up log-probabilities that name their token: of the token, and of the ids after it in descending order."""
    steps = np.arange(num_tops)
    ids = ((token + steps) % vocab_size).astype(np.int32)
    return _TOP_LOGPROB - token / vocab_size, ids, (_TOP_LOGPROB - token / vocab_size - steps).astype(np.float32)
