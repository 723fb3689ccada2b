"""A sequence: one continuation of a request. A Python object, touched only when something happens to it.

What every running sequence needs in every step lives in the arrays of `batch.Batch`, not here.

Who owns which tokens of a sequence, in order of position:

    0                  cached               computed        scheduled   known      predicted
    ├── prefix hit ──────┼── KV written, ─────┼── planned, ────┼── the ledger: ─┼── sampled by steps ──┤
    │   shared blocks    │   step applied     │   in flight    │   committed    │   not applied yet    │
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from pagewire.cache.lease import Lease
from pagewire.errors import PagewireError
from pagewire.request.request import Request, TokenArray
from pagewire.step.step import Int32Array
from pagewire_transport.messages import FinishReason

NO_ROW: Final = -1
_NO_TOKENS: Final[TokenArray] = np.empty(0, np.int32)


class SequenceState(Enum):
    """Where a sequence stands.

    WAITING ─▶ PREFILLING ─▶ RUNNING ⇄ PAUSED
       ▲           │            │         │
       └───────── PREEMPTED ◀───┴─────────┘         every state ─▶ FINISHED
    """

    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    PAUSED = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation.

    Attributes:
        choice: its index among the request's `n`.
        order: seniority: the n-th sequence ever submitted; lower is older.
        slot: small int, stable for the sequence's life; arrays of the engine are indexed by it.
        row: its row of the batch, or NO_ROW.
        output: generated tokens while it has no row (before, between, after); in a row they are in the batch's ledger.
        followers: for the leader of a fork, the sequences that start from its prompt; emptied when they have started.
        leader: for a follower that has not started.
        fork_blocks: for a leader in prefill, the block that each follower's partial tail will be copied to.
        is_leaving: chosen for preemption, which completes when its step in flight is applied.
        is_proven: a token was drawn from good logits since it got its row: the KV that led there may be shared.
        num_known: while it has a row, the batch's array of known lengths.
        num_cached: prompt tokens taken from the prefix cache at first admission.
        num_recomputed: tokens computed again after preemptions.
        share: whose share of the service it is; "" where nothing is promised to anybody, and all are served as one.
        due_ns: what orders the queue: when its first token is due, moved by priority; 0 where nothing is promised.
        first_token_due_ns: when its first token was promised.
        itl_ns: promised time between its tokens.
        num_uncached, prefill_ns: of its prompt, what was to be computed when it came, and how long it was thought to take.
        deadline_ns: when it ends with an error, done or not.
        is_late: its promise cannot be kept any more, and it let others go first once.
    """

    request: Request
    choice: int
    seed: int
    order: int
    slot: int
    state: SequenceState = SequenceState.WAITING
    row: int = NO_ROW
    output: TokenArray = field(default_factory=lambda: _NO_TOKENS)
    followers: list[Sequence] = field(default_factory=list)
    leader: Sequence | None = None
    lease: Lease | None = None
    num_known: Int32Array | None = None
    fork_blocks: Int32Array = field(default_factory=lambda: _NO_TOKENS)
    is_paused: bool = False
    is_leaving: bool = False
    is_proven: bool = False
    num_cached: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_prompt_logprobs: int = 0
    held_until_step: int = -1
    is_held: bool = False
    share: str = ""
    due_ns: int = 0
    first_token_due_ns: int | None = None
    itl_ns: float = math.inf
    num_uncached: int = 0
    prefill_ns: float = 0.0
    deadline_ns: int | None = None
    is_late: bool = False
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    finish_reason: FinishReason | None = None
    stop: int | None = None
    error: PagewireError | None = None

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return int(self.request.prompt_ids.size)

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        if self.num_known is None:
            return int(self.output.size)
        return int(self.num_known[self.row]) - self.num_prompt

    @property
    def limit(self) -> int:
        """Total length at which it ends."""
        return self.num_prompt + self.request.max_tokens

    @property
    def is_live(self) -> bool:
        """Not finished."""
        return self.state is not SequenceState.FINISHED

    def known_ids(self) -> TokenArray:
        """Prompt and committed outputs, int32 [known]; only while it has no row."""
        assert self.row == NO_ROW
        if self.output.size == 0:
            return self.request.prompt_ids
        return np.concatenate([self.request.prompt_ids, self.output])

    def is_junior_to(self, other: Sequence) -> bool:
        """May be preempted in favour of `other`: lower priority, or the same and younger."""
        mine, theirs = self.request.priority, other.request.priority
        return mine < theirs or (mine == theirs and self.order > other.order)
