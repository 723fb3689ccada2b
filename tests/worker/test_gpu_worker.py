"""The GPU worker's bookkeeping, on CPU tensors: the same tokens as the CPU worker, through the real engine."""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.worker.gpu_doubles import HostDevice, TorchOps

from pagewire import Engine
from pagewire.config import CacheConfig, from_mapping
from pagewire.errors import ConfigError
from pagewire.models import kv_scales
from pagewire.models.load import load_model
from pagewire.step.step import StepPlan
from pagewire.worker.gpu import GpuWorker
from pagewire.worker.gpu_graphs import Inbox, bucket_sizes
from pagewire.worker.gpu_memory import GpuKV, num_blocks_on_card
from pagewire.worker.gpu_staging import ALIGN, Staging
from pagewire.worker.gpu_stepper import Stepper

NUM_REQUESTS = 60
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
PER_BLOCK = 2 * 2 * 2 * 16 * 16 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path


@cache
def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 130 tokens, half of them with a common beginning; all kinds of sampling, forks among them."""
    rng = random.Random(5)
    shared = [rng.randrange(10, 500) for _ in range(50)]
    out = []
    for i in range(NUM_REQUESTS):
        own = [rng.randrange(10, 500) for _ in range(rng.randint(1, 80))]
        params: dict[str, Any] = {
            "max_tokens": rng.randint(1, 20),
            "seed": i,
            "temperature": rng.choice([0, 0.7, 1, 2]),
        }
        params |= rng.choice(
            [{}, {}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3},
             {"presence_penalty": 1.0}, {"logit_bias": {5: 3.0, 6: -100.0}}, {"logprobs": 2}, {"prompt_logprobs": 1},
             {"n": 3}, {"min_tokens": 1, "stop_token_ids": (33, 44, 55)}]
        )  # fmt: skip
        out.append(((shared if i % 2 else []) + own, params))
    return out


def config(folder, **options):
    scheduler = {"max_rows": 12, "max_step_tokens": 64, **options}
    return from_mapping({
        "model": {"path": str(folder), "load_format": "dummy", "device": "cpu"},
        "cache": {"kv_bytes": scheduler.pop("kv_bytes", 400 * PER_BLOCK)},
        "scheduler": scheduler,
        "engine": {"threads": 1},
    })  # fmt: skip


async def run(config, worker=None):
    """Token ids and log-probabilities of all requests, and the engine's counters."""
    async with Engine(config=config, worker=worker) as engine:
        streams = [engine.generate(prompt, echo_text=False, **params) for prompt, params in requests()]
        results = [await stream.result() for stream in streams]
        return results, await engine.stats()


def worker_of(config, *, patience=0, **options):
    decoder = load_model(config.model)
    return GpuWorker(config, decoder, HostDevice(patience=patience), TorchOps, **options)


def same(results, expected):
    """A token may differ where two candidates are nearly equal, since sums are taken in another order."""
    ids = [[choice.token_ids for choice in result.choices] for result in results]
    wanted = [[choice.token_ids for choice in result.choices] for result in expected]
    differing = [i for i, (a, b) in enumerate(zip(ids, wanted, strict=True)) if a != b]
    assert len(differing) <= 1, (differing, [(ids[i], wanted[i]) for i in differing])


@pytest.fixture(scope="module")
def expected(folder):
    torch.set_num_threads(1)
    return asyncio.run(run(config(folder)))[0]


class TestSameTokensAsTheCpuWorker:
    @pytest.mark.parametrize("with_graphs", [True, False])
    @pytest.mark.parametrize("overlap", [True, False])
    async def test_all_kinds_of_requests(self, folder, expected, with_graphs, overlap):
        made = config(folder, overlap=overlap)
        results, _ = await run(made, worker_of(made, with_graphs=with_graphs, patience=3))
        same(results, expected)
        for ours, theirs in zip(results, expected, strict=True):
            for a, b in zip(ours.choices, theirs.choices, strict=True):
                if a.token_ids == b.token_ids and b.logprobs is not None:
                    np.testing.assert_allclose(
                        [x.logprob for x in a.logprobs], [x.logprob for x in b.logprobs], rtol=1e-3, atol=1e-3
                    )

    async def test_preempted_and_resumed(self, folder, expected):
        made = config(folder, kv_bytes=16 * PER_BLOCK)
        results, stats = await run(made, worker_of(made))
        assert stats["preemptions_total"] > 0
        same(results, expected)


