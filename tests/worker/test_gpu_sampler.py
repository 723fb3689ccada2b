"""Special sampling on device tensors chooses what the CPU's sampler chooses from the same logits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampler.cases import VOCAB, cases, row_of, run
from tests.worker.gpu_doubles import HostDevice, TorchOps

from pagewire.step.step import SampleFlag, StepPlan
from pagewire.worker.gpu_results import Results
from pagewire.worker.gpu_rows import GpuRows
from pagewire.worker.gpu_sampler import SpecialSampler
from pagewire.worker.gpu_staging import Staging
from pagewire.worker.interface import LogitMasks
from pagewire.worker.sampler import Sampler
from pagewire_transport.params import SamplingParams

EMPTY = np.empty(0, np.int32)


def plan_of(joins, *, rows=EMPTY):
    return StepPlan(0, rows, EMPTY, EMPTY, EMPTY, 0, joins=joins)


class Bench:
    """A special sampler for so many rows."""

    def __init__(self, num_rows, vocab_size=VOCAB):
        self.device = HostDevice()
        self.staging = Staging(self.device)
        self.rows = GpuRows(
            max_rows=num_rows, max_blocks=1, vocab_size=vocab_size, num_eos=2, device=self.device.device
        )
        self.sampler = SpecialSampler(
            self.rows, TorchOps(None, None, self.rows, 0), self.staging, vocab_size=vocab_size
        )
        self.results = Results(self.device, max_rows=num_rows)

    def join(self, *joins):
        plan = plan_of(list(joins))
        self.rows.update(plan, self.staging)
        self.sampler.update(plan)

    def sample(self, logits, rows, positions, masks=None):
        rows = np.array(rows, np.int32)
        every = np.arange(rows.size)
        logprobs = self.sampler.sample(
            self.results.out,
            torch.from_numpy(np.stack(logits)),
            rows,
            every,
            np.array(positions, np.int32),
            every,
            masks,
        )
        plan = plan_of([])
        plan.sample_rows = rows
        return self.results.send(plan, logprobs, []).result(0.0)


def close_call(case, chosen, other):
    """Whether the filters' sums, which are added up in another order here, decide at this very token."""
    return case.join.params.top_p < 1 and chosen != other


@settings(max_examples=300, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=6))
def test_chooses_as_the_cpu_sampler(batch):
    expected = run(batch)
    bench = Bench(len(batch))
    bench.join(*[case.join for case in batch])
    result = bench.sample([c.logits for c in batch], range(len(batch)), [c.position for c in batch])
    tokens = np.full(len(batch), -1)
    tokens[result.counts == 1] = result.token_ids
    for i, case in enumerate(batch):
        if not close_call(case, tokens[i], expected.token_ids[i]):
            assert tokens[i] == expected.token_ids[i], case
            assert result.flags[i] == expected.flags[i], case
    kept = [i for i, case in enumerate(batch) if not close_call(case, tokens[i], expected.token_ids[i])]
    if expected.logprobs is None:
        assert result.logprobs is None or len(kept) < len(batch)
    elif len(kept) == len(batch):
        assert result.logprobs.samples.tolist() == expected.logprobs.samples.tolist()
        assert result.logprobs.top.tolist() == expected.logprobs.top.tolist()
        np.testing.assert_allclose(result.logprobs.chosen, expected.logprobs.chosen, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(result.logprobs.top_logprobs, expected.logprobs.top_logprobs, rtol=1e-5, atol=1e-5)
        finite = expected.logprobs.top_logprobs > -9999
        assert (result.logprobs.top_ids == expected.logprobs.top_ids)[finite].all()


@pytest.mark.parametrize("params", [
    {"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}, {"presence_penalty": 0.6}, {"repetition_penalty": 0.7},
])  # fmt: skip
def test_counts_what_it_drew(params):
    """Over many steps: the counts behind the penalties are the device's own."""
    rng = np.random.default_rng(3)
    join = row_of(SamplingParams(temperature=0.8, **params), seed=4, prompt=(1, 2, 2), outputs=(5, 2))
    bench, sampler = Bench(1), Sampler(max_rows=1, vocab_size=VOCAB)
    bench.join(join)
    sampler.join(join)
    for step in range(40):
        logits = rng.normal(0, 1, VOCAB).astype(np.float32)
        expected = sampler.sample(torch.from_numpy(logits[None]), np.zeros(1, np.int32), np.array([5 + step]))
        result = bench.sample([logits], [0], [5 + step])
        assert result.token_ids.tolist() == expected.token_ids.tolist(), step


def test_a_row_is_forgotten_by_its_next_tenant():
    bench = Bench(1)
    bench.join(row_of(SamplingParams(temperature=0, repetition_penalty=50.0), prompt=(3,)))
    bench.join(row_of(SamplingParams(temperature=0, logprobs=1), prompt=(1,)))
    logits = np.zeros(VOCAB, np.float32)
    logits[3] = 1
    assert bench.sample([logits], [0], [1]).token_ids.tolist() == [3]


def test_masks_leave_what_they_allow():
    bench = Bench(2)
    bench.join(*[row_of(SamplingParams(temperature=0), row=row) for row in range(2)])
    allowed = np.zeros((1, 2), np.uint32)
    allowed[0, 1] = 1 << (33 - 32)
    logits = np.arange(VOCAB, dtype=np.float32)
    masks = LogitMasks(np.array([1], np.int32), allowed)
    assert bench.sample([logits, logits], [0, 1], [1, 1], masks).token_ids.tolist() == [VOCAB - 1, 33]
    allowed[:] = 0
    bench.join(*[row_of(SamplingParams(temperature=0), row=row) for row in range(2)])
    result = bench.sample([logits, logits], [0, 1], [1, 1], masks)
    assert result.flags.tolist() == [SampleFlag.OK, SampleFlag.NUMERIC]
