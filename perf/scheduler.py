"""What a step costs on the host: `plan` + `apply` beside a plain numpy probe in the same run.

A stub worker answers one step late, as with overlap. Sequences are staggered in length (and once aligned, so that all
cross a block boundary in the same step), one joins and one finishes every 10 steps, and what they computed is published
in the radix tree. The probe does what cannot be left out: append, stop and length checks, growth of block tables.
Steps of the two alternate, so that both find the same machine and the same cold caches, as
in an engine whose loop does other things between two steps. Each case has a process of its own: memory that the case before
had touched would spare the probe, and not the scheduler, the page faults of a fresh start. Beside the times stand `anchors.md`'s host
table as targets; absolute times differ from machine to machine, the ratio does not.

The full policy: 512 sequences run, 512 wait, from 16 clients, all promised something; steps are timed, the cost model
learns, and one request comes and one goes every ten steps. There, and with `--cpu-time` everywhere, CPU time of the thread
counts: on a machine that others want, too, the 99th percentile of the clock's time is theirs.

    python perf/scheduler.py [--steps 3000] [--cpu-time] [--json]
    python perf/scheduler.py --million [N] [--json]  a million steps of that: the longest, beside the probe's longest
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import time

import numpy as np
from radix import measure as report_radix
from report import Report

from pagewire.config import SchedulerConfig
from pagewire.request.request import Request
from pagewire.scheduler.pipeline import Pipeline
from pagewire.scheduler.scheduler import Scheduler
from pagewire.step.step import StepPlan, StepResult
from pagewire_transport.params import SamplingParams

BLOCK = 16
PROMPT = 64
MAX_LEN = 12_288
CLIENTS = 16
STEP_NS = 10_000_000
MILLION = 1_000_000
GC_THRESHOLDS = (5_000, 20, 100)  # `pagewire.engine.process`


class Probe:
    """The least that a step needs: append, stop and length checks, growth of block tables."""

    def __init__(self, rows: int, rng: np.random.Generator, *, aligned: bool) -> None:
        self.rows = np.arange(rows, dtype=np.int32)
        self.length = (
            np.full(rows, PROMPT, np.int32) if aligned else rng.integers(PROMPT, PROMPT + BLOCK, rows, np.int32)
        )
        self.limit = np.full(rows, MAX_LEN, np.int32)
        self.ledger = np.zeros((rows, MAX_LEN + 1), np.int32)
        self.table = np.zeros((rows, MAX_LEN // BLOCK + 1), np.int32)
        self.num_blocks = -(-self.length // BLOCK)
        self.free = np.arange(rows * (MAX_LEN // BLOCK + 1), dtype=np.int32)
        self.num_free = self.free.size

    def step(self, tokens: np.ndarray, eos: int) -> int:
        self.ledger[self.rows, self.length] = tokens
        self.length += 1
        ended = (tokens == eos) | (self.length >= self.limit)
        finished = np.flatnonzero(ended).size
        growing = np.flatnonzero(self.length > self.num_blocks * BLOCK)
        if growing.size:
            self.num_free -= growing.size
            blocks = self.free[self.num_free : self.num_free + growing.size]
            self.table[growing, self.num_blocks[growing]] = blocks
            self.num_blocks[growing] += 1
        return finished


class Stub:
    """Scheduler and a worker that answers one step late."""

    def __init__(
        self, rows: int, rng: np.random.Generator, *, aligned: bool, waiting: int = 0, cpu_time: bool = False
    ) -> None:
        self.rng = rng
        self.clock = time.thread_time_ns if waiting or cpu_time else time.perf_counter_ns
        self.rows = rows
        self.num_ended = 0
        self.plan_ns = 0
        self.tokens = rng.integers(10, 1000, 4096, np.int32)
        self.now = 0
        self.serial = 0
        self.pending: list[StepPlan] = []
        promised = {"itl_target_ms": 40.0, "ttft_target_ms": 1e6} if waiting else {}
        config = SchedulerConfig(max_rows=rows, max_step_tokens=max(2048, rows), max_waiting=4 * rows + 16, **promised)
        blocks = rows * 256 + 4096  # never short: preemption is not what is measured here
        self.scheduler = Scheduler(
            num_blocks=blocks, block_size=BLOCK, max_rows=rows, max_model_len=MAX_LEN, config=config, eos_ids=(2,)
        )
        self.pipeline = Pipeline(self.scheduler, overlap=True)
        # Lengths are spread so that one sequence reaches its end every 10 steps.
        for i in range(rows):
            self.submit(PROMPT if aligned else PROMPT + int(rng.integers(0, BLOCK)), 10 * (i + 1) + 30)
        while self.scheduler.num_waiting or self.scheduler.departures.prefilling:
            self.step()
        for _ in range(waiting):
            self.submit(PROMPT, 10 * rows)

    def submit(self, prompt: int, max_tokens: int) -> None:
        self.serial += 1
        ids = self.rng.integers(10, 1000, prompt, np.int32)
        params = SamplingParams(max_tokens=max_tokens, seed=self.serial)
        request = Request(str(self.serial), ids, params, self.now, client=f"client-{self.serial % CLIENTS}")
        self.scheduler.submit(request, self.now)

    def churn(self, *, aligned: bool) -> None:
        """One joins; one finishes, unless one reached its length in the last ten steps by itself."""
        if self.scheduler.num_running >= self.rows:
            oldest = min((s for s in self.scheduler.batch.sequences if s is not None), key=lambda s: s.order)
            self.scheduler.finish_at(oldest, oldest.num_output, self.now)
        self.submit(PROMPT + (0 if aligned else int(self.rng.integers(0, BLOCK))), 10 * self.rows)

    def answer(self, plan: StepPlan) -> StepResult:
        n = plan.sample_rows.size
        return StepResult(plan.step, np.ones(n, np.int32), self.tokens[:n], np.zeros(n, np.uint8))

    def step(self) -> int:
        """One plan and one apply; nanoseconds that the two took."""
        self.now += STEP_NS
        clock = self.clock
        t0 = clock()
        plan = self.pipeline.plan(self.now)
        t1 = clock()
        self.plan_ns = t1 - t0
        if plan is not None:
            self.pending.append(plan)
        if len(self.pending) < 2 and plan is not None:
            return t1 - t0
        result = self.answer(self.pending.pop(0))
        t2 = clock()
        outcome = self.pipeline.apply(result, self.now)
        t3 = clock()
        self.num_ended += len(outcome.ended)
        return t1 - t0 + t3 - t2


def measure(
    rows: int, steps: int, *, aligned: bool, waiting: int, cpu_time: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Times of the scheduler and of the probe, ns a step, and how many sequences ended."""
    rng = np.random.default_rng(1)
    stub = Stub(rows, rng, aligned=aligned, waiting=waiting, cpu_time=cpu_time)
    probe = Probe(rows, rng, aligned=aligned)
    tokens = rng.integers(10, 1000, rows, np.int32)
    ours, theirs = [], []
    stub.num_ended = 0
    gc.collect()
    gc.freeze()
    gc.disable()
    for i in range(steps):
        t0 = stub.clock()
        probe.step(tokens, 2)
        theirs.append(stub.clock() - t0)
        if probe.length[0] > MAX_LEN - BLOCK - 2:
            probe = Probe(rows, rng, aligned=aligned)
        if i % 10 == 0:
            stub.churn(aligned=aligned)
        ours.append(stub.step())
    gc.enable()
    gc.unfreeze()
    stub.pipeline.check_invariants()
    return np.array(ours), np.array(theirs), stub.num_ended


