"""Which rows the steps between plan and apply name: what leaves meanwhile must wait for the last of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pagewire.scheduler.batch import DecodeSet

RowIndex = npt.NDArray[np.intp]


@dataclass(slots=True)
class PlannedStep:
    """Rows of one planned step, kept in the width that numpy indexes with."""

    step: int
    rows: RowIndex
    """Of the entries."""
    sample_rows: RowIndex
    """Of the samples; the same array where no prompt is in the step."""
    reaches_limit: bool
    """Some sample is the last that its row may have."""
    decode_set: DecodeSet | None
    """Where the step is nothing but one token for each of these."""
    departures: int
    """How many sequences had left their rows when it was planned: as long as no more did, nothing in it is stale."""


class InFlight:
    """The planned steps, oldest first, and the one being planned.

    Rejected: an array with each row's last step. It costs a write per row and step, and is read only when a sequence
    leaves; looking into at most two plans then is cheaper.
    """

    def __init__(self) -> None:
        self.steps: deque[PlannedStep] = deque()
        self.planning_step: int | None = None
        self.planning_rows: RowIndex = np.empty(0, np.intp)
        self.planning_chunks: set[int] = set()
        self.planning_last = False

    def begin(self, step: int, rows: RowIndex) -> None:
        """`step` is being planned; its decode rows stand."""
        self.planning_step = step
        self.planning_rows = rows
        self.planning_last = False

    def commit(self, planned: PlannedStep) -> None:
        """It is planned."""
        self.steps.append(planned)
        self.abandon()

    def abandon(self) -> None:
        """Nothing came of it, or it is planned."""
        self.planning_step = None
        self.planning_rows = self.planning_rows[:0]
        self.planning_chunks = set()

    def fence_of(self, row: int) -> int | None:
        """The last step not applied that names `row`; None: no step does. O(rows), when something leaves."""
        if self.planning_step is not None and (row in self.planning_chunks or _holds(self.planning_rows, row)):
            return self.planning_step
        for planned in reversed(self.steps):
            rows, sample_rows = planned.rows, planned.sample_rows
            if _holds(rows, row) or (sample_rows is not rows and _holds(sample_rows, row)):
                return planned.step
        return None


def _holds(rows: RowIndex, row: int) -> bool:
    return bool(np.count_nonzero(rows == row))
