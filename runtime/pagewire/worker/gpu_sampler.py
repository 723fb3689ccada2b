"""Sampling that takes more than temperature and noise: bias, penalties, filters, masks, log-probabilities.

The semantics are those of `pagewire.worker.sampler`, as whole-array operations on the card. Whatever forbids a token sets
its logit to −∞; the draw itself is then the same kernel as everybody's. Nothing comes back to the host before the step's
results do: counts for penalties live on the card too, since the host learns of a token a step late.

It is correct before it is fast: top-p sorts the vocabulary of the rows that ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.step.step import Float32Array, Int32Array, LogprobRows, StepPlan
from pagewire.worker.gpu_ops import Ops
from pagewire.worker.gpu_rows import GpuRows
from pagewire.worker.gpu_staging import Staging
from pagewire.worker.interface import LogitMasks
from pagewire.worker.sampler_logprobs import LOGPROB_MIN
from pagewire.worker.sampler_rows import SamplerRows

_FLOAT32_MAX: Final = torch.finfo(torch.float32).max


@dataclass(slots=True)
class Seen:
    """One row's tokens, for penalties; on the card."""

    in_prompt: Tensor  # bool [V]
    counts: Tensor  # int32 [V], how often each was generated


@dataclass(slots=True)
class SampleLogprobs:
    """Log-probabilities of some samples, on the card. C of them, T tops the most."""

    samples: Int32Array  # [C] indices into the plan's samples, ascending
    num_tops: Int32Array  # [C]
    chosen: Tensor  # float32 [C]
    top_ids: Tensor  # int32 [C, T]
    top_logprobs: Tensor  # float32 [C, T]


