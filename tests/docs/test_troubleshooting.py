"""Every message that docs/troubleshooting.md explains is one that the source has; those of other programs are in italics."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line.split(" | ")[0].removeprefix("| ")
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| message", "| status"))
]


def _texts() -> str:
    """Every string of the source, with what is filled in as …, and the Makefile."""
    out = [(ROOT / "Makefile").read_text()]
    for root in ("runtime", "transport", "clients/python"):
        for path in sorted((ROOT / root).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    out.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    out.append(node.value)
    return "\n".join(out)


TEXTS = _texts()


def _pieces(message: str) -> list[str]:
    """What stands between the places that are filled in: values, names of files and numbers."""
    return [
        piece.strip(" :'()")
        for piece in re.split(
            r"…|(?: in )?FILE\S*|config\.json|the engine|SIGKILL|forward of step|\bN\b|'?llama'?|\d+ times|\b5\b|`|^[\w.]+: |=",
            message,
        )
        if len(piece.strip(" :'()").split()) >= 3
    ]


@pytest.mark.parametrize("row", ROWS)
def test_the_message_is_a_real_one(row):
    for message in re.findall(r"``? ?(.*?) ?``?(?: |$)", row):
        for piece in _pieces(message):
            assert piece in TEXTS, f"{piece!r} is said nowhere"


def test_there_is_something_to_test():
    assert sum(len(_pieces(message)) for row in ROWS for message in re.findall(r"`(.*?)`", row)) > 25
