"""What became known by a step, in columns: the engine hands it to whoever streams tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import Int32Array, LogprobRows, PromptLogprobRows

_EMPTY: Final = np.empty(0, np.int32)


@dataclass(slots=True)
class StepOutcome:
    """Shapes: K sequences got tokens. A sequence's tokens of this outcome precede its appearance in `ended`.

    Attributes:
        slots: int32 [K].
        starts: int32 [K], index of the first new token among the sequence's generated tokens.
        counts: int32 [K].
        token_ids: int32 [sum(counts)].
        samples: int32 [K], which sample of the plan each entry came from.
        logprobs: as in the StepResult, with `samples` re-indexed to entries of this outcome.
        prompt_logprobs: (sequence, rows) in order of position.
        ended: finished, cancelled or failed since the last outcome.
    """

    step: int
    slots: Int32Array = field(default_factory=lambda: _EMPTY)
    starts: Int32Array = field(default_factory=lambda: _EMPTY)
    counts: Int32Array = field(default_factory=lambda: _EMPTY)
    token_ids: Int32Array = field(default_factory=lambda: _EMPTY)
    samples: Int32Array = field(default_factory=lambda: _EMPTY)
    logprobs: LogprobRows | None = None
    prompt_logprobs: list[tuple[Sequence, PromptLogprobRows]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
