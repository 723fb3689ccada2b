"""The last scheduling decisions, kept to be read after a stall."""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import NamedTuple

from pagewire.step.step import StepPlan


class Load(NamedTuple):
    """How full the engine is."""

    running: int
    waiting: int
    paused: int
    free_blocks: int


class Decision(NamedTuple):
    """One plan, or (`step` −1) that nothing could be planned. A tuple of ints: the collector never looks inside."""

    step: int
    now_ns: int
    entries: int
    decode: int
    prefill_tokens: int
    samples: int
    joins: int
    leaves: int
    new_blocks: int
    copies: int
    running: int
    waiting: int
    paused: int
    free_blocks: int


class DecisionLog:
    """A ring of the last `size` decisions. Recording is O(1) and keeps nothing of the plan alive."""

    def __init__(self, size: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._ring)

    def planned(self, plan: StepPlan, now_ns: int, load: Load) -> None:
        """Record a plan."""
        self._ring.append(
            Decision(
                plan.step,
                now_ns,
                plan.rows.size,
                plan.num_decode,
                plan.token_ids.size,
                plan.sample_rows.size,
                len(plan.joins),
                plan.leaves.size,
                plan.block_ids.size,
                plan.copy_src.size,
                *load,
            )
        )

    def nothing_planned(self, now_ns: int, load: Load) -> None:
        """Record that work is there and nothing could be planned; the same again only replaces the time."""
        decision = Decision(-1, now_ns, 0, 0, 0, 0, 0, 0, 0, 0, *load)
        if self._ring and self._ring[-1].step == -1 and self._ring[-1][2:] == decision[2:]:
            self._ring.pop()
        self._ring.append(decision)

    def decisions(self) -> list[Decision]:
        """Oldest first."""
        return list(self._ring)


def write_dump(folder: Path, reason: str, decisions: list[Decision]) -> Path:
    """Write a head line with the reason, then one JSON object a decision. Blocking: never called on the loop.

    The name is new and not to be guessed, and only the owner may read it: the folder may be everybody's, and the file
    tells how the service is used.

    Raises:
        OSError: the folder cannot be written.
    """
    handle, name = tempfile.mkstemp(prefix="pagewire-decisions-", suffix=".jsonl", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps({"reason": reason, "decisions": len(decisions)}) + "\n")
        file.writelines(json.dumps(decision._asdict()) + "\n" for decision in decisions)
    return Path(name)
