"""The engine loop: plans steps, keeps the worker one step ahead, hands out what each step brought.

One asyncio task, and everything of the scheduler happens on its thread. The public methods are plain calls: they change
the scheduler's state at once and wake the loop, which then plans. Nothing here waits for a socket, a disk or the
device:

    submit / cancel / …  ──▶ scheduler ──▶ wake ─┐
                                                 ▼
    step's handle resolves ──▶ wake ──▶  turn:  apply the oldest step that is done ──▶ sinks
                                                report what ended without a step   ──▶ sinks
                                                while can_plan: plan, launch forward, launch sample
                                                sleep until woken

A queue of commands was rejected: it would delay a cancel by a wake-up and gain nothing, since callers and loop share a
thread. Sinks come before the next plan, because a stop string found by a sink then ends its sequence before it is
planned once more; the worker does not starve meanwhile, the next step is queued already.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import structlog

from pagewire.clock import Clock
from pagewire.config import Config
from pagewire.engine.admission import Admission
from pagewire.engine.decisions import DecisionLog, Load
from pagewire.engine.health import Health, Monitor
from pagewire.engine.instruments import Instruments
from pagewire.engine.launches import Launches, MaskSource, WorkerError
from pagewire.engine.watchdog import Progress
from pagewire.errors import Draining, EngineFailed, EngineLost, InternalError, PagewireError, Unavailable
from pagewire.metrics import Registry
from pagewire.request.request import Request, TokenArray
from pagewire.scheduler.cost_model import CostModel
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.pipeline import Pipeline
from pagewire.scheduler.scheduler import Scheduler
from pagewire.scheduler.sequence import Sequence, SequenceState
from pagewire.worker.interface import Worker

NO_STEP: Final = -1
"""`StepOutcome.step` of what ended without a step."""


class Sink(Protocol):
    """Whoever streams tokens: the wire server, the in-process engine."""

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Take what a step brought. Plain call on the loop: it must not block.

        A sink isolates its own streams. If it raises all the same, every sequence named by the outcome is failed,
        since its reader may have missed tokens.
        """
        ...