class SpecialSampler:
    """Draws for the rows that `GpuRows.is_special` marks. Not thread-safe."""

    def __init__(
        self, rows: GpuRows, ops: Ops, staging: Staging, *, vocab_size: int, deterministic: bool = False
    ) -> None:
        self._rows = rows
        self._ops = ops
        self._staging = staging
        self._vocab_size = vocab_size
        self._deterministic = deterministic
        self._seen: dict[int, Seen] = {}

    def update(self, plan: StepPlan) -> None:
        """After `GpuRows.update` of the same plan."""
        for row in plan.leaves.tolist():
            self._seen.pop(row, None)
        for join in plan.joins:
            self._seen.pop(join.row, None)
            known = self._rows.params.seen.get(join.row)
            if known is not None:
                ids, counts = self._staging.upload([known.ids[: known.size], known.counts[: known.size]])
                in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=ids.device)
                all_counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=ids.device)
                at = ids.long()
                in_prompt[at] = True  # of the prompt or generated: both count as seen
                all_counts[at] = counts
                self._seen[join.row] = Seen(in_prompt, all_counts)

    def sample(
        self,
        out: Tensor,
        logits: Tensor,
        rows: Int32Array,
        logit_rows: npt.NDArray[np.integer],
        positions: Int32Array,
        which: npt.NDArray[np.intp],
        masks: LogitMasks | None,
    ) -> SampleLogprobs | None:
        """Draw for some samples of a step.

        Args:
            out: int32 [2, S], tokens and flags of all samples of the step; these are written.
            logits: float32 [L, V].
            rows: [C], of the samples drawn here.
            logit_rows: [C], which row of `logits` each draws from.
            positions: [C], the place of each new token in its sequence.
            which: [C], which of the step's samples they are, ascending.
            masks: by the samples' place in the step.
        """
        params = self._rows.params
        at, row_ids, sources, places = self._staging.upload(
            [which.astype(np.int64), rows, logit_rows.astype(np.int64), positions]
        )
        raw = logits.index_select(0, sources)
        x = raw.clone()
        self._add_bias(x, rows)
        penalised = np.array([i for i, row in enumerate(rows.tolist()) if row in self._seen], np.int64)
        if penalised.size:
            self._penalise(x, rows, penalised)
        self._mask_stops(x, rows, positions)
        if masks is not None:
            self._mask(x, which, masks)
        filter_logits(x, params, rows, self._staging, deterministic=self._deterministic)
        # What was broken stays broken, even where all of it was masked or clamped.
        x.masked_fill_(~raw.amax(dim=1, keepdim=True).isfinite(), torch.nan)
        drawn = torch.empty(2, -(-rows.size // 4) * 4, dtype=torch.int32, device=out.device)[:, : rows.size]
        self._ops.sample(drawn, x, row_ids, places, skip_special=False)
        out.index_copy_(1, at, drawn)
        if penalised.size:
            self._count(drawn[0], rows, penalised)
        return self._logprobs(raw, drawn[0], rows, which)

    def _add_bias(self, x: Tensor, rows: Int32Array) -> None:
        found = [
            (i, self._rows.params.bias[row]) for i, row in enumerate(rows.tolist()) if row in self._rows.params.bias
        ]
        if found:
            lines = np.concatenate([np.full(ids.size, i, np.int64) for i, (ids, _) in found])
            ids = np.concatenate([ids for _, (ids, _) in found]).astype(np.int64)
            values = np.concatenate([values for _, (_, values) in found])
            lines_, ids_, values_ = self._staging.upload([lines, ids, values])
            x[lines_, ids_] += values_

    def _penalise(self, x: Tensor, rows: Int32Array, penalised: npt.NDArray[np.int64]) -> None:
        params, owners = self._rows.params, rows[penalised]
        factors = [params.repetition[owners], params.presence[owners], params.frequency[owners]]
        at, repetition, presence, frequency = self._staging.upload([penalised, *factors])
        counts = torch.stack([self._seen[row].counts for row in owners.tolist()])
        seen = torch.stack([self._seen[row].in_prompt for row in owners.tolist()]) | (counts > 0)
        values = x.index_select(0, at)
        repeated = torch.where(values > 0, values / repetition[:, None], values * repetition[:, None])
        repeated -= frequency[:, None] * counts
        repeated -= presence[:, None] * (counts > 0)
        # As on the CPU: a tiny repetition penalty may push a good logit beyond float32.
        x.index_copy_(0, at, torch.where(seen, repeated.clamp(max=_FLOAT32_MAX), values))

    def _mask_stops(self, x: Tensor, rows: Int32Array, positions: Int32Array) -> None:
        params = self._rows.params
        held = params.must_go_on(rows, positions.astype(np.int64))
        ids = params.stop_ids[rows]
        lines, columns = np.nonzero((ids >= 0) & held[:, None])
        if lines.size:
            lines_, ids_ = self._staging.upload([lines.astype(np.int64), ids[lines, columns].astype(np.int64)])
            x[lines_, ids_] = -torch.inf

    def _mask(self, x: Tensor, which: npt.NDArray[np.intp], masks: LogitMasks) -> None:
        own = np.isin(masks.samples, which)
        if own.any():
            lines = np.searchsorted(which, masks.samples[own]).astype(np.int64)
            lines_, words = self._staging.upload([lines, masks.allowed[own].view(np.int32)])
            bits = (words[:, :, None] >> torch.arange(32, device=x.device, dtype=torch.int32)) & 1
            allowed = bits.view(lines.size, -1)[:, : self._vocab_size] != 0
            x.index_copy_(0, lines_, x.index_select(0, lines_).masked_fill_(~allowed, -torch.inf))

    def _count(self, tokens: Tensor, rows: Int32Array, penalised: npt.NDArray[np.int64]) -> None:
        for i in penalised.tolist():
            token = tokens[i : i + 1]
            counts = self._seen[int(rows[i])].counts
            counts.scatter_add_(0, token.clamp(min=0).long(), (token >= 0).int())

    def _logprobs(
        self, raw: Tensor, tokens: Tensor, rows: Int32Array, which: npt.NDArray[np.intp]
    ) -> SampleLogprobs | None:
        num_tops = self._rows.params.num_tops[rows]
        asked = np.flatnonzero(num_tops >= 0)
        if not asked.size:
            return None
        (at,) = self._staging.upload([asked.astype(np.int64)])
        chosen, top_ids, top_logprobs = score_on_card(
            raw.index_select(0, at), tokens.index_select(0, at).clamp(min=0), int(num_tops[asked].max())
        )
        return SampleLogprobs(which[asked].astype(np.int32), num_tops[asked], chosen, top_ids, top_logprobs)


def filter_logits(
    x: Tensor, params: SamplerRows, rows: Int32Array, staging: Staging, *, deterministic: bool = False
) -> None:
    """top-k, top-p and min-p in place: whatever lies below its row's floor becomes −∞. Greedy rows are left alone.

    Deterministic: rows are sorted and summed two at a time, since PyTorch sums one row in another order than several.
    """
    vocab_size = x.shape[1]
    drawing = ~params.is_greedy[rows]
    temperature, top_k, top_p = params.temperature[rows], params.top_k[rows], params.top_p[rows]
    log_min_p = np.where(drawing, params.log_min_p[rows], -np.inf)
    sorting = np.flatnonzero(drawing & ((top_k > 0) | (top_p < 1)))
    # min-p looks at the maximum, which top-k and top-p keep: the order between them does not matter.
    top = x.amax(dim=1)
    if (log_min_p > -np.inf).any():
        temperature_, log_min_p_ = staging.upload([temperature, log_min_p])
        floor = (top.double() + temperature_.double() * log_min_p_).float()
    else:
        floor = torch.full_like(top, -torch.inf)
    if sorting.size:
        k = np.where(top_k[sorting] > 0, top_k[sorting], vocab_size)
        at, k_, p_, temperature_ = staging.upload(
            [sorting.astype(np.int64), k.astype(np.int64), top_p[sorting], temperature[sorting]]
        )
        parts: list[Tensor | slice] = [slice(None)]
        if deterministic:
            last = sorting.size - 1
            parts = [*staging.upload([np.array([i, min(i + 1, last)], np.int64) for i in range(0, last + 1, 2)])]
        for part in parts:
            own = _floors(x.index_select(0, at[part]), k_[part], p_[part], temperature_[part])
            floor.index_copy_(0, at[part], torch.maximum(floor.index_select(0, at[part]), own))
    x.masked_fill_(x < floor[:, None], -torch.inf)


def _floors(x: Tensor, k: Tensor, p: Tensor, temperature: Tensor) -> Tensor:
    """float32 [C], the least logit of each row that top-k and top-p keep."""
    descending = x.sort(dim=1, descending=True).values
    kth = descending.gather(1, k[:, None] - 1)
    kept = descending >= kth
    weights = ((descending - descending[:, :1]) / temperature[:, None]).exp() * kept
    mass = weights.double().cumsum(dim=1)
    # Of a row with a NaN nothing is kept, and its floor does not matter; an index out of bounds would.
    last = (kept.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    reached = (mass < p[:, None] * mass.gather(1, last)).sum(dim=1, keepdim=True)
    least = weights.gather(1, torch.minimum(reached, last))
    heavy = ((weights >= least) & kept).sum(dim=1, keepdim=True) - 1
    return torch.where(p < 1, descending.gather(1, heavy.clamp(min=0))[:, 0], kth[:, 0])


def score_on_card(logits: Tensor, token_ids: Tensor, num_tops: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `pagewire.worker.sampler_logprobs.score`: chosen float32 [N], top_ids int32 [N, T], top_logprobs [N, T]."""
    total = logits.double().logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, token_ids.long()[:, None]).double() - total
    if num_tops:
        # A stable sort, since `topk` invents an order among equals.
        values, ids = logits.sort(dim=1, descending=True, stable=True)
        top_ids, tops = ids[:, :num_tops].int(), _finite(values[:, :num_tops].double() - total)
    else:
        top_ids = torch.empty(logits.shape[0], 0, dtype=torch.int32, device=logits.device)
        tops = torch.empty(logits.shape[0], 0, dtype=torch.float32, device=logits.device)
    return _finite(chosen[:, 0]), top_ids.contiguous(), tops.contiguous()


def _finite(logprobs: Tensor) -> Tensor:
    least = float(LOGPROB_MIN)
    return logprobs.float().nan_to_num(nan=least, posinf=least, neginf=least).clamp(min=least)


def logprob_rows(
    asked: SampleLogprobs,
    chosen: Float32Array,
    top_ids: Int32Array,
    top_logprobs: Float32Array,
    has_token: npt.NDArray[np.bool_],
) -> LogprobRows | None:
    """Of the samples that got a token (`has_token`, by all samples of the step), once they are in host memory."""
    kept = np.flatnonzero(has_token[asked.samples])
    if not kept.size:
        return None
    tops = asked.num_tops[kept]
    return LogprobRows(
        samples=asked.samples[kept],
        chosen=chosen[kept],
        top=tops,
        top_ids=np.concatenate([top_ids[i, :n] for i, n in zip(kept, tops, strict=True)]),
        top_logprobs=np.concatenate([top_logprobs[i, :n] for i, n in zip(kept, tops, strict=True)]),
    )
