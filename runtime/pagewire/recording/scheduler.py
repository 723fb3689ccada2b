"""A scheduler that says what it is told and what it decides; and how one is made again from a header."""

from __future__ import annotations

import importlib.metadata
import zlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pagewire.errors import ConfigError, PagewireError
from pagewire.recording.events import VERSION, Applied, Ended, Event, Header, Paused, Planned, Resumed, Submitted, Taken
from pagewire.request.request import Request
from pagewire.scheduler.cost_model import CostModel
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.scheduler import Scheduler
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import StepPlan, StepResult

PARTS: Final = ("rows", "starts", "num_tokens", "token_ids", "samples", "blocks", "copies", "leaves", "joins")
"""What a plan's check sums are of, in this order."""


def sums_of(plan: StepPlan) -> tuple[int, ...]:
    """CRC-32 of each of `PARTS`."""
    joins = [number for join in plan.joins for number in (join.row, join.epoch, join.output_ids.size)]
    return (
        zlib.crc32(plan.epochs.tobytes(), zlib.crc32(plan.rows.tobytes())),
        zlib.crc32(plan.starts.tobytes()),
        zlib.crc32(plan.num_tokens.tobytes()),
        zlib.crc32(plan.token_ids.tobytes()),
        zlib.crc32(plan.sample_rows.tobytes(), zlib.crc32(plan.sample_entries.tobytes())),
        zlib.crc32(
            plan.block_ids.tobytes(), zlib.crc32(plan.block_cols.tobytes(), zlib.crc32(plan.block_rows.tobytes()))
        ),
        zlib.crc32(plan.copy_dst.tobytes(), zlib.crc32(plan.copy_src.tobytes())),
        zlib.crc32(plan.leaves.tobytes()),
        zlib.crc32(np.array(joins, np.int64).tobytes()),
    )


def header_of(*, cost_model: CostModel | None = None, **arguments: Any) -> Header:
    """The header of a recording of `Scheduler(**arguments)`."""
    model: dict[str, Any] = {}
    if cost_model is not None:
        decode, mixed = cost_model.buckets
        model = {"state": cost_model.to_state(), "buckets": decode, "mixed_buckets": mixed}
    return Header(VERSION, importlib.metadata.version("pagewire"), cost_model=model, **arguments)


def scheduler_of(header: Header) -> Scheduler:
    """A fresh scheduler, as the recorded one was in the beginning.

    Raises:
        ConfigError: the header describes none.
    """
    try:
        return _scheduler_of(header)
    except PagewireError:
        raise
    except Exception as error:  # noqa: BLE001  (numbers that no scheduler has: they break whatever is made of them)
        raise ConfigError(f"the recording's header describes no scheduler: {error!r}", field="file") from None


def _scheduler_of(header: Header) -> Scheduler:
    model: CostModel | None = None
    if header.cost_model:
        given = header.cost_model
        model = CostModel.from_state(
            given["state"], buckets=tuple(given["buckets"]), mixed_buckets=tuple(given["mixed_buckets"])
        )
    return Scheduler(
        num_blocks=header.num_blocks,
        block_size=header.block_size,
        max_rows=header.max_rows,
        max_model_len=header.max_model_len,
        config=header.config,
        eos_ids=header.eos_ids,
        prefix_cache=header.prefix_cache,
        max_step_tokens=header.max_step_tokens,
        cost_model=model,
    )


class RecordedScheduler(Scheduler):
    """Says each call from outside that changes something to `record`, after it was made; calls of its own are no news.

    A subclass, and not a wrapper, since the engine reads many attributes; and not a line at each of the engine's calls,
    since what is not recorded everywhere cannot be played again.

    Args:
        record: takes an event; must neither raise nor block.
        arguments: of `Scheduler`.
    """

    def __init__(self, record: Callable[[Event], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._record = record
        self._is_inside = False

    def submit(self, request: Request, now_ns: int) -> list[Sequence]:
        """See `Scheduler`."""
        try:
            sequences = super().submit(request, now_ns)
        except Exception as error:
            self._record(Submitted(now_ns, request, error=_code(error)))
            raise
        self._record(Submitted(now_ns, request, sequences[0].order))
        return sequences

    def cancel(self, sequence: Sequence, now_ns: int) -> bool:
        """See `Scheduler`."""
        has_ended = super().cancel(sequence, now_ns)
        if has_ended:
            self._record(Ended(now_ns, sequence.order, "cancel"))
        return has_ended

    def fail(self, sequence: Sequence, error: PagewireError, now_ns: int) -> bool:
        """See `Scheduler`."""
        has_ended = super().fail(sequence, error, now_ns)
        if has_ended and not self._is_inside:
            self._record(Ended(now_ns, sequence.order, "fail", error=error.code, message=error.message))
        return has_ended

    def finish_at(self, sequence: Sequence, at: int, now_ns: int) -> bool:
        """See `Scheduler`."""
        has_ended = super().finish_at(sequence, at, now_ns)
        if has_ended:
            self._record(Ended(now_ns, sequence.order, "finish_at", at))
        return has_ended

    def pause(self, sequence: Sequence) -> None:
        """See `Scheduler`."""
        super().pause(sequence)
        if sequence.is_live:
            self._record(Paused(sequence.order))

    def resume(self, sequence: Sequence) -> None:
        """See `Scheduler`."""
        super().resume(sequence)
        if sequence.is_live:
            self._record(Resumed(sequence.order))

    def take_ended(self) -> list[Sequence]:
        """See `Scheduler`. Recorded where there were some: the call changes nothing otherwise."""
        ended = super().take_ended()
        if ended:
            self._record(Taken(tuple(sequence.order for sequence in ended)))
        return ended

    def plan(self, now_ns: int) -> StepPlan | None:
        """See `Scheduler`."""
        self._is_inside = True
        try:
            plan = super().plan(now_ns)
        except Exception as error:
            self._record(Planned(now_ns, error=_code(error)))
            raise
        finally:
            self._is_inside = False
        self._record(Planned(now_ns) if plan is None else Planned(now_ns, plan.step, sums_of(plan)))
        return plan

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutcome:
        """See `Scheduler`."""
        self._is_inside = True
        ended: tuple[int, ...] = ()
        code = ""
        try:
            outcome = super().apply(plan, result, now_ns)
            ended = tuple(sequence.order for sequence in outcome.ended)
        except Exception as error:
            code = _code(error)
            raise
        finally:
            self._is_inside = False
            self._record(
                Applied(
                    now_ns,
                    result.step,
                    result.counts.tobytes(),
                    result.token_ids.tobytes(),
                    result.flags.tobytes(),
                    result.forward_ns,
                    ended,
                    code,
                )
            )
        return outcome


def _code(error: Exception) -> str:
    """What was raised, in a word."""
    return error.code if isinstance(error, PagewireError) else type(error).__name__
