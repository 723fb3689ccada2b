"""A worker whose steps end when the test says so, and an engine core with everything that tests look at."""

import asyncio

import numpy as np

from pagewire.clock import MonotonicClock
from pagewire.config import from_mapping
from pagewire.engine.core import EngineCore
from pagewire.scheduler.scheduler import Scheduler
from pagewire.step.step import StepResult
from pagewire.worker.interface import WorkerShape
from pagewire_transport.params import SamplingParams


class HandWorker:
    """Every token is the number of the step that drew it, plus 10. Steps end at once, or, when held, on `release`."""

    def __init__(self, **shape):
        defaults = {
            "num_blocks": 33,
            "block_size": 16,
            "max_rows": 8,
            "max_model_len": 256,
            "vocab_size": 1000,
            "eos_ids": (),
            "kv_bytes": 0,
            "model_name": "hand",
        }
        self.shape = WorkerShape(**{**defaults, **shape})
        self.is_held = False
        self.plans = []
        self.masks = []
        self.forwards = []
        self.samples = []  # (plan, future), not resolved yet
        self.is_closed = False
        self.fail_launch = None

    def launch_forward(self, plan):
        if self.fail_launch is not None:
            raise self.fail_launch
        self.plans.append(plan)
        future = asyncio.get_running_loop().create_future()
        self.forwards.append(future)
        if not self.is_held:
            future.set_result(None)
        return future

    def launch_sample(self, plan, masks=None):
        self.masks.append(masks)
        future = asyncio.get_running_loop().create_future()
        self.samples.append((plan, future))
        if not self.is_held:
            asyncio.get_running_loop().call_soon(self.release)
        return future

    def result(self, plan):
        num = plan.sample_rows.size
        return StepResult(
            plan.step, np.ones(num, np.int32), np.full(num, 10 + plan.step, np.int32), np.zeros(num, np.uint8)
        )

    def release(self):
        """End the oldest step."""
        plan, future = self.samples.pop(0)
        forward = self.forwards[plan.step]
        if not forward.done():
            forward.set_result(None)
        future.set_result(self.result(plan))

    def release_all(self):
        """End what runs, and hold nothing any more."""
        self.is_held = False
        while self.samples:
            self.release()

    async def close(self):
        self.is_closed = True


class Recorder:
    """A sink that keeps what it was told, and can be made to fail."""

    def __init__(self):
        self.outcomes = []
        self.ended = []
        self.fault = None
        self.on = lambda outcome: None

    def on_outcome(self, outcome):
        self.outcomes.append(outcome)
        self.ended.extend(outcome.ended)
        self.on(outcome)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault


class Log:
    """Takes log events as a list of (event, keys)."""

    def __init__(self):
        self.events = []

    def _take(self, event, **keys):
        self.events.append((event, keys))

    info = warning = error = exception = _take

    def __contains__(self, event):
        return any(name == event for name, _ in self.events)


class Bench:
    """An engine core with everything that tests look at."""

    def __init__(self, worker, tmp_path, *, clock=None, masks=None, make_scheduler=Scheduler, **sections):
        sections.setdefault("scheduler", {})
        sections["scheduler"] = {"max_rows": 8, "max_step_tokens": 64, "seed": 7, **sections["scheduler"]}
        sections["engine"] = {"dump_dir": str(tmp_path), **sections.get("engine", {})}
        self.worker = worker
        self.sink = Recorder()
        self.log = Log()
        self.core = EngineCore(
            worker,
            config=from_mapping(sections),
            clock=clock or MonotonicClock(),
            sinks=(self.sink,),
            masks=masks,
            make_scheduler=make_scheduler,
            log=self.log,
        )

    def submit(self, prompt=20, *, priority=0, **params):
        """Sequences of a request with a prompt of so many tokens, or of these."""
        ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        request = self.core.admission.admit(ids, SamplingParams(**params), priority=priority)
        return self.core.submit(request)

    async def until(self, condition, timeout_s=5.0):
        """Let the loop run until something holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.001)

    async def ended(self, *sequences, timeout_s=5.0):
        """Until these were reported as ended."""
        await self.until(lambda: all(any(s is e for e in self.sink.ended) for s in sequences), timeout_s)

    @property
    def num_available(self):
        return self.core.scheduler.memory.num_available


def check_after_every_step(core):
    """From now on the scheduler's invariants are checked after every plan and every apply."""
    pipeline, plan, apply = core.pipeline, core.pipeline.plan, core.pipeline.apply

    def checked_plan(now_ns):
        out = plan(now_ns)
        pipeline.check_invariants()
        return out

    def checked_apply(result, now_ns):
        out = apply(result, now_ns)
        pipeline.check_invariants()
        return out

    pipeline.plan, pipeline.apply = checked_plan, checked_apply


async def back_to_baseline(bench):
    """Every block is free or cached, nobody holds one, and no row is taken."""
    scheduler = bench.core.scheduler
    await bench.until(lambda: bench.core._launches.oldest is None)
    assert bench.num_available == scheduler.memory.num_usable
    assert not scheduler.memory.pool.ref.any()
    assert scheduler.batch.num_rows == 0
    assert bench.core.num_live == 0
    bench.core.pipeline.check_invariants()
