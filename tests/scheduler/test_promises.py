"""Promises of time on a simulated clock: F21 and what belongs to it, the order of the queue, shares, and honest refusals."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from timed import MS, Timed

from pagewire.errors import Overloaded
from pagewire.scheduler.cost_model import CostModel, StepWork
from pagewire.scheduler.cost_prior import PRIOR, Coefficients
from pagewire.scheduler.pacing import LEAST_CHUNK
from pagewire.scheduler.sequence import SequenceState

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048)


def slower(factor: float) -> CostModel:
    return CostModel(Coefficients(tuple(factor * c for c in PRIOR.values), PRIOR.knot), buckets=BUCKETS)


def learnt(timed: Timed) -> None:
    """Steps enough that refusals are believed."""
    timed.submit(100, max_tokens=40)
    timed.run()


class TestChunks:
    def test_f21_long_prompts_do_not_starve_decode(self):
        """F21: one decoder and two prompts of 72k tokens: no gap exceeds the promise, and the chunk shrinks."""
        timed = Timed(itl_target_ms=15.0, max_step_tokens=8192, noise=0.02, num_blocks=12_000)
        learnt(timed)
        decoder = timed.submit(600, max_tokens=2000)
        timed.run_until(timed.now + 200 * MS)
        first = len(timed.chunks)
        prompts = [timed.submit(72_000, max_tokens=4) for _ in range(2)]
        while any(p.sequence.is_live for p in prompts):
            timed.step()
        chunks = np.array(timed.chunks[first:])
        chunks = chunks[chunks > LEAST_CHUNK]
        gaps = decoder.gaps_ms
        assert np.percentile(gaps, 99) <= 15.0
        assert gaps.max() <= 15.0 * 1.05  # what the noise of the card is beyond the margin
        assert chunks.max() < 1000, "8192 would take a quarter of a second"
        assert chunks[:20].mean() > 1.15 * chunks[-20:].mean(), "later chunks look at more, and so are smaller"
        assert decoder.sequence.is_live, "the case must last"

    def test_f22_the_first_token_is_the_first_that_was_drawn(self):
        """F22: no chunk but the last counts as a first token, however short they are made."""
        timed = Timed(itl_target_ms=15.0)
        learnt(timed)
        timed.submit(100, max_tokens=500)
        timed.run_until(timed.now + 20 * MS)
        prompt, begun = timed.submit(3000, max_tokens=4), len(timed.chunks)
        while not prompt.token_ns:
            timed.step()
        assert prompt.sequence.first_token_ns == prompt.token_ns[0] == timed.now
        assert sum(timed.chunks[begun:]) == 3000
        assert len([n for n in timed.chunks[begun:] if n]) > 3

    def test_without_targets_nothing_is_held_back(self):
        timed = Timed(max_step_tokens=8192, num_blocks=12_000)
        decoder = timed.submit(600, max_tokens=400)
        timed.run_until(timed.now + 100 * MS)
        timed.submit(72_000, max_tokens=4)
        timed.run()
        assert decoder.gaps_ms.max() > 200
        assert timed.scheduler.pacer.model.num_observed == 0

    def test_the_tightest_stream_decides_and_only_while_it_runs(self):
        timed = Timed(itl_target_ms=100.0, max_step_tokens=8192, num_blocks=20_000)
        learnt(timed)
        tight = timed.submit(600, max_tokens=50, itl_ms=12)
        loose = timed.submit(600, max_tokens=600)
        timed.run_until(timed.now + 30 * MS)
        timed.submit(72_000, max_tokens=4)
        timed.run()
        assert tight.gaps_ms.max() <= 12.5
        assert 50 < loose.gaps_ms.max() <= 102

    def test_alone_a_prompt_gets_the_whole_step(self):
        timed = Timed(itl_target_ms=10.0, max_step_tokens=4096)
        timed.submit(4000, max_tokens=1)
        timed.run()
        assert timed.chunks == [4000]

    def test_a_promise_that_cannot_be_kept_does_not_stop_prompts(self):
        timed = Timed(itl_target_ms=1.0, max_step_tokens=512)
        decoder = timed.submit(100, max_tokens=300)
        timed.run_until(timed.now + 50 * MS)
        prompt = timed.submit(4000, max_tokens=2)
        timed.run()
        assert prompt.token_ns
        assert len(decoder.token_ns) == 300
        assert set(timed.chunks) - {100} <= {0, LEAST_CHUNK, 4000 % LEAST_CHUNK}

    @pytest.mark.parametrize("factor", [0.3, 3.0])
    def test_it_learns_another_card(self, factor):
        timed = Timed(itl_target_ms=15.0 * factor, card=slower(factor), model=CostModel(buckets=BUCKETS), noise=0.02)
        decoder = timed.submit(600, max_tokens=1500)
        for _ in range(60):
            timed.submit(int(timed.rng.integers(50, 2000)), max_tokens=8)
            timed.run_until(timed.now + int(100 * MS * factor))
        timed.run()
        late = decoder.gaps_ms[300:] > 15.0 * factor
        assert late.mean() < 0.05
        assert timed.scheduler.pacer.model.error < 0.05

    def test_the_first_prompts_on_an_unknown_card_are_tried_with_care(self):
        """A card whose prefill is thirty times slower beside its decode than the prior thinks."""
        values = list(PRIOR.values)
        values[4] *= 200
        card = CostModel(Coefficients(tuple(values), PRIOR.knot), buckets=BUCKETS)
        timed = Timed(itl_target_ms=60.0, card=card, model=CostModel(buckets=BUCKETS), max_step_tokens=2048)
        decoder = timed.submit(50, max_tokens=400)
        timed.run_until(timed.now + 100 * MS)
        timed.submit(3000, max_tokens=2)
        timed.run()
        assert card.predict(StepWork(2048, 2048 * 1024.0, 1, 100)) > 1500 * MS, "what it would have tried"
        assert decoder.gaps_ms.max() < 150
        assert np.median(decoder.gaps_ms[60:90]) < 60

    def test_streams_are_not_let_in_that_would_break_the_promise_of_all(self):
        timed = Timed(itl_target_ms=12.0, max_rows=512, num_blocks=60_000, max_step_tokens=2048)
        learnt(timed)
        streams = [timed.submit(600, max_tokens=200) for _ in range(400)]
        timed.run()
        gaps = np.concatenate([s.gaps_ms for s in streams])
        assert np.percentile(gaps, 99) <= 12.0
        assert all(len(s.token_ns) == 200 for s in streams)


class TestOrder:
    def test_the_earliest_due_goes_first_also_past_a_prompt_in_prefill(self):
        timed = Timed(ttft_target_ms=60_000.0, itl_target_ms=15.0)
        learnt(timed)
        timed.submit(100, max_tokens=2000)  # so that steps are short
        timed.run_until(timed.now + 20 * MS)
        long = timed.submit(20_000, max_tokens=2)
        timed.run_until(timed.now + 50 * MS)
        assert long.sequence.state is SequenceState.PREFILLING
        short = timed.submit(300, max_tokens=2, ttft_ms=100)
        timed.run_until(timed.now + 500 * MS)
        assert short.ttft_ms < 100
        assert not long.token_ns

    def test_a_short_prompt_passes_a_long_one_that_has_time(self):
        """The server's promise is about waiting: a long prompt is due later by what its own prefill takes, and is in time all the same."""
        timed = Timed(ttft_target_ms=250.0, itl_target_ms=15.0)
        learnt(timed)
        timed.submit(100, max_tokens=2000)  # so that steps are short
        timed.run_until(timed.now + 20 * MS)
        long = timed.submit(6000, max_tokens=2)
        shorts = [timed.submit(60, max_tokens=2) for _ in range(5)]
        timed.run_until(timed.now + 2_000 * MS)
        assert all(short.token_ns[0] < long.token_ns[0] for short in shorts)
        assert max(short.ttft_ms for short in shorts) < 100
        own_ms = long.sequence.prefill_ns / MS
        assert own_ms > 150
        assert long.ttft_ms < 250 + own_ms

    def test_a_prompt_that_is_longer_than_the_promise_is_not_late_before_it_has_waited(self):
        """The server promises nothing about a prompt's own length: else every long one is late when it comes, and lets others go."""
        timed = Timed(ttft_target_ms=250.0, itl_target_ms=15.0)
        learnt(timed)
        timed.submit(100, max_tokens=2000)  # so that steps are short
        timed.run_until(timed.now + 20 * MS)
        long = timed.submit(12_000, max_tokens=2)
        timed.run_until(timed.now + 100 * MS)
        assert long.sequence.prefill_ns > 300 * MS
        assert not long.sequence.is_late
        assert timed.scheduler.promises.num_late == 0

    def test_a_giant_is_passed_for_no_longer_than_the_target(self):
        """Its prefill takes seconds; short prompts that come more than the target later wait for it, or beside it."""
        timed = Timed(ttft_target_ms=250.0, itl_target_ms=15.0)
        learnt(timed)
        timed.submit(100, max_tokens=4000)
        timed.run_until(timed.now + 20 * MS)
        begun = timed.now
        giant = timed.submit(40_000, max_tokens=2)
        while not giant.token_ns and timed.now < begun + 20_000 * MS:
            with contextlib.suppress(Overloaded):
                timed.submit(400, max_tokens=2)
            timed.run_until(timed.now + 25 * MS)
        assert giant.sequence.prefill_ns / MS > 1000
        assert giant.sequence.due_ns == giant.sequence.request.arrival_ns + 500 * MS
        assert giant.ttft_ms < 1_000 + 1.5 * giant.sequence.prefill_ns / MS

    def test_what_a_request_asks_for_includes_its_own_prefill(self):
        timed = Timed(itl_target_ms=15.0)
        learnt(timed)
        timed.submit(100, max_tokens=2000)
        timed.run_until(timed.now + 20 * MS)
        long = timed.submit(3000, max_tokens=2, ttft_ms=400)
        short = timed.submit(60, max_tokens=2, ttft_ms=450)
        timed.run_until(timed.now + 2_000 * MS)
        assert long.token_ns[0] <= short.token_ns[0], "due earlier; the short one may fill its last step"
        assert long.ttft_ms < 400

    def test_those_who_can_still_be_in_time_go_before_the_late(self):
        """Three prompts that nothing can save do not drag the fourth along."""
        timed = Timed(itl_target_ms=15.0, max_rows=1)
        blocker = timed.submit(100, max_tokens=60)
        timed.run_until(timed.now + 20 * MS)
        late = [timed.submit(2000, max_tokens=2, ttft_ms=60) for _ in range(3)]
        timed.run_until(timed.now + 100 * MS)
        fresh = timed.submit(200, max_tokens=2, ttft_ms=400)
        timed.run()
        assert not blocker.sequence.is_live
        assert fresh.ttft_ms < 400
        assert all(fresh.token_ns[0] < s.token_ns[0] for s in late)
        assert timed.scheduler.promises.num_late == 3

    def test_priority_is_a_matter_of_time(self):
        """Lower priority waits longer, not for ever: it ages."""
        timed = Timed(itl_target_ms=15.0, max_rows=1)
        timed.submit(100, max_tokens=10)
        timed.step()
        low = timed.submit(100, max_tokens=2, priority=-2)
        for _ in range(300):
            timed.submit(100, max_tokens=10)
            timed.run_until(timed.now + 30 * MS)
            if low.token_ns:
                break
        assert 1_900 < low.ttft_ms < 4_000

    @pytest.mark.parametrize("overlap", [True, False])
    def test_a_prompt_in_prefill_may_lose_its_row_while_a_step_is_planned(self, overlap):
        timed = Timed(itl_target_ms=15.0, max_rows=1, max_step_tokens=512, overlap=overlap, check=True)
        low = timed.submit(5000, max_tokens=2, priority=-1)
        for _ in range(3):
            timed.step()
        high = timed.submit(100, max_tokens=2, priority=1)
        timed.run()
        assert high.token_ns[-1] < low.token_ns[0]
        assert low.sequence.num_preemptions == 1
        assert len(low.token_ns) == 2

    def test_a_deadline_ends_it_with_a_named_error(self):
        timed = Timed()
        stream = timed.submit(100, max_tokens=5000, deadline_ms=200)
        other = timed.submit(100, max_tokens=100)
        timed.run()
        assert stream.sequence.error is not None
        assert stream.sequence.error.code == "deadline"
        assert 195 < (stream.sequence.finished_ns - stream.asked_ns) / MS < 215
        assert len(other.token_ns) == 100


