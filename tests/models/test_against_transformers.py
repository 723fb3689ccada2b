"""Logits of tiny random Llama models equal those of `transformers`, whatever the shape of the model and of the steps."""

import pytest
import torch
from tests.models.conftest import LINEAR, LLAMA3, save
from tests.models.paged import Paged
from transformers import AutoModelForCausalLM

from pagewire.config import ModelConfig
from pagewire.models.load import load_model
from pagewire.worker.cpu_linear import pack_weights

BLOCK = 16
MODELS = {
    "gqa, untied": {},
    "tied": {"tie_word_embeddings": True},
    "one KV head": {"num_key_value_heads": 1},
    "as many KV heads": {"num_key_value_heads": 6},
    "own head size": {"head_dim": 24},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": LINEAR},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
}


def token_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_logits(tmp_path, changes, exact):
    model = save(tmp_path, **changes)
    decoder = load_model(ModelConfig(path=str(tmp_path)))
    pack_weights(decoder)
    ids = token_ids(300)
    paged = Paged(decoder, exact=exact)
    got = paged.prefill(paged.row(300), ids, sizes=[33, 100, 1])
    assert (got - expected(model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_lengths_around_a_block(tiny_folder, tiny, length, block_size):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    ids = token_ids(length + 4)
    paged = Paged(tiny, block_size=block_size)
    row = paged.row(length + 4)
    got = [paged.prefill(row, ids[:length])] + [paged.step(decode=[(row, token)])[0] for token in ids[length:]]
    assert (torch.cat(got) - expected(model, ids)).abs().max() < 1e-4


def test_sharded_and_other_precisions(tmp_path):
    model = save(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    ids = token_ids(20)
    decoder = load_model(ModelConfig(path=str(tmp_path / "many")))
    paged = Paged(decoder)
    assert (paged.prefill(paged.row(20), ids) - expected(model, ids)).abs().max() < 1e-4
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    decoder = load_model(ModelConfig(path=str(tmp_path / "half")))
    paged = Paged(decoder)
    assert decoder.weights.embedding.dtype == torch.float32
    # Read anew: in the model at hand even the frequencies of rope are rounded to bfloat16.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    assert (paged.prefill(paged.row(20), ids) - expected(model, ids)).abs().max() < 1e-4
