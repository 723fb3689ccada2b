"""What the scheduler tells the worker to do in one forward pass, and what the worker tells back.

Both are structs of arrays. Rows are stable slots of the worker's resident state (last token, block table, sampling
parameters, penalty counts); a plan lists the rows that take part and carries only what changed since the last plan.

One plan, in the order in which the worker must act:

1. `leaves`      forget these rows.
2. `joins`       set up these rows (sampling state; for a resumed row also its outputs so far).
3. `block_*`     block_table[block_rows[i], block_cols[i]] = block_ids[i].
4. `copies`      copy whole KV blocks src → dst (forks, before their first write).
5. forward       entry e computes positions starts[e] … starts[e] + num_tokens[e] − 1 of row rows[e] and writes their KV
                 into that row's blocks. The first `num_decode` entries have one token each, which is the row's last
                 sampled token, known to the worker alone (it may not have been applied yet). The others take their
                 tokens from `token_ids`, one after another.
6. sample        sample s draws one token from the logits of the last position of entry sample_entries[s], with the
                 parameters of row sample_rows[s], and makes it that row's last token. Several samples of one entry are
                 a fork: one row of logits, n draws.

A row whose sampler met a stop (flag `STOPPED`) may be named by the one plan that was already made: the worker then
writes that entry's KV into the null block (id 0), draws nothing for it (`counts` 0), and the host drops it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt

from pagewire.request.request import TokenArray
from pagewire_transport.params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

NULL_BLOCK: Final = 0
"""Block 0 belongs to nobody: padding and dropped rows write there; nothing reads it unmasked."""

_EMPTY: Final = np.empty(0, np.int32)


class SampleFlag(IntFlag):
    """What happened to a sample, a bit each."""

    OK = 0
    STOPPED = 1
    """The token is an EOS (and `ignore_eos` is off) or one of `stop_token_ids`; it is counted among the tokens."""
    NUMERIC = 2
    """The logits held NaN or +infinity; no token was drawn."""
    DROPPED = 4
    """The row had stopped in an earlier step; no token was drawn."""


@dataclass(slots=True)
class RowJoin:
    """A sequence takes a row.

    Attributes:
        row: index into the worker's resident state.
        seed: key of this sequence's noise (request seed + choice).
        prompt_ids: int32 [P]; with `output_ids` the base of the penalty counts.
        output_ids: int32 [G], tokens generated before a preemption.
        eos_ids: resolved: empty with `ignore_eos`.
    """

    row: int
    epoch: int
    params: SamplingParams
    seed: int
    prompt_ids: TokenArray
    output_ids: TokenArray
    eos_ids: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """See the module's docstring. Shapes: B entries, S samples, D block-table deltas, C copies."""

    step: int
    rows: Int32Array  # [B]
    starts: Int32Array  # [B]
    num_tokens: Int32Array  # [B]
    epochs: Int32Array  # [B]
    num_decode: int
    token_ids: Int32Array = field(default_factory=lambda: _EMPTY)  # [sum(num_tokens[num_decode:])]
    sample_entries: Int32Array = field(default_factory=lambda: _EMPTY)  # [S]
    sample_rows: Int32Array = field(default_factory=lambda: _EMPTY)  # [S]
    sample_epochs: Int32Array = field(default_factory=lambda: _EMPTY)  # [S]
    leaves: Int32Array = field(default_factory=lambda: _EMPTY)
    joins: list[RowJoin] = field(default_factory=list)
    block_rows: Int32Array = field(default_factory=lambda: _EMPTY)  # [D]
    block_cols: Int32Array = field(default_factory=lambda: _EMPTY)  # [D]
    block_ids: Int32Array = field(default_factory=lambda: _EMPTY)  # [D]
    copy_src: Int32Array = field(default_factory=lambda: _EMPTY)  # [C]
    copy_dst: Int32Array = field(default_factory=lambda: _EMPTY)  # [C]
    prompt_logprobs: dict[int, int] = field(default_factory=dict)
    """Entry → how many top log-probabilities for each of its positions' next prompt token."""

    @property
    def total_tokens(self) -> int:
        """Tokens computed in this step."""
        return int(self.num_decode + self.token_ids.size)


@dataclass(slots=True)
class LogprobRows:
    """Log-probabilities of some samples. L samples asked; T_i = how many top ones sample i asked for."""

    samples: Int32Array  # [L] indices into the plan's samples, ascending
    chosen: Float32Array  # [L]
    top: Int32Array  # [L] T_i
    top_ids: Int32Array  # [sum T_i], most likely first
    top_logprobs: Float32Array  # [sum T_i]


@dataclass(slots=True)
class PromptLogprobRows:
    """Log-probabilities of prompt tokens start + 1 … start + num given what precedes them, for one entry of a plan.

    The last position of the last chunk has no next prompt token and gives no row.
    """

    entry: int
    start: int
    chosen: Float32Array  # [num]
    top_ids: Int32Array  # [num, T]
    top_logprobs: Float32Array  # [num, T]


@dataclass(slots=True)
class StepResult:
    """What a step brought. Variable tokens a sample, so that speculation fits later; today `counts` is 0 or 1."""

    step: int
    counts: Int32Array  # [S]
    token_ids: Int32Array  # [sum(counts)]
    flags: npt.NDArray[np.uint8]  # [S] SampleFlag
    logprobs: LogprobRows | None = None
    prompt_logprobs: list[PromptLogprobRows] = field(default_factory=list)
    forward_ns: int = 0
    """Time that the worker spent computing, for metrics."""
