"""The CPU worker obeys plans made by hand: every kind of delta, forks, rows that stopped, bad logits, faults."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
from tests.worker.plans import GREEDY, Clerk, generate, int32, run

from pagewire.config import CacheConfig, Config, EngineConfig, ModelConfig, SchedulerConfig
from pagewire.errors import ConfigError, InternalError
from pagewire.models.load import load_model
from pagewire.step.step import SampleFlag
from pagewire.worker.cpu import CpuWorker
from pagewire.worker.interface import LogitMasks
from pagewire_transport.params import SamplingParams

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "eos_token_id": [3, 4],
}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # K and V × layers × KV heads × head size × tokens × float32
POISON = 200  # its embedding is NaN in `poisoned`


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


def config_of(folder, *, deterministic=False, num_blocks=64, **model) -> Config:
    return Config(
        model=ModelConfig(path=str(folder), load_format="dummy", **model),
        cache=CacheConfig(kv_bytes=num_blocks * BLOCK_BYTES),
        scheduler=SchedulerConfig(max_rows=8),
        engine=EngineConfig(threads=1, deterministic=deterministic),
    )


@pytest.fixture(params=[False, True], ids=["fast", "deterministic"])
async def worker(folder, request):
    worker = await CpuWorker.load(config_of(folder, deterministic=request.param))
    yield worker
    await worker.close()


@pytest.fixture
async def poisoned(folder):
    config = config_of(folder)
    decoder = load_model(config.model)
    decoder.weights.embedding[POISON] = float("nan")
    worker = CpuWorker(config, decoder)
    yield worker
    await worker.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, POISON, length).tolist()


def test_shape(worker):
    shape = worker.shape
    assert (shape.num_blocks, shape.block_size, shape.kv_bytes) == (64, 16, 64 * BLOCK_BYTES)
    assert (shape.max_rows, shape.max_model_len, shape.vocab_size, shape.eos_ids) == (8, 512, 256, (3, 4))


async def test_greedy_tokens_are_the_favourites(folder, worker):
    """A queue of steps against a dense pass over prompt and tokens."""
    prompt, clerk = prompt_of(37), Clerk()
    tokens = await generate(worker, clerk, clerk.join(0, prompt), prompt, 20)
    assert len(tokens) == 20
    logits = _dense(load_model(config_of(folder).model), prompt + tokens)
    assert tokens == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def _dense(decoder, ids) -> torch.Tensor:
    """Logits of every position with no cache: keys and values as they come."""

    def attend(_layer, q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(ids), -1)

    with torch.inference_mode():
        return decoder.logits(decoder.forward(torch.tensor(ids), torch.arange(len(ids)), attend))


async def test_chunks_beside_decode(worker):
    """One prompt in three chunks, while another sequence decodes: each gets what it gets alone."""
    first, second = prompt_of(10, 1), prompt_of(50, 2)
    clerk = Clerk()
    alone = [await generate(worker, clerk, clerk.join(i, ids), ids, 6) for i, ids in enumerate((first, second))]
    a, b = clerk.join(2, first), clerk.join(3, second)
    clerk.chunk(a, first, a)
    tokens = {2: [], 3: []}
    results = [(await run(worker, plan := clerk.plan()), plan)]
    for part in (second[:16], second[16:33], second[33:]):
        clerk.decode(a)
        clerk.chunk(b, part, *([b] if part == second[33:] else []))
        results.append((await run(worker, plan := clerk.plan()), plan))
    for _ in range(5):
        clerk.decode(b, a)
        results.append((await run(worker, plan := clerk.plan()), plan))
    for result, plan in results:
        for row, token in zip(plan.sample_rows.tolist(), result.token_ids.tolist(), strict=True):
            tokens[row].append(token)
    assert tokens[2][:6] == alone[0]
    assert tokens[3] == alone[1]


@pytest.mark.parametrize("length", [32, 41])
async def test_copied_tail(worker, length):
    """Full blocks shared, the last one copied before the first write: as three requests with their seeds."""
    prompt, params, clerk = prompt_of(length), SamplingParams(temperature=2.0), Clerk()
    alone = []
    for i in range(3):
        tenant = clerk.join(0, prompt, params, seed=40 + i)
        alone.append(await generate(worker, clerk, tenant, prompt, 8))
        clerk.leave(tenant)
    leader = clerk.join(1, prompt, params, seed=40)
    clerk.chunk(leader, prompt[:20])
    await run(worker, clerk.plan())
    clerk.chunk(leader, prompt[20:-1])
    await run(worker, clerk.plan())
    # The tail is complete but for the last position, which each follower computes in a block of its own.
    clerk.chunk(leader, prompt[-1:], leader)
    followers = [leader]
    first = await run(worker, clerk.plan())
    for i in (1, 2):
        follower = clerk.join(1 + i, prompt, params, seed=40 + i, blocks=leader.blocks[: (length - 1) // 16])
        clerk.copies.append((leader.blocks[(length - 1) // 16], follower.blocks[(length - 1) // 16]))
        follower.length = length - 1
        followers.append(follower)
        clerk.chunk(follower, prompt[-1:], follower)
    second = await run(worker, clerk.plan())
    got = [[int(token)] for result in (first, second) for token in result.token_ids]
    for _ in range(7):
        clerk.decode(*followers)
        for mine, token in zip(got, (await run(worker, clerk.plan())).token_ids.tolist(), strict=True):
            mine.append(token)
    assert got == alone
    assert len({tuple(tokens) for tokens in got}) == 3


async def test_fork(worker):
    """One row of logits, three draws; full blocks shared, the tail copied one step later."""
    prompt, params, clerk = prompt_of(41), SamplingParams(temperature=2.0), Clerk()
    alone = []
    for i in range(3):
        tenant = clerk.join(0, prompt, params, seed=7 + i)
        alone.append(await generate(worker, clerk, tenant, prompt, 5))
        clerk.leave(tenant)
    leader = clerk.join(1, prompt, params, seed=7)
    rows = [leader] + [clerk.join(1 + i, prompt, params, seed=7 + i, blocks=leader.blocks[:2]) for i in (1, 2)]
    clerk.chunk(leader, prompt, *rows)
    got = [[int(token)] for token in (await run(worker, clerk.plan())).token_ids]
    for step in range(4):
        if step == 0:
            clerk.copies += [(leader.blocks[2], row.blocks[2]) for row in rows[1:]]
        clerk.decode(*rows)
        for mine, token in zip(got, (await run(worker, clerk.plan())).token_ids.tolist(), strict=True):
            mine.append(token)
    assert got == alone


async def test_stopped_row_is_dropped_and_writes_nowhere(worker):
    """The plan made before the stop was known names it once more."""
    prompt, other, clerk = prompt_of(20), prompt_of(30, 1), Clerk()
    probe = await generate(worker, clerk, clerk.join(0, prompt), prompt, 4)
    alone = await generate(worker, clerk, clerk.join(1, other), other, 6)
    stop = probe[2]
    a = clerk.join(2, prompt, SamplingParams(temperature=0, stop_token_ids=(stop,)))
    b = clerk.join(3, other)
    clerk.chunk(a, prompt, a)
    clerk.chunk(b, other, b)
    plans = [clerk.plan()]
    for _ in range(5):
        clerk.decode(a, b)
        plans.append(clerk.plan())
    handles = [(worker.launch_forward(plan), worker.launch_sample(plan))[1] for plan in plans]
    results = [await handle for handle in handles]
    at = probe.index(stop)
    for step, result in enumerate(results):
        expected = SampleFlag.OK if step < at else SampleFlag.STOPPED if step == at else SampleFlag.DROPPED
        assert result.flags[0] == expected
        assert result.counts.tolist() == [int(step <= at), 1]
        assert result.token_ids.size == result.counts.sum()
    assert [int(result.token_ids[-1]) for result in results] == alone
    memory = worker._stepper._memory
    assert not any(pool[0].any() for pool in (*memory.keys, *memory.values)), "something was written to the null block"
    # All dropped: a step with nothing to compute.
    clerk.decode(a)
    result = await run(worker, clerk.plan())
    assert (result.flags.tolist(), result.counts.tolist(), result.token_ids.size) == ([SampleFlag.DROPPED], [0], 0)


async def test_eos_counts_as_a_token(worker):
    prompt, clerk = prompt_of(12), Clerk()
    probe = await generate(worker, clerk, clerk.join(0, prompt), prompt, 1)
    tenant = clerk.join(1, prompt, eos_ids=(3, probe[0]))
    clerk.chunk(tenant, prompt, tenant)
    result = await run(worker, clerk.plan())
    assert (result.flags.tolist(), result.token_ids.tolist()) == ([SampleFlag.STOPPED], probe)


async def test_bad_logits_are_flagged_and_spread_to_nobody(poisoned):
    """F32: not to neighbours in the batch, and not to who gets the blocks next."""
    good, bad, clerk = prompt_of(20), [*prompt_of(10), POISON, *prompt_of(30)], Clerk(num_blocks=12)
    first = clerk.join(0, good, max_tokens=8)
    alone = await generate(poisoned, clerk, first, good, 5)
    clerk.leave(first)
    a, b = clerk.join(1, bad, max_tokens=8), clerk.join(2, good, max_tokens=8)
    clerk.chunk(a, bad, a)
    clerk.chunk(b, good, b)
    plans = [clerk.plan()]
    for _ in range(4):
        clerk.decode(a, b)
        plans.append(clerk.plan())
    results = [await run(poisoned, plan) for plan in plans]
    assert results[0].flags.tolist() == [SampleFlag.NUMERIC, SampleFlag.OK]
    assert [result.flags[0] for result in results[1:]] == [SampleFlag.DROPPED] * 4
    assert all(result.counts.tolist() == [0, 1] for result in results)
    assert [int(result.token_ids[0]) for result in results] == alone
    clerk.leave(a)
    clerk.leave(b)
    clerk.free = clerk.free[: -len(a.blocks) - len(b.blocks)] + b.blocks + a.blocks  # the poisoned blocks go first
    again = clerk.join(1, good, max_tokens=8)
    assert set(again.blocks) <= set(a.blocks)
    assert await generate(poisoned, clerk, again, good, 5) == alone


async def test_resumed_row(worker):
    """After a preemption: prompt and outputs are computed anew, penalties go on where they were."""
    prompt, clerk = prompt_of(25), Clerk()
    params = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5)
    whole = await generate(worker, clerk, clerk.join(0, prompt, params, seed=9), prompt, 12)
    tenant = clerk.join(1, prompt, params, seed=9, outputs=whole[:5])
    assert await generate(worker, clerk, tenant, prompt + whole[:5], 7) == whole[5:]


async def test_rows_and_blocks_find_new_tenants(worker):
    """Leave and join of one row in one plan; the new one is shorter than the old one's block table."""
    long, short, clerk = prompt_of(100), prompt_of(5, 3), Clerk(num_blocks=24)
    first = clerk.join(5, short, max_tokens=16)
    alone = await generate(worker, clerk, first, short, 6)
    clerk.leave(first)
    second = clerk.join(5, long)
    await generate(worker, clerk, second, long, 3)
    clerk.leave(second)
    assert await generate(worker, clerk, clerk.join(5, short, max_tokens=16), short, 6) == alone


