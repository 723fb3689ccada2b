"""Numbers of bytes as people write them: `2GiB`, `512 MiB`, `1.5GB`, `4096`."""

from __future__ import annotations

import re
from typing import Final

_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes. KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB of 1000; the B may be left out.

    Raises:
        ValueError: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size: give bytes, or a number with a unit, as 2GiB or 512MB")
    number, unit = match[1], _UNITS[(match[2] or "").lower()]
    return int(number) * unit if "." not in number else round(float(number) * unit)


def size_text(size: int) -> str:
    """The shortest exact way to write it: `16 MiB`, else the plain number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit[:2].lower()]
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return str(size)
