"""F13, F14, F15, F16: a request that ends in whatever state gives back all that it held, once, and nothing in use."""

import asyncio
import random

import pytest
from engine_bench import back_to_baseline
from fakes import expected, fake

from pagewire.errors import InternalError

SHARED = [1] * 48


async def queued(bench):
    """Waits for a row."""
    others = [bench.submit([20 + i] * 20, max_tokens=100, ignore_eos=True)[0] for i in range(8)]
    await bench.until(lambda: all(s.num_output for s in others))
    (target,) = bench.submit([2] * 20, max_tokens=50, seed=1, ignore_eos=True)
    return target


async def just_submitted(bench):
    """The loop has not seen it yet."""
    return bench.submit([2] * 20, max_tokens=50, seed=1, ignore_eos=True)[0]


async def held_for_a_prefix(bench):
    """Waits while another prompt computes what both share."""
    bench.worker.hang()
    bench.submit([*SHARED, 7, 8, 9], max_tokens=4, seed=2)
    (target,) = bench.submit([*SHARED, 9, 9], max_tokens=50, seed=1, ignore_eos=True)
    await bench.until(lambda: target.is_held)
    return target


async def prefilling(bench):
    """Some chunks of its prompt are computed, others are not."""
    bench.worker.hang()
    (target,) = bench.submit([3] * 300, max_tokens=50, seed=1, ignore_eos=True)
    await bench.until(lambda: bench.worker.num_queued == bench.core.pipeline.depth)
    assert target.num_output == 0
    return target


async def decoding(bench):
    """Runs, with steps queued that name it."""
    (target,) = bench.submit([2] * 20, max_tokens=100, seed=1, ignore_eos=True)
    await bench.until(lambda: target.num_output > 5)
    bench.worker.hang()
    return target


async def paused(bench):
    """Its reader does not keep up."""
    target = await decoding(bench)
    bench.worker.unhang()
    bench.core.pause(target)
    await bench.until(lambda: bench.core._launches.oldest is None)
    return target


async def preempted(bench):
    """Lost its blocks to a senior and waits again."""
    elder = bench.submit([4] * 250, max_tokens=250, seed=3, priority=5, ignore_eos=True)[0]
    await bench.until(lambda: elder.num_output > 0)
    targets = [bench.submit([30 + i] * 250, max_tokens=250, seed=4, ignore_eos=True)[0] for i in range(4)]
    await bench.until(lambda: any(t.state.name == "PREEMPTED" for t in targets))
    return next(t for t in targets if t.state.name == "PREEMPTED")


async def at_its_last_token(bench):
    """The step that draws its last token runs."""
    bench.worker.hang()
    (target,) = bench.submit([2] * 20, max_tokens=1, seed=1, ignore_eos=True)
    await bench.until(lambda: bench.worker.num_queued)
    return target


async def leading_a_fork(bench):
    """Its followers wait for its prompt."""
    bench.worker.hang()
    sequences = bench.submit([3] * 200, max_tokens=50, seed=1, n=3, ignore_eos=True)
    await bench.until(lambda: bench.worker.num_queued == bench.core.pipeline.depth)
    return sequences[0]


async def following_a_fork(bench):
    """Waits for its leader's prompt."""
    bench.worker.hang()
    sequences = bench.submit([3] * 200, max_tokens=50, seed=1, n=3, ignore_eos=True)
    await bench.until(lambda: bench.worker.num_queued == bench.core.pipeline.depth)
    return sequences[2]


async def finished(bench):
    """Ended by itself."""
    (target,) = bench.submit([2] * 20, max_tokens=3, seed=1, ignore_eos=True)
    await bench.ended(target)
    return target


