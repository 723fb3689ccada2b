"""Every family on the card: in float32 the CPU worker's tokens, beyond windows, too; near it in bf16 and FP8; bit for bit."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.families import FAMILIES, save_family
from tests.models.paged import Paged

from pagewire import Engine
from pagewire.config import ModelConfig, from_mapping
from pagewire.models.load import load_model
from pagewire.worker.cpu import CpuWorker
from pagewire.worker.gpu import GpuWorker
from pagewire.worker.gpu_device import CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NEAR = 2e-2
"""Two candidates are a near-tie where their logits differ by less: tensor cores take float32 with 10 bits."""
LLAMAS = {"llama, yarn, all options", "llama, biases"}
CHANGES = {"head_dim": 32}
"""A card computes heads whose size is a power of two."""


@cache
def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts on both sides of a window of 40, some in several chunks, some with a common beginning."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(33)]
    lengths = (1, 15, 30, 39, 40, 41, 70, 130, 200, 7)
    prompts = [(shared if i % 2 else []) + [rng.randrange(3, 320) for _ in range(n)] for i, n in enumerate(lengths)]
    return [(p, {"max_tokens": rng.randint(6, 16), "temperature": 0, "logprobs": 1}) for p in prompts]


def config(folder, *, kv_dtype="auto", deterministic=False, **scheduler):
    """With a tokenizer of bytes: the models have none."""
    return from_mapping({
        "model": {"path": str(folder), "device": "cpu", "load_format": "dummy", "max_model_len": 512},
        "cache": {"kv_bytes": 2**25, "kv_dtype": kv_dtype},
        "scheduler": {"max_rows": 6, "max_step_tokens": 80, **scheduler},
        "engine": {"deterministic": deterministic},
    })  # fmt: skip


def load(folder, **options):
    made = {"dtype": "float32", **options}
    on_card = {"device": "cuda", "keeps_fp8": True} if made.pop("on_card", False) else {"vector_dtype": torch.float32}
    return load_model(ModelConfig(path=str(folder), max_model_len=512, **made), **on_card)


def run(config, worker):
    async def work():
        async with Engine(config=config, worker=worker) as engine:
            streams = [engine.generate(prompt, echo_text=False, **params) for prompt, params in requests()]
            return [(await stream.result()).choices[0] for stream in streams]

    return asyncio.run(work())


def is_near_tie(decoder, prompt, ours, theirs) -> bool:
    """Whether the first tokens that differ had nearly the same logits after what came before."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    ids = [*prompt, *theirs[:at]]
    paged = Paged(decoder, num_blocks=40)
    logits = paged.step(chunks=[(paged.row(len(ids)), ids)])[0][-1]
    return abs(float(logits[ours[at]] - logits[theirs[at]])) < NEAR


# One with a scaled rope is enough: others differ in their tables alone.
@pytest.fixture(scope="module", params=[name for name in FAMILIES if not name.startswith("llama, ") or name in LLAMAS])
def family(request, tmp_path_factory):
    """A saved model, and what the CPU worker makes of all requests."""
    folder = tmp_path_factory.mktemp("family")
    save_family(request.param, folder, **CHANGES)
    made = config(folder)
    return folder, run(made, CpuWorker(made, load(folder)))


def test_tokens_are_those_of_the_cpu_worker(family):
    folder, expected = family
    made = config(folder)
    results = run(made, GpuWorker(made, load(folder, on_card=True), CudaDevice()))
    plain, differing = load(folder), 0
    for (prompt, _), ours, theirs in zip(requests(), results, expected, strict=True):
        if ours.token_ids != theirs.token_ids:
            differing += 1
            assert is_near_tie(plain, prompt, ours.token_ids, theirs.token_ids), (ours.token_ids, theirs.token_ids)
        else:
            logprobs = [[x.logprob for x in choice.logprobs] for choice in (ours, theirs)]
            np.testing.assert_allclose(*logprobs, atol=0.03, rtol=0.01)
    print(f"{differing} of {len(expected)} are near-ties")
    assert differing <= 3


def differences(results, expected):
    """Between log-probabilities of the first tokens, where these are the same."""
    pairs = [(a, b) for a, b in zip(results, expected, strict=True) if a.token_ids[0] == b.token_ids[0]]
    assert len(pairs) > len(expected) // 2
    return [abs(a.logprobs[0].logprob - b.logprobs[0].logprob) for a, b in pairs]


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3"])
@pytest.mark.parametrize(("kv_dtype", "quantization"), [("auto", "none"), ("fp8", "none"), ("auto", "fp8")])
def test_bfloat16_is_near_float32(tmp_path, name, kv_dtype, quantization):
    if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this card does not multiply in FP8")
    save_family(name, tmp_path, **CHANGES)
    plain = config(tmp_path)
    expected = run(plain, CpuWorker(plain, load(tmp_path, quantization=quantization)))
    made = config(tmp_path, kv_dtype=kv_dtype)
    decoder = load(tmp_path, dtype="bfloat16", quantization=quantization, on_card=True)
    found = differences(run(made, GpuWorker(made, decoder, CudaDevice())), expected)
    print(f"{name}, KV {kv_dtype}, weights {quantization}: differ by {np.mean(found):.3f}, at most {max(found):.3f}")
    assert np.mean(found) < (0.05 if (kv_dtype, quantization) == ("auto", "none") else 0.15)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma2"])
def test_deterministic(tmp_path, name):
    """Bit for bit with other neighbours and other chunks."""
    save_family(name, tmp_path, **CHANGES)
    seen = []
    for max_rows, max_step_tokens in ((6, 80), (2, 33)):
        made = config(tmp_path, max_rows=max_rows, max_step_tokens=max_step_tokens, deterministic=True)
        results = run(made, GpuWorker(made, load(tmp_path, dtype="bfloat16", on_card=True), CudaDevice()))
        seen.append([(choice.token_ids, [x.logprob for x in choice.logprobs]) for choice in results])
    assert seen[0] == seen[1]