@pytest.mark.parametrize("sizes", [[41], [16, 25], [1, 3, 37], [40, 1]])
async def test_prompt_logprobs(folder, worker, sizes):
    """Of tokens 1 … P − 1, over any chunks; the last position has no next one."""
    prompt, clerk = prompt_of(41), Clerk()
    logprobs = _dense(load_model(config_of(folder).model), prompt).log_softmax(dim=-1)
    tenant = clerk.join(0, prompt, SamplingParams(temperature=0, prompt_logprobs=3))
    rows, at = [], 0
    for size in sizes:
        clerk.chunk(tenant, prompt[at : at + size], *([tenant] if at + size == 41 else []), prompt_logprobs=3)
        (got,) = (await run(worker, clerk.plan())).prompt_logprobs
        assert (got.entry, got.start) == (0, at)
        rows.append(got)
        at += size
    chosen = np.concatenate([row.chosen for row in rows])
    assert chosen.shape == (40,)
    np.testing.assert_allclose(chosen, logprobs[range(40), prompt[1:]], atol=1e-4)
    best = logprobs[:40].topk(3)
    np.testing.assert_array_equal(np.concatenate([row.top_ids for row in rows]), best.indices)
    np.testing.assert_allclose(np.concatenate([row.top_logprobs for row in rows]), best.values, atol=1e-4)


