"""Sampling and step inputs against plain PyTorch, on few rows."""

import numpy as np
import pytest
import torch
from tests.worker.gpu_doubles import TorchOps

from pagewire_kernels import sampling
from pagewire_kernels.step_input import set_blocks, step_inputs

V = 4096 + 77
NAN, INF = float("nan"), float("inf")


class State:
    """Rows as the worker keeps them."""

    def __init__(self, temperature, seeds, stops, *, stopped=None, special=None):
        num = len(temperature)
        self.temperature = torch.tensor(temperature, dtype=torch.float32)
        self.seeds = torch.tensor(seeds, dtype=torch.int64)
        self.stop_ids = torch.full((num, 4), -1, dtype=torch.int32)
        for row, ids in enumerate(stops):
            self.stop_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.stopped = torch.tensor(stopped or [0] * num, dtype=torch.int32)
        self.special = torch.tensor(special or [0] * num, dtype=torch.int32)
        self.last_token = torch.full((num,), -7, dtype=torch.int32)

    def columns(self):
        return self.temperature, self.seeds, self.stop_ids, self.stopped, self.last_token


def make(logits):
    rows = len(logits)
    temperature = [0, 1, 0.7, 0, 2, 1, 0.01, 0][:rows]
    seeds = [0, 1, 2**40 + 5, 3, -1, 6, 7, 8][:rows]
    stops = [[], [5], [], [int(logits[3].nan_to_num(-9.0).argmax()), 9], [], [], [], []][:rows]
    return State(temperature, seeds, stops, stopped=[0, 0, 0, 0, 0, 1, 0, 0], special=[0, 0, 0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize("broken", [None, (1, NAN), (2, INF), (0, NAN), (4, -INF)])
@pytest.mark.parametrize("by_index", [False, True])
def test_draws_what_the_definition_says(broken, by_index):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, V, generator=generator) * 3
    logits[0, [17, 4000, V - 1]] = 30.0  # ties: the lowest
    if broken is not None:
        row, value = broken
        logits[row, slice(None) if value == -INF else 4100] = value
    ours, theirs = make(logits), make(logits)
    order = (
        torch.tensor([3, 0, 7, 5, 1, 2, 6, 4], dtype=torch.int32) if by_index else torch.arange(8, dtype=torch.int32)
    )
    positions = torch.tensor([0, 1, 77, 4095, 5, 6, 7, 8], dtype=torch.int32)
    out, expected = torch.full((2, 8), 99, dtype=torch.int32), torch.full((2, 8), 99, dtype=torch.int32)
    scratch = sampling.SampleScratch(8, V, "cpu")
    sources = order if by_index else None
    sampling.sample(
        out[0], out[1], logits, order, positions, *ours.columns(), scratch, skip=ours.special, logit_rows=sources
    )
    TorchOps(None, None, theirs, 0).sample(expected, logits, order, positions, logit_rows=sources)
    assert out.tolist() == expected.tolist()
    assert ours.last_token.tolist() == theirs.last_token.tolist()
    assert ours.stopped.tolist() == theirs.stopped.tolist()


def test_only_what_is_left_of_the_logits_is_drawn():
    logits = torch.full((1, V), -INF)
    logits[0, [8, 4123]] = torch.tensor([1.0, 1.5])
    drawn = set()
    for seed in range(12):
        state = State([1.0], [seed], [[]])
        out = torch.zeros(2, 1, dtype=torch.int32)
        row = torch.zeros(1, dtype=torch.int32)
        sampling.sample(out[0], out[1], logits, row, row, *state.columns(), sampling.SampleScratch(1, V, "cpu"))
        drawn.add(int(out[0]))
    assert drawn == {8, 4123}


def test_step_inputs_of_rows_that_run_and_rows_that_stopped():
    rows = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    starts = torch.tensor([5, 7, 9, 4], dtype=torch.int32)
    table = torch.tensor([[3, 4, 0], [5, 6, 7], [8, 9, 0]], dtype=torch.int32)
    last, stopped = torch.tensor([11, 12, 13], dtype=torch.int32), torch.tensor([0, 1, 0], dtype=torch.int32)
    for ids, expected in ((None, [13, 11, 0, 13]), ([-1, 40, -1, 41], [13, 40, 0, 41])):
        tokens, positions, slots, lens = torch.full((4, 4), 99, dtype=torch.int32)
        given = None if ids is None else torch.tensor(ids, dtype=torch.int32)
        step_inputs(tokens, positions, slots, lens, rows, starts, last, stopped, table, 4, given)
        assert tokens.tolist() == expected
        assert positions.tolist() == [5, 7, 0, 4]
        assert slots.tolist() == [9 * 4 + 1, 4 * 4 + 3, -1, 9 * 4]
        assert lens.tolist() == [6, 8, 0, 5]


@pytest.mark.parametrize("num", [0, 1, 5, 4500])
def test_set_blocks_writes_just_as_many_as_it_is_told(num):
    rng = np.random.default_rng(num)
    cells = rng.permutation(90 * 60)[:4500]
    deltas = torch.from_numpy(np.stack([cells // 60, cells % 60, 1 + np.arange(4500)], axis=1).astype(np.int32))
    table = torch.zeros(90, 60, dtype=torch.int32)
    expected = table.clone()
    for row, col, block in deltas[:num].tolist():
        expected[row, col] = block
    set_blocks(table, deltas, torch.tensor([num], dtype=torch.int32))
    assert torch.equal(table, expected)
