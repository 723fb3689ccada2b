"""What the engine measures about itself; see `docs/metrics.md` for the names."""

from __future__ import annotations

from collections.abc import Callable

from pagewire.engine.decisions import Load
from pagewire.metrics import Registry
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.scheduler import Scheduler
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import StepPlan, StepResult

_NS = 1e-9


class Instruments:
    """Updates are O(1) a step; per sequence there is one at its first token and one at its end."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.requests = registry.counter("requests_total")
        self.refused = registry.counter("requests_refused_total")
        self.sequences = registry.counter("sequences_total")
        self.ended = {
            reason: registry.counter(f"sequences_{reason}_total") for reason in ("stop", "length", "cancelled", "error")
        }
        self.prompt_tokens = registry.counter("prompt_tokens_total")
        self.cached_tokens = registry.counter("prompt_tokens_cached_total")
        self.prefilled_tokens = registry.counter("prefilled_tokens_total")
        self.recomputed_tokens = registry.counter("recomputed_tokens_total")
        self.output_tokens = registry.counter("output_tokens_total")
        self.overrun_tokens = registry.counter("overrun_tokens_total")
        self.preemptions = registry.counter("preemptions_total")
        self.steps = registry.counter("steps_total")
        self.stalls = registry.counter("stalls_total")
        self.sink_faults = registry.counter("sink_faults_total")
        self.step_time = registry.histogram("step_seconds")
        self.forward_time = registry.histogram("forward_seconds")
        self.schedule_time = registry.histogram("schedule_seconds")
        self.loop_lag = registry.histogram("loop_lag_seconds")
        self.queue_time = registry.histogram("queue_seconds")
        self.first_token_time = registry.histogram("first_token_seconds")
        self.request_time = registry.histogram("sequence_seconds")
        self.num_ended_tokens = 0
        """Prompt and output tokens of all ended sequences, for the watchdog."""

    def look_at(self, scheduler: Scheduler, load: Callable[[], Load], is_ready: Callable[[], bool]) -> None:
        """Add the gauges, read when somebody asks."""
        gauge, memory = self.registry.gauge, scheduler.memory
        gauge("ready", is_ready)
        gauge("sequences_running", lambda: load().running)
        gauge("sequences_waiting", lambda: load().waiting)
        gauge("sequences_paused", lambda: load().paused)
        model, promises = scheduler.pacer.model, scheduler.promises
        gauge("step_prediction_error", lambda: model.error)
        gauge("step_prediction_bias", lambda: model.bias)
        gauge("step_prediction_margin", lambda: model.margin)
        gauge("promises_refused_total", lambda: promises.num_refused)
        gauge("promises_late_total", lambda: promises.num_late)
        gauge("clients_waiting", lambda: scheduler.waiting.num_clients)
        gauge("recomputed_share", lambda: self._recomputed_share(scheduler))
        gauge("kv_blocks", lambda: memory.num_usable)
        gauge("kv_blocks_used", lambda: memory.num_usable - memory.num_available)
        gauge("kv_blocks_cached", lambda: memory.pool.num_cached)

    def _recomputed_share(self, scheduler: Scheduler) -> float:
        computed = self.prefilled_tokens.value + self.output_tokens.value
        return scheduler.admission.num_recomputed_tokens / computed if computed else 0.0

    def on_submit(self, sequences: list[Sequence]) -> None:
        """A request was taken."""
        self.requests.add()
        self.sequences.add(len(sequences))
        self.prompt_tokens.add(sequences[0].num_prompt)

    def on_step(self, plan: StepPlan, result: StepResult, outcome: StepOutcome, step_ns: int) -> None:
        """A step was applied."""
        self.steps.add()
        self.prefilled_tokens.add(int(plan.token_ids.size))
        self.output_tokens.add(int(outcome.token_ids.size))
        self.step_time.observe(step_ns * _NS)
        if result.forward_ns:
            self.forward_time.observe(result.forward_ns * _NS)

    def on_first_token(self, sequence: Sequence, now_ns: int) -> None:
        """Its first token is known."""
        arrival_ns = sequence.request.arrival_ns
        self.first_token_time.observe((now_ns - arrival_ns) * _NS)
        if sequence.first_scheduled_ns is not None:
            self.queue_time.observe((sequence.first_scheduled_ns - arrival_ns) * _NS)

    def on_ended(self, sequence: Sequence, now_ns: int) -> None:
        """It ended, whatever the reason."""
        self.ended[sequence.finish_reason or "error"].add()
        self.preemptions.add(sequence.num_preemptions)
        self.recomputed_tokens.add(sequence.num_recomputed)
        if sequence.choice == 0:  # the others took the prompt from this one: no work was saved by the cache
            self.cached_tokens.add(sequence.num_cached)
        self.num_ended_tokens += sequence.num_prompt + sequence.num_output
        self.request_time.observe((now_ns - sequence.request.arrival_ns) * _NS)
