"""The real scheduler, told again what a recording says it was told; and the first thing that it decides otherwise."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagewire.errors import ConfigError, PagewireError
from pagewire.recording.events import (
    NO_STEP,
    Applied,
    Cut,
    Ended,
    Event,
    Header,
    Paused,
    Planned,
    Resumed,
    Submitted,
    Taken,
)
from pagewire.recording.scheduler import PARTS, scheduler_of, sums_of
from pagewire.scheduler.scheduler import Scheduler
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import StepPlan, StepResult
from pagewire_transport.errors import from_code


@dataclass(slots=True)
class Replay:
    """What came of it.

    Attributes:
        difference: the first, in words; "": none.
        is_cut: the recorder stopped before the engine did.
    """

    events: int = 0
    requests: int = 0
    refused: int = 0
    steps: int = 0
    tokens: int = 0
    ended: int = 0
    virtual_ns: int = 0
    preemptions: int = 0
    difference: str = ""
    is_cut: bool = False
    _first_ns: int | None = field(default=None, repr=False)

    def at(self, now_ns: int) -> None:
        """The clock says so."""
        if self._first_ns is None:
            self._first_ns = now_ns
        self.virtual_ns = now_ns - self._first_ns


class _Differs(Exception):  # noqa: N818  (no error: the answer)
    """The scheduler decided otherwise."""


class Player:
    """Plays one recording. `scheduler` may be looked into between two events: that is what a bug report is for."""

    def __init__(self, header: Header) -> None:
        self.scheduler: Scheduler = scheduler_of(header)
        self.found = Replay()
        self._plans: deque[StepPlan] = deque()
        self._live: dict[int, Sequence] = {}

    def play(self, events: Iterable[Event], *, check: bool = False) -> Replay:
        """Until the end, or the first difference. `check`: invariants after each event, which takes its time.

        Raises:
            ConfigError: the recording contradicts itself.
        """
        for event in events:
            if isinstance(event, Cut):
                self.found.is_cut = True
                break
            try:
                self._one(event)
            except _Differs as difference:
                self.found.difference = f"event {self.found.events}: {difference}"
                break
            self.found.events += 1
            if check:
                self.scheduler.check_invariants()
        self.found.preemptions = self.scheduler.departures.num_preemptions
        return self.found

    def _one(self, event: Event) -> None:
        match event:
            case Submitted():
                self._submit(event)
            case Planned():
                self._plan(event)
            case Applied():
                self._apply(event)
            case Ended():
                self._end(event)
            case Paused(order):
                self.scheduler.pause(self._sequence(order))
            case Resumed(order):
                self.scheduler.resume(self._sequence(order))
            case Taken(orders):
                self._reported(self.scheduler.take_ended(), orders, "outside of steps")

    def _submit(self, event: Submitted) -> None:
        self.found.requests += 1
        self.found.at(event.now_ns)
        order, code = NO_STEP, ""
        try:
            sequences = self.scheduler.submit(event.request, event.now_ns)
            order = sequences[0].order
            self._live.update((sequence.order, sequence) for sequence in sequences)
        except Exception as error:  # noqa: BLE001  (it may have been raised then, too)
            code = _code(error)
            self.found.refused += 1
        if (order, code) != (event.order, event.error):
            then, now = event.error or "was taken", code or "is taken"
            raise _Differs(f"request {event.request.request_id}: {then} then, {now} now")

    def _plan(self, event: Planned) -> None:
        self.found.at(event.now_ns)
        code = ""
        plan: StepPlan | None = None
        try:
            plan = self.scheduler.plan(event.now_ns)
        except Exception as error:  # noqa: BLE001  (as above)
            code = _code(error)
        if code or event.error:
            self._same(f"planning at {event.now_ns} ns", event.error or "a plan", code or "a plan")
            return
        self._same("what is planned next", _step(event.step), _step(plan.step if plan is not None else NO_STEP))
        if plan is None:
            return
        self.found.steps += 1
        self._plans.append(plan)
        sums = sums_of(plan)
        if sums != event.sums:
            parts = [name for name, a, b in zip(PARTS, sums, event.sums, strict=False) if a != b]
            raise _Differs(f"step {plan.step}: other {', '.join(parts) or 'parts'}; now {_shown(plan)}")

    def _apply(self, event: Applied) -> None:
        self.found.at(event.now_ns)
        if not self._plans:
            raise ConfigError(f"the recording applies step {event.step} before it is planned", field="file")
        plan = self._plans.popleft()
        result = _result(event)
        try:
            outcome = self.scheduler.apply(plan, result, event.now_ns)
        except Exception as error:  # noqa: BLE001  (as above)
            self._same(f"applying step {event.step}", event.error or "applied", _code(error))
            return
        self._same(f"applying step {event.step}", event.error or "applied", "applied")
        self.found.tokens += outcome.token_ids.size
        self._reported(outcome.ended, event.ended, f"by step {event.step}")

    def _end(self, event: Ended) -> None:
        self.found.at(event.now_ns)
        sequence = self._sequence(event.order)
        if event.how == "cancel":
            self.scheduler.cancel(sequence, event.now_ns)
        elif event.how == "fail":
            self.scheduler.fail(sequence, _error(event), event.now_ns)
        else:
            self.scheduler.finish_at(sequence, event.at, event.now_ns)

    def _reported(self, ended: list[Sequence], orders: tuple[int, ...], when: str) -> None:
        now = tuple(sequence.order for sequence in ended)
        self._same(f"sequences that ended {when}", orders, now)
        self.found.ended += len(now)
        for order in now:
            self._live.pop(order, None)

    def _sequence(self, order: int) -> Sequence:
        sequence = self._live.get(order)
        if sequence is None:
            raise _Differs(f"sequence {order} is gone already")
        return sequence

    @staticmethod
    def _same(what: str, then: Any, now: Any) -> None:
        if then != now:
            raise _Differs(f"{what}: {then} then, {now} now")


def _result(event: Applied) -> StepResult:
    try:
        counts, token_ids = np.frombuffer(event.counts, np.int32), np.frombuffer(event.token_ids, np.int32)
    except ValueError:
        raise ConfigError(f"the recording's step {event.step} is damaged: no whole numbers", field="file") from None
    flags = np.frombuffer(event.flags, np.uint8)
    return StepResult(event.step, counts, token_ids, flags, forward_ns=event.forward_ns)


def _code(error: Exception) -> str:
    return error.code if isinstance(error, PagewireError) else type(error).__name__


def _error(event: Ended) -> PagewireError:
    return from_code(event.error, event.message)


def _step(step: int) -> str:
    return "nothing" if step == NO_STEP else f"step {step}"


def _shown(plan: StepPlan) -> str:
    chunks = ", ".join(
        f"row {row}: {n} from {start}"
        for row, start, n in zip(
            plan.rows[plan.num_decode :].tolist()[:4],
            plan.starts[plan.num_decode :].tolist(),
            plan.num_tokens[plan.num_decode :].tolist(),
            strict=False,
        )
    )
    return f"{plan.num_decode} rows decode" + (f", prefill of {chunks}" if chunks else "")
