"""Mixed steps as graphs: the inbox says what the plan says, whatever was in it before, and the smallest shape is taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worker.gpu_doubles import HostDevice

from pagewire.simulator import card
from pagewire.step.step import StepPlan
from pagewire.worker.gpu_graphs import bucket_sizes
from pagewire.worker.gpu_mixed import MAX_CHUNKS, TOKEN_BUCKETS, MixedGraphs, MixedInbox, Shape, shapes
from pagewire.worker.gpu_staging import Staging

MAX_ROWS = 40
PADDING = MAX_ROWS


def plan_of(decode, chunks, samples, deltas):
    """decode: starts; chunks: (start, tokens); samples: entries."""
    rows = np.arange(len(decode) + len(chunks), dtype=np.int32)[::-1].copy()
    starts = np.array([*decode, *(start for start, _ in chunks)], np.int32)
    num_tokens = np.array([1] * len(decode) + [n for _, n in chunks], np.int32)
    plan = StepPlan(0, rows, starts, num_tokens, np.zeros(rows.size, np.int32), len(decode))
    plan.token_ids = np.arange(100, 100 + sum(n for _, n in chunks), dtype=np.int32)
    plan.sample_entries = np.array(samples, np.int32)
    plan.sample_rows = rows[plan.sample_entries]
    plan.block_rows, plan.block_cols, plan.block_ids = np.array(deltas, np.int32).reshape(-1, 3).T
    return plan


@st.composite
def plans(draw):
    decode = draw(st.lists(st.integers(1, 500), max_size=20))
    chunks = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=10))
    ends = [len(decode) + i for i in range(len(chunks)) if draw(st.booleans())]
    samples = [*range(len(decode)), *ends, *(ends[:1] * draw(st.integers(0, 2)))]  # a fork draws twice of one entry
    deltas = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 99)), max_size=30))
    return plan_of(decode, chunks, samples, deltas)


def graphs_of(inbox, seen):
    return MixedGraphs(
        HostDevice(),
        inbox,
        forward=lambda batch: seen.append(("forward", batch)),
        sample=lambda batch: seen.append(("sample", batch)),
        max_rows=MAX_ROWS,
        max_step_tokens=8192,
    )


@pytest.fixture(scope="module")
def made():
    inbox = MixedInbox(max_rows=MAX_ROWS, padding_row=PADDING, device=torch.device("cpu"))
    seen = []
    return inbox, graphs_of(inbox, seen), seen, Staging(HostDevice())


@settings(deadline=None, max_examples=60)
@given(plans())
def test_the_inbox_says_what_the_plan_says(made, plan):
    inbox, graphs, seen, staging = made
    shape = graphs.shape_for(plan)
    assert shape is not None
    inbox.fill(plan, shape, staging)
    seen.clear()
    graphs.forward(shape)
    graphs.sample(shape)
    (_, batch), (_, sampling) = seen
    assert batch.rows.numel() == shape.num_tokens
    total, num_decode, num_samples = plan.total_tokens, plan.num_decode, plan.sample_rows.size
    at, token = 0, 0
    for entry in range(plan.rows.size):
        for i in range(plan.num_tokens[entry]):
            assert batch.rows[at] == plan.rows[entry]
            assert batch.starts[at] == plan.starts[entry] + i
            assert batch.token_ids[at] == (-1 if entry < num_decode else plan.token_ids[token])
            token += entry >= num_decode
            at += 1
    assert (batch.rows[total:] == PADDING).all()
    assert (batch.token_ids[total:] == -1).all()
    assert batch.is_decode.tolist() == [1] * num_decode + [0] * (shape.num_rows - num_decode)
    bounds = np.concatenate([[0], np.cumsum(plan.num_tokens)])
    for i in range(inbox.max_chunks):
        first, last = batch.query_starts[i].item(), batch.query_starts[i + 1].item()
        entry = num_decode + i
        if entry < plan.rows.size:
            assert (first, last) == (bounds[entry], bounds[entry + 1])
            assert batch.chunk_rows[i] == plan.rows[entry]
            assert batch.chunk_lens[i] == plan.starts[entry] + plan.num_tokens[entry]
        else:
            assert (first, last, batch.chunk_rows[i].item()) == (total, total, PADDING)
    for s, entry in enumerate(plan.sample_entries):
        assert batch.sample_tokens[s] == bounds[entry + 1] - 1
        assert sampling.sample_rows[s] == plan.rows[entry]
        assert sampling.sample_positions[s] == plan.starts[entry] + plan.num_tokens[entry]
    assert sampling.sample_rows.numel() == shape.num_rows
    assert (sampling.sample_rows[num_samples:] == PADDING).all()
    deltas = np.stack([plan.block_rows, plan.block_cols, plan.block_ids], axis=1)
    assert int(batch.num_deltas) == len(deltas)
    np.testing.assert_array_equal(batch.deltas[: len(deltas)].numpy(), deltas)


def test_the_smallest_shape_that_holds_the_step(made):
    graphs = made[1]
    assert graphs.shape_for(plan_of([5] * 3, [(0, 30)], [0, 1, 2, 3], [])) == Shape(64, 32)
    assert graphs.shape_for(plan_of([5] * 33, [(0, 31)], list(range(34)), [])) == Shape(64, 40)
    assert graphs.shape_for(plan_of([5], [(0, 64)], [0], [])) == Shape(128, 32)
    assert graphs.shape_for(plan_of([], [(0, 1024)], [], [])) == Shape(1024, 32)
    assert graphs.shape_for(plan_of([], [(0, 1025)], [], [])) == Shape(1152, 40)
    assert graphs.shape_for(plan_of([], [(0, 2049)], [], [])) == Shape(2560, 40)
    assert graphs.shape_for(plan_of([], [(0, 8193)], [], [])) is None
    assert graphs.shape_for(plan_of([], [(0, 10)], [0] * 41, [])) is None, "more samples than rows"


def test_too_many_chunks_or_deltas_go_another_way(made):
    inbox = made[0]
    assert inbox.max_chunks == min(MAX_CHUNKS, MAX_ROWS)
    assert not inbox.takes(plan_of([], [(0, 1)] * (inbox.max_chunks + 1), [], []))
    assert inbox.takes(plan_of([], [(0, 1)] * inbox.max_chunks, [], []))
    assert not inbox.takes(plan_of([], [(0, 1)], [], [(0, 0, 1)] * 9000))


@pytest.mark.parametrize("max_rows", [1, 16, 40, 256, 700, 1024])
@pytest.mark.parametrize("max_step_tokens", [64, 97, 512, 8192])
def test_every_mix_up_to_the_largest_bucket_has_a_shape(max_rows, max_step_tokens):
    known = shapes(max_rows, max_step_tokens)
    largest = max(shape.num_tokens for shape in known)
    assert largest >= min(max_step_tokens, TOKEN_BUCKETS[-1])
    for tokens in {shape.num_tokens for shape in known}:
        rows = [shape.num_rows for shape in known if shape.num_tokens == tokens]
        assert rows == sorted(set(rows))
        assert rows[-1] == min(tokens, max_rows)


def test_the_modelled_card_has_the_same_graphs():
    assert card.MIXED_BUCKETS == TOKEN_BUCKETS
    assert card.DECODE_BUCKETS == bucket_sizes(card.DECODE_BUCKETS[-1])
