"""From what was asked to a `Request`: every limit that depends on the model is checked here, once, for every door."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Collection
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from pagewire.clock import Clock
from pagewire.errors import InvalidRequest
from pagewire.request.request import NO_WISHES, Namespace, Request, TokenArray, Wishes
from pagewire.request.validate import validate
from pagewire_transport.messages import Replay
from pagewire_transport.params import SamplingParams

_SEED_BITS: Final = 63


class Admission:
    """Checks requests against model and KV pool, resolves `max_tokens` and `seed`, numbers them.

    Args:
        vocab_size: token ids are below it.
        max_len: the longest sequence, prompt and output together, that can be served (`Scheduler.max_len`).
        seed: makes the drawn seeds repeatable; 0: from the system.
        kv_format: of the KV that is computed, part of every request's namespace.
    """

    def __init__(self, *, vocab_size: int, max_len: int, clock: Clock, seed: int = 0, kv_format: str = "") -> None:
        self._vocab_size = vocab_size
        self.max_len = max_len
        self._clock = clock
        self._kv_format = kv_format
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
        replay: Replay | None = None,
        wishes: Wishes = NO_WISHES,
        client: str = "",
    ) -> Request:
        """The request, its id drawn, `max_tokens` and `seed` resolved.

        Parameters are checked by `pagewire.request.validate`; see there for what `max_tokens` may be. A `replay` keeps
        its id; its seed must be given.

        Raises:
            InvalidRequest: an empty prompt, or a value that this model cannot take.
            PromptTooLong: the prompt leaves no room for what was asked.
            UnsupportedFeature: `stop` strings; they are found where the text is.
        """
        ids = self._checked_prompt(prompt_ids)
        params = validate(
            params,
            vocab_size=self._vocab_size,
            num_prompt=int(ids.size),
            max_model_len=self.max_len,
            stop_allowed=False,
        )
        output_ids = self._checked_outputs(replay, params) if replay is not None else ()
        seed = self._random.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        return Request(
            request_id=replay.request_id if replay is not None else f"{self._prefix}-{next(self._numbers)}",
            prompt_ids=ids,
            params=msgspec.structs.replace(params, seed=seed),
            arrival_ns=self._clock.now_ns() if arrival_ns is None else arrival_ns,
            priority=priority,
            namespace=replace(namespace or Namespace(), kv_format=self._kv_format),
            output_ids=output_ids,
            wishes=wishes,
            client=client,
        )

    def _checked_outputs(self, replay: Replay, params: SamplingParams) -> tuple[TokenArray, ...]:
        """What was generated before, one array for each sequence."""
        if params.seed is None:
            raise InvalidRequest("must be the one that was in use", field="params.seed")
        if not replay.request_id:
            raise InvalidRequest("must not be empty", field="replay.request_id")
        if len(replay.output_ids) != params.n:
            raise InvalidRequest(f"must hold one entry for each of n, {params.n}", field="replay.output_ids")
        assert params.max_tokens is not None
        outputs = []
        for choice, packed in enumerate(replay.output_ids):
            field = f"replay.output_ids[{choice}]"
            if len(packed) % 4:
                raise InvalidRequest(f"has {len(packed)} bytes, not a multiple of 4", field=field)
            ids = np.frombuffer(packed, "<u4")
            if ids.size > params.max_tokens:
                raise InvalidRequest(f"holds more than max_tokens, {params.max_tokens}", field=field)
            if ids.size and int(ids.max()) >= self._vocab_size:
                raise InvalidRequest(f"must be below the vocabulary size, {self._vocab_size}", field=field)
            outputs.append(ids.astype(np.int32))
        return tuple(outputs)

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
