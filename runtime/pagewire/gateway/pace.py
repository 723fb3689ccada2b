"""How much the gateway hands over in one turn of its loop, shared out among clients.

A reader that stopped for a while and reads again may be owed a million log-probabilities. Handed over at once they would
hold every other stream for seconds; so a turn has a budget, and who is owed more goes on in the next one (F18, F27).
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

_TURN: Final = 8_192
"""Units of a turn: one is about half a microsecond, a token or a log-probability that is made JSON."""
_SHARE: Final = 2_048
"""Of one client in a turn, so that one that is owed much leaves something for those that are owed a token."""


class Waiter(Protocol):
    """Who is owed something."""

    def flush(self) -> None:
        """Hand over what the pace allows now."""
        ...


class Pace:
    """The budget of this turn, and those that wait for the next one, first come first served.

    Costs one call-back for each turn in which anything is handed over.
    """

    def __init__(self) -> None:
        self._left = _TURN
        self._waiting: dict[Waiter, None] = {}
        self._is_armed = False

    def __contains__(self, client: Waiter) -> bool:
        return client in self._waiting

    @property
    def share(self) -> int:
        """Units that one client may spend now; 0: none, it has to wait."""
        return min(self._left, _SHARE)

    def spend(self, units: int) -> None:
        """Something was handed over. It may be more than was left, by one token of a client."""
        self._left = max(0, self._left - units)
        self._arm()

    def wait(self, client: Waiter) -> None:
        """`client` is owed more: it is flushed in the next turn."""
        self._waiting[client] = None
        self._arm()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_armed = False
        self._left = _TURN
        queue, self._waiting = list(self._waiting), {}
        for at, client in enumerate(queue):
            if not self._left:  # those that had their share this time go behind those that had none
                self._waiting = dict.fromkeys(queue[at:]) | self._waiting
                self._arm()
                break
            client.flush()
