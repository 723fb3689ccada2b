"""What the sampler remembers of each row: sampling parameters as a struct of arrays, and what only some rows have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagewire.request.request import TokenArray
from pagewire.step.step import Float32Array, Int32Array, RowJoin
from pagewire.worker.sampler_penalties import SeenTokens

Bools = npt.NDArray[np.bool_]
Bias = tuple[Int32Array, Float32Array]
_NONE = -1
_TINY_TEMPERATURE = 1e-30
"""Below it a float32 temperature may round to 0, and 0 / 0 is no logit. It leaves nothing but ties of the maximum."""


class SamplerRows:
    """Indexed by row. Joining costs O(prompt) only where there are penalties; memory O(vocabulary) likewise.

    Attributes:
        is_plain: greedy, with nothing that changes or reports logits: argmax is all there is to do.
        adjusts: has logit bias or penalties.
        stop_ids: int32 [max_rows, W], EOS and stop ids, padded with −1; W grows to the longest list met.
        num_tops: top log-probabilities wanted; −1: none at all.
        log_min_p: ln(min_p), −inf where off.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.is_plain: Bools = np.ones(max_rows, np.bool_)
        self.adjusts: Bools = np.zeros(max_rows, np.bool_)
        self.is_greedy: Bools = np.ones(max_rows, np.bool_)
        self.temperature: Float32Array = np.ones(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int64)
        self.top_p = np.ones(max_rows, np.float64)
        self.log_min_p = np.full(max_rows, -np.inf, np.float64)
        self.repetition: Float32Array = np.ones(max_rows, np.float32)
        self.presence: Float32Array = np.zeros(max_rows, np.float32)
        self.frequency: Float32Array = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.uint64)
        self.min_length = np.zeros(max_rows, np.int64)
        self.num_tops: Int32Array = np.full(max_rows, _NONE, np.int32)
        self.stop_ids: Int32Array = np.full((max_rows, 1), _NONE, np.int32)
        self.bias: dict[int, Bias] = {}
        self.seen: dict[int, SeenTokens] = {}

    def join(self, join: RowJoin) -> None:
        """Set up a row; what it held before is forgotten."""
        row, params = join.row, join.params
        self._forget(row)
        self.is_greedy[row] = params.temperature == 0
        self.temperature[row] = max(params.temperature, _TINY_TEMPERATURE)
        self.top_k[row] = params.top_k if params.top_k < self._vocab_size else 0
        self.top_p[row] = params.top_p
        self.log_min_p[row] = np.log(params.min_p) if params.min_p > 0 else -np.inf
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.seed[row] = join.seed
        self.min_length[row] = len(join.prompt_ids) + params.min_tokens
        self.num_tops[row] = _NONE if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._set_stops(row, (*join.eos_ids, *params.stop_token_ids))
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
            values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
            self.bias[row] = ids, values
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            self.seen[row] = SeenTokens(join.prompt_ids, join.output_ids, self._vocab_size)
        self.adjusts[row] = row in self.bias or row in self.seen
        self.is_plain[row] = (
            self.is_greedy[row] and not self.adjusts[row] and params.min_tokens == 0 and params.logprobs is None
        )

    def leave(self, rows: Int32Array) -> None:
        """Free what rows hold beyond their place in the arrays. Rows that hold nothing may be named."""
        for row in rows.tolist():
            self._forget(row)

    def must_go_on(self, rows: Int32Array, positions: npt.NDArray[np.int64]) -> Bools:
        """Which of `rows` may not stop yet at these positions, because of `min_tokens`."""
        below: Bools = positions < self.min_length[rows]
        return below

    def stops_at(self, rows: Int32Array, token_ids: TokenArray) -> Bools:
        """Which tokens are among their rows' EOS and stop ids."""
        found: Bools = (self.stop_ids[rows] == token_ids[:, None]).any(axis=1)
        return found

    def count(self, rows: Int32Array, token_ids: TokenArray) -> None:
        """Take generated tokens into the penalties of the rows that have any."""
        if self.seen:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in self.seen:
                    self.seen[row].add(token_id)

    def _forget(self, row: int) -> None:
        self.bias.pop(row, None)
        self.seen.pop(row, None)

    def _set_stops(self, row: int, ids: tuple[int, ...]) -> None:
        known = [i for i in ids if i < self._vocab_size]  # a model may name an EOS that its head does not have
        if len(known) > self.stop_ids.shape[1]:
            wider = np.full((len(self.stop_ids), len(known)), _NONE, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = _NONE
        self.stop_ids[row, : len(known)] = known