class TestFp8Kv:
    """KV in 8 bits: stored by scale, read back by scale, found only by those of the same scales."""

    def made(self, folder, **cache):
        values = msgspec.to_builtins(config(folder))
        values["cache"] |= {"kv_dtype": "fp8", **cache}
        return from_mapping(values)

    async def test_tokens_are_near_those_in_float32(self, folder, expected):
        made = self.made(folder)
        worker = worker_of(made)
        assert worker.shape.kv_bytes == 400 * PER_BLOCK, "the same bytes"
        assert worker.shape.num_blocks == 1600, "hold four times as many blocks"
        results, stats = await run(made, worker)
        assert stats["cached_tokens_total"] > 0 if "cached_tokens_total" in stats else True
        same = agree = 0
        for ours, theirs in zip(results, expected, strict=True):
            for a, b in zip(ours.choices, theirs.choices, strict=True):
                same += a.token_ids[:1] == b.token_ids[:1]
                agree += 1
        assert agree > 60
        assert same > 0.8 * agree, "first tokens of a model with random weights"

    async def test_scales_are_part_of_the_namespace(self, folder, tmp_path):
        model = load_model(config(folder).model).config
        kv_scales.from_largest(np.full((2, 2), 20.0), np.full((2, 2), 3.0)).save(tmp_path / "scales.json")
        formats = set()
        for made in (config(folder), self.made(folder), self.made(folder, kv_scales=str(tmp_path / "scales.json"))):
            worker = worker_of(made)
            formats.add(worker.shape.kv_format)
            async with Engine(config=made, worker=worker) as engine:
                await engine.generate([5] * 40, max_tokens=2, echo_text=False).result()
        assert len(formats) == 3
        assert "" in formats
        assert kv_scales.default(model).digest in formats

    def test_a_cpu_refuses_by_name(self, folder):
        made = self.made(folder)
        with pytest.raises(ConfigError, match="takes a GPU") as caught:
            asyncio.run(run(made))
        assert caught.value.field == "cache.kv_dtype"

    def test_the_scales_of_another_model_are_refused(self, folder, tmp_path):
        kv_scales.from_largest(np.ones((3, 2)), np.ones((3, 2))).save(tmp_path / "scales.json")
        with pytest.raises(ConfigError, match="another model") as caught:
            worker_of(self.made(folder, kv_scales=str(tmp_path / "scales.json")))
        assert caught.value.field == "cache.kv_scales"


class TestFp8Weights:
    """Matrices and what enters them in E4M3, with one token at a time and with many."""

    @pytest.mark.parametrize("deterministic", [False, True])
    async def test_greedy_tokens_are_nearly_those_of_the_cpu(self, folder, deterministic):
        values = msgspec.to_builtins(config(folder))
        values["model"]["quantization"] = "fp8"
        made = from_mapping(values)
        decoder = load_model(made.model, keeps_fp8=True)
        assert decoder.weights.layers[0].down.dtype == torch.float8_e4m3fn
        stepper = Stepper(
            msgspec.structs.replace(made, engine=msgspec.structs.replace(made.engine, deterministic=deterministic)),
            decoder, HostDevice(), TorchOps, with_graphs=True,
        )  # fmt: skip
        assert stepper.shape.num_blocks == 400
        worker = GpuWorker(made, decoder, HostDevice(), TorchOps)
        prompts = [prompt for prompt, _ in requests()][:20]

        async def first_tokens(worker):
            async with Engine(config=made, worker=worker) as engine:
                streams = [engine.generate(p, max_tokens=3, temperature=0, echo_text=False) for p in prompts]
                return [(await stream.result()).token_ids for stream in streams]

        ours, theirs = await first_tokens(worker), await first_tokens(None)
        assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 18, "a rounded value may fall to either side"

    def test_sides_that_no_card_multiplies_are_refused(self, folder, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({**MODEL, "intermediate_size": 168}))
        values = msgspec.to_builtins(config(tmp_path))
        values["model"]["quantization"] = "fp8"
        made = from_mapping(values)
        with pytest.raises(ConfigError, match="multiples of 16") as caught:
            GpuWorker(made, load_model(made.model, keeps_fp8=True), HostDevice(), TorchOps)
        assert caught.value.field == "model.quantization"


