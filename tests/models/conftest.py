"""Tiny Llama checkpoints, made by `transformers` with random weights."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagewire.config import ModelConfig
from pagewire.models.load import load_model

TINY = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,  # so that heads attend to something: with 0.02 all scores are nearly equal
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


def save(folder: Path, **changes) -> LlamaForCausalLM:
    """A random model of the sizes above with changes, saved to `folder`."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny products gain nothing from threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A saved model with GQA and untied embeddings."""
    folder = tmp_path_factory.mktemp("tiny")
    save(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder):
    """That model, loaded by us."""
    return load_model(ModelConfig(path=str(tiny_folder)))
