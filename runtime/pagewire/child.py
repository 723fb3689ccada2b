"""A child process's side of its parent: configuration in, reports out, and an end when the parent ends.

The supervisor starts `python -m pagewire.engine.main --config-fd 5 --report-fd 6`. Both are pipes that the child inherits:

- config fd: the whole configuration as JSON, then end of file. No pickle, nothing on the command line, no file to clean.
- report fd: JSON lines from the child, one `Report` each: `loading` (stage, for the log), then `ready` or `failed`;
  `beat` from its loop once it is ready, so that a stuck process is told from an idle one; `failed` also when it ends for a
  reason that it knows; `draining` once it was told to leave and knows for whom it waits; `stop` when the server's owner
  asked it to stop the whole server.
  It is also the lifeline: its read end closes when the parent dies, however that happens, and the child then leaves.

The first thing that a child's `main` does, before it imports torch, is `leave_with_parent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from pagewire.config import Config
from pagewire.errors import ConfigError, PagewireError

_PR_SET_PDEATHSIG: Final = 1
_LARGEST_CONFIG: Final = 1 << 20
_WRITE_MS: Final = 1000
_FEWEST_FILES: Final = 64
_LONGEST_STALL: Final = 500


class Report(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of the report pipe. Unknown fields are tolerated, so that a child may say more."""

    event: Literal["loading", "ready", "beat", "failed", "draining", "stop"]
    stage: str = ""
    """What is being done, for `loading`: `import`, `weights 42 %`, `warm-up`, …"""
    endpoint: str = ""
    """Where the child listens, for `ready`."""
    model: str = ""
    info: dict[str, str | int | float | bool] = {}
    """For `ready`: what is worth telling the user (KV blocks, longest sequence, …)."""
    streams: int = 0
    """For `draining`: how many are open."""
    code: str = ""
    """For `failed`: an error code of the error tree."""
    message: str = ""
    stall: str = ""
    """For `beat`: which step is late, where one is."""
    field: str | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Report)


def encode_report(report: Report) -> bytes:
    """One JSON line."""
    return _encoder.encode(report) + b"\n"


def decode_report(line: bytes) -> Report:
    """The report in one line.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _decoder.decode(line)


def failure(error: BaseException) -> Report:
    """What to report about an error that ends the child while it starts."""
    if isinstance(error, PagewireError):
        return Report(event="failed", code=error.code, message=error.message, field=error.field)
    return Report(event="failed", code="internal", message=f"{type(error).__name__}: {error}")


class Reporter:
    """Writes reports. A parent that is gone is no error here: `leave_with_parent` deals with it.

    A parent that does not read (it was stopped, say) holds up nobody for long: beats are dropped when the pipe is full,
    other reports after a second.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._percent = -1
        os.set_blocking(fd, False)

    def send(self, report: Report) -> None:
        """Write one line."""
        line = encode_report(report)
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        try:
            while line and poller.poll(_WRITE_MS):
                line = line[os.write(self._fd, line) :]
        except (BrokenPipeError, BlockingIOError):
            return

    def beat(self, stall: str = "") -> None:
        """Say that the loop turns. Never waits: a line below 4,096 bytes is written whole or not at all."""
        self._try(Report(event="beat", stall=stall[:_LONGEST_STALL]))

    def _try(self, report: Report) -> None:
        try:
            os.write(self._fd, encode_report(report))
        except (BrokenPipeError, BlockingIOError):
            return

    def loading(self, stage: str) -> None:
        self.send(Report(event="loading", stage=stage))

    def weights(self, part: float) -> None:
        """Say how much of the weights is read, from 0 to 1, a hundred times at most. From any thread; never waits."""
        percent = int(100 * part)
        if percent != self._percent:
            self._percent = percent
            self._try(Report(event="loading", stage=f"weights {percent} %" if percent < 100 else "warm-up"))

    def failed(self, error: BaseException) -> None:
        self.send(failure(error))


async def keep_beating(reporter: Reporter, interval_s: float, stall: Callable[[], str] = lambda: "") -> None:
    """Beat for as long as the task lives: as an ordinary task of the loop whose turning it proclaims."""
    while True:
        reporter.beat(stall())
        await asyncio.sleep(interval_s)


def read_config(fd: int) -> Config:
    """Read the configuration from an inherited pipe up to its end, and close it.

    Raises:
        ConfigError, msgspec.DecodeError: it is none.
    """
    with os.fdopen(fd, "rb") as pipe:
        return msgspec.json.decode(pipe.read(_LARGEST_CONFIG), type=Config)


def leave_with_parent(report_fd: int) -> None:
    """From now on this process is killed as soon as its parent is gone (F19).

    Two ways at once. Linux kills it through PR_SET_PDEATHSIG, which works even while C code holds the interpreter lock.
    A thread watches the report pipe, which works everywhere, and also if the parent died before the first was set.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch, args=(report_fd,), name="lifeline", daemon=True).start()


def explain_crashes() -> None:
    """Write the stacks of all threads to standard error when this process crashes, and on SIGQUIT.

    The supervisor sends SIGQUIT to a child that does not answer before it kills it: the handler is C, and works where the
    interpreter does not.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True)


def allow_many_files() -> None:
    """As many open files as the system lets this user have: each connection is one, and the usual first limit is 1,024.

    Raises:
        ConfigError: they are too few to begin with.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems name a limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < _FEWEST_FILES:
        raise ConfigError(
            f"the system lets a process open {allowed} files only (`ulimit -n`); a server needs {_FEWEST_FILES} at least"
        )


def _watch(report_fd: int) -> None:
    poller = select.poll()
    poller.register(report_fd, 0)  # errors and hang-ups are always reported
    while True:
        for _, event in poller.poll():
            if event & (select.POLLERR | select.POLLHUP):
                os.kill(os.getpid(), signal.SIGKILL)
            if event & select.POLLNVAL:
                return
