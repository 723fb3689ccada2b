"""When everything about every step happened, noted by wrapping methods of one engine's objects; the product knows nothing of it.

All times are seconds of `time.perf_counter`. The card's come from CUDA events on its streams, brought to the host's clock
by two readings, before and after. An event before a forward pass is reached when the step before it ends, though the graph
may not be launched yet; so a step that is a graph begins at the later of that and the end of the launching call.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from dataclasses import dataclass

import torch
from processes import Pauses

_NEVER = (math.nan, math.nan)
_READINGS = 7
_TICK_S = 0.001


@dataclass(slots=True)
class StepTimes:
    """One step. Spans are (begin, end); NaN: it did not happen, or is not known on this worker.

    Attributes:
        computed: begin and end on the card; the end is that of the sampling.
        forward_end: on the card; then the sampling begins.
        home: its results were in host memory.
        seen: the loop noticed.
    """

    step: int
    num_decode: int = 0
    num_prefill: int = 0
    num_ended: int = 0
    is_graph: bool = False
    plan: tuple[float, float] = _NEVER
    forward: tuple[float, float] = _NEVER
    sample: tuple[float, float] = _NEVER
    computed: tuple[float, float] = _NEVER
    forward_end: float = math.nan
    home: float = math.nan
    seen: float = math.nan
    apply: tuple[float, float] = _NEVER
    deliver: tuple[float, float] = _NEVER

    @property
    def host_time(self) -> float:
        """What planning, launching, applying and delivering took."""
        spans = (self.plan, self.forward, self.sample, self.apply, self.deliver)
        return sum(end - begin for begin, end in spans)


# ---- points in the card's work -------------------------------------------------------------------------------------------


class HostMarks:
    """For a device whose work is done when it is launched: a CPU that stands for a card."""

    is_behind = False

    def compute(self) -> float:
        """After all that was launched."""
        return time.perf_counter()

    def fetch(self) -> float:
        """After all results that were sent home."""
        return time.perf_counter()

    def times(self, marks: list[float]) -> list[float]:
        """Of marks, all reached."""
        return marks


class CudaMarks:
    """Events on the streams of a `CudaDevice`. Made, and `times` called, while the card is idle."""

    is_behind = True
    """Work goes on after its launch."""

    def __init__(self, device) -> None:
        self._compute, self._fetch = device._compute, device._fetch
        self._first = self._reading()

    def _mark(self, stream):
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def compute(self):
        """See `HostMarks`."""
        return self._mark(self._compute)

    def fetch(self):
        """See `HostMarks`."""
        return self._mark(self._fetch)

    def _reading(self):
        """(an event, the host's time then, how unsure that is); the surest of several."""
        readings = []
        for _ in range(_READINGS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            event = self.compute()
            event.synchronize()
            ended = time.perf_counter()
            readings.append((event, (begun + ended) / 2, ended - begun))
        return min(readings, key=lambda reading: reading[2])

    def times(self, marks) -> list[float]:
        """See `HostMarks`. The two clocks differ in rate by some parts in a million, hence two readings."""
        (first, at_first, _), (last, at_last, _) = self._first, self._reading()
        span = 1e-3 * first.elapsed_time(last)
        rate = (at_last - at_first) / span if span > 1.0 else 1.0
        return [at_first + 1e-3 * first.elapsed_time(mark) * rate for mark in marks]


# ---- the loop ------------------------------------------------------------------------------------------------------------


class Ticker:
    """How late a timer of one millisecond is: (when, seconds). Timers of uvloop are whole milliseconds, so up to one is its own."""

    def __init__(self) -> None:
        self.lags: list[tuple[float, float]] = []
        self._due = math.nan
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """On the running loop."""
        self._due = time.perf_counter() + _TICK_S
        self._handle = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.lags.append((now, max(0.0, now - self._due)))
        self.start()

    def stop(self) -> None:
        """No more."""
        if self._handle is not None:
            self._handle.cancel()


class StepLog:
    """Notes the steps of one engine between `attach` and `detach`.

    Args:
        core: the engine's core.
        server: its sink.
        marks: of the card; None where the worker has none.
    """

    def __init__(self, core, server, marks: HostMarks | CudaMarks | None) -> None:
        self.steps: dict[int, StepTimes] = {}
        self.turns: list[tuple[float, float]] = []
        self.pauses = Pauses()
        self.ticker = Ticker()
        self._core, self._server, self._marks = core, server, marks
        self._points: list[tuple[StepTimes, str, object]] = []  # of the card, told apart when all is done
        self._by_handle: dict[asyncio.Future, StepTimes] = {}
        self._current: StepTimes | None = None
        self._wrapped: list[tuple[object, str]] = []

    def attach(self) -> None:
        """From now on, on the running loop."""
        core, worker = self._core, self._core.worker
        self._wrap(core, "_turn", self._turn)
        self._wrap(core.pipeline, "plan", self._plan)
        self._wrap(core.pipeline, "apply", self._apply)
        self._wrap(self._server, "on_outcome", self._deliver)
        self._wrap(worker, "launch_forward", self._launch_forward)
        self._wrap(worker, "launch_sample", self._launch_sample)
        if self._marks is not None:
            self._wrap(worker._stepper, "forward", self._compute_forward)
            self._wrap(worker._stepper, "sample", self._compute_sample)
            self._wrap(worker._stepper.device, "fetch", self._fetch)
            self._wrap(worker._completions, "_settle", self._settle)
        gc.callbacks.append(self.pauses)
        self.ticker.start()

    def detach(self) -> None:
        """No more; the card is idle. Brings its times to the host's clock."""
        self.ticker.stop()
        gc.callbacks.remove(self.pauses)
        for owner, name in self._wrapped:
            delattr(owner, name)  # the class's own comes back
        if self._marks is None:
            return
        times = self._marks.times([mark for _, _, mark in self._points])
        for (step, name, _), at in zip(self._points, times, strict=True):
            if name == "begin":
                step.computed = (max(at, step.forward[1]) if step.is_graph and self._marks.is_behind else at, math.nan)
            elif name == "end":
                step.computed = (step.computed[0], at)
            else:
                setattr(step, name, at)

    def _wrap(self, owner, name: str, by) -> None:
        inner = getattr(owner, name)

        def outer(*args):
            return by(inner, *args)

        setattr(owner, name, outer)
        self._wrapped.append((owner, name))

    def _point(self, step: StepTimes, name: str) -> None:
        self._points.append((step, name, self._marks.compute()))

    # ---- one method each -----------------------------------------------------------------------------------------------

    def _turn(self, inner):
        begun = time.perf_counter()
        has_moved = inner()
        self.turns.append((begun, time.perf_counter()))
        return has_moved

    def _plan(self, inner, now_ns):
        begun = time.perf_counter()
        plan = inner(now_ns)
        if plan is not None:
            span = (begun, time.perf_counter())
            step = StepTimes(plan.step, plan.num_decode, int(plan.token_ids.size), plan=span)
            self.steps[plan.step] = step
        return plan

    def _launch_forward(self, inner, plan):
        begun = time.perf_counter()
        handle = inner(plan)
        step = self.steps.get(plan.step)
        if step is not None:
            step.forward = (begun, time.perf_counter())
        return handle

    def _launch_sample(self, inner, plan, masks):
        begun = time.perf_counter()
        handle = asyncio.ensure_future(inner(plan, masks))
        step = self.steps.get(plan.step)
        if step is not None:
            step.sample = (begun, time.perf_counter())
            self._by_handle[handle] = step
            handle.add_done_callback(self._resolved)
        return handle

    def _compute_forward(self, inner, plan):
        step = self._current = self.steps.get(plan.step)
        if step is None:
            return inner(plan)
        kind = self._core.worker._stepper.kind(plan)
        step.is_graph = not (isinstance(kind, tuple) and kind[0] == "chunks")
        self._point(step, "begin")
        out = inner(plan)
        self._point(step, "forward_end")
        return out

    def _compute_sample(self, inner, plan, masks):
        out = inner(plan, masks)
        if self._current is not None:
            self._point(self._current, "end")
        return out

    def _fetch(self, inner, pairs):
        event = inner(pairs)
        if self._current is not None:
            self._points.append((self._current, "home", self._marks.fetch()))
        return event

    def _settle(self, inner, pending):
        step = self._by_handle.get(pending.sample)
        if step is not None:
            step.seen = time.perf_counter()
        return inner(pending)

    def _resolved(self, handle) -> None:
        step = self._by_handle.pop(handle)
        if math.isnan(step.seen):
            step.seen = time.perf_counter()

    def _apply(self, inner, result, now_ns):
        begun = time.perf_counter()
        outcome = inner(result, now_ns)
        step = self.steps.get(result.step)
        if step is not None:
            step.apply = (begun, time.perf_counter())
            step.num_ended = len(outcome.ended)
        return outcome

    def _deliver(self, inner, outcome):
        begun = time.perf_counter()
        inner(outcome)
        step = self.steps.get(outcome.step)
        if step is not None:
            step.deliver = (begun, time.perf_counter())