class TestShares:
    def test_a_flood_does_not_delay_others(self):
        """One client asks for 300 prompts at once; another's small ones are served in between, in time."""
        timed = Timed(itl_target_ms=15.0, max_rows=8)
        flood = [timed.submit(1000, max_tokens=20, client="flood") for _ in range(300)]
        small = []
        for _ in range(20):
            timed.run_until(timed.now + 200 * MS)
            small.append(timed.submit(200, max_tokens=20, client="small"))
        timed.run()
        assert max(s.ttft_ms for s in small) < 1_500
        assert np.median([s.ttft_ms for s in flood]) > 3 * max(s.ttft_ms for s in small)

    def test_clients_that_all_want_everything_get_the_same(self):
        timed = Timed(itl_target_ms=15.0, max_rows=8)
        for client, size in (("a", 500), ("b", 1000), ("c", 2000)):
            for _ in range(60_000 // size):
                timed.submit(size, max_tokens=4, client=client)
        served = dict.fromkeys("abc", 0)
        while timed.scheduler.waiting.num_clients == 3:
            timed.step()
        for seen in timed.seen.values():
            if seen.token_ns:
                served[seen.sequence.share] += seen.sequence.num_prompt
        assert max(served.values()) - min(served.values()) <= 8192 + 2 * 2000

    def test_what_nobody_else_wanted_is_not_held_against_a_client(self):
        timed = Timed(itl_target_ms=15.0, max_rows=2)
        for _ in range(50):
            timed.submit(2000, max_tokens=2, client="old")
        timed.run()
        old = [timed.submit(2000, max_tokens=2, client="old") for _ in range(4)]
        new = [timed.submit(2000, max_tokens=2, client="new") for _ in range(20)]
        timed.run()
        assert max(s.ttft_ms for s in old) < np.median([s.ttft_ms for s in new])


class TestRefusals:
    def test_what_a_queue_makes_impossible_is_refused_at_once(self):
        timed = Timed(ttft_target_ms=250.0, itl_target_ms=15.0, max_rows=256, num_blocks=60_000)
        learnt(timed)
        taken, refused = [], []
        for _ in range(100):
            try:
                taken.append(timed.submit(1000, max_tokens=30))
            except Overloaded as error:
                refused.append(error)
        assert refused
        assert len(taken) > 3
        error = refused[-1]
        assert error.predicted_ttft_ms is not None
        assert error.predicted_ttft_ms > 250
        assert error.retry_after_ms is not None
        assert error.retry_after_ms >= 50
        timed.run()
        assert np.percentile([s.ttft_ms for s in taken], 95) < 300
        assert timed.submit(1000, max_tokens=2), "when the queue is gone, all is taken again"

    def test_predictions_are_near_what_happens(self):
        timed = Timed(itl_target_ms=15.0, max_rows=256, num_blocks=60_000)
        learnt(timed)
        decoders = [timed.submit(600, max_tokens=3000) for _ in range(8)]
        timed.run_until(timed.now + 100 * MS)
        for _ in range(12):
            timed.submit(1500, max_tokens=100)
        due = timed.now + 20_000 * MS
        forecast = timed.scheduler.promises.forecast(1500, 1500, due, timed.now)
        last = timed.submit(1500, max_tokens=4)
        while not last.token_ns:
            timed.step()
        assert forecast.ms == pytest.approx(last.ttft_ms, rel=0.3)
        assert all(d.sequence.is_live for d in decoders)

    def test_a_promise_that_the_prompt_itself_breaks_is_refused_without_a_hint_to_retry(self):
        timed = Timed(itl_target_ms=15.0)
        learnt(timed)
        with pytest.raises(Overloaded) as error:
            timed.submit(20_000, max_tokens=2, ttft_ms=50)
        assert (error.value.field, error.value.retry_after_ms) == ("ttft_ms", None)
        assert error.value.predicted_ttft_ms > 200
        assert timed.submit(20_000, max_tokens=2), "who asks for nothing is taken: its own length is no queue"

    def test_a_gap_that_cannot_be_kept_is_refused(self):
        timed = Timed(max_rows=128, num_blocks=60_000)
        timed.submit(100, max_tokens=20, itl_ms=100)
        timed.run()
        for _ in range(100):
            timed.submit(500, max_tokens=500)
        timed.run_until(timed.now + 1000 * MS)
        with pytest.raises(Overloaded) as error:
            timed.submit(100, max_tokens=20, itl_ms=6)
        assert error.value.field == "itl_ms"

    def test_a_full_queue_says_when_to_come_back(self):
        timed = Timed(itl_target_ms=15.0, max_waiting=4, max_rows=1)
        learnt(timed)
        for _ in range(4):
            timed.submit(3000, max_tokens=50)
        with pytest.raises(Overloaded) as error:
            timed.submit(100)
        assert error.value.retry_after_ms is not None
        assert error.value.predicted_ttft_ms > 100

    def test_nobody_is_refused_by_guesses_of_a_card_that_was_not_seen(self):
        timed = Timed(ttft_target_ms=1.0, itl_target_ms=15.0)
        for _ in range(5):
            timed.submit(5000)
        timed.run()
