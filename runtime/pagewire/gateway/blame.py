"""What kills engines is found out, at the price of two of them.

A stream under which one engine died is as good as any other: it begins again at the next. Under which two died one after the
other before it got further, it may be what kills them, and ends. To isolate the streams of a dead engine, half of them at a
time, would spare the innocent among those, and cost more engines.
"""

from __future__ import annotations

from typing import Final

from pagewire.gateway.stream import GatewayStream

MOST_DEATHS: Final = 2
"""Engines that may die under a stream one after another before it got far."""
FAR: Final = 4
"""Tokens after the last death, of which more acquit a stream. What dies with an engine are also tokens that it had drawn and not
sent: one that dies at a certain token seems to have come a little further the second time."""


def leave(stream: GatewayStream) -> None:
    """Its engine does not go on with it. Who had no token of that is suspect, and begins later than the others at the next."""
    stream.was_idle, stream.is_resuming = stream.is_idle, False
    stream.is_suspect, stream.has_moved = not stream.has_moved and not stream.was_idle, False


def died_under(stream: GatewayStream) -> bool:
    """Count the death of the engine that it left against the stream; whether that is one too many."""
    num = stream.num_completion_tokens
    if num - stream.num_at_death > FAR:
        stream.num_deaths = 1
    elif not stream.was_idle:  # else nothing was computed for it
        stream.num_deaths += 1
    stream.num_at_death = num
    return stream.num_deaths >= MOST_DEATHS
