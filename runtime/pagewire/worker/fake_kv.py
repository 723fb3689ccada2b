"""KV memory that remembers what was written, by whom, and what queued steps have yet to touch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pagewire.step.step import Int32Array

_NOTHING: Final = -1

Bools = npt.NDArray[np.bool_]
Owner = tuple[int, int]
"""(row, epoch): one tenancy of a row."""


class BookkeepingError(AssertionError):
    """A plan broke a promise of `step.step` or an invariant of the design; the message says which, and where."""


def ensure(condition: bool, message: str) -> None:
    """Raise BookkeepingError unless `condition`; unlike `assert` also under `python -O`."""
    if not condition:
        raise BookkeepingError(message)


class FakeKv:
    """Cells [num_blocks, block_size], each of which holds the token and position written there.

    Attributes:
        poisoned: cells written with NaN.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: Int32Array = np.full((num_blocks, block_size), _NOTHING, np.int32)
        self.positions: Int32Array = np.full((num_blocks, block_size), _NOTHING, np.int32)
        self.poisoned = np.zeros((num_blocks, block_size), np.bool_)
        self._writer: list[Owner | None] = [None] * num_blocks

    def read(self, table: Int32Array, history: Int32Array, stop: int, who: Owner) -> bool:
        """Check that positions 0 … stop − 1 through `table` hold `history`; whether any of them is poisoned."""
        if stop == 0:
            return False
        blocks = table[: -(-stop // self.block_size)]
        tokens = self.tokens[blocks].reshape(-1)[:stop]
        positions = self.positions[blocks].reshape(-1)[:stop]
        wrong = (tokens != history[:stop]) | (positions != np.arange(stop))
        if wrong.any():
            at = int(wrong.argmax())
            block = int(blocks[at // self.block_size])
            raise BookkeepingError(
                f"row {who[0]} (epoch {who[1]}) reads block {block} for position {at}: it holds token {tokens[at]} of "
                f"position {positions[at]}, last written by row, epoch {self._writer[block]}; expected {history[at]}"
            )
        return bool(self.poisoned[blocks].reshape(-1)[:stop].any())

    def write(self, table: Int32Array, start: int, tokens: Int32Array, who: Owner, poisoned: Bools) -> None:
        """Write `tokens` at positions start … through `table`."""
        positions = np.arange(start, start + tokens.size, dtype=np.int32)
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        self.tokens[blocks, offsets] = tokens
        self.positions[blocks, offsets] = positions
        self.poisoned[blocks, offsets] = poisoned
        for block in np.unique(blocks).tolist():
            self._writer[block] = who

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole block."""
        for cells in (self.tokens, self.positions, self.poisoned):
            cells[dst] = cells[src]
        self._writer[dst] = self._writer[src]


@dataclass(slots=True)
class Touches:
    """Blocks that one step reads and writes, and for whom."""

    step: int
    rows: frozenset[int] = frozenset()
    reads: dict[int, set[Owner]] = field(default_factory=dict)
    writes: dict[int, Owner] = field(default_factory=dict)


class QueuedTouches:
    """What the steps that are not complete have yet to read and write.

    Their order on one device would hide most mistakes with them: a step that takes a block too early runs after the one
    that still writes it. A second stream or a transfer would not wait, so taking it is a mistake even then.
    """

    def __init__(self) -> None:
        self._queue: deque[Touches] = deque()

    def push(self, touches: Touches, family: dict[Owner, Owner]) -> None:
        """Add a step's touches.

        Args:
            touches: its own.
            family: fork → its leader: a fork may read what its leader has yet to write.

        Raises:
            BookkeepingError: it writes a block that an older queued step touches for somebody else, or reads one that
                an older queued step has yet to write for somebody else.
        """
        for older in self._queue:
            for block, owner in touches.writes.items():
                before = older.writes.get(block, owner)
                ensure(before == owner, _clash("writes", block, owner, touches, f"{before} still writes it", older))
                readers = older.reads.get(block, set()) - {owner}
                ensure(not readers, _clash("writes", block, owner, touches, f"{readers} still read it", older))
            for block, owners in touches.reads.items():
                if (writer := older.writes.get(block)) is not None:
                    strangers = {o for o in owners if family.get(o, o) != family.get(writer, writer)}
                    ensure(
                        not strangers,
                        _clash("reads", block, strangers, touches, f"{writer} has yet to write it", older),
                    )
        self._queue.append(touches)

    def pop(self) -> None:
        """The oldest step is complete."""
        self._queue.popleft()

    def names(self, row: int) -> bool:
        """Some queued step names `row`."""
        return any(row in touches.rows for touches in self._queue)


def _clash(verb: str, block: int, owner: object, step: Touches, other: str, older: Touches) -> str:
    return f"step {step.step} {verb} block {block} for {owner}, but in step {older.step} {other}"
