"""A deployment: a model on cards, how KV memory is given out, who prefills; and a run of a workload on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from pagewire.config import SchedulerConfig
from pagewire.errors import ConfigError
from pagewire.scheduler.cost_model import CostModel
from pagewire.scheduler.scheduler import Scheduler
from pagewire.simulator.card import (
    DECODE_BUCKETS,
    H200,
    MIXED_BUCKETS,
    CardRates,
    ModelledCard,
    ModelShape,
    Precision,
    ReceivingCard,
)
from pagewire.simulator.figures import Counting, Figures, Summary, summarise
from pagewire.simulator.simulation import Host, Simulation, run_together
from pagewire.simulator.traces import Arrival, Workload

Allocation = Literal["paged", "contiguous"]

_ARRIVING_TOKENS: Final = 1 << 20
"""Prompts that come with their K and V cost a step nothing, however long they are."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """What runs where.

    Attributes:
        gpus: cards of the group that decodes (and, without `prefill_gpus`, prefills).
        prefill_gpus: cards of a group of their own for prompts, whose K and V then travel; 0: none.
        allocation: paged; or contiguous, which reserves the longest sequence for each, rounded up to a power of two: the
            same scheduler with one block a sequence.
        kv_tokens: size of the pool; 0: what fits on the cards.
        prefill_step_tokens: tokens of a step of the cards that only prefill: nobody waits for their next step.
    """

    model: ModelShape
    rates: CardRates = H200
    gpus: int = 1
    prefill_gpus: int = 0
    weights: Precision = "bf16"
    kv: Precision = "bf16"
    allocation: Allocation = "paged"
    max_model_len: int = 0
    kv_tokens: int = 0
    block_size: int = 16
    prefix_cache: bool = True
    prefill_step_tokens: int = 8192
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(max_rows=512, max_step_tokens=1024))
    host: Host = field(default_factory=Host)

    @property
    def max_len(self) -> int:
        """Longest sequence, tokens."""
        return self.max_model_len or self.model.max_positions

    def card(self, *, prefills: bool = True) -> ModelledCard:
        """The group that decodes, or with `prefill_gpus` either of the two.

        Raises:
            ConfigError: the model does not fit.
        """
        if self.prefill_gpus == 0:
            kind, gpus = ModelledCard, self.gpus
        else:
            kind, gpus = (ModelledCard, self.prefill_gpus) if prefills else (ReceivingCard, self.gpus)
        return kind(self.model, self.rates, gpus=gpus, weights=self.weights, kv=self.kv)

    def make_scheduler(self, card: ModelledCard, *, step_tokens: int = 0) -> Scheduler:
        """A fresh scheduler whose pool is what `card` holds; `step_tokens` other than the configuration's, where not 0.

        Raises:
            ConfigError: not even one sequence fits.
        """
        tokens = self.kv_tokens or card.kv_tokens
        block_size, prefix_cache = self.block_size, self.prefix_cache
        if self.allocation == "contiguous":
            block_size, prefix_cache = 1 << (self.max_len - 1).bit_length(), False
            if tokens < block_size:
                raise ConfigError(
                    f"{tokens} tokens of KV memory hold no sequence of {block_size}", field="max_model_len"
                )
        return Scheduler(
            num_blocks=tokens // block_size + 1,
            block_size=block_size,
            max_rows=self.scheduler.max_rows,
            max_model_len=self.max_len,
            config=msgspec.structs.replace(
                self.scheduler, max_step_tokens=step_tokens or self.scheduler.max_step_tokens
            ),
            prefix_cache=prefix_cache,
            cost_model=CostModel(card.prior(), buckets=DECODE_BUCKETS, mixed_buckets=MIXED_BUCKETS),
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run. `prefill` and `prefill_scheduler` are of the cards that only prefill, None where there are none."""

    figures: Figures
    scheduler: Scheduler
    seconds: float
    digest: str
    prefill: Figures | None = None
    prefill_scheduler: Scheduler | None = None

    @property
    def summary(self) -> Summary:
        """Its figures."""
        hits = self.prefill_scheduler.admission if self.prefill_scheduler is not None else None
        return summarise(self.figures, self.scheduler, self.seconds, self.digest, first=self.prefill, hits=hits)


