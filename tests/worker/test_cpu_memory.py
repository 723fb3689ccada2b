"""Steps of ever other sizes do not make the process grow (F17)."""

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
from pathlib import Path
import torch
from pagewire.models.config import DecoderConfig, RopeConfig
from pagewire.models.decoder import Decoder
from pagewire.models.dummy import random_weights
from pagewire.worker.cpu_linear import pack_weights

def now():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024

torch.set_num_threads(1)
config = DecoderConfig(
    architecture="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=16, max_positions=512, norm_eps=1e-5, rope=RopeConfig(), tie_embeddings=False,
)
decoder = Decoder(config, random_weights(config, torch.float32))
pack_weights(decoder)
with torch.inference_mode():
    for size in range(1, 321):
        ids = torch.arange(size) % 64
        decoder.logits(decoder.forward(ids, torch.arange(size), lambda _layer, q, k, v: q.flatten(1)))
        if size == 20:
            before = now()
print(now() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell what a process takes")
def test_many_sizes_of_steps():
    """1,500 shapes of products; without a bound they take 580 MB."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200
