"""The simulator is the scheduler: same bytes twice, invariants after every turn, every token accounted for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator.small import WINDOW_NS, conversations, deployment

from pagewire.errors import ConfigError
from pagewire.simulator.card import H200, LLAMA_8B, LLAMA_70B, ModelledCard, StepWork
from pagewire.simulator.deployment import simulate
from pagewire.simulator.figures import Figures, percentile_ms
from pagewire.simulator.simulation import Simulation
from pagewire.simulator.traces import Arrival, ClosedLoop, Trace, chat_lengths, poisson


def run(workload, **changes):
    return simulate(deployment(**changes), workload, window_ns=WINDOW_NS)


def test_twice_the_same_decisions():
    first, again = (run(conversations()).summary for _ in range(2))
    assert first == again
    assert first.unfinished == first.refused == 0
    assert run(conversations(seed=2)).summary.digest != first.digest


def test_turns_of_a_conversation_find_their_prefix():
    found = run(conversations(), kv_tokens=400_000).summary
    assert 0.5 < found.hit_rate < 0.9
    assert run(conversations(), prefix_cache=False).summary.hit_rate == 0


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_invariants_hold_and_everybody_is_served(data):
    num = data.draw(st.integers(1, 14))
    requests = [
        Arrival(
            data.draw(st.integers(0, 400_000_000)),
            number,
            data.draw(st.integers(1, 600)),
            data.draw(st.integers(1, 80)),
            (0, number + 1) if data.draw(st.booleans()) else (),
        )
        for number in range(num)
    ]
    used = deployment(kv_tokens=data.draw(st.integers(700, 3000)), max_model_len=700, max_rows=8, max_step_tokens=64)
    figures = Figures(50_000_000)
    scheduler = used.make_scheduler(used.card())
    simulation = Simulation(scheduler, used.card(), Trace(requests), figures)
    while (now_ns := simulation.next_event()) is not None:
        simulation.turn(now_ns)
        simulation.pipeline.check_invariants()
    figures.finish(simulation.now_ns, scheduler)
    assert figures.num_ended == num
    assert figures.num_tokens == sum(arrival.num_output for arrival in requests)
    assert figures.gaps.size == figures.num_tokens - num
    assert figures.ttfts.size == num
    assert (figures.gaps.values() > 0).all()
    assert sum(window.num_tokens for window in figures.windows) == figures.num_tokens
    assert scheduler.memory.pool.num_owned == 0


def test_gaps_are_those_of_a_plain_account():
    """Oracle: a dict of last times."""
    used = deployment()
    figures = Figures(WINDOW_NS)
    last, gaps, ttfts = {}, [], []
    arrivals = {}
    submitted, tokens = figures.submitted, figures.tokens

    def note(outcome, at_ns, *, may_be_first):
        for slot, start in zip(outcome.slots.tolist(), outcome.starts.tolist(), strict=True):
            (gaps if start else ttfts).append(at_ns - (last[slot] if start else arrivals[slot]))
            last[slot] = at_ns
        tokens(outcome, at_ns, may_be_first=may_be_first)

    def began(arrival, sequence):
        arrivals[sequence.slot] = arrival.at_ns
        submitted(arrival, sequence)

    figures.tokens, figures.submitted = note, began
    Simulation(used.make_scheduler(used.card()), used.card(), conversations(), figures).run()
    assert sorted(gaps) == sorted(figures.gaps.values().tolist())
    assert sorted(ttfts) == sorted(figures.ttfts.values().tolist())
    ordered = sorted(gaps)
    assert percentile_ms(figures.gaps.values(), 50) == ordered[-(-len(ordered) // 2) - 1] / 1e6


def test_one_step_ahead_hides_the_host():
    loop = lambda: ClosedLoop(chat_lengths(np.random.default_rng(1)), 8, 2_000_000_000)  # noqa: E731
    used = deployment()
    rates = {}
    for overlap in (True, False):
        figures = Figures(WINDOW_NS)
        simulation = Simulation(used.make_scheduler(used.card()), used.card(), loop(), figures, overlap=overlap)
        simulation.run()
        rates[overlap] = figures.num_tokens / simulation.now_ns
    assert rates[True] > 1.1 * rates[False]


def test_preemption_is_counted_and_everybody_ends():
    lengths = iter([(300, 300)] * 40)
    rng = np.random.default_rng(1)
    found = run(poisson(lengths, 200, 0.15, rng), kv_tokens=3_000, max_model_len=700).summary
    assert found.preemptions > 0
    assert found.unfinished == 0
    assert 0 < found.owned_share <= 1


def test_what_cannot_fit_is_refused_and_counted():
    found = run(Trace([Arrival(0, 0, 5000, 10), Arrival(5, 1, 50, 10)])).summary
    assert (found.requests, found.refused, found.unfinished) == (2, 1, 0)


def test_contiguous_memory_holds_fewer_streams():
    loop = lambda: ClosedLoop(chat_lengths(np.random.default_rng(1)), 64, 3_000_000_000)  # noqa: E731
    paged = run(loop(), max_rows=64, kv_tokens=32_768).summary
    contiguous = run(loop(), max_rows=64, kv_tokens=32_768, allocation="contiguous").summary
    assert contiguous.streams_max == 8
    assert paged.streams_max == 64
    assert paged.throughput > 2 * contiguous.throughput
    assert paged.live_share > 0.9
    assert contiguous.live_share < 0.2


def test_prefill_on_other_cards_leaves_decode_alone():
    rng = np.random.default_rng(5)
    trace = poisson(chat_lengths(rng), 10, 3, rng)
    alone = run(trace, max_step_tokens=2048, max_rows=64).summary
    rng = np.random.default_rng(5)
    apart = run(poisson(chat_lengths(rng), 10, 3, rng), max_step_tokens=2048, max_rows=64, prefill_gpus=1)
    assert apart.summary.requests == alone.requests
    assert apart.summary.unfinished == 0
    assert apart.summary.itl_p99 < alone.itl_p99
    assert apart.prefill.num_tokens == alone.requests
    assert apart.figures.num_tokens == sum(a.num_output - 1 for a in trace)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="do not fit"):
        ModelledCard(LLAMA_70B, H200)
    with pytest.raises(ConfigError, match="cannot be shared"):
        ModelledCard(LLAMA_8B, H200, gpus=5)


@pytest.mark.parametrize(("streams", "ms"), [(1, 4.07), (32, 5.38), (128, 8.09), (256, 12.66), (512, 22.84)])
def test_decode_takes_what_it_took_on_the_card(streams, ms):
    """Steps of `perf/results/2026-11-29-decode-h200.json`."""
    card = ModelledCard(LLAMA_8B, H200)
    assert 1e3 * card.seconds(StepWork(streams, streams * 612, 0, streams)) == pytest.approx(ms, rel=0.1)


@given(st.integers(1, 9000), st.integers(0, 10**6), st.integers(0, 10**8), st.integers(0, 512))
@settings(max_examples=50)
def test_more_work_never_takes_less(tokens, kv, pairs, samples):
    card = ModelledCard(LLAMA_8B, H200)
    base = card.seconds(StepWork(tokens, kv, pairs, samples))
    for more in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        work = StepWork(*(a + b for a, b in zip((tokens, kv, pairs, samples), more, strict=True)))
        assert card.seconds(work) >= base
