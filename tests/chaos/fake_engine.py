"""An engine process around a fake worker: ready in a moment, checks every read of KV, and fails as its prompts tell it.

A prompt that begins with a command's token does that to the engine which computes it:

    HANG        the step never ends                DIE     kill -9
    STUCK       nothing is planned any more        BLOCK   the loop waits for ever
    POISON      the logits are NaN                 BREAK   the worker raises
    UNADMITTED  the scheduler raises               SEGV    the process crashes

`model.name` may carry settings: `latency_us=500 load_s=1 light=1 vocab=49152`. `light`: a worker that keeps and checks
nothing, for long prompts and many requests. `vocab`: the engine obeys nobody and repeats the prompt; see `echo`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
import types

import numpy as np

from pagewire.engine import main as engine_main
from pagewire.scheduler.pipeline import Pipeline
from pagewire.scheduler.scheduler import Scheduler
from pagewire.step.step import StepResult
from pagewire.worker.fake import FakeWorker, fake_shape

HANG, STUCK, POISON, UNADMITTED, DIE, BLOCK, BREAK, SEGV = range(120, 128)
VOCAB = 128
EOS = 0
BLOCK_BYTES = 1024
"""So many of `cache.kv_bytes` make a block."""


class LightWorker:
    """Every token is the number of its row, plus 10, and no step takes any time but the loop's.

    From its first step on it measures how long the loop keeps a timer waiting, and how much of that the loop's own thread
    computed: on a machine that is shared the rest is others' work. `close` prints it.
    """

    def __init__(self, shape, latency_s):
        self.shape = shape
        self._latency_s = latency_s
        self._gaps = []
        self._own = []
        self._measuring = None

    async def _measure(self):
        while True:
            due, cpu = time.perf_counter() + 0.001, time.thread_time()
            await asyncio.sleep(0.001)
            gap = time.perf_counter() - due
            self._gaps.append(gap)
            self._own.append(min(gap, time.thread_time() - cpu))

    def launch_forward(self, plan):
        if self._measuring is None:
            self._measuring = asyncio.create_task(self._measure())
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def launch_sample(self, plan, masks=None):
        future = asyncio.get_running_loop().create_future()
        num = plan.sample_rows.size
        tokens = (10 + plan.sample_rows % 90).astype(np.int32)
        result = StepResult(plan.step, np.ones(num, np.int32), tokens, np.zeros(num, np.uint8))
        asyncio.get_running_loop().call_later(self._latency_s, future.set_result, result)
        return future

    async def close(self):
        if self._measuring is None:
            return
        self._measuring.cancel()
        figures = " ".join(
            f"{name}{q}={gaps[int(len(gaps) * q / 100.001)] * 1e3:.2f}"
            for name, gaps in (("p", sorted(self._gaps) or [0.0]), ("own", sorted(self._own) or [0.0]))
            for q in (50, 99, 100)
        )
        print(f"longest loop gaps in ms: {figures} of {len(self._gaps)}", file=sys.stderr, flush=True)


def obey(worker, plan):
    """Do what a prompt of this plan demands."""
    for join in plan.joins:
        command = int(join.prompt_ids[0])
        if command == HANG:
            worker.hang()
        elif command == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        elif command == BLOCK:
            time.sleep(3600)
        elif command == BREAK:
            raise RuntimeError("the device fell off the bus")
        elif command == SEGV:
            ctypes.string_at(0)


def make_worker(config):
    settings = dict(word.split("=") for word in config.model.name.split() if "=" in word)
    time.sleep(float(settings.get("load_s", 0)))
    shape = fake_shape(
        num_blocks=(config.cache.kv_bytes or 2**20) // BLOCK_BYTES,
        max_rows=config.scheduler.max_rows,
        max_model_len=config.model.max_model_len or 8192,
        vocab_size=int(settings.get("vocab", VOCAB)),
        eos_ids=(EOS,),
    )
    latency_us = int(settings.get("latency_us", 500))
    if "light" in settings:
        return LightWorker(shape, latency_us * 1e-6)
    worker = FakeWorker(shape, latency=latency_us * 1000, keep_plans=False)
    if "vocab" in settings:
        worker.device.model = echo
        return worker
    worker.poison(lambda join: int(join.prompt_ids[0]) == POISON)
    launch = worker.launch_forward

    def launch_forward(plan):
        obey(worker, plan)
        return launch(plan)

    worker.launch_forward = launch_forward
    return worker


def echo(tokens, seed):
    """Repeats the prompt, given its length as the seed."""
    return int(tokens[tokens.size - max(1, min(seed, tokens.size))])


async def load_worker(config, on_progress):
    return make_worker(config)


def break_things():
    """Let the scheduler raise on command, and plan nothing on command."""
    submit, plan = Scheduler.submit, Pipeline.plan
    stuck = []

    def broken_submit(self, request, now_ns):
        if request.prompt_ids[0] == UNADMITTED:
            raise RuntimeError("planted")
        if request.prompt_ids[0] == STUCK:
            stuck.append(1)
        return submit(self, request, now_ns)

    Scheduler.submit = broken_submit
    Pipeline.plan = lambda self, now_ns: None if stuck else plan(self, now_ns)


if __name__ == "__main__":
    # Instead of the module that imports torch; and instead of torch, of which others only ask which card there is. To
    # import it costs more than all else that a start does, and tests start many servers.
    load = types.ModuleType("pagewire.engine.load")
    load.load_worker = load_worker
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(is_available=lambda: False)
    sys.modules |= {"pagewire.engine.load": load, "torch": torch}
    break_things()
    sys.exit(engine_main.main())
