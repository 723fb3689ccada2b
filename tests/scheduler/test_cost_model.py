"""The cost model: it finds the coefficients of made-up cards through noise and outliers, and never predicts nonsense."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.scheduler.cost_model import CostModel, StepWork, work_of
from pagewire.scheduler.cost_prior import H200, PRIOR, SHAPE_8B, Coefficients, Shape, describe
from pagewire.step.step import StepPlan

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)

works = st.builds(
    StepWork,
    prefill_tokens=st.integers(0, 8192),
    prefill_pairs=st.floats(0, 1e10),
    decode_rows=st.integers(0, 1024),
    decode_kv=st.integers(0, 10**8),
)


def some_work(rng: np.random.Generator) -> StepWork:
    rows = int(rng.integers(0, 256))
    tokens = int(rng.integers(1, 512)) if rng.random() < 0.5 or rows == 0 else 0
    return StepWork(tokens, tokens * float(rng.integers(1, 20_000)), rows, rows * int(rng.integers(100, 2000)))


def card(seed: int, low: float = 0.4, high: float = 2.5) -> CostModel:
    """A card whose coefficients are anything near the prior's."""
    factors = np.random.default_rng(seed).uniform(low, high, 8)
    values = tuple(c * f for c, f in zip(PRIOR.values, factors.tolist(), strict=True))
    return CostModel(Coefficients(values, PRIOR.knot), buckets=BUCKETS)


def mean_error(model: CostModel, truth: CostModel, rng: np.random.Generator) -> float:
    works = [some_work(rng) for _ in range(200)]
    return float(np.mean([abs(model.predict(w) / truth.predict(w) - 1) for w in works]))


@given(seed=st.integers(0, 2**32 - 1), outliers=st.sampled_from([0.0, 0.02, 0.05]), scale=st.sampled_from([1.0, 30.0]))
@settings(max_examples=8, deadline=None)
def test_it_finds_a_card_through_noise_and_outliers(seed, outliers, scale):
    """`scale` 30: a card, or a model, thirty times slower than the prior's."""
    rng = np.random.default_rng(seed)
    truth, model = card(seed), CostModel(buckets=BUCKETS)
    for _ in range(800):
        work = some_work(rng)
        took = scale * truth.predict(work) * (1 + 0.03 * rng.standard_normal())
        if rng.random() < outliers:
            took += scale * rng.uniform(0, 100e6)
        model.observe(work, took)
    model.check_invariants()
    works = [some_work(rng) for _ in range(200)]
    errors = [abs(model.predict(w) / (scale * truth.predict(w)) - 1) for w in works]
    assert np.mean(errors) < 0.03
    assert np.max(errors) < 0.15


def test_it_follows_a_card_that_changes():
    rng = np.random.default_rng(1)
    first, second, model = card(2), card(3), CostModel(buckets=BUCKETS)
    for truth in (first, second):
        for _ in range(4000):
            work = some_work(rng)
            model.observe(work, truth.predict(work) * (1 + 0.02 * rng.standard_normal()))
        assert mean_error(model, truth, rng) < 0.05


def test_hours_of_decode_do_not_make_prefill_forgotten():
    rng = np.random.default_rng(4)
    truth, model = card(5), CostModel(buckets=BUCKETS)
    for _ in range(1500):
        work = some_work(rng)
        model.observe(work, truth.predict(work))
    for _ in range(20_000):
        model.observe(StepWork(0, 0.0, 8, 8000), truth.predict(StepWork(0, 0.0, 8, 8000)))
    assert mean_error(model, truth, rng) < 0.05


def test_one_long_pause_moves_nothing():
    rng = np.random.default_rng(6)
    truth, model = card(7), CostModel(buckets=BUCKETS)
    for _ in range(500):
        work = some_work(rng)
        model.observe(work, truth.predict(work) * (1 + 0.02 * rng.standard_normal()))
    work = StepWork(0, 0.0, 64, 64_000)
    before = model.predict(work)
    model.observe(work, 1e9)
    assert abs(model.predict(work) / before - 1) < 0.02