async def test_broken_logits_end_their_request_alone(folder):
    made = config(folder)
    decoder = load_model(made.model)
    decoder.weights.embedding[7] = torch.nan
    worker = GpuWorker(made, decoder, HostDevice(), TorchOps)
    async with Engine(config=made, worker=worker) as engine:
        good = engine.generate([3, 4, 5], max_tokens=6, temperature=0, logit_bias={7: -100}, echo_text=False)
        bad = engine.generate([3, 7, 5], max_tokens=6, temperature=0, echo_text=False)
        assert len((await good.result()).token_ids) == 6
        with pytest.raises(Exception, match="NaN"):
            await bad.result()
        again = engine.generate([3, 4, 5], max_tokens=6, temperature=0, logit_bias={7: -100}, echo_text=False)
        assert (await again.result()).token_ids == (await good.result()).token_ids


async def test_without_a_card_it_says_so(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        await GpuWorker.load(config(folder))


async def test_a_device_that_fails_fails_the_handles(folder):
    made = config(folder)
    worker = worker_of(made)

    def fail(pairs):
        class Broken:
            def query(self):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return Broken()

    worker._stepper.device.fetch = fail
    async with Engine(config=made, worker=worker) as engine:
        with pytest.raises(Exception, match="illegal memory access"):
            await engine.generate([3, 4, 5], max_tokens=6, echo_text=False).result()


async def test_close_waits_for_what_is_queued_and_is_idempotent(folder):
    made = config(folder)
    worker = worker_of(made, patience=5)
    device = worker._stepper.device
    empty = np.empty(0, np.int32)
    plan = StepPlan(0, empty, empty, empty, empty, 0)
    forward, sample = worker.launch_forward(plan), worker.launch_sample(plan)
    await worker.close()
    assert forward.done()
    assert sample.done()
    assert device.is_closed
    await worker.close()


class TestMemory:
    def test_kv_bytes_are_obeyed_and_counted(self, folder):
        worker = worker_of(config(folder, kv_bytes=100 * PER_BLOCK + 5))
        assert worker.shape.num_blocks == 100
        assert worker.shape.kv_bytes == 100 * PER_BLOCK

    @pytest.mark.parametrize(("kv_bytes", "free", "says", "field"), [
        (200 * PER_BLOCK, 100 * PER_BLOCK, f"{80 * PER_BLOCK} would", "cache.kv_bytes"),
        (PER_BLOCK, 900 * PER_BLOCK, "at least 2", "cache.kv_bytes"),
        (0, 101 * PER_BLOCK, f"{81 * PER_BLOCK} bytes fit on the card, {PER_BLOCK} within", "cache.gpu_memory_fraction"),
        (0, 0, " 0 bytes fit", "cache.gpu_memory_fraction"),
    ])  # fmt: skip
    def test_what_does_not_fit_is_refused_with_what_would(self, folder, kv_bytes, free, says, field):
        model = load_model(config(folder).model).config
        cache = CacheConfig(kv_bytes=kv_bytes)
        sizes = {"free_bytes": free, "total_bytes": 1000 * PER_BLOCK, "itemsize": 4}
        with pytest.raises(ConfigError, match=says) as caught:
            num_blocks_on_card(model, cache, **sizes, max_tokens=10**9)
        assert caught.value.field == field

    def test_the_fraction_counts_what_is_used_already(self, folder):
        model = load_model(config(folder).model).config
        sizes = {"free_bytes": 700 * PER_BLOCK, "total_bytes": 1000 * PER_BLOCK, "itemsize": 4}
        assert num_blocks_on_card(model, CacheConfig(), **sizes, max_tokens=10**9) == 600
        assert num_blocks_on_card(model, CacheConfig(gpu_memory_fraction=0.5), **sizes, max_tokens=10**9) == 200
        assert num_blocks_on_card(model, CacheConfig(gpu_memory_fraction=1), **sizes, max_tokens=10**9) == 680
        assert num_blocks_on_card(model, CacheConfig(), **sizes, max_tokens=33) == 4, "no more than can be used"

    def test_pools_are_contiguous_and_zero(self, folder):
        model = load_model(config(folder).model).config
        memory = GpuKV(model, num_blocks=3, block_size=16, dtype=torch.float16, device=torch.device("cpu"))
        assert memory.num_bytes == 2 * 2 * 2 * 16 * 3 * 16 * 2
        assert len(memory.keys) == len(memory.values) == 2
        for pool in (*memory.keys, *memory.values):
            assert pool.is_contiguous()
            assert pool.shape == (3, 2, 16, 16)
            assert not pool.any()


class TestStaging:
    def test_what_is_uploaded_comes_out_in_its_type(self):
        staging = Staging(HostDevice(), capacity=8)
        arrays = [
            np.arange(3, dtype=np.int32), np.array([-1, 2**63 - 1], np.int64), np.array([0.5], np.float32),
            np.array([[1e300, -2.0]]), np.array([2**64 - 1], np.uint64), np.empty((0, 3), np.int32),
        ]  # fmt: skip
        out = staging.upload(arrays)
        for tensor, array in zip(out, arrays, strict=True):
            assert tensor.shape == array.shape
            assert tensor.storage_offset() * tensor.element_size() % (4 * ALIGN) == 0
            np.testing.assert_array_equal(tensor.numpy().view(array.dtype), array)

    def test_a_buffer_is_not_written_before_its_copy_is_done(self):
        staging = Staging(HostDevice(patience=10**9), num_slots=2, capacity=8)
        slots = {id(slot.words) for slot in staging._ring}
        for _ in range(6):
            staging.upload([np.ones(4, np.int32)])
        assert len(staging._ring) == 6
        assert slots < {id(slot.words) for slot in staging._ring}

    def test_the_ring_does_not_grow_while_copies_are_in_time(self):
        staging = Staging(HostDevice(), num_slots=4)
        for _ in range(50):
            staging.upload([np.ones(4, np.int32)])
        assert len(staging._ring) == 4


class TestInbox:
    def test_rows_are_padded_and_deltas_follow(self):
        inbox, staging = Inbox(max_rows=6, padding_row=6, device=torch.device("cpu")), Staging(HostDevice())
        ints = lambda *values: np.array(values, np.int32)  # noqa: E731
        plan = StepPlan(0, ints(4, 2, 5), ints(9, 8, 7), ints(1, 1, 1), ints(0, 0, 0), 3)
        plan.block_rows, plan.block_cols, plan.block_ids = ints(4, 5), ints(0, 1), ints(31, 32)
        inbox.fill(plan, 5, staging)
        batch = inbox.batch(5)
        assert batch.rows.tolist() == [4, 2, 5, 6, 6]
        assert batch.starts.tolist()[:3] == [9, 8, 7]
        assert batch.num_deltas.tolist() == [2]
        assert batch.deltas[:2].tolist() == [[4, 0, 31], [5, 1, 32]]
        for view in (batch.rows, batch.starts, batch.deltas):
            assert view.storage_offset() % ALIGN == 0

    def test_more_deltas_than_it_has_room_for_go_another_way(self):
        inbox = Inbox(max_rows=2, padding_row=2, device=torch.device("cpu"))
        plan = StepPlan(0, *[np.empty(0, np.int32)] * 4, 0)
        plan.block_rows = np.zeros(4, np.int32)
        assert inbox.takes(plan)
        plan.block_rows = np.zeros(5, np.int32)
        assert not inbox.takes(plan)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 64, 65, 512, 1024, 1500, 8192])
def test_buckets_hold_every_batch(max_rows):
    sizes = bucket_sizes(max_rows)
    assert sizes[-1] == max_rows
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
