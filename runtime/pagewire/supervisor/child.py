"""A child process as its parent sees it: started with a configuration, getting ready or failing, ended for a reason."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pagewire.child import Report, decode_report
from pagewire.config import Config
from pagewire.errors import EngineFailed, from_code
from pagewire.supervisor.liveness import Limits, Liveness
from pagewire.supervisor.output import Output

_REPORT_LIMIT: Final = 1 << 20
_LAST_OUTPUT_S: Final = 0.2
"""After the end: time for its last line to arrive. Not for ever, since a process that it started may hold the pipe."""
_KILL_S: Final = 5.0
_STACKS_S: Final = 0.3
"""For a stuck child to write its stacks."""


class Child:
    """One running child.

    It is ready once, or it fails once; whichever comes first decides. It ends once, and `reason` then says how.
    The parent keeps the read end of the report pipe open for as long as it lives: that is the child's lifeline.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, reports: asyncio.StreamReader, output: Output
    ) -> None:
        self.name = name
        self.stage = "start of the interpreter"
        self._process = process
        self._output = output
        self._farewell = ""
        self._verdict = ""
        self._num_beats = 0
        self._stall = ""
        self._ready_s: float | None = None
        self._ended_s: float | None = None
        self.on_draining: Callable[[int], None] = lambda num_streams: None  # noqa: ARG005
        """Told once it drains: how many streams are open."""
        self.on_stop: Callable[[], None] = lambda: None
        """Told that the server's owner asked it to stop the server."""
        self._ready: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reports), name=f"reports of the {name}")
        self._ending = asyncio.create_task(self._wait(), name=f"end of the {name}")

    @classmethod
    async def start(cls, name: str, module: str, config: Config, arguments: Sequence[str] = ()) -> Child:
        """Start `python -m module` with two inherited pipes.

        The child gets a session of its own: Ctrl-C in the terminal reaches the parent alone, which then drains.
        What it writes, to standard output too, goes to our standard error, so that our output carries nothing but what
        we say; see `Output`.
        """
        config_out, config_in = os.pipe()
        report_out, report_in = os.pipe()
        error_out, error_in = os.pipe()
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
                stdout=error_in,
                stderr=error_in,
                pass_fds=(config_out, report_in),
                start_new_session=True,
            )
        except BaseException:
            os.close(report_out)
            os.close(error_out)
            raise
        finally:
            os.close(config_out)
            os.close(config_in)
            os.close(report_in)
            os.close(error_in)
        output = Output(error_out, name)
        reports = asyncio.StreamReader(_REPORT_LIMIT)
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(report_out, "rb", 0)
        try:
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), pipe)
        except BaseException:  # cancelled, say: nobody would know the process
            process.kill()
            pipe.close()
            raise
        return cls(name, process, reports, output)

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
    def served_s(self) -> float:
        """How long it was ready, so far or before it ended; 0 if it never was."""
        if self._ready_s is None:
            return 0.0
        return (self._ended_s if self._ended_s is not None else time.monotonic()) - self._ready_s

    @property
    def reason(self) -> str:
        """One clause about how it ended: our verdict, what it reported, or how the system says it ended and its last line."""
        code = self._process.returncode
        if self._verdict:
            return self._verdict
        if code is None:
            return "still runs"
        if self._farewell:
            return f"failed: {self._farewell}"
        return self._how(code) + self._last_words()

    async def ready(self) -> Report:
        """Wait until it says that it is ready.

        Raises:
            PagewireError: it said why it cannot (with the code it gave), or it ended without a word (`EngineFailed`).
        """
        return await asyncio.shield(self._ready)

    async def ended(self) -> int:
        """Wait until the process is gone; its return code."""
        return await asyncio.shield(self._ending)

    async def ended_within(self, seconds: float) -> bool:
        """Wait until the process is gone, for so long at most; whether it is.

        Not `wait_for`: before Python 3.12 that may swallow a cancellation.
        """
        await asyncio.wait({self._ending}, timeout=seconds)
        return self._ending.done()

    async def useless(self, limits: Limits) -> str:
        """Wait until it has ended, or is alive and of no use: silent, or in a stall without end. Then kill it.

        Returns:
            the reason, which `reason` says from then on, too.
        """
        liveness = Liveness(limits)
        while not self._ending.done():
            await asyncio.wait({self._ending}, timeout=limits.interval_s)
            verdict = liveness.check(time.monotonic(), self._num_beats, self._stall)
            if verdict is not None and not self._ending.done():
                self._verdict = f"{verdict}{_state_of(self.pid)} and was killed"
                self._send(signal.SIGQUIT)  # it writes the stacks of its threads
                await asyncio.wait({self._ending}, timeout=_STACKS_S)
                self.kill()
                return self.reason
        return self.reason

    def terminate(self) -> None:
        """Ask it to drain and leave (SIGTERM)."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL; harmless when it is gone."""
        self._send(signal.SIGKILL)

    async def close(self) -> None:
        """Make sure that it is gone, and release what watches it. Idempotent."""
        self.kill()
        await asyncio.wait({self._ending}, timeout=_KILL_S)  # one that the kernel holds goes when it lets go
        if not self._ending.done():
            return
        await self._reading
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # seen, whether somebody waited for it or not
        self._ready.cancel()

    def _how(self, code: int) -> str:
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (is there enough memory?)" if -code == signal.SIGKILL else ""
        return f"was killed by {_signal_name(-code)}{hint}"

    def _last_words(self) -> str:
        return f"; its last words: {self._output.last_words}" if self._output.last_words else ""

    async def _wait(self) -> int:
        code = await self._process.wait()
        self._ended_s = time.monotonic()
        await asyncio.wait({self._output.ended}, timeout=_LAST_OUTPUT_S)
        return code

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
        code = await self._ending
        if not self._ready.done():
            how = f"{self._how(code)} while it was starting, at: {self.stage}{self._last_words()}"
            self._ready.set_exception(EngineFailed(f"the {self.name} {how}"))

    def _take(self, report: Report) -> None:
        if report.event == "loading":
            self.stage = report.stage
        elif report.event == "draining":
            self.on_draining(report.streams)
        elif report.event == "stop":
            self.on_stop()
        elif report.event == "beat":
            self._num_beats += 1
            self._stall = report.stall
        elif self._ready.done():
            if report.event == "failed":
                self._farewell = report.message
        elif report.event == "ready":
            self._ready_s = time.monotonic()
            self._ready.set_result(report)
        else:
            self._ready.set_exception(from_code(report.code, report.message, field=report.field))


def _state_of(pid: int) -> str:
    """What a process that does not answer is doing, where the system says so (Linux) and it explains something."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""
    return {"T": " (it was stopped)", "D": " (it is stuck in a system call)"}.get(state, "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
