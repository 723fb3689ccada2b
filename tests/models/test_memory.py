"""Weights are in memory once: reading a model takes little more than what it leaves there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.models.gguf_files import write
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MEASURE = """
import sys
from pathlib import Path
import torch
from pagewire.config import ModelConfig
from pagewire.models.load import load_model

def peak():
    # Not `ru_maxrss`: a child begins with its parent's.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

torch.ones(2) @ torch.ones(2)
before = peak()
decoder = load_model(ModelConfig(path=sys.argv[1]))
weights = decoder.weights
tensors = [weights.embedding, weights.lm_head, *(getattr(layer, name) for layer in weights.layers
           for name in ("qkv", "attn_out", "gate_up", "down"))]
print(peak() - before, sum(t.numel() * t.itemsize for t in tensors))
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the peak")
@pytest.mark.parametrize("kind", ["safetensors", "sharded", "gguf"])
def test_peak(tmp_path, model, kind):
    path = tmp_path
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        write(path, model, kind="F16")
    else:
        model.save_pretrained(tmp_path, max_shard_size="20MB" if kind == "sharded" else "1GB")
    out = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True).stdout
    taken, weights = map(int, out.split())
    assert weights > 120e6
    assert taken < 1.4 * weights, "the rest is the largest tensor, converted"
