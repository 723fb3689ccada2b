"""A child process as its parent sees it: started with a configuration, getting ready or failing, ended for a reason."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence

import msgspec

from pagewire.child import Report, decode_report
from pagewire.config import Config
from pagewire.errors import EngineFailed, from_code

_REPORT_LIMIT = 1 << 20


class Child:
    """One running child.

    It is ready once, or it fails once; whichever comes first decides. It ends once, and `reason` then says how.
    The parent keeps the read end of the report pipe open for as long as it lives: that is the child's lifeline.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, reports: asyncio.StreamReader) -> None:
        self.name = name
        self.stage = "start of the interpreter"
        self._process = process
        self.on_draining: Callable[[int], None] = lambda num_streams: None  # noqa: ARG005
        """Told once it drains: how many streams are open."""
        self._ready: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reports), name=f"reports of the {name}")
        self._ending = asyncio.create_task(process.wait(), name=f"end of the {name}")

    @classmethod
    async def start(cls, name: str, module: str, config: Config, arguments: Sequence[str] = ()) -> Child:
        """Start `python -m module` with two inherited pipes.

        The child gets a session of its own: Ctrl-C in the terminal reaches the parent alone, which then drains.
        Its standard output goes to our standard error, so that ours carries nothing but what we say.
        """
        config_out, config_in = os.pipe()
        report_out, report_in = os.pipe()
        try:
            os.set_blocking(config_in, False)
            os.write(config_in, msgspec.json.encode(config))  # a few kB; a pipe holds 64 kB (16 on some systems)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                "--config-fd",
                str(config_out),
                "--report-fd",
                str(report_in),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if sys.stderr else asyncio.subprocess.DEVNULL,
                pass_fds=(config_out, report_in),
                start_new_session=True,
            )
        except BaseException:
            os.close(report_out)
            raise
        finally:
            os.close(config_out)
            os.close(config_in)
            os.close(report_in)
        reports = asyncio.StreamReader(_REPORT_LIMIT)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(report_out, "rb", 0))
        return cls(name, process, reports)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: minus the signal that killed it."""
        return self._process.returncode

    @property
    def is_ready(self) -> bool:
        return self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None

    @property
    def reason(self) -> str:
        """One clause about how it ended."""
        code = self._process.returncode
        if code is None:
            return "still runs"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (is there enough memory?)" if -code == signal.SIGKILL else ""
        return f"was killed by {_signal_name(-code)}{hint}"

    async def ready(self) -> Report:
        """Wait until it says that it is ready.

        Raises:
            PagewireError: it said why it cannot (with the code it gave), or it ended without a word (`EngineFailed`).
        """
        return await asyncio.shield(self._ready)

    async def ended(self) -> int:
        """Wait until the process is gone; its return code."""
        return await asyncio.shield(self._ending)

    def terminate(self) -> None:
        """Ask it to drain and leave (SIGTERM)."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL; harmless when it is gone."""
        self._send(signal.SIGKILL)

    async def close(self) -> None:
        """Make sure that it is gone, and release what watches it. Idempotent."""
        self.kill()
        await self._ending
        await self._reading
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen, whether somebody waited for it or not
        self._ready.cancel()

    def _send(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:
                return

    async def _read(self, reports: asyncio.StreamReader) -> None:
        while line := await reports.readline():
            try:
                report = decode_report(line)
            except msgspec.DecodeError:
                continue  # a newer child may say what we do not know
            self._take(report)
        # The child closed its end: it is gone, or about to be.
        await self._ending
        if not self._ready.done():
            self._ready.set_exception(
                EngineFailed(f"the {self.name} {self.reason} while it was starting, at: {self.stage}")
            )

    def _take(self, report: Report) -> None:
        if report.event == "loading":
            self.stage = report.stage
        elif report.event == "draining":
            self.on_draining(report.streams)
        elif self._ready.done():
            return
        elif report.event == "ready":
            self._ready.set_result(report)
        else:
            self._ready.set_exception(from_code(report.code, report.message, field=report.field))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