STATES = [
    queued,
    just_submitted,
    held_for_a_prefix,
    prefilling,
    decoding,
    paused,
    preempted,
    at_its_last_token,
    leading_a_fork,
    following_a_fork,
    finished,
]
ENDS = {
    "cancel": lambda bench, s: bench.core.cancel(s),
    "fail": lambda bench, s: bench.core.fail(s, InternalError("planted")),
    "finish_at": lambda bench, s: bench.core.finish_at(s, 0),
}


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in turn"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_f13_ended_in_every_state(make_bench, state, end, overlap):
    bench = make_bench(scheduler={"overlap": overlap})
    target = await state(bench)
    before = bench.core.output(target).tolist()
    was_live = target.is_live
    assert ENDS[end](bench, target) is was_live
    assert ENDS[end](bench, target) is False, "a second time"
    await bench.ended(target)
    assert sum(s is target for s in bench.sink.ended) == 1
    if end != "finish_at" and was_live:
        assert bench.core.output(target).tolist() == before, "what was generated stays"
    bench.worker.unhang()
    (probe,) = bench.submit([5] * 40, max_tokens=20, seed=11)
    await bench.ended(probe)
    assert bench.core.output(probe).tolist() == expected([5] * 40, 11, 20)


@pytest.mark.parametrize("seed", range(12))
async def test_f13_f14_random_ends_against_a_late_device(make_bench, seed):
    """Requests come and end at any moment, steps take any time: tokens are right, blocks come back."""
    rng = random.Random(seed)
    worker = fake(num_blocks=40, latency=lambda plan: rng.choice([0, 0, 20_000, 500_000]))
    bench = make_bench(worker, scheduler={"overlap": seed % 3 != 0})
    submitted = []
    for _ in range(60):
        if rng.random() < 0.6:
            prompt = [*SHARED[: rng.choice([0, 16, 40])], *rng.choices(range(10, 14), k=rng.randrange(1, 120))]
            asked = {"max_tokens": rng.randrange(0, 60), "seed": rng.randrange(5), "n": rng.choice([1, 1, 3])}
            submitted += [(s, prompt, asked) for s in bench.submit(prompt, priority=rng.randrange(3), **asked)]
        for _ in range(rng.randrange(3)):
            sequence = rng.choice(submitted)[0] if submitted else None
            if sequence is not None:
                act = rng.choice([bench.core.cancel, bench.core.pause, bench.core.resume, None])
                if act is not None:
                    act(sequence)
                else:
                    bench.core.finish_at(sequence, rng.randrange(1 + sequence.num_output))
        for _ in range(rng.choice([0, 1, 3, 30])):
            await asyncio.sleep(0)
    for sequence, _, _ in submitted:
        bench.core.resume(sequence)
    await bench.ended(*(s for s, _, _ in submitted), timeout_s=20)
    for sequence, prompt, asked in submitted:
        whole = expected(prompt, sequence.seed, asked["max_tokens"])
        got = bench.core.output(sequence).tolist()
        assert got == whole[: len(got)]
        if sequence.finish_reason == "length":
            assert len(got) == asked["max_tokens"]
    await back_to_baseline(bench)


async def test_f15_a_request_that_nobody_waits_for_gives_its_blocks_back(make_bench):
    bench = make_bench()
    (target,) = bench.submit([2] * 100, max_tokens=400, seed=1, ignore_eos=True)
    await bench.until(lambda: target.num_output > 3)
    assert bench.num_available < bench.core.scheduler.memory.num_usable
    bench.core.cancel(target)
    await bench.until(lambda: bench.num_available == bench.core.scheduler.memory.num_usable)
    steps = len(bench.worker.plans)
    await asyncio.sleep(0.02)
    assert len(bench.worker.plans) == steps, "nothing is computed for it any more"


async def test_f16_a_long_prompt_is_gone_within_a_chunk(make_bench):
    worker = fake(num_blocks=700, max_model_len=10_240)
    bench = make_bench(worker)
    (target,) = bench.submit([i % 50 for i in range(10_000)], max_tokens=10, seed=1)
    bench.sink.on = lambda outcome: worker.device.num_prefilled >= 1000 and bench.core.cancel(target)
    await bench.ended(target)
    await back_to_baseline(bench)
    # 16 chunks of 64 until it was seen; one more was queued by then.
    assert worker.device.num_prefilled == 17 * 64
