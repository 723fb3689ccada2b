"""Repetition, presence and frequency penalties: on the tokens that a row has seen, and no others.

Repetition (Keskar et al., CTRL, 2019) looks at prompt and output alike; presence and frequency look at the output only,
as in the OpenAI API.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagewire.request.request import TokenArray
from pagewire.step.step import Float32Array, Int32Array

_FLOAT32_MAX: Final = np.finfo(np.float32).max


class SeenTokens:
    """The distinct tokens of one row, in order of first sight, and how often each was generated.

    `add` is O(1). Penalties then touch only these tokens. Rejected: a dense array of counts alone, which makes every
    step read and write the whole vocabulary for a handful of tokens.

    Attributes:
        size: distinct tokens.
        ids: int32 [≥ size].
        counts: int32 [≥ size], how often each was generated; 0 for tokens of the prompt alone.
    """

    def __init__(self, prompt_ids: TokenArray, output_ids: TokenArray, vocab_size: int) -> None:
        distinct = np.unique(np.concatenate([prompt_ids, output_ids])).astype(np.int32)
        self.size = distinct.size
        self.ids: Int32Array = np.zeros(max(64, 2 * self.size), np.int32)
        self.ids[: self.size] = distinct
        self._place: Int32Array = np.full(vocab_size, -1, np.int32)
        self._place[distinct] = np.arange(self.size, dtype=np.int32)
        self.counts: Int32Array = np.zeros(self.ids.size, np.int32)
        np.add.at(self.counts, self._place[output_ids], 1)

    def add(self, token_id: int) -> None:
        """One more generated token."""
        place = int(self._place[token_id])
        if place < 0:
            place = self._append(token_id)
        self.counts[place] += 1

    def _append(self, token_id: int) -> int:
        place = self.size
        if place == self.ids.size:
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
        self.ids[place] = token_id
        self._place[token_id] = place
        self.size += 1
        return place


def penalise(
    logits: Float32Array,
    seen: list[tuple[int, SeenTokens]],
    repetition: Float32Array,
    presence: Float32Array,
    frequency: Float32Array,
) -> None:
    """Penalise in place.

    Args:
        logits: float32 [A, V].
        seen: (row of `logits`, its tokens), P of them.
        repetition: float32 [P], 1 for none.
        presence: float32 [P], 0 for none.
        frequency: float32 [P], 0 for none.
    """
    sizes = np.array([tokens.size for _, tokens in seen])
    rows = np.repeat(np.array([row for row, _ in seen]), sizes)
    ids = np.concatenate([tokens.ids[: tokens.size] for _, tokens in seen])
    counts = np.concatenate([tokens.counts[: tokens.size] for _, tokens in seen])
    values = logits[rows, ids]
    factor = np.repeat(repetition, sizes)
    values = np.where(values > 0, values / factor, values * factor)
    values -= np.repeat(frequency, sizes) * counts.astype(np.float32)
    values -= np.repeat(presence, sizes) * (counts > 0)
    # A tiny repetition penalty may push a good logit beyond float32; that is the most likely token, no fault.
    logits[rows, ids] = np.minimum(values, _FLOAT32_MAX)
