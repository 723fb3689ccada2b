"""Columns of a step result, cut to what is still wanted when the step is applied."""

from __future__ import annotations

import numpy as np

from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import Int32Array, LogprobRows, PromptLogprobRows


def commit_logprobs(rows: LogprobRows, committed: Int32Array, num_samples: int) -> LogprobRows | None:
    """`rows` of the samples in `committed` (ascending), re-indexed to positions in `committed`."""
    position = np.full(num_samples, -1, np.int32)
    position[committed] = np.arange(committed.size, dtype=np.int32)
    target = position[rows.samples]
    keep = target >= 0
    if keep.all():
        return LogprobRows(target, rows.chosen, rows.top, rows.top_ids, rows.top_logprobs)
    if not keep.any():
        return None
    keep_top = np.repeat(keep, rows.top)
    return LogprobRows(
        target[keep], rows.chosen[keep], rows.top[keep], rows.top_ids[keep_top], rows.top_logprobs[keep_top]
    )


def trim_prompt_logprobs(
    sequence: Sequence | None, rows: PromptLogprobRows
) -> tuple[Sequence, PromptLogprobRows] | None:
    """`rows` without what an earlier run of the same prompt delivered, before a preemption; None if nothing is new."""
    if sequence is None:
        return None
    done = sequence.num_prompt_logprobs
    skip = max(0, done - rows.start)
    # A resumed sequence prefills its outputs too; they are no prompt.
    stop = min(rows.chosen.size, sequence.num_prompt - 1 - rows.start)
    if stop <= skip:
        return None
    sequence.num_prompt_logprobs = rows.start + stop
    part = slice(skip, stop)
    return sequence, PromptLogprobRows(
        rows.entry, rows.start + skip, rows.chosen[part], rows.top_ids[part], rows.top_logprobs[part]
    )
