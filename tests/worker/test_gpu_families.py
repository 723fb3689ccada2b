"""Every family through the GPU worker on CPU tensors: the CPU worker's tokens, once windows are outgrown, too."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.families import FAMILIES, save_family
from tests.worker.gpu_doubles import HostDevice, TorchOps

from pagewire import Engine
from pagewire.config import ModelConfig, from_mapping
from pagewire.models.load import load_model
from pagewire.worker.cpu import CpuWorker
from pagewire.worker.gpu import GpuWorker
from pagewire.worker.gpu_families import FamilyModel

OWN_WAY = {"llama, biases", "qwen2", "qwen2, window", "qwen3, biases", "gemma2", "gemma3"}
"""Those that the launches of a plain Llama do not compute."""
WITHOUT_GRAPHS = {"qwen2, window", "qwen3, biases", "smollm3"}
"""Launched one by one; the others in graphs."""


@cache
def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts on both sides of a window of 40, some in several chunks, some with a common beginning; one fork."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 320) for _ in range(33)]
    out = []
    for i, length in enumerate((1, 30, 39, 41, 70, 5, 100)):
        params: dict[str, Any] = {"max_tokens": rng.randint(4, 9), "temperature": 0, "seed": i, "logprobs": 1}
        params |= {3: {"prompt_logprobs": 1}, 5: {"n": 2, "temperature": 1}}.get(i, {})
        out.append(((shared if i % 2 else []) + [rng.randrange(3, 320) for _ in range(length)], params))
    return out


def config(folder):
    """With a tokenizer of bytes: the models have none."""
    return from_mapping({
        "model": {"path": str(folder), "device": "cpu", "load_format": "dummy", "max_model_len": 256},
        "cache": {"kv_bytes": 2**24},
        "scheduler": {"max_rows": 5, "max_step_tokens": 48},
        "engine": {"threads": 1},
    })  # fmt: skip


def load(folder, **options):
    return load_model(ModelConfig(path=str(folder), max_model_len=256, **options), keeps_fp8=True)


async def run(config, worker):
    async with Engine(config=config, worker=worker) as engine:
        streams = [engine.generate(prompt, echo_text=False, **params) for prompt, params in requests()]
        return [choice for stream in streams for choice in (await stream.result()).choices]


async def run_on_cpu(folder):
    made = config(folder)
    return await run(made, CpuWorker(made, load(folder)))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A saved model, and what the CPU worker makes of all requests."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("family")
    save_family(request.param, folder)
    return request.param, folder, asyncio.run(run_on_cpu(folder))


async def test_tokens_are_those_of_the_cpu_worker(family):
    name, folder, expected = family
    made, decoder = config(folder), load(folder)
    worker = GpuWorker(made, decoder, HostDevice(patience=2), TorchOps, with_graphs=name not in WITHOUT_GRAPHS)
    stepper = worker._stepper
    assert isinstance(stepper._model, FamilyModel) == (name in OWN_WAY)
    results = await run(made, worker)
    assert stepper._ops.outgrown == {layer.window for layer in decoder.config.layers} - {0}
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        logprobs = [[x.logprob for x in choice.logprobs] for choice in (ours, theirs)]
        np.testing.assert_allclose(*logprobs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["mistral", "llama, biases", "gemma3"])
async def test_with_weights_in_fp8(tmp_path, name):
    """Biases, gates and norms behind products in E4M3, too."""
    save_family(name, tmp_path)
    made, decoder = config(tmp_path), load(tmp_path, quantization="fp8")
    assert decoder.weights.layers[0].down.dtype == torch.float8_e4m3fn
    widened = load_model(ModelConfig(path=str(tmp_path), max_model_len=256, quantization="fp8"))
    results = await run(made, GpuWorker(made, decoder, HostDevice(), TorchOps))
    expected = await run(made, CpuWorker(made, widened))
    first = [[choice.token_ids[0] for choice in choices] for choices in (results, expected)]
    assert sum(map(int.__eq__, *first)) >= len(expected) - 1, "a rounded value may fall to either side"
