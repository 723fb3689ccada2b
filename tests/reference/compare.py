"""Compares greedy tokens with those of `transformers`: equal, or a proven tie.

A differing token is a tie where the reference's logits of the two were less than `TIE` apart. From there on the texts are
different ones, so the comparison goes on along our tokens: `transformers` is asked for its logits there, and each of our
tokens must be its favourite, or tie with it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TIE = 1e-4
REFERENCE = Path(__file__).with_name("smollm2_greedy.json.gz")

LogitsAlong = Callable[[list[int], list[int]], npt.NDArray[np.float32]]
"""(prompt, tokens) → logits [len(tokens), V]: row i judges token i."""


def load() -> list[dict[str, Any]]:
    """Rows of `scripts/make_reference.py`: prompt, tokens, second, gap."""
    with gzip.open(REFERENCE) as file:
        rows: list[dict[str, Any]] = json.load(file)["rows"]
    return rows


def compare(
    tokens: list[int], row: dict[str, Any], logits_along: LogitsAlong, tie: float = TIE
) -> tuple[int, list[str]]:
    """How many ties, and what is wrong (nothing, if all is well)."""
    want = row["tokens"]
    if len(tokens) != len(want):
        return 0, [f"{len(tokens)} tokens instead of {len(want)}"]
    first = next((i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b), None)
    if first is None:
        return 0, []
    if tokens[first] != row["second"][first] or row["gap"][first] >= tie:
        return 0, [f"token {first}: {tokens[first]} instead of {want[first]}, {row['gap'][first]} ahead"]
    ties, wrong = 0, []
    logits = logits_along(row["prompt"], tokens)
    for i in range(first, len(tokens)):
        behind = float(logits[i].max() - logits[i][tokens[i]])
        if behind >= tie:
            wrong.append(f"token {i}, behind a tie: {behind} below the favourite")
        elif behind > 0:
            ties += 1
    return max(ties, 1), wrong
