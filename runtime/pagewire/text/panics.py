"""Panics of the package `tokenizers`, told as exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def panics_as(kind: Callable[[str], Exception]) -> Iterator[None]:
    """Rust's panics come as a `BaseException` that has no name to import: whoever handles faults (F7) lets it pass, and a
    request whose text did it would never be answered.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise kind(f"the tokenizer failed: {' '.join(str(error).split())}") from None
