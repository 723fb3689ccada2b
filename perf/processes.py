"""The processes of a benchmark: an engine, clients that load it, what each takes of a core and how long it collects garbage.

A client process (`clients.py`) is told what to do in one JSON line and says when it is ready; all begin at the same moment;
what they found comes back as another line. One Python process may be too slow a reader for 512 streams, so there can be
several, each with its part of the streams.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from workload import RAMP_S, Served

from pagewire.child import decode_report
from pagewire.config import Config

_CLIENTS = Path(__file__).with_name("clients.py")
_HEAD_START_S = 0.25
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


# ---- the engine ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EngineProcess:
    """One that is ready."""

    endpoint: str
    pid: int
    info: dict[str, str | int | float | bool]


@contextlib.contextmanager
def engine_process(config: Config) -> Iterator[EngineProcess]:
    """An engine process, ready; ended afterwards.

    Raises:
        RuntimeError: it did not start.
    """
    config_out, config_in = os.pipe()
    report_out, report_in = os.pipe()
    os.write(config_in, msgspec.json.encode(config))
    os.close(config_in)
    flags = ["--config-fd", str(config_out), "--report-fd", str(report_in)]
    command = [sys.executable, "-m", "pagewire.engine.main", *flags]
    process = subprocess.Popen(command, pass_fds=(config_out, report_in))
    os.close(config_out)
    os.close(report_in)
    try:
        with os.fdopen(report_out, "rb") as lines:
            reports = (decode_report(line) for line in lines)
            ready = next((report for report in reports if report.event != "loading"), None)
            if ready is None or ready.event != "ready":
                raise RuntimeError(f"the engine did not start: {ready}")
            yield EngineProcess(ready.endpoint, process.pid, ready.info)
    finally:
        process.terminate()
        process.wait(60)


def cpu_seconds(pid: int) -> tuple[float, float]:
    """What a process has taken so far, and its first thread alone: the one with the event loop."""

    def of(path: str) -> float:
        fields = Path(path).read_text().rpartition(")")[2].split()  # a name may hold spaces
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    return of(f"/proc/{pid}/stat"), of(f"/proc/{pid}/task/{pid}/stat")


class Pauses:
    """Garbage collections of this process: (begin, seconds, generation)."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float, int]] = []
        self._begun = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        now = time.perf_counter()
        if phase == "start":
            self._begun = now
        else:
            self.found.append((self._begun, now - self._begun, info["generation"]))


# ---- clients -------------------------------------------------------------------------------------------------------------


class Job(msgspec.Struct, kw_only=True):
    """What a client process does; it has part `part` of `parts` of the whole load."""

    kind: str
    """closed: `streams` open at any time; poisson: `rate` arrivals a second; decode: `streams` prompts of `context` tokens
    at once, `max_tokens` each, and once all decode, `rate` prompts a second beside them."""
    endpoint: str
    vocab_size: int
    streams: int = 0
    rate: float = 0.0
    seconds: float = 15.0
    ramp: float = RAMP_S
    context: int = 512
    max_tokens: int = 200
    namespace: str = ""
    """Cases must not find each other's prompts in the prefix cache."""
    seed: int = 0
    """0: the lengths, prompts and arrivals that others were measured with."""
    part: int = 0
    parts: int = 1

    @property
    def own_streams(self) -> int:
        """Of this part."""
        return self.streams // self.parts + (self.part < self.streams % self.parts)


class Answer(msgspec.Struct, kw_only=True):
    """What a client process found.

    Attributes:
        served: requests of the load; of `decode` those that decode.
        beside: of `decode`, the prompts that came beside them.
        cpu_share: of one core, in the window.
        pauses: (begin, seconds, generation) of its garbage collections.
        messages: (when, streams) of each message with tokens, as it came from the socket.
        stats: what the engine's counters grew by in the window; of part 0.
        state: its counters and gauges at the end of the window; of part 0.
    """

    served: list[Served]
    beside: list[Served] = []
    cpu_share: float = 0.0
    pauses: list[tuple[float, float, int]] = []
    messages: list[tuple[float, int]] = []
    stats: dict[str, float] = {}
    state: dict[str, float] = {}


class Clients:
    """Client processes that share one job. Every method but `close` blocks."""

    def __init__(self, job: Job, parts: int) -> None:
        self._processes = []
        for part in range(parts):
            process = subprocess.Popen([sys.executable, str(_CLIENTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._processes.append(process)
            _tell(process, msgspec.json.encode(msgspec.structs.replace(job, part=part, parts=parts)))

    def start(self) -> float:
        """Wait until all are ready and let them begin; at which moment.

        Raises:
            RuntimeError: one of them failed.
        """
        for process in self._processes:
            _hear(process)
        begin = time.perf_counter() + _HEAD_START_S
        for process in self._processes:
            _tell(process, msgspec.json.encode(begin))
        return begin

    def answers(self) -> list[Answer]:
        """Wait for what they found.

        Raises:
            RuntimeError: one of them failed.
        """
        return [msgspec.json.decode(_hear(process), type=Answer) for process in self._processes]

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a client process ended early; what it wrote to standard error says why")
    return line