def report_steps(report: Report, steps: int, *, cpu_time: bool) -> None:
    cases = [(n, False, 0) for n in (1, 64, 256, 512, 1024)] + [(512, True, 0), (512, False, 512)]
    for rows, aligned, waiting in cases:
        given = {"aligned": aligned, "waiting": waiting, "cpu_time": cpu_time}
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            ours, theirs, ended = pool.apply(measure, (rows, steps), given)
        case = f"{rows} running" + (", aligned" if aligned else "") + (f" + {waiting} waiting" if waiting else "")
        for name, q in (("p50", 50), ("p99", 99)):
            a, b = np.percentile(ours, q) / 1e3, np.percentile(theirs, q) / 1e3
            report.add(case, f"plan_apply_{name}", round(a, 1), "µs")
            report.add(case, f"probe_{name}", round(b, 1), "µs")
            report.add(case, f"plan_apply_{name}_ratio", round(a / b, 2), "")
        report.add(case, "ended", ended, "sequences")


class Longest:
    """What else happened in the longest step: of the thread, of the collector, and whether the machine was somewhere else."""

    def __init__(self) -> None:
        self.ns = 0
        self.found: dict[str, float] = {}
        self.num_collections = 0
        self._before = self._now()

    def begin(self) -> None:
        """A step begins."""
        self._before = self._now()

    def end(self, ns: int, plan_ns: int) -> None:
        """It took so long."""
        if ns <= self.ns:
            return
        now = self._now()
        self.ns = ns
        self.found = {"plan": plan_ns / 1e3}
        for name, a, b in zip(("page_faults", "switches", "collections"), self._before, now, strict=True):
            self.found[name] = b - a

    def _now(self) -> tuple[int, int, int]:
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return usage.ru_minflt + usage.ru_majflt, usage.ru_nivcsw + usage.ru_nvcsw, self.num_collections


