"""The scheduler, case by case: faults known in this field, each by its number."""

from __future__ import annotations

import numpy as np
import pytest
from device import expected, next_token
from harness import BLOCK, Harness

from pagewire.config import SchedulerConfig
from pagewire.errors import ConfigError, NumericError, Overloaded, PromptTooLong
from pagewire.request.request import Request
from pagewire.scheduler import prefill
from pagewire.scheduler.scheduler import Scheduler
from pagewire.scheduler.sequence import SequenceState
from pagewire_transport.params import SamplingParams


def result(harness: Harness, sequence) -> list[int]:
    return harness.results[sequence.request.request_id, sequence.choice]


def prompt_without_stop(length: int, seed: int, max_tokens: int, *, base: int = 10) -> list[int]:
    """A prompt whose continuation does not stop early."""
    for salt in range(1000):
        prompt = [base + salt] + [20 + i % 7 for i in range(length - 1)]
        if len(expected(prompt, seed, max_tokens)) == max_tokens:
            return prompt
    raise AssertionError


PROMISED = [{}, {"itl_target_ms": 5.0}]
"""Without and with planning by time."""


class TestOrder:
    def test_one_step_ahead_gives_the_same_tokens_as_without(self):
        for overlap in (True, False):
            harness = Harness(overlap=overlap)
            prompts = [[10 + i, 20, 21, 22, 23] for i in range(12)]
            sequences = [harness.submit(p, max_tokens=20, seed=i)[0] for i, p in enumerate(prompts)]
            harness.run()
            for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
                assert result(harness, sequence) == expected(prompt, i, 20)

    def test_the_second_plan_is_made_before_the_first_result(self):
        harness = Harness()
        harness.submit(prompt_without_stop(5, 0, 8))
        assert harness.plan()
        assert harness.plan()
        assert not harness.pipeline.can_plan()
        assert harness.pipeline.num_in_flight == 2

    def test_length_is_never_overrun(self):
        """A length stop is predicted: no step computes a token that is thrown away."""
        harness = Harness()
        harness.submit(prompt_without_stop(5, 0, 8), max_tokens=8)
        num_samples = 0
        while harness.scheduler.has_unfinished:
            while harness.plan():
                num_samples += harness.device.queue[-1].sample_rows.size
            harness.apply()
        assert num_samples == 8

    def test_priority_goes_first(self):
        harness = Harness(max_rows=1)
        first = harness.submit(prompt_without_stop(4, 0, 4), max_tokens=4)[0]
        low, high = harness.submit([11] * 4, priority=-1)[0], harness.submit([12] * 4, priority=0)[0]
        harness.run()
        assert [s.order for s in harness.ended] == [first.order, high.order, low.order]

    def test_higher_priority_takes_the_place_of_lower(self):
        harness = Harness(max_rows=1)
        low = harness.submit(prompt_without_stop(4, 0, 30), max_tokens=30, priority=0)[0]
        for _ in range(5):
            harness.step()
        high = harness.submit([12] * 4, priority=1, max_tokens=4)[0]
        harness.run()
        assert harness.ended[0] is high
        assert low.num_preemptions == 1
        assert result(harness, low) == expected(low.request.prompt_ids.tolist(), 0, 30)

    def test_equal_priority_never_takes_a_place(self):
        harness = Harness(max_rows=1)
        first = harness.submit(prompt_without_stop(4, 0, 30), max_tokens=30)[0]
        harness.step()
        harness.submit([12] * 4, max_tokens=4)
        harness.run()
        assert harness.ended[0] is first
        assert first.num_preemptions == 0