async def test_logprobs_keep_their_samples_when_others_are_dropped(worker):
    prompt, clerk = prompt_of(20), Clerk()
    probe = await generate(worker, clerk, clerk.join(0, prompt), prompt, 1)
    a = clerk.join(1, prompt, SamplingParams(temperature=0, stop_token_ids=(probe[0],), logprobs=1))
    b = clerk.join(2, prompt, SamplingParams(temperature=0, logprobs=2))
    clerk.chunk(a, prompt, a)
    clerk.chunk(b, prompt, b)
    assert (await run(worker, clerk.plan())).logprobs.samples.tolist() == [0, 1]
    clerk.decode(a, b)
    result = await run(worker, clerk.plan())
    assert result.flags.tolist() == [SampleFlag.DROPPED, SampleFlag.OK]
    assert result.logprobs.samples.tolist() == [1]
    assert result.logprobs.top.tolist() == [2]


async def test_masks_reach_their_samples(worker):
    """Also when a dropped sample stands before them."""
    prompt, clerk = prompt_of(20), Clerk()
    probe = await generate(worker, clerk, clerk.join(0, prompt), prompt, 1)
    a = clerk.join(1, prompt, SamplingParams(temperature=0, stop_token_ids=(probe[0],)))
    b = clerk.join(2, prompt)
    clerk.chunk(a, prompt, a)
    clerk.chunk(b, prompt, b)
    await run(worker, clerk.plan())
    clerk.decode(a, b)
    plan = clerk.plan()
    await worker.launch_forward(plan)
    allowed = np.zeros((2, 8), np.uint32)
    allowed[1, 77 // 32] = 1 << (77 % 32)
    result = await worker.launch_sample(plan, LogitMasks(int32(0, 1), allowed))
    assert result.token_ids.tolist() == [77]


async def test_a_cancelled_handle_takes_no_step_away(worker):
    prompt, clerk = prompt_of(20), Clerk()
    alone = await generate(worker, clerk, clerk.join(0, prompt), prompt, 4)
    tenant = clerk.join(1, prompt)
    handles = []
    for i in range(4):
        if i:
            clerk.decode(tenant)
        else:
            clerk.chunk(tenant, prompt, tenant)
        plan = clerk.plan()
        handles.append((worker.launch_forward(plan), worker.launch_sample(plan)))
    handles[1][0].cancel()
    handles[1][1].cancel()
    assert [int((await handles[i][1]).token_ids[0]) for i in (0, 2, 3)] == [alone[0], alone[2], alone[3]]


async def test_handles_resolve_in_launch_order(worker):
    prompt, clerk, order = prompt_of(20), Clerk(), []
    tenant = clerk.join(0, prompt)
    handles = []
    for i in range(5):
        if i:
            clerk.decode(tenant)
        else:
            clerk.chunk(tenant, prompt, tenant)
        plan = clerk.plan()
        for name, launch in (("forward", worker.launch_forward), ("sample", worker.launch_sample)):
            handle = launch(plan)
            handle.add_done_callback(lambda _, what=(i, name): order.append(what))
            handles.append(handle)
    await asyncio.gather(*handles)
    assert order == [(i, name) for i in range(5) for name in ("forward", "sample")]


async def test_a_fault_fails_all_that_follows(worker):
    """The state may be half changed: no later step is computed on it."""
    prompt, clerk = prompt_of(20), Clerk()
    tenant = clerk.join(0, prompt)
    clerk.chunk(tenant, prompt, tenant)
    await run(worker, clerk.plan())
    clerk.decode(tenant)
    stale = clerk.plan()
    stale.epochs = stale.epochs + 1
    forward, sample = worker.launch_forward(stale), worker.launch_sample(stale)
    with pytest.raises(InternalError, match="another tenant"):
        await forward
    with pytest.raises(InternalError):
        await sample
    clerk.decode(tenant)
    with pytest.raises(InternalError):
        await worker.launch_forward(clerk.plan())


async def test_sampling_needs_its_forward(worker):
    clerk = Clerk()
    tenant = clerk.join(0, [5])
    clerk.chunk(tenant, [5], tenant)
    with pytest.raises(InternalError, match="without its forward"):
        await worker.launch_sample(clerk.plan())


async def test_close_waits_for_what_is_queued(folder):
    worker, clerk = await CpuWorker.load(config_of(folder)), Clerk()
    tenant = clerk.join(0, prompt_of(20))
    clerk.chunk(tenant, prompt_of(20), tenant)
    plan = clerk.plan()
    worker.launch_forward(plan)
    handle = worker.launch_sample(plan)
    await worker.close()
    assert (await handle).counts.tolist() == [1]
    await worker.close()
    with pytest.raises(RuntimeError):
        worker.launch_forward(plan)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "float16"}, "model.dtype"),
        ({"num_blocks": 1}, "cache.kv_bytes"),
        ({"max_model_len": 513}, "model.max_model_len"),
    ],
)
async def test_what_cannot_be_served_as_asked(folder, changes, field):
    with pytest.raises(ConfigError) as caught:
        await CpuWorker.load(config_of(folder, **changes))
    assert caught.value.field == field


def test_greedy_is_the_default_here():
    """The tests above lean on it."""
    assert GREEDY.temperature == 0
