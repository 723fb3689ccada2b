"""The sampler of the CPU worker: one token a row from float32 logits, every sampling parameter, no row's bits changed by
its neighbours.

The order of operations is that of `SamplingParams`. How each batch is treated alike: what works on the whole batch is
element by element, or a maximum, and therefore exact whatever the shape; sums and sorts are done one row at a time, for
the rows that asked. Rejected: `torch.softmax` and `cumsum` over the batch, whose order of summation follows the shape.

It works on numpy views of the logits: numpy's argmax and comparisons over 49,152 floats take a tenth of torch's time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagewire.step.step import Float32Array, Int32Array, LogprobRows, RowJoin, SampleFlag
from pagewire.worker.interface import LogitMasks
from pagewire.worker.sampler_draw import Draws, Int64Array, draw
from pagewire.worker.sampler_filters import top_k_floor, top_p_floor
from pagewire.worker.sampler_logprobs import score
from pagewire.worker.sampler_penalties import penalise
from pagewire.worker.sampler_rows import Bools, SamplerRows

NO_TOKEN = -1


@dataclass(slots=True)
class SampleOutput:
    """S samples in the order asked."""

    token_ids: Int32Array  # [S]; NO_TOKEN where the flag is NUMERIC
    flags: npt.NDArray[np.uint8]  # [S] SampleFlag: OK, STOPPED or NUMERIC
    logprobs: LogprobRows | None  # of the samples that asked and got a token


class Sampler:
    """Keeps the sampling state of rows and draws for them. Not thread-safe.

    Args:
        max_rows: rows are below it.
        vocab_size: V; token ids in joins are below it (admission has checked).
    """

    def __init__(self, *, max_rows: int, vocab_size: int) -> None:
        self._rows = SamplerRows(max_rows, vocab_size)
        self._vocab_size = vocab_size

    def join(self, join: RowJoin) -> None:
        """A sequence takes a row. O(prompt + outputs) if it has penalties, else O(1)."""
        self._rows.join(join)

    def leave(self, rows: Int32Array) -> None:
        """Free what rows hold. O(rows)."""
        self._rows.leave(rows)

    def sample(
        self, logits: torch.Tensor, rows: Int32Array, positions: Int64Array, allowed: LogitMasks | None = None
    ) -> SampleOutput:
        """Draw one token for each of S samples, and count it in its row's penalties.

        Args:
            logits: float32 [S, V] on the CPU; left as it is.
            rows: int32 [S], whose parameters apply; each row once.
            positions: int64 [S], the place that the new token takes in its sequence: prompt length + outputs before it.
            allowed: token masks of the samples that have a grammar.
        """
        raw: Float32Array = logits.detach().contiguous().numpy()
        assert raw.dtype == np.float32, raw.dtype
        assert raw.shape == (rows.size, self._vocab_size), raw.shape
        with np.errstate(all="ignore"):  # NaN and infinity are answered by a flag
            return self._sample(raw, rows, positions, allowed)

    def _sample(
        self, raw: Float32Array, rows: Int32Array, positions: Int64Array, allowed: LogitMasks | None
    ) -> SampleOutput:
        state = self._rows
        token_ids = raw.argmax(axis=1).astype(np.int32)  # the first of the largest; of a NaN, where there is one
        tops = raw[np.arange(rows.size), token_ids]
        good = np.isfinite(tops)  # not NaN, not +inf, not −inf throughout
        logprobs = None
        if allowed is not None or not state.is_plain[rows].all():
            adjusted, changed = self._adjusted(raw, rows, positions, allowed)
            if changed.size:
                token_ids[changed] = adjusted.argmax(axis=1)
                tops[changed] = adjusted[np.arange(changed.size), token_ids[changed]]
                good &= np.isfinite(tops)  # masks may have left nothing
            drawing = good & ~state.is_greedy[rows]
            if drawing.any():
                self._draw(raw, adjusted, changed, drawing, rows, positions, tops, token_ids)
            logprobs = self._logprobs(raw, rows, token_ids, good)
        flags = np.where(state.stops_at(rows, token_ids), SampleFlag.STOPPED, SampleFlag.OK).astype(np.uint8)
        if not good.all():
            flags[~good] = SampleFlag.NUMERIC
            token_ids[~good] = NO_TOKEN
        state.count(rows[good], token_ids[good])
        return SampleOutput(token_ids, flags, logprobs)

    def _adjusted(
        self, raw: Float32Array, rows: Int32Array, positions: Int64Array, allowed: LogitMasks | None
    ) -> tuple[Float32Array, Int64Array]:
        """Copies of the logits that something changes, changed, [A, V]; and which samples they are of, [A]."""
        state = self._rows
        held = state.must_go_on(rows, positions)
        changes = state.adjusts[rows] | held
        if allowed is not None:
            changes[allowed.samples] = True
        changed = np.flatnonzero(changes)
        logits = raw[changed]
        self._add_bias(logits, rows[changed])
        self._penalise(logits, rows[changed])
        self._mask_stops(logits, rows[changed], held[changed])
        if allowed is not None:
            bits = np.unpackbits(allowed.allowed.astype("<u4").view(np.uint8), axis=1, bitorder="little")
            logits[np.searchsorted(changed, allowed.samples)] += np.where(bits[:, : self._vocab_size], 0, -np.inf)
        return logits, changed

    def _add_bias(self, logits: Float32Array, rows: Int32Array) -> None:
        for i, row in enumerate(rows.tolist()):
            if row in self._rows.bias:
                ids, values = self._rows.bias[row]
                logits[i, ids] += values

    def _penalise(self, logits: Float32Array, rows: Int32Array) -> None:
        state = self._rows
        seen = [(i, state.seen[row]) for i, row in enumerate(rows.tolist()) if row in state.seen]
        if seen:
            owners = rows[[i for i, _ in seen]]
            penalise(logits, seen, state.repetition[owners], state.presence[owners], state.frequency[owners])

    def _mask_stops(self, logits: Float32Array, rows: Int32Array, held: Bools) -> None:
        """Rows that may not end yet draw no token that would end them."""
        ids = self._rows.stop_ids[rows]
        where, which = np.nonzero((ids >= 0) & held[:, None])
        logits[where, ids[where, which]] = -np.inf

    def _draw(
        self,
        raw: Float32Array,
        adjusted: Float32Array,
        changed: Int64Array,
        drawing: Bools,
        rows: Int32Array,
        positions: Int64Array,
        tops: Float32Array,
        token_ids: Int32Array,
    ) -> None:
        """Replace the most likely token of each sample in `drawing` by a random one."""
        is_raw = drawing.copy()
        is_raw[changed] = False
        of_raw, of_adjusted = np.flatnonzero(is_raw), changed[drawing[changed]]
        # Copying rows is dearer than looking at them, so it is done only where some do not draw.
        sources = (
            (raw if of_raw.size == len(raw) else raw[of_raw], of_raw),
            (adjusted if of_adjusted.size == changed.size else adjusted[drawing[changed]], of_adjusted),
        )
        for logits, samples in sources:
            if samples.size:
                owners = rows[samples]
                token_ids[samples] = draw(
                    Draws(
                        logits=logits,
                        floors=self._floors(logits, owners, tops[samples]),
                        tops=tops[samples],
                        temperatures=self._rows.temperature[owners],
                        seeds=self._rows.seed[owners],
                        positions=positions[samples].astype(np.uint64),
                    )
                )

    def _floors(self, logits: Float32Array, rows: Int32Array, tops: Float32Array) -> Float32Array:
        """The least logit that top-k, top-p and min-p leave in each row of `logits`, float32 [n, V]."""
        state = self._rows
        temperature, top_k, top_p = state.temperature[rows], state.top_k[rows], state.top_p[rows]
        floors = (tops + temperature * state.log_min_p[rows]).astype(np.float32)
        for i in np.flatnonzero((top_k > 0) | (top_p < 1)):
            kept = logits[i]
            if top_k[i] > 0:
                floor = top_k_floor(kept, tops[i], int(top_k[i]))
                floors[i] = max(floors[i], floor)
                kept = np.compress(kept >= floor, kept)
            if top_p[i] < 1:
                floors[i] = max(floors[i], top_p_floor(kept, tops[i], temperature[i], float(top_p[i])))
        return floors

    def _logprobs(self, raw: Float32Array, rows: Int32Array, token_ids: Int32Array, good: Bools) -> LogprobRows | None:
        num_tops = self._rows.num_tops[rows]
        samples = np.flatnonzero(good & (num_tops >= 0)).astype(np.int32)
        if samples.size == 0:
            return None
        scores = [score(raw[s : s + 1], token_ids[s : s + 1], int(num_tops[s])) for s in samples]
        return LogprobRows(
            samples=samples,
            chosen=np.concatenate([chosen for chosen, _, _ in scores]),
            top=num_tops[samples],
            top_ids=np.concatenate([ids[0] for _, ids, _ in scores]),
            top_logprobs=np.concatenate([logprobs[0] for _, _, logprobs in scores]),
        )
