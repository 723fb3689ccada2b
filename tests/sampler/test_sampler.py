"""The sampler against what sampling means, and each row against itself in other company (F32, F35, F37)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.sampler import oracle
from tests.sampler.cases import VOCAB, Case, cases, row_of, run

from pagewire.step.step import SampleFlag
from pagewire.worker.interface import LogitMasks
from pagewire.worker.sampler import NO_TOKEN, Sampler
from pagewire.worker.sampler_logprobs import LOGPROB_MIN, score
from pagewire_transport.params import SamplingParams

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
POSITION = np.array([1], np.int64)
ROW = np.array([0], np.int32)


def one(logits, params: SamplingParams, **join):
    """Sample one row once, at the position that its outputs imply."""
    case = Case(row_of(params, **join), np.array(logits, np.float32))
    return run([case])


@relaxed
@given(st.lists(cases(), min_size=1, max_size=5))
def test_tokens_and_flags_are_those_of_the_oracle(batch):
    output = run(batch)
    for case, token, flag in zip(batch, output.token_ids.tolist(), output.flags.tolist(), strict=True):
        expected = oracle.sample(case.logits, case.join, case.position)
        if expected is None:
            assert (token, flag) == (NO_TOKEN, SampleFlag.NUMERIC)
            continue
        assert token == expected
        stops = (*case.join.eos_ids, *case.join.params.stop_token_ids)
        assert flag == (SampleFlag.STOPPED if token in stops else SampleFlag.OK)


@relaxed
@given(st.lists(cases(), min_size=1, max_size=5))
def test_logprobs_are_those_of_the_raw_logits(batch):
    output = run(batch)
    asked = [
        s
        for s, case in enumerate(batch)
        if case.join.params.logprobs is not None and output.flags[s] != SampleFlag.NUMERIC
    ]
    if not asked:
        assert output.logprobs is None
        return
    assert output.logprobs.samples.tolist() == asked
    assert output.logprobs.top.tolist() == [batch[s].join.params.logprobs for s in asked]
    at = 0
    for i, s in enumerate(asked):
        exact = [max(x, float(LOGPROB_MIN)) for x in oracle.logprobs(batch[s].logits)]
        assert output.logprobs.chosen[i] == pytest.approx(exact[output.token_ids[s]], abs=1e-5)
        top = int(output.logprobs.top[i])
        ids = output.logprobs.top_ids[at : at + top].tolist()
        assert ids == sorted(range(VOCAB), key=lambda t: (-batch[s].logits[t], t))[:top]
        assert output.logprobs.top_logprobs[at : at + top] == pytest.approx([exact[t] for t in ids], abs=1e-5)
        at += top
    assert at == output.logprobs.top_ids.size


def columns(output, s: int):
    """All that a batch says about one of its samples, as bytes."""
    said = [output.token_ids[s].tobytes(), output.flags[s].tobytes()]
    if output.logprobs is not None:
        for i in np.flatnonzero(output.logprobs.samples == s):
            first = int(output.logprobs.top[:i].sum())
            part = slice(first, first + int(output.logprobs.top[i]))
            said += [output.logprobs.chosen[i].tobytes(), output.logprobs.top_ids[part].tobytes()]
            said += [output.logprobs.top_logprobs[part].tobytes()]
    return said


@relaxed
@given(st.lists(cases(), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_f35_a_row_is_the_same_to_the_bit_in_any_company(batch, random):
    alone = [columns(run([case]), 0) for case in batch]
    order = list(range(len(batch)))
    random.shuffle(order)
    together = run([batch[i] for i in order], rows=random.sample(range(20), len(batch)))
    for place, i in enumerate(order):
        assert columns(together, place) == alone[i]


@pytest.mark.parametrize("vocab", [1000, 4099, 49152])
def test_f35_large_rows_are_the_same_to_the_bit_in_any_company(vocab):
    """Sums, sorts and vector tails at the size of real vocabularies."""
    rng = np.random.default_rng(vocab)
    kinds = [
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(temperature=1.0, logprobs=20),
        SamplingParams(temperature=30.0),
        SamplingParams(temperature=0.8, top_p=0.95, logprobs=0),
        SamplingParams(temperature=5.0, top_p=0.99),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    ]
    batch = [
        Case(
            row_of(kind, seed=seed, prompt=rng.integers(0, vocab, 50), outputs=rng.integers(0, vocab, 9)),
            (rng.standard_normal(vocab) * scale).astype(np.float32),
        )
        for seed, kind in enumerate(kinds)
        for scale in (1, 4)
    ]
    alone = [columns(run([case]), 0) for case in batch]
    together = run(batch)
    assert [columns(together, s) for s in range(len(batch))] == alone
    backwards = run(batch[::-1])
    assert [columns(backwards, s) for s in range(len(batch))] == alone[::-1]


def test_f32_broken_rows_are_flagged_and_neighbours_unchanged():
    good = [
        Case(row_of(SamplingParams(temperature=1.0, logprobs=2), seed=s), np.arange(VOCAB, dtype=np.float32))
        for s in range(4)
    ]
    alone = [columns(run([case]), 0) for case in good]
    bad = []
    for fault in (np.nan, np.inf, -np.inf):
        logits = np.zeros(VOCAB, np.float32)
        if fault == -np.inf:
            logits[:] = fault
        else:
            logits[VOCAB - 1] = fault
        bad.append(Case(row_of(SamplingParams(temperature=1.0, logprobs=2)), logits))
    output = run([good[0], bad[0], good[1], bad[1], good[2], bad[2], good[3]])
    assert output.flags[1::2].tolist() == [SampleFlag.NUMERIC] * 3
    assert output.token_ids[1::2].tolist() == [NO_TOKEN] * 3
    assert output.logprobs.samples.tolist() == [0, 2, 4, 6]
    assert [columns(output, s) for s in (0, 2, 4, 6)] == alone


def test_a_mask_that_leaves_nothing_is_a_numeric_fault():
    output = one([1.0, 2.0], SamplingParams(min_tokens=1, max_tokens=2, stop_token_ids=(0, 1)))
    assert output.flags.tolist() == [SampleFlag.NUMERIC]


def test_greedy_takes_the_lowest_of_equals():
    assert one([0, 3, 3, 1], SamplingParams(temperature=0)).token_ids.tolist() == [1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_the_least_temperature_takes_the_maximum(temperature):
    assert one([0, 3, 2.9999, 1], SamplingParams(temperature=temperature)).token_ids.tolist() == [1]


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-10])
def test_a_penalty_beyond_float32_rewards_without_a_fault(penalty):
    output = one([1.0, 2.0], SamplingParams(temperature=0, repetition_penalty=penalty), prompt=[0])
    assert (output.token_ids.tolist(), output.flags.tolist()) == ([0], [SampleFlag.OK])


def test_frequencies_follow_the_distribution():
    """χ² of 20,000 draws at as many positions; 99.9 % of right samplers stay below the limit."""
    logits = np.array([2.0, 1.0, 0.0, 0.0, -1.0, -3.0, 0.5], np.float32)
    num, batch = 20_000, 500
    sampler = Sampler(max_rows=batch, vocab_size=logits.size)
    for row in range(batch):
        sampler.join(row_of(SamplingParams(temperature=0.8), seed=5, row=row))
    counts = np.zeros(logits.size)
    stacked = torch.from_numpy(np.tile(logits, (batch, 1)))
    for positions in np.arange(1, num + 1).reshape(-1, batch):
        drawn = sampler.sample(stacked, np.arange(batch, dtype=np.int32), positions)
        counts += np.bincount(drawn.token_ids, minlength=logits.size)
    expected = np.exp(logits / 0.8)
    expected *= num / expected.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 22.46  # six degrees of freedom


def test_a_seed_gives_its_tokens_again_and_another_seed_others():
    def tokens(seed):
        return [one(np.zeros(VOCAB), SamplingParams(), seed=seed, outputs=[0] * n).token_ids[0] for n in range(20)]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)


def test_fork_i_draws_what_a_single_request_with_seed_plus_i_draws():
    logits = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    forks = run([Case(row_of(SamplingParams(n=4), seed=2**63 - 1 + i), logits) for i in range(4)])
    singles = [one(logits, SamplingParams(), seed=2**63 - 1 + i).token_ids[0] for i in range(4)]
    assert forks.token_ids.tolist() == singles


def test_penalties_count_what_the_sampler_drew():
    """With a frequency penalty, equal logits are taken in turn; a resumed row goes on where it was."""
    sampler = Sampler(max_rows=2, vocab_size=4)
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    sampler.join(row_of(params, prompt=[0, 0]))
    logits = torch.zeros(1, 4)
    drawn = [int(sampler.sample(logits, ROW, POSITION + n).token_ids[0]) for n in range(6)]
    assert drawn == [0, 1, 2, 3, 0, 1]
    sampler.leave(ROW)
    sampler.join(row_of(params, prompt=[0, 0], outputs=drawn, row=1))
    assert sampler.sample(logits, ROW + 1, POSITION).token_ids.tolist() == [2]


@pytest.mark.parametrize("leaves", [True, False])
def test_a_row_keeps_nothing_of_its_last_owner(leaves):
    sampler = Sampler(max_rows=1, vocab_size=4)
    heavy = SamplingParams(
        temperature=0, logit_bias={3: 50.0}, frequency_penalty=2.0, stop_token_ids=(0, 1), min_tokens=3, logprobs=1
    )
    sampler.join(row_of(heavy, prompt=[0], outputs=[1, 2]))
    if leaves:
        sampler.leave(ROW)
    sampler.join(row_of(SamplingParams(temperature=0)))
    output = sampler.sample(torch.tensor([[1.0, 0, 0, 0]]), ROW, POSITION)
    assert (output.token_ids.tolist(), output.flags.tolist(), output.logprobs) == ([0], [SampleFlag.OK], None)


def test_min_tokens_counts_from_the_prompt():
    params = SamplingParams(temperature=0, min_tokens=2, max_tokens=5, stop_token_ids=(1,))
    for outputs, token in (([], 0), ([0], 0), ([0, 0], 1)):
        output = one([1.0, 9.0, 0.5, 5.0], params, prompt=[2, 2, 2], outputs=outputs, eos=[3])
        assert output.token_ids.tolist() == [token]
        assert output.flags.tolist() == [SampleFlag.STOPPED if token == 1 else SampleFlag.OK]


def test_an_eos_beyond_the_head_is_no_stop():
    output = one([1.0, 2.0], SamplingParams(temperature=0, min_tokens=1), eos=[5])
    assert (output.token_ids.tolist(), output.flags.tolist()) == ([1], [SampleFlag.OK])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_leave_only_what_a_grammar_allows(temperature):
    logits = np.random.default_rng(2).standard_normal((3, 70)).astype(np.float32)
    sampler = Sampler(max_rows=3, vocab_size=70)
    for row in range(3):
        sampler.join(row_of(SamplingParams(temperature=temperature), row=row))
    rows, positions = np.arange(3, dtype=np.int32), np.ones(3, np.int64)
    free = sampler.sample(torch.from_numpy(logits), rows, positions)
    allowed = np.zeros((2, 3), np.uint32)
    allowed[0, 2] = 1 << 4  # token 68
    allowed[1] = 0xFFFFFFFF
    masked = sampler.sample(torch.from_numpy(logits), rows, positions, LogitMasks(np.array([0, 2], np.int32), allowed))
    assert masked.token_ids.tolist() == [68, *free.token_ids[1:].tolist()]


def test_logits_are_left_as_they_are():
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    sampler = Sampler(max_rows=2, vocab_size=VOCAB)
    for row in range(2):
        sampler.join(row_of(SamplingParams(logit_bias={1: 5.0}, top_p=0.5, repetition_penalty=2.0), row=row))
    sampler.sample(logits, np.arange(2, dtype=np.int32), np.ones(2, np.int64))
    assert torch.equal(logits, before)


def test_scores_of_broken_rows_are_finite():
    logits = np.array([[np.nan, 1, 2], [np.inf, 1, 2], [-np.inf, -np.inf, -np.inf], [0, -np.inf, 0]], np.float32)
    chosen, ids, tops = score(logits, np.array([1, 1, 1, 1], np.int32), 3)
    assert np.isfinite(chosen).all()
    assert np.isfinite(tops).all()
    assert ids[3].tolist() == [0, 2, 1]
    assert tops[3].tolist() == pytest.approx([math.log(0.5), math.log(0.5), -9999.0])