def report_million(report: Report, num_steps: int) -> None:
    """Many steps of the full policy, the collector as the engine sets it, in turns with the probe.

    The probe neither allocates nor decides: what makes its longest step long is the machine, and hits ours likewise.
    """
    rng = np.random.default_rng(1)
    stub, probe = Stub(512, rng, aligned=False, waiting=512), Probe(512, rng, aligned=False)
    tokens = rng.integers(10, 1000, 512, np.int32)
    pauses, begun, longest = [], 0, Longest()

    def note(phase: str, _info: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.thread_time_ns()
        else:
            pauses.append(time.thread_time_ns() - begun)
            longest.num_collections += 1

    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.callbacks.append(note)
    ours, theirs = np.empty(num_steps, np.int64), np.empty(num_steps, np.int64)
    for i in range(num_steps):
        begins = stub.clock()
        probe.step(tokens, 2)
        theirs[i] = stub.clock() - begins
        if probe.length.max() > MAX_LEN - BLOCK - 2:
            probe.length[:], probe.num_blocks[:], probe.num_free = PROMPT, PROMPT // BLOCK, probe.free.size
        if i % 10 == 0:
            stub.churn(aligned=False)
        longest.begin()
        ours[i] = stub.step()
        longest.end(int(ours[i]), stub.plan_ns)
    gc.callbacks.remove(note)
    stub.pipeline.check_invariants()
    case = f"{num_steps:,} steps, 512 running + 512 waiting"
    for name, q in (("p50", 50), ("p99", 99), ("p99.99", 99.99), ("max", 100)):
        report.add(case, f"plan_apply_{name}", round(float(np.percentile(ours, q)) / 1e3, 1), "µs")
        report.add(case, f"probe_{name}", round(float(np.percentile(theirs, q)) / 1e3, 1), "µs")
    for name, value in longest.found.items():
        report.add(case, f"longest: {name}", round(value, 1), "µs" if name == "plan" else "")
    report.add(case, "collections", len(pauses), "")
    report.add(case, "collection_max", round(max(pauses, default=0) / 1e3, 1), "µs")
    report.add(case, "ended", stub.num_ended, "sequences")


def report_admission(report: Report) -> None:
    """A 2,000-token prompt, nothing of it cached: from submit to its first chunk planned."""
    rng = np.random.default_rng(2)
    times = []
    stub = Stub(64, rng, aligned=False)
    for _ in range(200):
        while stub.pending:
            stub.pipeline.apply(stub.answer(stub.pending.pop(0)), stub.now)
        victim = next(s for s in stub.scheduler.batch.sequences if s is not None)
        stub.scheduler.cancel(victim, stub.now)
        stub.scheduler.take_ended()
        t0 = time.perf_counter_ns()
        stub.submit(2000, 16)
        plan = stub.pipeline.plan(stub.now)
        times.append(time.perf_counter_ns() - t0)
        assert plan is not None
        assert plan.token_ids.size == 1985 or plan.token_ids.size > 1000, plan.token_ids.size
        stub.pending.append(plan)
    report.add("admission of 2,000 tokens", "submit_plan_p50", round(float(np.median(times)) / 1e3, 1), "µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the thread instead of the clock's")
    parser.add_argument("--steps", type=int, default=3000, help="measured steps a case")
    parser.add_argument(
        "--million", type=int, nargs="?", const=MILLION, help="nothing but so many steps of the full policy"
    )
    Report.arguments(parser)
    args = parser.parse_args()
    report = Report("scheduler")
    if args.million:
        report_million(report, args.million)
    else:
        report_steps(report, args.steps, cpu_time=args.cpu_time)
        report_admission(report)
        report_radix(report)
    report.finish()


if __name__ == "__main__":
    main()
