"""What a sequence finds and holds in the radix tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewire.cache.radix_node import RadixNode, RadixRoot
from pagewire.request.request import Namespace


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix, as found; `RadixTree.acquire` makes it the caller's. Valid until the tree's next change.

    Attributes:
        num_blocks: its length.
        num_wanted: blocks that were looked for.
    """

    namespace: Namespace
    num_blocks: int
    num_wanted: int
    version: int
    node: RadixNode | None
    """The deepest node, None where the namespace has none yet; the match takes its first `num_in_node` blocks."""
    num_in_node: int


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence holds of the tree. Made by `acquire` or `fork`, updated by `publish`, ended by one release.

    The sequence's block table, by index:

        0                  num_blocks                          full              len(blocks)
        ├── in the tree ───────┼── its own, can be published ────┼── partial tail, ───┤
        │   root … node, held  │   once computed                 │   not computed yet │

    Attributes:
        num_blocks: how many leading blocks of its table are in the tree.
        is_open: not released yet.
    """

    root: RadixRoot
    node: RadixNode
    num_blocks: int
    family: Family | None = None
    is_open: bool = True


@dataclass(slots=True, eq=False)
class Family:
    """Leases of a fork, whose tables have their first `num_blocks` blocks in common, published or not yet."""

    num_blocks: int
    members: list[Lease] = field(default_factory=list)
