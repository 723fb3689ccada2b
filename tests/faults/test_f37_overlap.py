"""F37: planning a step ahead changes no token, for any feature of sampling. A tiny model with random weights."""

import asyncio
import json

import numpy as np
import pytest

from pagewire.clock import MonotonicClock
from pagewire.config import from_mapping
from pagewire.engine.core import EngineCore
from pagewire.engine.load import load_worker
from pagewire_transport.params import SamplingParams

VOCAB = 64
FEATURES = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.8},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 2.0},
    "frequency_penalty": {"temperature": 0.3, "frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {3: 4.0, 7: -100.0}},
    "n": {"n": 3},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "stop_token_ids": {"stop_token_ids": tuple(range(40, 46)), "ignore_eos": True},
    "eos": {"logit_bias": {2: 2.5}},
    "min_tokens": {"logit_bias": {2: 5.0}, "min_tokens": 9},
    "ignore_eos": {"logit_bias": {2: 5.0}, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "everything": {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {5: 2.0},
        "n": 2,
        "stop_token_ids": (11,),
        "min_tokens": 4,
        "logprobs": 1,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


class Collector:
    def __init__(self):
        self.ended = []
        self.logprobs = {}

    def on_outcome(self, outcome):
        self.ended += outcome.ended
        rows = outcome.logprobs
        if rows is not None:
            ends = np.cumsum(rows.top)
            for i, entry in enumerate(rows.samples.tolist()):
                key = int(outcome.slots[entry]), int(outcome.starts[entry])
                self.logprobs[key] = rows.top_ids[ends[i] - rows.top[i] : ends[i]].tolist()


async def run(folder, *, overlap, together, num_blocks=None):
    """Tokens and reasons of every feature's request: all at once, so that they mix, or one after another."""
    cache = {} if num_blocks is None else {"kv_bytes": num_blocks * 16 * 2 * 2 * 16 * 4}
    config = from_mapping(
        {
            "model": {"path": str(folder), "load_format": "dummy"},
            "cache": cache,
            "scheduler": {"max_rows": 16, "max_step_tokens": 32, "overlap": overlap, "seed": 1},
            "engine": {"threads": 1, "deterministic": True},
        }
    )
    core = EngineCore(await load_worker(config), config=config, clock=MonotonicClock())
    sink = Collector()
    core.sinks.append(sink)
    core.start()
    try:
        out = {}
        for i, (name, params) in enumerate(FEATURES.items()):
            prompt = [3 + (i * 7 + j * (1 + i % 3)) % (VOCAB - 3) for j in range(5 + 9 * (i % 5))]
            asked = {"max_tokens": 40, "seed": 100 + i, **params}
            sequences = core.submit(core.admission.admit(prompt, SamplingParams(**asked)))
            out[name] = [(s, s.slot) for s in sequences]
            if not together:
                await wait(core)
        await wait(core)
        core.pipeline.check_invariants()
        tokens = {
            name: [
                (
                    core.output(s).tolist(),
                    s.finish_reason,
                    s.stop,
                    [sink.logprobs.get((slot, j)) for j in range(s.num_output)] if together else None,
                )
                for s, slot in sequences
            ]
            for name, sequences in out.items()
        }
        return tokens, core.stats()
    finally:
        assert await core.stop()


async def wait(core):
    async with asyncio.timeout(30):
        while core.num_live:
            await asyncio.sleep(0.001)


async def test_overlap_changes_no_token(folder):
    ahead, stats = await run(folder, overlap=True, together=True)
    in_turn, _ = await run(folder, overlap=False, together=True)
    for name in FEATURES:
        assert ahead[name] == in_turn[name], name
    # The features did what they are for; otherwise the comparison would show little.
    assert stats["sequences_error_total"] == 0
    assert {reason for _, reason, _, _ in ahead["eos"]} == {"stop"}
    assert ahead["eos"][0][2] == 2
    assert ahead["stop_token_ids"][0][1] == "stop"
    assert ahead["stop_token_ids"][0][2] in range(40, 46)
    assert len(ahead["min_tokens"][0][0]) >= 9
    assert len(ahead["ignore_eos"][0][0]) == 40
    assert 2 in ahead["ignore_eos"][0][0]
    assert 7 not in ahead["logit_bias"][0][0]
    assert len({tuple(tokens) for tokens, _, _, _ in ahead["n"]}) == 3
    assert len(set(ahead["presence_penalty"][0][0])) > len(set(ahead["greedy"][0][0]))


async def test_company_changes_no_token(folder):
    together, _ = await run(folder, overlap=True, together=True)
    alone, _ = await run(folder, overlap=True, together=False)
    for name in FEATURES:
        assert [row[:3] for row in together[name]] == [row[:3] for row in alone[name]], name


async def test_preemption_changes_no_token(folder):
    roomy, _ = await run(folder, overlap=True, together=True)
    tight, stats = await run(folder, overlap=True, together=True, num_blocks=22)
    assert stats["preemptions_total"] > 0
    for name in FEATURES:
        assert [row[:3] for row in roomy[name]] == [row[:3] for row in tight[name]], name
