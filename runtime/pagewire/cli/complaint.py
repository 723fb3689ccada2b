"""An error as one line on a terminal."""

from __future__ import annotations

from pagewire.errors import PagewireError


def complaint(error: PagewireError, flag: str | None = None) -> str:
    """What is wrong, by its field and by the flag that was given for it, and when to try again."""
    message = str(error)
    if flag is not None and error.field is not None:
        # A setting keeps its name, which a file of settings has, too; what is no setting is known by its flag alone.
        named = f"{error.field} ({flag})" if "." in error.field else flag
        message = f"{named}: {error.message}"
    again = f"; try again in {error.retry_after_ms / 1000:g} s" if error.retry_after_ms else ""
    return " ".join(f"{message}{again}".split())
