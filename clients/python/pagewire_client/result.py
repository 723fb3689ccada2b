"""What a stream gives: chunks while it runs, a result when it is over."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import msgspec

from pagewire_transport.messages import FinishReason, Usage
from pagewire_transport.messages import Timings as ServerTimings


class TokenLogprob(msgspec.Struct, frozen=True):
    """Of one token: its log-probability, and the most likely tokens in its place as (token id, log-probability)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Chunk(msgspec.Struct, frozen=True):
    """What became known at once of one choice.

    Text and token ids may each be empty: a character can take several tokens, and what was held back because it could
    have become a stop string comes at the end. The texts of all chunks of a choice, joined, are its text.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int
    """Of the first of `token_ids` among the generated tokens."""
    choice: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One a token, if they were asked for."""


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One finished continuation."""

    text: str
    """Empty from an engine, which knows token ids only."""
    token_ids: list[int]
    finish_reason: FinishReason
    stop: str | int | None
    """The stop string or the stop token's id that ended it."""
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True, slots=True)
class Timings:
    """Nanoseconds. `itl` are the gaps between tokens seen here; tokens that came in one message are 0 apart."""

    queue_ns: int
    """At the server, until the request was first scheduled."""
    ttft_ns: int | None
    """From `generate` to the first token here; None if there was none."""
    itl_p50_ns: int | None
    itl_p95_ns: int | None
    itl_p99_ns: int | None
    total_ns: int
    """From `generate` to the end."""
    server: ServerTimings
    """Measured by the engine."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished stream. The fields of the first choice are the result's own; `choices` has all of them."""

    request_id: str
    choices: list[ChoiceResult]
    usage: Usage
    seed: int
    """With this seed the same request gives the same tokens."""
    timings: Timings
    prompt_logprobs: list[TokenLogprob] | None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def stop(self) -> str | int | None:
        return self.choices[0].stop

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs


def percentile(values: list[int] | array[int], share: float) -> int | None:
    """The smallest of the sorted `values` that `share` of them do not exceed; None if there are none."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else None
