"""Faults by number that show at the engine as a whole: F6, F17, F25, F31, F32."""

import asyncio
import gc
import sys

import pytest
from engine_bench import HandWorker, back_to_baseline
from fakes import expected, fake

from pagewire.errors import InvalidRequest, NumericError, PromptTooLong


async def test_f6_a_full_pool_of_cancelled_requests_serves_a_probe(make_bench):
    bench = make_bench()
    sequences = [bench.submit([10 + i] * 200, max_tokens=300, ignore_eos=True)[0] for i in range(20)]
    await bench.until(lambda: bench.num_available < 8)
    bench.worker.hang()
    for sequence in sequences:
        bench.core.cancel(sequence)
    await bench.ended(*sequences)
    (probe,) = bench.submit([5] * 400, max_tokens=100, seed=2)
    bench.worker.unhang()
    await bench.ended(probe)
    assert bench.core.output(probe).tolist() == expected([5] * 400, 2, 100)


# ---- F17: nothing stays of a request -----------------------------------------------------------------------------------


async def one_token_requests(bench, num, *, at_once=64):
    """Serve `num` requests of one token each, a few at a time, as a server's clients would."""
    serial = iter(range(num))
    free = asyncio.Semaphore(at_once)
    waiting = set()

    def told(outcome):
        for sequence in outcome.ended:
            waiting.discard(sequence)
            free.release()

    bench.sink.on_outcome = told
    for i in serial:
        await free.acquire()
        waiting.update(bench.submit([1 + i % 900, 2, 3 + i // 900 % 900], max_tokens=1))
    while waiting:
        await asyncio.sleep(0)


async def residue(bench, num):
    """Objects that the collector knows, and blocks of Python memory, that `num` requests leave behind; a first
    thousand has filled what is bounded.
    """

    def now():
        gc.collect()
        return len(gc.get_objects()), sys.getallocatedblocks()

    await one_token_requests(bench, 1000)
    objects, blocks = now()
    await one_token_requests(bench, num)
    more_objects, more_blocks = now()
    return more_objects - objects, more_blocks - blocks


class ForgetfulWorker(HandWorker):
    """Keeps no record of what it was asked."""

    def launch_forward(self, plan):
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    def launch_sample(self, plan, masks=None):
        future = asyncio.get_running_loop().create_future()
        self.samples.append((plan, future))
        asyncio.get_running_loop().call_soon(self.release)
        return future

    def release(self):
        plan, future = self.samples.pop(0)
        future.set_result(self.result(plan))


@pytest.fixture
def forgetful(tmp_path):
    return ForgetfulWorker(num_blocks=200, max_rows=64)


SMALL = {"scheduler": {"max_rows": 64, "max_step_tokens": 512}, "engine": {"decision_log": 100}}


async def test_f17_ten_thousand_requests_leave_nothing(make_plain_bench, forgetful):
    bench = make_plain_bench(forgetful, **SMALL)
    objects, blocks = await residue(bench, 10_000)
    assert objects < 200, f"{objects} objects stay"
    assert blocks < 500, f"{blocks} blocks of memory stay"
    await back_to_baseline(bench)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_f17_a_million_requests_leave_nothing(make_plain_bench, forgetful):
    bench = make_plain_bench(forgetful, **SMALL)
    objects, blocks = await residue(bench, 1_000_000)
    assert objects < 200, f"{objects} objects stay"
    assert blocks < 500, f"{blocks} blocks of memory stay"
    await back_to_baseline(bench)


async def test_f17_two_thousand_requests_one_after_another_leave_the_blocks_as_they_were(make_plain_bench):
    bench = make_plain_bench(fake())
    for i in range(2000):
        (sequence,) = bench.submit([1 + i % 40] * (1 + i % 37), max_tokens=1 + i % 3, seed=i)
        while sequence.is_live:
            await asyncio.sleep(0)
    await back_to_baseline(bench)


# ---- F25: what can never finish ----------------------------------------------------------------------------------------


async def test_f25_two_prompts_of_sixty_percent_of_the_pool_both_finish(make_bench):
    bench = make_bench(fake(num_blocks=21))  # 320 tokens
    prompts = [[5] * 192, [6] * 192]
    sequences = [bench.submit(prompt, max_tokens=100, seed=3, ignore_eos=True)[0] for prompt in prompts]
    await bench.ended(*sequences)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.core.output(sequence).tolist() == expected(prompt, 3, 100, ignore_eos=True)


async def test_f25_longer_than_the_pool_is_refused_by_name(make_bench):
    bench = make_bench(fake(num_blocks=21))
    with pytest.raises(PromptTooLong) as caught:
        bench.submit([5] * 321, max_tokens=1)
    assert caught.value.field == "prompt_ids"
    with pytest.raises(InvalidRequest) as caught:
        bench.submit([5] * 300, max_tokens=21)
    assert caught.value.field == "params.max_tokens"
    (fits,) = bench.submit([5] * 300, max_tokens=20, seed=1, ignore_eos=True)
    await bench.ended(fits)
    assert fits.finish_reason == "length"


async def test_f24_a_pool_for_one_and_a_half_serves_ten(make_bench):
    bench = make_bench(fake(num_blocks=10))
    prompts = [[10 + i] * 40 for i in range(10)]
    sequences = [bench.submit(prompt, max_tokens=50, seed=4, ignore_eos=True)[0] for prompt in prompts]
    await bench.ended(*sequences, timeout_s=20)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert bench.core.output(sequence).tolist() == expected(prompt, 4, 50, ignore_eos=True)
        assert sequence.num_preemptions <= 6
    assert bench.core.health.ready


# ---- F31, F32 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompt", [16, 32, 48, 31, 33])
async def test_f31_a_prompt_that_is_cached_whole_gives_the_same_tokens(make_bench, num_prompt):
    bench = make_bench()
    prompt = [3] * num_prompt
    (cold,) = bench.submit(prompt, max_tokens=10, seed=5)
    await bench.ended(cold)
    before = bench.worker.device.num_prefilled
    (warm,) = bench.submit(prompt, max_tokens=10, seed=5)
    await bench.ended(warm)
    assert bench.core.output(warm).tolist() == bench.core.output(cold).tolist() == expected(prompt, 5, 10)
    assert warm.num_cached == (num_prompt - 1) // 16 * 16
    assert bench.worker.device.num_prefilled - before == num_prompt - warm.num_cached >= 1


async def test_f32_bad_logits_fail_the_request_keep_nothing_and_touch_nobody(make_bench):
    bench = make_bench()
    poisoned = [4] * 40
    bench.worker.poison(lambda join: join.prompt_ids.tolist() == poisoned)
    (good,) = bench.submit([5] * 40, max_tokens=30, seed=6, ignore_eos=True)
    (bad,) = bench.submit(poisoned, max_tokens=30, seed=6)
    (late,) = bench.submit([6] * 40, max_tokens=30, seed=6, ignore_eos=True)
    await bench.ended(good, bad, late)
    assert isinstance(bad.error, NumericError)
    assert bad.num_output == 0
    assert bench.core.output(good).tolist() == expected([5] * 40, 6, 30, ignore_eos=True)
    assert bench.core.output(late).tolist() == expected([6] * 40, 6, 30, ignore_eos=True)
    bench.worker.device.heal()
    (again,) = bench.submit(poisoned, max_tokens=5, seed=6)
    await bench.ended(again)
    assert again.num_cached == 0, "nothing of the poisoned prompt was kept"
    assert bench.core.output(again).tolist() == expected(poisoned, 6, 5)
