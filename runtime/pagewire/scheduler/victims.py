"""Who gives way when blocks or rows run out."""

from __future__ import annotations

from pagewire.scheduler.batch import Batch
from pagewire.scheduler.sequence import Sequence, SequenceState


def choose_victim(batch: Batch, requester: Sequence, max_preemptions: int) -> Sequence | None:
    """The junior of `requester` whose preemption costs least; None where it has no junior in a row.

    Lowest priority first; then those not preempted too often yet; then those that nobody reads (paused); then least
    lost work, which is what is computed and would have to be computed again if its cached blocks are evicted; then the
    youngest. O(rows), on the rare path.
    """
    juniors = [s for s in batch.sequences if s is not None and not s.is_leaving and s.is_junior_to(requester)]
    return min(juniors, key=lambda s: _cost(batch, s, max_preemptions), default=None)


def choose_paused(batch: Batch) -> Sequence | None:
    """The paused sequence that gives way to whoever waits, senior or not: nobody reads what it would compute. O(rows)."""
    paused = [s for s in batch.sequences if s is not None and s.state is SequenceState.PAUSED and not s.is_leaving]
    return min(paused, key=lambda s: _cost(batch, s, 0), default=None)


def _cost(batch: Batch, sequence: Sequence, max_preemptions: int) -> tuple[int, bool, bool, int, int]:
    return (
        sequence.request.priority,
        sequence.num_preemptions >= max_preemptions,
        not sequence.is_paused,
        int(batch.num_scheduled[sequence.row]),
        -sequence.order,
    )
