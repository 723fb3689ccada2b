"""How many blocks fit, and what lies in them."""

import numpy as np
import pytest
import torch

from pagewire.config import CacheConfig
from pagewire.errors import ConfigError
from pagewire.models.config import DecoderConfig, RopeConfig
from pagewire.worker import kv_memory
from pagewire.worker.kv_memory import KVMemory, available_memory, num_blocks_for

CONFIG = DecoderConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=2048,
    norm_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
)
TOKEN = 2 * 3 * 2 * 16 * 4


def blocks(kv_bytes: int = 0, *, block_size: int = 16, max_rows: int = 4, max_model_len: int = 2048) -> int:
    return num_blocks_for(
        CONFIG,
        CacheConfig(kv_bytes=kv_bytes, block_size=block_size),
        max_rows=max_rows,
        max_model_len=max_model_len,
        itemsize=4,
    )


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_bytes_asked_for_are_bytes_had(block_size):
    num_blocks = blocks(10**6, block_size=block_size)
    memory = KVMemory(CONFIG, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32)
    held = sum(pool.numel() * pool.element_size() for pool in (*memory.keys, *memory.values))
    assert held == memory.num_bytes == num_blocks * block_size * TOKEN
    assert held <= 10**6 < held + block_size * TOKEN
    assert all(pool.shape == (num_blocks, 2, block_size, 16) for pool in memory.keys)


def test_default_suits_rows_or_memory(monkeypatch):
    monkeypatch.setattr(kv_memory, "available_memory", lambda: 10**12)
    assert blocks() == 4 * 1024 // 16 + 1
    assert blocks(max_rows=1) == 2048 // 16 + 1, "one sequence of full length fits"
    assert blocks(max_model_len=100) == 25 + 1
    monkeypatch.setattr(kv_memory, "available_memory", lambda: 100 * 16 * TOKEN)
    assert blocks() == 25


@pytest.mark.parametrize("kv_bytes", [1 << 50, 1 << 80])
def test_memory_that_no_machine_has_is_refused_by_name(kv_bytes):
    with pytest.raises(ConfigError, match=r"cannot be had on this machine; [0-9]+ are free") as refused:
        KVMemory(CONFIG, num_blocks=blocks(kv_bytes), block_size=16, dtype=torch.float32)
    assert refused.value.field == "cache.kv_bytes"


def test_available_memory_is_what_the_system_says():
    assert 10**7 < available_memory() < 10**14


def test_write_clears_a_block_when_it_begins():
    memory = KVMemory(CONFIG, num_blocks=6, block_size=16, dtype=torch.float32)
    for pool in (*memory.keys, *memory.values):
        pool[1:] = float("nan")
    table = np.array([[3, 5]], np.int32)
    k, v = torch.randn(2, 17, 2, 16)
    memory.prepare_write(table, np.array([0], np.int32), np.array([17], np.int32))
    memory.write(1, k, v)
    assert torch.equal(memory.keys[1][3], k[:16].transpose(0, 1))
    assert torch.equal(memory.values[1][5, :, 0], v[16])
    assert not memory.values[1][5, :, 1:].any()
    memory.prepare_write(table, np.array([17], np.int32), np.array([1], np.int32))
    memory.write(1, k[:1], v[:1])
    assert torch.equal(memory.keys[1][5, :, :2].transpose(0, 1), torch.stack((k[16], k[0]))), "a block begun is kept"
    assert memory.keys[1][[1, 2, 4]].isnan().all()
    assert not memory.keys[1][0].any()


def test_copies_read_before_they_write():
    memory = KVMemory(CONFIG, num_blocks=4, block_size=16, dtype=torch.float32)
    for pool in memory.keys:
        pool[:] = torch.arange(4.0)[:, None, None, None]
    memory.copy(np.array([1, 2], np.int32), np.array([2, 1], np.int32))
    assert all(pool[:, 0, 0, 0].tolist() == [0, 2, 1, 3] for pool in memory.keys)
