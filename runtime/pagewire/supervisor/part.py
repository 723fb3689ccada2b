"""One of the two parts of a server, kept alive: its process now, and the one that follows when that dies.

start ──▶ ready ──▶ serves ──▶ died, silent or stalled ──▶ waits ──▶ start …
                                         │ too many in a row
                                         ▼
                                 `keep` returns the reason
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog

from pagewire.child import Report
from pagewire.errors import EngineFailed, PagewireError
from pagewire.supervisor.child import Child
from pagewire.supervisor.liveness import Limits
from pagewire.supervisor.restarts import Restarts

_log: Final = structlog.get_logger()

_KILL_S: Final = 20.0
"""A killed process that is still there after so long is held by the kernel, with all its memory."""


class Part:
    """Made on a running loop.

    Args:
        name: `engine` or `gateway`.
        launch: starts a process; told the last report of the previous one, None for the first.
        restarts: how often.
        limits: when a process that lives is of no use.
        start_s: time to get ready.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[Report | None], Awaitable[Child]],
        *,
        restarts: Restarts,
        limits: Limits,
        start_s: float,
    ) -> None:
        self.name = name
        self.child: Child | None = None
        """The latest process; it may have ended."""
        self._launch = launch
        self._restarts = restarts
        self._limits = limits
        self._start_s = start_s
        self._last: Report | None = None

    async def start(self) -> Child:
        """Start a process; it is not ready yet."""
        if self.child is not None:
            await self.child.close()
        self.child = await self._launch(self._last)
        return self.child

    async def ready(self) -> Report:
        """Wait until the process that was started is ready.

        Raises:
            PagewireError: why it is not.
        """
        assert self.child is not None, "start first"
        try:
            async with asyncio.timeout(self._start_s):
                self._last = await self.child.ready()
                return self._last
        except TimeoutError:
            raise self.late() from None

    def late(self) -> EngineFailed:
        """It was not ready in time."""
        assert self.child is not None, "start first"
        return EngineFailed(
            f"the {self.name} was not ready after {self._start_s:g} s, at: {self.child.stage}",
            field="server.start_timeout_ms",
        )

    async def keep(self) -> str:
        """Start it again whenever it ends; returns why not any more."""
        assert self.child is not None, "start first"
        while True:
            reason = f"the {self.name} {await self.child.useless(self._limits)}"
            if not await self.child.ended_within(_KILL_S):
                return f"{reason}, but it does not end: the kernel holds it"
            served_s = self.child.served_s
            while (delay_s := self._restarts.next_delay_s(served_s)) is not None:
                _log.error(
                    f"{self.name}_lost", reason=reason, restart_in_s=delay_s, attempt=self._restarts.num_in_a_row
                )
                await asyncio.sleep(delay_s)
                error = await self._try_again()
                if error is None:
                    break
                reason, served_s = str(error), 0.0
            else:
                return reason + self._given_up()

    async def _try_again(self) -> PagewireError | None:
        """Why the next process is not ready; None: it is."""
        try:
            await self.start()
            report = await self.ready()
        except PagewireError as error:
            if self.child is not None:
                await self.child.close()
            return error
        except OSError as error:  # no more processes, or file descriptors
            return EngineFailed(f"the {self.name} cannot be started: {error}")
        info: dict[str, Any] = {"restarts": self._restarts.num_total, "endpoint": report.endpoint}
        _log.warning(f"{self.name}_restarted", **info)
        return None

    def _given_up(self) -> str:
        num = self._restarts.limit
        if not num:
            return ""
        return f"; it was restarted {num} times in a row, that is given up" if num > 1 else "; it was restarted once"
