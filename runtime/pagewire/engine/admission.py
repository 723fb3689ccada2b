"""From what was asked to a `Request`: every limit that depends on the model is checked here, once, for every door."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Collection
from typing import Final

import msgspec
import numpy as np

from pagewire.clock import Clock
from pagewire.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from pagewire.request.request import Namespace, Request, TokenArray
from pagewire_transport.params import SamplingParams

_SEED_BITS: Final = 63


class Admission:
    """Checks requests against model and KV pool, resolves `max_tokens` and `seed`, numbers them.

    Values are taken to be in the ranges that `SamplingParams` states: whoever decodes them has checked that.

    Args:
        vocab_size: token ids are below it.
        max_len: the longest sequence, prompt and output together, that can be served (`Scheduler.max_len`).
        seed: makes the drawn seeds repeatable; 0: from the system.
    """

    def __init__(self, *, vocab_size: int, max_len: int, clock: Clock, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self.max_len = max_len
        self._clock = clock
        self._random: random.Random = random.Random(seed) if seed else random.SystemRandom()  # noqa: S311
        self._numbers = itertools.count(1)
        self._prefix = f"{self._random.getrandbits(32):08x}"

    def admit(
        self,
        prompt_ids: TokenArray | Collection[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        namespace: Namespace | None = None,
        arrival_ns: int | None = None,
    ) -> Request:
        """The request, its id drawn, `max_tokens` and `seed` resolved.

        `max_tokens` may be 0 (nothing is generated) and defaults to what fits. More than fits is refused, not cut: a
        caller that asked for 4,000 tokens should learn that it cannot get them before it has paid for the first.

        Raises:
            InvalidRequest: an empty prompt, or a value that this model cannot take.
            PromptTooLong: the prompt leaves no room for what was asked.
            UnsupportedFeature: `stop` strings; they are found where the text is.
        """
        if params.stop:
            raise UnsupportedFeature("stop strings need text; this engine knows token ids only", field="params.stop")
        ids = self._checked_prompt(prompt_ids)
        self._check_params(params)
        max_tokens = self._resolved_max_tokens(int(ids.size), params.max_tokens)
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"must be at most max_tokens, {max_tokens}, is {params.min_tokens}", field="params.min_tokens"
            )
        seed = self._random.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        return Request(
            request_id=f"{self._prefix}-{next(self._numbers)}",
            prompt_ids=ids,
            params=msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed),
            arrival_ns=self._clock.now_ns() if arrival_ns is None else arrival_ns,
            priority=priority,
            namespace=namespace if namespace is not None else Namespace(),
        )

    def _checked_prompt(self, prompt_ids: TokenArray | Collection[int]) -> TokenArray:
        try:
            ids = np.asarray(prompt_ids)
        except ValueError:  # lists of different lengths
            raise InvalidRequest("must be one list of token ids", field="prompt_ids") from None
        if ids.ndim != 1 or ids.size == 0:
            raise InvalidRequest("must hold at least one token", field="prompt_ids")
        if ids.dtype.kind not in "iu":  # fractions, text, None, or integers beyond 64 bits
            raise InvalidRequest("must hold token ids, that is, integers", field="prompt_ids")
        outside = (ids < 0) | (ids >= self._vocab_size)
        if outside.any():
            at = int(outside.argmax())
            raise InvalidRequest(
                f"must be below the vocabulary size, {self._vocab_size}, is {int(ids[at])}",
                field=f"prompt_ids[{at}]",
            )
        return ids.astype(np.int32)  # a copy: the caller may reuse its buffer

    def _check_params(self, params: SamplingParams) -> None:
        for token_id in params.logit_bias:
            self._check_token(token_id, f"params.logit_bias[{token_id}]")
        for i, token_id in enumerate(params.stop_token_ids):
            self._check_token(token_id, f"params.stop_token_ids[{i}]")

    def _check_token(self, token_id: int, field: str) -> None:
        if token_id >= self._vocab_size:
            raise InvalidRequest(
                f"must name a token below the vocabulary size, {self._vocab_size}, is {token_id}", field=field
            )

    def _resolved_max_tokens(self, num_prompt: int, asked: int | None) -> int:
        room = self.max_len - num_prompt
        if room < 0 or (room == 0 and asked != 0):
            raise PromptTooLong(
                f"{num_prompt} tokens leave no room: prompt and output together may have {self.max_len}",
                field="prompt_ids",
            )
        if asked is None:
            return room
        if asked > room:
            raise InvalidRequest(
                f"must be at most {room} for a prompt of {num_prompt} tokens"
                f" (prompt and output together may have {self.max_len}), is {asked}",
                field="params.max_tokens",
            )
        return asked