class TestMemory:
    @pytest.mark.parametrize("targets", PROMISED)
    def test_f24_preemption_never_livelocks(self, targets):
        """F24: KV for 1.5 requests, 10 requests: all finish, and preemptions per request are bounded."""
        length, new = 24, 40
        harness = Harness(num_blocks=1 + (length + new) // BLOCK * 3 // 2, max_len=80, max_preemptions=3, **targets)
        prompts = [prompt_without_stop(length, i, new, base=10 * i + 100) for i in range(10)]
        sequences = [harness.submit(p, max_tokens=new, seed=i)[0] for i, p in enumerate(prompts)]
        harness.run()
        for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
            assert result(harness, sequence) == expected(prompt, i, new)
            assert sequence.num_preemptions <= 4, sequence.num_preemptions
        assert harness.scheduler.departures.num_preemptions > 0, "the case must preempt"

    @pytest.mark.parametrize("targets", PROMISED)
    def test_f25_two_prompts_of_60_percent_run_one_after_the_other(self, targets):
        harness = Harness(num_blocks=21, max_len=80, **targets)
        a, b = (harness.submit(prompt_without_stop(48, i, 8, base=200 * i + 50), seed=i)[0] for i in range(2))
        harness.step()
        assert (a.state, b.state) == (SequenceState.PREFILLING, SequenceState.WAITING)
        harness.run()
        assert a.num_preemptions == b.num_preemptions == 0

    def test_f25_a_prompt_longer_than_the_pool_is_refused_by_name(self):
        harness = Harness(num_blocks=11, max_len=200)
        with pytest.raises(PromptTooLong) as error:
            harness.submit([10] * 40, max_tokens=1)
        assert error.value.field == "prompt_ids"
        assert harness.submit([10] * 39, max_tokens=1)
        harness.run()

    def test_forks_that_can_never_start_are_refused(self):
        harness = Harness(num_blocks=6, max_len=20, max_rows=8)
        with pytest.raises(PromptTooLong) as error:
            harness.submit([10] * 17, max_tokens=1, n=3)
        assert error.value.field == "params.n"

    @pytest.mark.parametrize("targets", PROMISED)
    def test_f26_resume_neither_skips_nor_repeats(self, targets):
        for overlap in (True, False):
            harness = Harness(num_blocks=14, max_len=48, max_rows=4, overlap=overlap, **targets)
            prompts = [prompt_without_stop(10, i, 24, base=100 * i + 30) for i in range(4)]
            sequences = [harness.submit(p, max_tokens=24, seed=i)[0] for i, p in enumerate(prompts)]
            harness.run()
            assert sum(s.num_preemptions for s in sequences) > 0
            for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
                assert result(harness, sequence) == expected(prompt, i, 24)

    def test_the_most_senior_is_never_preempted(self):
        harness = Harness(num_blocks=14, max_len=48, max_rows=4)
        sequences = [harness.submit([50 * i + 10] * 10, max_tokens=24, seed=i)[0] for i in range(4)]
        harness.run()
        assert sequences[0].num_preemptions == 0

    def test_f6_a_pool_full_of_cancelled_requests_serves_a_probe(self):
        harness = Harness(num_blocks=20, max_len=76, max_rows=4)
        for _ in range(5):
            sequences = [harness.submit([30 + i] * 15, max_tokens=20, seed=i)[0] for i in range(4)]
            for _ in range(3):
                harness.step()
            for sequence in sequences:
                harness.scheduler.cancel(sequence, harness.now)
        probe = harness.submit(prompt_without_stop(60, 0, 8))[0]
        harness.run()
        assert result(harness, probe) == expected(probe.request.prompt_ids.tolist(), 0, 8)


class TestPrefix:
    def test_a_shared_prefix_is_computed_once(self):
        """16 prompts that share 25 blocks, submitted together on a cold cache."""
        harness = Harness(num_blocks=400, max_rows=16, max_len=200, max_step_tokens=64)
        shared = [20 + i % 9 for i in range(100)]
        prompts = [[*shared, 60 + i, 61, 62] for i in range(16)]
        sequences = [harness.submit(p, max_tokens=4, seed=i)[0] for i, p in enumerate(prompts)]
        harness.run()
        assert harness.device.num_prefilled == 100 + 16 * 3
        assert sum(s.num_cached for s in sequences) == 15 * 100
        for i, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
            assert result(harness, sequence) == expected(prompt, i, 4)

    def test_waiting_for_a_prefix_is_bounded(self):
        harness = Harness(num_blocks=400, max_rows=4, max_len=200, max_step_tokens=70, max_prefix_wait_steps=1)
        shared = [20 + i % 9 for i in range(100)]
        harness.submit([*shared, 60])
        second = harness.submit([*shared, 61])[0]
        was_held = False
        for _ in range(40):
            harness.step()
            was_held |= second.is_held
            assert not (second.is_held and harness.scheduler._next_step > second.held_until_step + 1)
        assert was_held
        harness.run()

    def test_many_that_share_a_long_prompt_are_not_placed_in_one_plan(self, monkeypatch):
        """F27: what is cached takes nothing of the budget, but placing it costs the loop time."""
        monkeypatch.setattr(prefill, "MOST_PLACED", 100)
        h = Harness(num_blocks=300)
        prompt = [7] * 90
        h.submit(prompt, max_tokens=1)
        h.run()
        joins, submit = [], h.device.submit
        monkeypatch.setattr(h.device, "submit", lambda plan: (joins.append(len(plan.joins)), submit(plan)))
        for _ in range(6):
            h.submit(prompt, max_tokens=1)
        h.run()
        assert (sum(joins), max(joins)) == (6, 2)

    def test_who_waits_for_a_prefix_goes_on_when_its_producer_is_cancelled(self):
        harness = Harness(num_blocks=400, max_rows=4, max_len=200, max_step_tokens=64)
        shared = [20 + i % 9 for i in range(100)]
        first, second = harness.submit([*shared, 60])[0], harness.submit([*shared, 61])[0]
        harness.step()
        assert second.is_held
        harness.scheduler.cancel(first, harness.now)
        harness.run()
        assert result(harness, second) == expected([*shared, 61], 0, 8)

    def test_f31_a_fully_cached_aligned_prompt_computes_its_last_block(self):
        harness = Harness()
        prompt = prompt_without_stop(4 * BLOCK, 0, 4)
        harness.submit(prompt, max_tokens=4)
        harness.run()
        before = harness.device.num_prefilled
        second = harness.submit(prompt, max_tokens=4)[0]
        harness.run()
        assert harness.device.num_prefilled - before == BLOCK
        assert second.num_cached == 3 * BLOCK
        assert result(harness, second) == expected(prompt, 0, 4)

    @pytest.mark.parametrize("offset", range(BLOCK + 1))
    def test_f30_hits_at_any_offset_in_a_block(self, offset):
        harness = Harness()
        harness.submit([20, 21, 22, 23, 24, 25, 26, 27], max_tokens=1)
        harness.run()
        prompt = [*range(20, 20 + BLOCK + offset), 40]
        second = harness.submit(prompt, max_tokens=6)[0]
        harness.run()
        assert result(harness, second) == expected(prompt, 0, 6)
        assert second.num_cached == (BLOCK + offset) // BLOCK * BLOCK

    def test_f33_tenants_do_not_meet(self):
        harness = Harness()
        prompt = prompt_without_stop(3 * BLOCK, 0, 4)
        harness.submit(prompt, tenant="a")
        harness.run()
        other, same = harness.submit(prompt, tenant="b")[0], harness.submit(prompt, tenant="a")[0]
        harness.run()
        assert (other.num_cached, same.num_cached) == (0, 2 * BLOCK)

    def test_f29_an_evicted_block_is_never_hit(self):
        harness = Harness(num_blocks=12, max_len=44)
        old = prompt_without_stop(5 * BLOCK, 0, 2)
        harness.submit(old, max_tokens=2)
        harness.run()
        harness.submit(prompt_without_stop(9 * BLOCK, 1, 2, base=100), max_tokens=2, seed=1)
        harness.run()
        again = harness.submit(old, max_tokens=2)[0]
        harness.run()
        assert again.num_cached < 4 * BLOCK
        assert result(harness, again) == expected(old, 0, 2)

    def test_what_was_generated_is_found_by_the_next_turn(self):
        harness = Harness()
        prompt = prompt_without_stop(BLOCK, 0, 9)
        first = harness.submit(prompt, max_tokens=9)[0]
        harness.run()
        turn = [*prompt, *result(harness, first), 30, 31]
        second = harness.submit(turn, max_tokens=2)[0]
        harness.run()
        assert second.num_cached == 3 * BLOCK


class TestForks:
    @pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
    def test_forks_equal_single_requests(self, length):
        prompt = prompt_without_stop(length, 5, 6)
        harness = Harness(num_blocks=100)
        sequences = harness.submit(prompt, n=4, seed=5, max_tokens=6)
        harness.run()
        for choice, sequence in enumerate(sequences):
            assert result(harness, sequence) == expected(prompt, 5 + choice, 6)
        assert harness.device.num_prefilled == length, "the prompt is computed once"

    def test_followers_survive_their_leader(self):
        harness = Harness(num_blocks=100, max_step_tokens=8)
        prompt = prompt_without_stop(30, 5, 6)
        leader, *followers = harness.submit(prompt, n=3, seed=5, max_tokens=6)
        harness.step()
        harness.scheduler.cancel(leader, harness.now)
        harness.run()
        for choice, sequence in enumerate(followers, 1):
            assert result(harness, sequence) == expected(prompt, 5 + choice, 6)


class TestFaults:
    def test_f32_nan_fails_that_request_alone_and_leaves_nothing_in_the_cache(self):
        harness = Harness(num_blocks=100)
        bad, good = prompt_without_stop(13, 0, 6, base=50), prompt_without_stop(13, 1, 6, base=150)
        harness.device.poisoned.add(tuple(bad))
        poisoned, neighbour = harness.submit(bad)[0], harness.submit(good, seed=1, max_tokens=6)[0]
        harness.run()
        assert poisoned.finish_reason == "error"
        assert isinstance(poisoned.error, NumericError)
        assert result(harness, neighbour) == expected(good, 1, 6)
        harness.device.poisoned.clear()
        again = harness.submit(bad, max_tokens=6)[0]
        harness.run()
        assert again.num_cached == 0
        assert result(harness, again) == expected(bad, 0, 6)

    def test_f13_cancel_in_every_state(self):
        """Each state by name, with both orders of cancel and completion; the baseline returns."""
        for overlap in (True, False):
            for steps in range(12):
                for cut in range(3):
                    harness = Harness(num_blocks=14, max_len=48, max_rows=3, overlap=overlap, max_step_tokens=8)
                    prompts = [[60 * i + 20] * 10 for i in range(3)]
                    sequences = [harness.submit(p, max_tokens=20, seed=i)[0] for i, p in enumerate(prompts)]
                    for _ in range(steps):
                        harness.step()
                    harness.plan()  # something is on its way
                    harness.scheduler.cancel(sequences[cut], harness.now)
                    harness.run()
                    for i, sequence in enumerate(sequences):
                        want = expected(prompts[i], i, 20)
                        assert result(harness, sequence) == (want[: sequence.num_output] if i == cut else want)

    def test_f16_a_long_prefill_ends_within_one_chunk(self):
        harness = Harness(num_blocks=600, max_len=2000, max_step_tokens=16)
        sequence = harness.submit([21] * 1500, max_tokens=4)[0]
        for _ in range(10):
            harness.step()
        harness.scheduler.cancel(sequence, harness.now)
        before = harness.device.num_prefilled
        harness.run()
        assert harness.device.num_prefilled - before <= 2 * 16, "what was planned, and no more"

    def test_f14_a_freed_block_waits_for_the_fence(self):
        """With a step on its way, a cancelled sequence's blocks are not available yet."""
        harness = Harness(cache=False)
        sequence = harness.submit(prompt_without_stop(8, 0, 20), max_tokens=20)[0]
        harness.step()
        assert harness.pipeline.num_in_flight == 1
        owned = harness.scheduler.memory.pool.num_owned
        harness.scheduler.cancel(sequence, harness.now)
        assert harness.scheduler.memory.pool.num_owned == owned
        harness.apply()
        assert harness.scheduler.memory.pool.num_owned == 0

    def test_f17_nothing_is_left_of_many_requests(self):
        harness = Harness()
        for i in range(300):
            harness.submit([10 + i % 30, 11], max_tokens=1)
            harness.run()
            harness.results.clear()
            harness.ended.clear()
        scheduler = harness.scheduler
        assert not scheduler._live
        assert not scheduler.prefixes._producers
        assert scheduler.waiting.num_clients == 0
        assert scheduler._slots._next <= 2


class TestPause:
    def test_a_paused_sequence_gets_no_tokens_and_goes_on_where_it_was(self):
        harness = Harness()
        prompt = prompt_without_stop(6, 0, 20)
        sequence = harness.submit(prompt, max_tokens=20)[0]
        for _ in range(4):
            harness.step()
        harness.scheduler.pause(sequence)
        for _ in range(4):
            harness.step()
        had = sequence.num_output
        assert sequence.state is SequenceState.PAUSED
        assert not harness.step()
        assert sequence.num_output == had
        harness.scheduler.resume(sequence)
        harness.run()
        assert result(harness, sequence) == expected(prompt, 0, 20)

    def test_a_paused_sequence_gives_way_to_a_senior(self):
        harness = Harness(num_blocks=14, max_len=52, max_rows=2)
        senior = harness.submit(prompt_without_stop(8, 0, 40), max_tokens=40)[0]
        junior = harness.submit(prompt_without_stop(8, 1, 20, base=99), max_tokens=20, seed=1)[0]
        for _ in range(4):
            harness.step()
        harness.scheduler.pause(junior)
        while senior.is_live:
            harness.step()
        assert junior.state is SequenceState.PREEMPTED
        harness.scheduler.resume(junior)
        harness.run()
        assert result(harness, junior) == expected(junior.request.prompt_ids.tolist(), 1, 20)

    @pytest.mark.parametrize("short", ["rows", "blocks"])
    def test_a_paused_sequence_gives_way_to_whoever_waits_as_often_as_it_takes(self, short):
        """Also a senior one, and beyond `max_preemptions`: what nobody reads must not hold up what is read (F18)."""
        few = {"max_rows": 1} if short == "rows" else {"num_blocks": 14}
        harness = Harness(**few, max_len=60, max_preemptions=1)
        paused = harness.submit(prompt_without_stop(8, 0, 40), max_tokens=40)[0]
        for round_ in range(3):
            while paused.num_output < 12 * (round_ + 1):
                harness.step()
            harness.scheduler.pause(paused)
            other = harness.submit(prompt_without_stop(30, round_, 20, base=99), max_tokens=20, seed=round_)[0]
            for _ in range(40):
                harness.step()
            assert not other.is_live
            assert paused.state is SequenceState.PREEMPTED
            harness.scheduler.resume(paused)
        harness.run()
        assert result(harness, paused) == expected(paused.request.prompt_ids.tolist(), 0, 40)


class TestLimits:
    def test_a_full_queue_refuses(self):
        harness = Harness(max_rows=1, max_waiting=2)
        for _ in range(2):
            harness.submit([10, 11])
        with pytest.raises(Overloaded) as error:
            harness.submit([10, 11])
        assert error.value.retry_after_ms
        harness.run()

    def test_no_tokens_asked_no_tokens_given(self):
        harness = Harness()
        sequence = harness.submit([10, 11], max_tokens=0)[0]
        harness.run()
        assert result(harness, sequence) == []
        assert sequence.finish_reason == "length"

    def test_finish_at_cuts_the_ledger(self):
        harness = Harness()
        prompt = prompt_without_stop(6, 0, 20)
        sequence = harness.submit(prompt, max_tokens=20)[0]
        for _ in range(8):
            harness.step()
        assert sequence.num_output > 4
        harness.scheduler.finish_at(sequence, 3, harness.now)
        harness.run()
        assert result(harness, sequence) == expected(prompt, 0, 20)[:3]
        assert sequence.finish_reason == "stop"

    def test_a_step_must_hold_all_rows(self):
        with pytest.raises(ConfigError) as error:
            Harness(max_rows=8, max_step_tokens=4)
        assert error.value.field == "scheduler.max_step_tokens"

    def test_outputs_can_be_read_in_slices(self):
        harness = Harness()
        prompt = prompt_without_stop(6, 0, 20)
        sequence = harness.submit(prompt, max_tokens=20)[0]
        for _ in range(8):
            harness.step()
        live = harness.scheduler.output(sequence, 2, 5).tolist()
        harness.run()
        assert live == expected(prompt, 0, 20)[2:5] == harness.scheduler.output(sequence, 2, 5).tolist()
        assert isinstance(harness.scheduler.output(sequence, 0, 1), np.ndarray)

    def test_the_oracle_and_the_device_agree(self):
        assert expected([1, 2], 3, 1) == [next_token([1, 2], 3)]


def test_a_worker_may_want_smaller_steps_than_the_configuration_allows():
    config = SchedulerConfig(max_rows=4, max_step_tokens=512)
    scheduler = Scheduler(
        num_blocks=100, block_size=16, max_rows=4, max_model_len=1024, config=config, max_step_tokens=100
    )
    ids = np.arange(300, dtype=np.int32)
    scheduler.submit(Request("r", ids, SamplingParams(max_tokens=4, seed=1), 0), 0)
    assert [scheduler.plan(0).token_ids.size for _ in range(3)] == [100, 100, 100]