class EngineCore:
    """Owns pipeline and worker. Made and used on one event loop.

    Args:
        worker: loaded; closed by `stop`.
        config: sections `cache`, `scheduler` and `engine` are used.
        clock: gives every time that the scheduler sees.
        sinks: told of every outcome, in this order; the attribute may be changed at any time.
        masks: see `MaskSource`.
        registry: where metrics are kept.
        cost_model: what is known of how long steps take; None: nothing yet.
        make_scheduler: `Scheduler`, or one that is recorded.
        log: a structlog logger; None: that of the process.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        config: Config,
        clock: Clock,
        sinks: tuple[Sink, ...] = (),
        masks: MaskSource | None = None,
        registry: Registry | None = None,
        cost_model: CostModel | None = None,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
        log: Any = None,
    ) -> None:
        self.worker = worker
        self.config = config
        self.clock = clock
        shape = worker.shape
        self.scheduler = make_scheduler(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_rows=shape.max_rows,
            max_model_len=shape.max_model_len,
            config=config.scheduler,
            max_step_tokens=shape.max_step_tokens,
            eos_ids=shape.eos_ids,
            prefix_cache=config.cache.prefix_cache,
            cost_model=cost_model or CostModel(buckets=shape.decode_buckets, mixed_buckets=shape.mixed_buckets),
        )
        self.admission = Admission(
            vocab_size=shape.vocab_size,
            max_len=self.scheduler.max_len,
            clock=clock,
            seed=config.scheduler.seed,
            kv_format=shape.kv_format,
        )
        self.pipeline = Pipeline(self.scheduler, overlap=config.scheduler.overlap)
        self.decisions = DecisionLog(config.engine.decision_log)
        self.instruments = Instruments(registry if registry is not None else Registry())
        self.sinks = list(sinks)
        self._log = log if log is not None else structlog.get_logger("pagewire.engine")
        self._monitor = Monitor(
            limit_ns=config.engine.stall_timeout_ms * 1_000_000,
            clock=clock,
            progress=self._progress,
            on_stall=self._stalled,
            on_dead=self._fault,
            decisions=self.decisions,
            dump_dir=Path(config.engine.dump_dir or tempfile.gettempdir()),
            loop_lag=self.instruments.loop_lag,
            log=self._log,
        )
        self._live: dict[int, Sequence] = {}  # by slot
        self._num_paused = 0
        self._launches = Launches(worker, masks, self.wake)
        self._failure: EngineFailed | None = None
        self._is_draining = False
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        self._is_woken = False
        self._waker: asyncio.Future[None] | None = None
        self._emptied: asyncio.Future[None] | None = None
        self.instruments.look_at(self.scheduler, self._load, lambda: self.health.ready)

    # ---- what callers ask for: plain calls on the loop's thread --------------------------------------------------

    @property
    def health(self) -> Health:
        """Ready or not, and why not."""
        return self._monitor.health

    @property
    def num_live(self) -> int:
        """Sequences that were taken and have not been reported as ended."""
        return len(self._live)

    def submit(self, request: Request) -> list[Sequence]:
        """Take a request; its `n` sequences, waiting.

        Raises:
            InvalidRequest, PromptTooLong, Overloaded: refused by the scheduler.
            Draining, EngineLost: nothing is taken any more.
            Unavailable: not now; the engine stalls.
        """
        if self._failure is not None:
            raise EngineLost(self._failure.message)  # a new one: one raised again and again collects tracebacks
        if self._is_draining:
            raise Draining("the engine is shutting down")
        if not self.health.ready:
            raise Unavailable(
                f"the engine is not ready: {self.health.reason}", retry_after_ms=self.config.engine.stall_timeout_ms
            )
        try:
            sequences = self.scheduler.submit(request, self.clock.now_ns())
        except PagewireError:
            self.instruments.refused.add()
            raise
        except Exception as error:
            self.instruments.refused.add()
            self._log.exception("submit_failed", request_id=request.request_id)
            raise InternalError(f"the request could not be admitted: {error!r}") from error
        for sequence in sequences:
            self._live[sequence.slot] = sequence
        self.instruments.on_submit(sequences)
        self.wake()
        return sequences

    def cancel(self, sequence: Sequence) -> bool:
        """End it, in whatever state it is; reported by an outcome. False: it had ended."""
        return self._ended(self.scheduler.cancel(sequence, self.clock.now_ns()))

    def fail(self, sequence: Sequence, error: PagewireError) -> bool:
        """End it with an error; reported by an outcome. False: it had ended."""
        return self._ended(self.scheduler.fail(sequence, error, self.clock.now_ns()))

    def finish_at(self, sequence: Sequence, at: int) -> bool:
        """Cut it after `at` generated tokens: a stop string was found. False: it had ended."""
        overrun = sequence.num_output - at
        has_ended = self.scheduler.finish_at(sequence, at, self.clock.now_ns())
        if has_ended:
            self.instruments.overrun_tokens.add(max(0, overrun))
        return self._ended(has_ended)

    def _ended(self, has_ended: bool) -> bool:
        if has_ended:
            self.wake()
        return has_ended

    def pause(self, sequence: Sequence) -> None:
        """Plan it no more until `resume`: its reader does not keep up. It may be preempted meanwhile."""
        if sequence.is_live and not sequence.is_paused:
            self._num_paused += 1
            self.scheduler.pause(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Undo `pause`."""
        if sequence.is_live and sequence.is_paused:
            self._num_paused -= 1
            self.scheduler.resume(sequence)
            self.wake()

    def output(self, sequence: Sequence, start: int = 0, stop: int | None = None) -> TokenArray:
        """Committed output tokens start … stop − 1, int32; of a live sequence or one that ended."""
        return self.scheduler.output(sequence, start, sequence.num_output if stop is None else stop)

    def stats(self) -> dict[str, float]:
        """All metrics as numbers; see `docs/metrics.md`."""
        return self.instruments.registry.values()

    def wake(self) -> None:
        """Let the loop take a turn."""
        self._is_woken = True
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    # ---- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve, on the running loop."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name="engine loop")
        self._monitor.start()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the live ones; those still live at the deadline end with `Draining`.

        Returns:
            Whether all ended by themselves.
        """
        self._is_draining = True
        if self._failure is None:
            self._monitor.close("draining")
        in_time = await self._empty_within(timeout_s)
        if not in_time:
            for sequence in list(self._live.values()):
                self.fail(sequence, Draining("the engine is shutting down and the time for open streams is over"))
            # Reported by the next turn, which waits for no step: the loop is woken by `fail`.
            await self._empty_within(1.0)
        return in_time

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """End the loop and close the worker; sequences still live are cancelled. Idempotent.

        Returns:
            False where the worker did not close within `timeout_s`: only ending the process frees it.
        """
        self._is_draining = True
        for sequence in list(self._live.values()):
            self.cancel(sequence)
        await self._empty_within(min(1.0, timeout_s))
        self._is_stopping = True
        self.wake()
        if self._task is not None:
            await self._task
        await self._monitor.stop()
        if self._failure is None:
            self._monitor.close("stopped")
        try:
            await asyncio.wait_for(self.worker.close(), timeout_s)
        except TimeoutError:
            self._log.error("worker_not_closed", timeout_s=timeout_s)
            return False
        return True

    async def wait_failed(self) -> EngineFailed:
        """Return the reason once the engine has failed for good; never, if it does not."""
        assert self._task is not None
        await asyncio.wait([self._task])
        if self._failure is None:
            await asyncio.get_running_loop().create_future()
        assert self._failure is not None
        return self._failure

    async def _empty_within(self, timeout_s: float) -> bool:
        if self._live and self._task is not None and not self._task.done():
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._emptied], timeout=timeout_s)
            self._emptied = None
        return not self._live

    # ---- the loop ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._is_stopping and self._failure is None:
            self._is_woken = False
            try:
                has_moved = self._turn()
            except Exception as error:  # noqa: BLE001  (whatever it was, every open stream gets an answer)
                is_worker = isinstance(error, WorkerError)
                self._fault(str(error) if is_worker else f"fault in the engine loop: {error!r}", error)
                return
            if has_moved or self._is_woken:
                await asyncio.sleep(0)  # sockets have their turn between two of ours
            else:
                self._waker = asyncio.get_running_loop().create_future()
                await self._waker
                self._waker = None

    def _turn(self) -> bool:
        """Whether anything moved."""
        applied = self._apply_oldest()
        ended = self.scheduler.take_ended()
        if ended:
            self._hand_out(StepOutcome(NO_STEP, ended=ended))
        launched = self._launch()
        return applied or bool(ended) or launched

    def _launch(self) -> bool:
        launched = False
        while self.pipeline.can_plan():
            begun_ns = self.clock.now_ns()
            plan = self.pipeline.plan(begun_ns)
            if plan is None:
                if self._live and self._launches.oldest is None:  # otherwise there is merely nothing more to plan
                    self.decisions.nothing_planned(begun_ns, self._load())
                break
            self.decisions.planned(plan, begun_ns, self._load())
            now_ns = self.clock.now_ns()
            self.instruments.schedule_time.observe((now_ns - begun_ns) * 1e-9)
            self._launches.launch(plan, now_ns)
            launched = True
        return launched

    def _apply_oldest(self) -> bool:
        begun_ns = self.clock.now_ns()
        done = self._launches.take_done(begun_ns)
        if done is None:
            return False
        launch, result = done
        outcome = self.pipeline.apply(result, begun_ns)
        now_ns = self.clock.now_ns()
        self.instruments.schedule_time.observe((now_ns - begun_ns) * 1e-9)
        self.instruments.on_step(launch.plan, result, outcome, begun_ns - launch.since_ns)
        for entry in np.flatnonzero(outcome.starts == 0).tolist():
            sequence = self._live.get(int(outcome.slots[entry]))
            if sequence is not None:
                self.instruments.on_first_token(sequence, now_ns)
        self._hand_out(outcome)
        return True

    def _hand_out(self, outcome: StepOutcome) -> None:
        if outcome.ended:
            now_ns = self.clock.now_ns()
            for sequence in outcome.ended:
                self._live.pop(sequence.slot, None)
                self._num_paused -= sequence.is_paused
                self.instruments.on_ended(sequence, now_ns)
        for sink in tuple(self.sinks):
            try:
                sink.on_outcome(outcome)
            except Exception as error:  # noqa: BLE001  (a sink's fault ends its streams, not the engine)
                self.instruments.sink_faults.add()
                self._log.exception("sink_failed", step=outcome.step)
                for slot in outcome.slots.tolist():
                    if slot in self._live:
                        self.fail(self._live[slot], InternalError(f"its tokens could not be handed out: {error!r}"))
        if not self._live and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    # ---- faults and health ---------------------------------------------------------------------------------------

    def _fault(self, reason: str, cause: BaseException | None = None) -> None:
        """The engine ends: every live sequence fails with `reason`, nothing is planned any more.

        The scheduler is not asked: the fault may be its own, and the blocks go with the process.
        """
        self._failure = EngineFailed(reason)
        self._monitor.fail(reason)
        self._log.error("engine_failed", reason=reason, exc_info=cause)
        open_ones = list(self._live.values())
        for sequence in open_ones:
            if sequence.is_live:  # the others ended by themselves and were about to be reported
                sequence.state, sequence.finish_reason = SequenceState.FINISHED, "error"
                sequence.error = EngineLost(reason)  # whoever reads it may go on at another engine
                sequence.finished_ns = self.clock.now_ns()
        if open_ones:
            self._hand_out(StepOutcome(NO_STEP, ended=open_ones))
        self.wake()

    def _stalled(self, reason: str) -> None:
        self.instruments.stalls.add()
        for sequence in list(self._live.values()):
            self.fail(sequence, EngineFailed(f"the engine stalls: {reason}"))

    def _progress(self) -> Progress:
        oldest, load = self._launches.oldest, self._load()
        return Progress(
            step=oldest.plan.step if oldest is not None else None,
            stage=oldest.stage if oldest is not None else "",
            step_since_ns=oldest.since_ns if oldest is not None else 0,
            num_running=load.running,
            num_waiting=load.waiting,
            num_paused=load.paused,
            num_committed=self.instruments.output_tokens.value,
            num_prefilled=self.instruments.prefilled_tokens.value,
            num_ended_tokens=self.instruments.num_ended_tokens,
            num_live_tokens=lambda: sum(s.num_prompt + s.num_output for s in self._live.values()),
        )

    def _load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            paused=self._num_paused,
            free_blocks=scheduler.memory.num_available,
        )