@given(observed=st.lists(st.tuples(works, st.floats(-1e12, 1e12)), max_size=40), asked=works)
@settings(max_examples=60, deadline=None)
def test_never_nothing_or_less_whatever_it_was_told(observed, asked):
    model = CostModel(buckets=BUCKETS)
    for work, took in observed:
        model.observe(work, took)
        model.check_invariants()
    assert model.predict(asked) > 0
    assert np.isfinite(model.predict(asked))


@given(
    observed=st.lists(st.tuples(works, st.floats(1, 1e12)), max_size=20),
    work=works,
    more=st.sampled_from(["prefill_tokens", "prefill_pairs", "decode_rows", "decode_kv"]),
    by=st.integers(1, 1000),
)
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less_time(observed, work, more, by):
    model = CostModel(buckets=BUCKETS)
    for done, took in observed:
        model.observe(done, took)
    parts = {name: getattr(work, name) for name in StepWork._fields}
    larger = StepWork(**(parts | {more: parts[more] + by}))
    assert model.predict(larger) >= model.predict(work)


@given(work=works, context=st.integers(0, 10**5), budget=st.floats(0, 1e9), most=st.integers(1, 4096))
@settings(max_examples=100, deadline=None)
def test_the_largest_chunk_fits_and_one_token_more_does_not(work, context, budget, most):
    model = CostModel(buckets=BUCKETS)
    n = model.largest_chunk(work, context, budget, most)
    assert 0 <= n <= most
    if n:
        assert model.predict(work.with_chunk(n, context)) <= budget
    if n < most:
        assert model.predict(work.with_chunk(n + 1, context)) > budget


def test_the_margin_is_what_one_step_in_a_hundred_exceeds():
    rng = np.random.default_rng(8)
    truth, model, beyond = card(9), CostModel(buckets=BUCKETS), 0
    for i in range(6000):
        work = some_work(rng)
        took = truth.predict(work) * (1 + 0.05 * rng.standard_normal())
        beyond += i >= 2000 and took > model.predict(work) * (1 + model.margin)
        model.observe(work, took)
    assert 0.004 < beyond / 4000 < 0.03
    assert 0.02 < model.error < 0.06
    assert abs(model.bias) < 0.02


def test_what_was_learnt_is_kept():
    rng = np.random.default_rng(10)
    truth, model = card(11), CostModel(buckets=BUCKETS)
    for _ in range(1000):
        work = some_work(rng)
        model.observe(work, truth.predict(work))
    again = CostModel.from_state(json.loads(json.dumps(model.to_state())), buckets=BUCKETS)
    for _ in range(20):
        work = some_work(rng)
        assert again.predict(work) == pytest.approx(model.predict(work))
    assert again.num_observed == 1000


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"coefficients": [1.0] * 7},
        {"coefficients": "no"},
        {"coefficients": [0.0] + [1.0] * 7},
        {"coefficients": [1.0] * 7 + [-1.0]},
        {"coefficients": [1.0] * 7 + [float("nan")]},
        {"coefficients": [1.0] * 7 + [True]},
        {"coefficients": [1.0] * 7 + [10**400]},
        {"coefficients": [1e308] * 8},
        {"observed": 10**400},
        {"knot": None},
        {"spread": "wide"},
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(change):
    with pytest.raises(ValueError, match=r"."):
        CostModel.from_state(CostModel().to_state() | change)


def test_work_of_a_plan():
    plan = StepPlan(
        step=0,
        rows=np.arange(4, dtype=np.int32),
        starts=np.array([9, 19, 100, 0], np.int32),
        num_tokens=np.array([1, 1, 8, 4], np.int32),
        epochs=np.zeros(4, np.int32),
        num_decode=2,
        token_ids=np.zeros(12, np.int32),
    )
    assert work_of(plan) == StepWork(12, 8 * 104 + 4 * 2, 2, 30)


