"""The worker around the device: handles in order, ended by time, by a clock or by hand; faults on demand."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.fake.mini import SHAPE
from tests.fake.test_fake_device import PROMPT, join, plan_of

from pagewire.clock import ManualClock
from pagewire.step.step import SampleFlag
from pagewire.worker.fake import BookkeepingError, FakeWorker, continuation
from pagewire.worker.interface import Worker
from pagewire_transport.params import SamplingParams

PREFILL = {
    "tokens": PROMPT,
    "samples": [(0, 0)],
    "blocks": [(0, 0, 1), (0, 1, 2)],
}


def plans(num: int = 3):
    """A prefill and the decodes after it, one row."""
    yield plan_of(0, [(0, 0, 6)], joins=[join(0, PROMPT, seed=4)], **PREFILL)
    for step in range(1, num):
        yield plan_of(step, [(0, 5 + step, 1)], num_decode=1, samples=[(0, 0)], blocks=[(0, 2, 3)] if step == 3 else [])


def launch(worker: Worker, plan):
    return worker.launch_forward(plan), worker.launch_sample(plan)


def expected(num: int):
    params = SamplingParams(max_tokens=num)
    return continuation(FakeWorker(SHAPE).device.model, PROMPT, params, 4, vocab_size=SHAPE.vocab_size)


async def turns(num: int = 5) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_steps_end_by_themselves_and_in_order():
    worker = FakeWorker(SHAPE)
    handles = [launch(worker, plan) for plan in plans(3)]
    assert not any(handle.done() for pair in handles for handle in pair), "launching ends nothing"
    tokens = [int((await sample).token_ids[0]) for _, sample in handles]
    assert tokens == expected(3)
    assert all(forward.done() for forward, _ in handles)
    worker.check()
    await worker.close()


async def test_latency_is_waited_for_one_step_after_another():
    loop = asyncio.get_running_loop()
    worker = FakeWorker(SHAPE, latency=lambda plan: 20_000_000 if plan.step == 0 else 30_000_000)
    began = loop.time()
    (_, first), (_, second) = (launch(worker, plan) for plan in plans(2))
    assert (await first).forward_ns == 20_000_000
    assert loop.time() - began >= 0.019
    assert not second.done()
    await second
    assert loop.time() - began >= 0.049
    await worker.close()


async def test_a_clock_decides_when_steps_are_due():
    clock = ManualClock()
    worker = FakeWorker(SHAPE, latency=100, clock=clock)
    handles = [launch(worker, plan)[1] for plan in plans(3)]
    clock.advance_ns(250)
    assert worker.complete_due() == 2
    assert [handle.done() for handle in handles] == [True, True, False]
    clock.advance_ns(49)
    assert worker.complete_due() == 0
    clock.advance_ns(1)
    assert worker.complete_due() == 1
    await worker.close()


async def test_held_steps_end_when_released():
    worker = FakeWorker(SHAPE, latency=None)
    made = plans(4)
    first, second = launch(worker, next(made))[1], launch(worker, next(made))[1]
    await turns()
    assert not first.done()
    worker.release(3)
    assert first.done()
    assert second.done()
    assert launch(worker, next(made))[1].done(), "released before it came"
    last = launch(worker, next(made))[1]
    await turns()
    assert not last.done()
    worker.release_all()
    await last
    await worker.close()


async def test_a_step_waits_for_its_launch_sample():
    worker = FakeWorker(SHAPE)
    plan = next(plans())
    forward = worker.launch_forward(plan)
    await turns()
    assert not forward.done()
    await worker.launch_sample(plan)
    await worker.close()


async def test_launches_out_of_order_are_refused():
    worker = FakeWorker(SHAPE)
    first, second = plans(2)
    with pytest.raises(BookkeepingError, match="does not follow"):
        worker.launch_sample(first)
    forward = worker.launch_forward(first)
    with pytest.raises(BookkeepingError, match="before step 0 may sample"):
        worker.launch_forward(second)
    await worker.close()
    assert forward.cancelled()
    with pytest.raises(BookkeepingError, match="closed"):
        worker.launch_forward(second)


async def test_a_hanging_worker_ends_nothing_until_it_goes_on():
    worker = FakeWorker(SHAPE)
    worker.hang()
    _, sample = launch(worker, next(plans()))
    await asyncio.sleep(0.01)
    assert not sample.done()
    worker.unhang()
    await sample
    await worker.close()


async def test_a_hanging_worker_can_be_closed():
    worker = FakeWorker(SHAPE)
    worker.hang()
    forward, sample = launch(worker, next(plans()))
    await worker.close()
    await worker.close()
    assert forward.cancelled()
    assert sample.cancelled()


async def test_close_ends_what_is_queued():
    worker = FakeWorker(SHAPE, latency=3_600_000_000_000)
    handles = [launch(worker, plan)[1] for plan in plans(3)]
    await worker.close()
    assert [int(handle.result().token_ids[0]) for handle in handles] == expected(3)


async def test_faults_on_demand():
    worker = FakeWorker(SHAPE)
    first, second, third = plans(3)
    worker.fail_launch(RuntimeError("launch"))
    with pytest.raises(RuntimeError, match="launch"):
        worker.launch_forward(first)
    worker.fail_step(RuntimeError("sample"))
    forward, sample = launch(worker, first)
    with pytest.raises(RuntimeError, match="sample"):
        await sample
    await forward
    worker.fail_step(RuntimeError("forward"), stage="forward")
    forward, sample = launch(worker, second)
    with pytest.raises(RuntimeError, match="forward"):
        await forward
    assert not sample.done()
    assert int((await launch(worker, third)[1]).token_ids[0]) == expected(3)[2]
    worker.check()
    await worker.close()


async def test_poison_is_a_flag_of_its_row():
    worker = FakeWorker(SHAPE)
    worker.poison(lambda join: join.seed == 4)
    result = await launch(worker, next(plans()))[1]
    assert (result.counts.tolist(), result.flags.tolist()) == ([0], [SampleFlag.NUMERIC])
    await worker.close()


async def test_mistakes_are_raised_and_kept():
    worker = FakeWorker(SHAPE)
    plan = next(plans())
    plan.token_ids = plan.token_ids + np.int32(1)
    _, sample = launch(worker, plan)
    with pytest.raises(BookkeepingError, match="other ones"):
        await sample
    with pytest.raises(BookkeepingError, match="other ones"):
        worker.check()
    with pytest.raises(BookkeepingError, match="out of order"):
        worker.launch_forward(next(plans()))
    assert len(worker.violations) == 2
    await worker.close()


async def test_a_cancelled_handle_disturbs_nobody():
    worker = FakeWorker(SHAPE, latency=None)
    first, second = plans(2)
    _, sample = launch(worker, first)
    _, other = launch(worker, second)
    sample.cancel()
    worker.release(2)
    assert int(other.result().token_ids[0]) == expected(2)[1]
    await worker.close()


def test_no_torch_is_loaded():
    import subprocess
    import sys

    code = "import sys, pagewire.worker.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
