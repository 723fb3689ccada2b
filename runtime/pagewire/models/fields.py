"""Typed reading of a model's own description, which is untrusted: every value has the wanted type, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pagewire.errors import ModelError

_SHOWN: Final = 80
_MOST_WHOLE: Final = 2**63


def whole(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number; missing or null: the default, which must then be there.

    Raises:
        ModelError: it is none.
    """
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST_WHOLE:
        raise ModelError(f"the model's configuration needs a whole number for {key!r}, not {shown(value)}")
    return value


def positive(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number above 0.

    Raises:
        ModelError: it is none.
    """
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"the model's configuration needs a positive number for {key!r}, not {shown(value)}")
    return float(value)


def positive_or_none(values: Mapping[str, Any], key: str) -> float:
    """A finite number above 0, or 0 where there is none.

    Raises:
        ModelError: it is anything else.
    """
    return positive(values, key) if values.get(key) not in (None, 0) else 0.0


def flag(values: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """True or false.

    Raises:
        ModelError: it is neither.
    """
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelError(f"the model's configuration needs true or false for {key!r}, not {shown(value)}")
    return value


def table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; missing or null: an empty one.

    Raises:
        ModelError: it is none.
    """
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError(f"the model's configuration needs an object for {key!r}, not {shown(value)}")
    return value


def refuse(values: Mapping[str, Any], key: str, default: object, allowed: tuple[object, ...]) -> None:
    """Raise where a value is none of those that the decoder computes.

    Raises:
        ModelError: it names key, value and what is supported.
    """
    value = values.get(key, default)
    if value not in allowed:
        raise ModelError(f"the model's {key} = {shown(value)} is not supported; supported: {default!r}")


def shown(value: object) -> str:
    """A value for a message, however long it is."""
    if isinstance(value, int) and abs(value) > _MOST_WHOLE:
        return "a number of more than 64 bits"  # turning it into digits may be refused, or take long
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