@pytest.mark.parametrize(("rows", "measured_ms"), [(1, 4.07), (32, 5.38), (128, 8.09), (256, 12.66), (512, 22.84)])
def test_the_prior_is_near_what_was_measured_on_its_card(rows, measured_ms):
    """`perf/README.md`: decode of the 8B shape in bf16 on an H200, contexts of 512 to 712 tokens."""
    assert CostModel().predict(StepWork(0, 0.0, rows, rows * 612)) * 1e-6 == pytest.approx(measured_ms, rel=0.08)


def test_a_prior_by_shape_and_card():
    small = Coefficients.of(Shape(SHAPE_8B.weight_bytes / 8, SHAPE_8B.token_flops / 8, 1e4, 1e5), H200)
    assert CostModel(small).predict(StepWork(0, 0.0, 1, 100)) < 0.3 * CostModel().predict(StepWork(0, 0.0, 1, 100))
    assert describe(PRIOR)["kv_token"] == pytest.approx(131_072 / 4e3)


class TestGraphs:
    """Steps that are padded to graphs, of which some cost more than any formula says."""

    SIZES = (64, 128, 192, 256, 320, 384, 512)
    BEYOND: ClassVar = dict(zip(SIZES, (0.0, 0.08, 0.02, -0.07, -0.05, 0.12, 0.0), strict=True))

    def model(self) -> CostModel:
        return CostModel(buckets=BUCKETS, mixed_buckets=self.SIZES)

    def took(self, truth: CostModel, work: StepWork) -> float:
        beyond = self.BEYOND[truth.padded(work.prefill_tokens, work.decode_rows)] if work.prefill_tokens else 0.0
        return truth.predict(work) * (1 + beyond)

    def learnt(self, num: int = 3000) -> tuple[CostModel, CostModel, np.random.Generator]:
        rng, truth, model = np.random.default_rng(20), self.model(), self.model()
        for _ in range(num):
            work = self.some_work(rng)
            model.observe(work, self.took(truth, work) * (1 + 0.01 * rng.standard_normal()))
        return model, truth, rng

    def some_work(self, rng: np.random.Generator) -> StepWork:
        rows = int(rng.integers(1, 128))
        tokens = int(rng.integers(1, 384)) if rng.random() < 0.7 else 0
        return StepWork(tokens, tokens * 200.0, rows, rows * int(rng.integers(100, 1000)))

    def test_each_has_its_own_cost(self):
        model, truth, rng = self.learnt()
        works = [self.some_work(rng) for _ in range(300)]
        errors = [abs(model.predict(work) / self.took(truth, work) - 1) for work in works]
        assert np.mean(errors) < 0.012
        assert np.percentile(errors, 95) < 0.03
        assert model.margin < 0.06

    @given(
        work=works,
        more=st.sampled_from(["prefill_tokens", "prefill_pairs", "decode_rows", "decode_kv"]),
        by=st.integers(1, 1000),
    )
    @settings(max_examples=100, deadline=None)
    def test_more_work_still_takes_no_less(self, work, more, by):
        model = self._learnt_once()
        parts = {name: getattr(work, name) for name in ("prefill_tokens", "prefill_pairs", "decode_rows", "decode_kv")}
        assert model.predict(StepWork(**(parts | {more: parts[more] + by}))) >= model.predict(work)

    _once: CostModel | None = None

    def _learnt_once(self) -> CostModel:
        if TestGraphs._once is None:
            TestGraphs._once = self.learnt(1500)[0]
        return TestGraphs._once

    def test_a_step_takes_the_most_tokens_that_cost_no_more(self):
        """What a graph costs is known, so a chunk ends where its graph does."""
        model, _, _ = self.learnt()
        work = StepWork(0, 0.0, 100, 45_000)
        cost = [model.predict(StepWork(size - 100, 100.0 * size, 100, 45_000)) for size in (256, 320, 384)]
        n = model.largest_chunk(work, 0, (cost[1] + cost[2]) / 2, 512)
        assert n == 220

    def test_what_was_learnt_of_them_is_kept(self):
        model, _, rng = self.learnt()
        state = json.loads(json.dumps(model.to_state()))
        again = CostModel.from_state(state, buckets=BUCKETS, mixed_buckets=self.SIZES)
        other = CostModel.from_state(state, buckets=BUCKETS, mixed_buckets=(96, 256))
        for _ in range(50):
            work = self.some_work(rng)
            assert again.predict(work) == pytest.approx(model.predict(work))
            assert other.predict(work) > 0
        other.check_invariants()

    @pytest.mark.parametrize(
        "sizes",
        [None, [], [[]], [[], [[64]]], [[], [[64, "much"]]], [[], [[64, float("nan")]]], [[], [[64, 10**400]]], [1, 2]],
    )
    def test_a_damaged_file_is_refused(self, sizes):
        state = self.model().to_state() | {"sizes": sizes}
        with pytest.raises(ValueError, match="sizes"):
            CostModel.from_state(state, buckets=BUCKETS, mixed_buckets=self.SIZES)

    @pytest.mark.parametrize("beyond", [-1e17, 1e17])
    def test_what_cannot_be_true_of_a_graph_is_soon_unlearnt(self, beyond):
        """A file of another card, or damaged: no more is believed than ever is, and that is forgotten like it."""
        state = self.model().to_state() | {"sizes": [[[64, beyond]], []]}
        model = CostModel.from_state(state, buckets=BUCKETS, mixed_buckets=self.SIZES)
        work = StepWork(0, 0.0, 64, 64_000)
        truth = self.model().predict(work)
        for _ in range(200):
            model.observe(work, truth)
        assert model.predict(work) == pytest.approx(truth, rel=0.04)


