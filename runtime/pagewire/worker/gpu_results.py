"""A step's results on their way home: copied to pinned memory behind the compute stream, read once they are there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagewire.step.step import Float32Array, Int32Array, PromptLogprobRows, SampleFlag, StepPlan, StepResult
from pagewire.worker.gpu_device import Device, Event
from pagewire.worker.gpu_sampler import SampleLogprobs, logprob_rows

_RING: Final = 4
"""More than the steps that can be in flight: a place is used again only after its step was settled."""
_NO_TOKEN: Final = SampleFlag.NUMERIC | SampleFlag.DROPPED


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of one entry's prompt tokens, on the card, a piece after another."""

    entry: int
    start: int
    pieces: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # chosen, top_ids, top_logprobs


@dataclass(slots=True)
class _Home:
    """A tensor on the card and where it goes."""

    source: Tensor
    pinned: Tensor


class Results:
    """Where the tokens and flags of steps in flight lie, on the card and in pinned memory."""

    def __init__(self, device: Device, *, max_rows: int) -> None:
        self._device = device
        self.out: Final = torch.zeros(2, max_rows, dtype=torch.int32, device=device.device)
        """Tokens and flags of the step that is being sampled."""
        self._on_card = [torch.zeros_like(self.out) for _ in range(_RING)]
        self._pinned = [device.pinned(2 * max_rows, torch.int32).view(2, max_rows) for _ in range(_RING)]
        self._next = 0

    def send(self, plan: StepPlan, logprobs: SampleLogprobs | None, prompts: list[PromptScores]) -> Arrival:
        """Start them on their way; current stream: compute."""
        at, self._next = self._next, (self._next + 1) % _RING
        on_card, pinned = self._on_card[at], self._pinned[at]
        on_card.copy_(self.out)  # the next step's sampling overwrites `out`
        homes = [_Home(on_card, pinned)]
        scores = None
        if logprobs is not None:
            scores = [self._home(t) for t in (logprobs.chosen, logprobs.top_ids, logprobs.top_logprobs)]
            homes += scores
        prompt_homes = []
        for prompt in prompts:
            columns = [torch.cat(parts) for parts in zip(*prompt.pieces, strict=True)]
            prompt_homes.append([self._home(column) for column in columns])
            homes += prompt_homes[-1]
        done = self._device.fetch([(home.pinned, home.source) for home in homes])
        return Arrival(plan, done, pinned, logprobs, scores, prompts, prompt_homes)

    def _home(self, source: Tensor) -> _Home:
        return _Home(source, self._device.pinned(source.numel(), source.dtype).view(source.shape))


@dataclass(slots=True)
class Arrival:
    """Results of one step; readable once `done`."""

    plan: StepPlan
    done: Event
    _pinned: Tensor
    _logprobs: SampleLogprobs | None
    _scores: list[_Home] | None
    _prompts: list[PromptScores]
    _prompt_homes: list[list[_Home]]

    def result(self, duration_s: float) -> StepResult:
        """What the step brought."""
        tokens, flags = self._pinned.numpy()[:, : self.plan.sample_rows.size]
        has_token = (flags & _NO_TOKEN) == 0
        logprobs = None
        if self._logprobs is not None and self._scores is not None:
            chosen, top_ids, top_logprobs = (home.pinned.numpy() for home in self._scores)
            logprobs = logprob_rows(self._logprobs, chosen, top_ids, top_logprobs, has_token)
        return StepResult(
            step=self.plan.step,
            counts=has_token.astype(np.int32),
            token_ids=tokens[has_token],
            flags=flags.astype(np.uint8),
            logprobs=logprobs,
            prompt_logprobs=[
                PromptLogprobRows(prompt.entry, prompt.start, *_columns(homes))
                for prompt, homes in zip(self._prompts, self._prompt_homes, strict=True)
            ],
            forward_ns=int(duration_s * 1e9),
        )


def _columns(homes: list[_Home]) -> tuple[Float32Array, Int32Array, Float32Array]:
    chosen, top_ids, top_logprobs = (home.pinned.numpy() for home in homes)
    return chosen, top_ids, top_logprobs