class _Handover:
    """Prompts that were computed elsewhere, in the order in which their K and V arrive."""

    def __init__(self, on_ended: Callable[[int], None]) -> None:
        self._due: list[tuple[int, int, Arrival]] = []
        self._on_ended = on_ended

    def push(self, arrival: Arrival, due_ns: int) -> None:
        heapq.heappush(self._due, (due_ns, arrival.number, arrival))

    def next_ns(self) -> int | None:
        return self._due[0][0] if self._due else None

    def take(self) -> Arrival:
        return heapq.heappop(self._due)[2]

    def ended(self, now_ns: int) -> None:
        self._on_ended(now_ns)


class _Prompts:
    """A workload of which only first tokens are asked; its clients hear of an end when the rest has ended, too."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.open: dict[int, Arrival] = {}

    def next_ns(self) -> int | None:
        return self._workload.next_ns()

    def take(self) -> Arrival:
        arrival = self._workload.take()
        self.open[arrival.number] = arrival
        return Arrival(arrival.at_ns, arrival.number, arrival.num_prompt, 1, arrival.prefix_ids)

    def ended(self, now_ns: int) -> None:
        """Not the end of the whole."""


def simulate(
    deployment: Deployment,
    workload: Workload,
    *,
    window_ns: int,
    until_ns: int = 2**62,
    counting: Counting | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Run:
    """Run `workload` on a fresh `deployment`.

    Raises:
        ConfigError: the deployment cannot exist.
    """
    counting = counting if counting is not None else Counting()
    card = deployment.card(prefills=False)
    scheduler = deployment.make_scheduler(card, step_tokens=_ARRIVING_TOKENS if deployment.prefill_gpus else 0)
    overlap = deployment.scheduler.overlap
    if deployment.prefill_gpus == 0:
        figures = Figures(window_ns, counting=counting)
        simulation = Simulation(scheduler, card, workload, figures, host=deployment.host, overlap=overlap)
        simulation.run(until_ns, on_progress)
        return Run(figures, scheduler, _seconds(simulation, counting), simulation.digest)
    return _disaggregated(deployment, workload, card, scheduler, window_ns, until_ns, counting, on_progress)


def _seconds(simulation: Simulation, counting: Counting) -> float:
    """Length of the time in which tokens counted."""
    return max(1, min(simulation.now_ns, counting.until_ns) - counting.from_ns) / 1e9


def _disaggregated(
    deployment: Deployment,
    workload: Workload,
    card: ModelledCard,
    scheduler: Scheduler,
    window_ns: int,
    until_ns: int,
    counting: Counting,
    on_progress: Callable[[int], None] | None,
) -> Run:
    prefill_card = deployment.card(prefills=True)
    prompts = _Prompts(workload)
    handover = _Handover(workload.ended)

    def computed(prompt: Arrival, at_ns: int) -> None:
        whole = prompts.open.pop(prompt.number)
        if whole.num_output == 1:
            workload.ended(at_ns)
            return
        # The first token is with the client; K and V of the prompt follow it to the other cards.
        rest = Arrival(at_ns, whole.number, whole.num_prompt + 1, whole.num_output - 1)
        handover.push(rest, at_ns + card.transfer_ns(whole.num_prompt))

    first = Figures(window_ns, counting=counting)
    rest = Figures(window_ns, continues=True, counting=counting)
    prefill = Simulation(
        deployment.make_scheduler(prefill_card, step_tokens=deployment.prefill_step_tokens), prefill_card, prompts, first,
        host=deployment.host, overlap=deployment.scheduler.overlap, on_ended=computed,
    )  # fmt: skip
    decode = Simulation(scheduler, card, handover, rest, host=deployment.host, overlap=deployment.scheduler.overlap)
    run_together((prefill, decode), until_ns, on_progress)
    digest = prefill.digest + decode.digest
    return Run(rest, scheduler, _seconds(decode, counting), digest, first, prefill.scheduler)