def test_the_margin_forgets_what_was_off_while_the_model_learnt():
    """Twenty seconds of a server's life, not a minute."""
    rng, model = np.random.default_rng(4), CostModel(buckets=BUCKETS)
    truth = CostModel(Coefficients(tuple(0.3 * c for c in PRIOR.values), PRIOR.knot), buckets=BUCKETS)
    for i in range(2000):
        work = some_work(rng)
        pause = 4.0 if i < 40 else 1.0  # the host is slow in the beginning
        model.observe(work, pause * truth.predict(work) * (1 + 0.01 * rng.standard_normal()))
    assert model.margin < 0.06


def test_the_first_steps_on_another_card_are_no_margin():
    """What was off while nothing was known is not what is off once it is: half a margin for 512 steps holds prompts back for minutes
    on a slow card."""
    rng, model = np.random.default_rng(5), CostModel(buckets=BUCKETS)
    truth = CostModel(Coefficients(tuple(2.0 * c for c in PRIOR.values), PRIOR.knot), buckets=BUCKETS)
    margins = []
    for _ in range(500):
        work = some_work(rng)
        model.observe(work, truth.predict(work) * (1 + 0.01 * rng.standard_normal()))
        margins.append(model.margin)
    assert max(margins) <= 0.1
    assert margins[-1] < 0.06


def test_one_pause_after_a_restart_is_no_margin():
    """The worst of 32 steps is not what one in a hundred exceeds, and what was learnt before is worth more."""
    rng, truth, model = np.random.default_rng(6), CostModel(buckets=BUCKETS), CostModel(buckets=BUCKETS)
    for i in range(1000 + 300):
        if i == 1000:
            model = CostModel.from_state(model.to_state(), buckets=BUCKETS)
        work = some_work(rng)
        pause = 4.0 if i == 1010 else 1.0
        model.observe(work, pause * truth.predict(work) * (1 + 0.01 * rng.standard_normal()))
        assert i < 1000 or model.margin < 0.06
