"""Both attentions of the CPU worker, and its other operations, against the oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.models.config import DecoderConfig, LayerConfig, RopeConfig
from pagewire.models.decoder import Decoder
from pagewire.models.dummy import random_weights
from pagewire.worker import cpu_linear
from pagewire.worker.cpu_attention import PagedAttention
from pagewire.worker.cpu_linear import pack_weights
from pagewire.worker.cpu_split_attention import SPLIT, TILE, SplitAttention
from pagewire.worker.kv_memory import KVMemory
from pagewire_kernels import cpu, reference


def config_of(num_heads=6, num_kv_heads=2, head_dim=16, windows=(0, 0), **changes) -> DecoderConfig:
    return DecoderConfig(
        architecture="llama",
        vocab_size=70,
        hidden_size=num_heads * head_dim,
        intermediate_size=72,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=1024,
        norm_eps=1e-5,
        rope=RopeConfig(),
        tie_embeddings=False,
        layers=tuple(LayerConfig(RopeConfig(), window) for window in windows),
        **changes,
    )


@pytest.mark.parametrize("kind", [PagedAttention, SplitAttention])
@settings(max_examples=60, deadline=None)
@given(
    decode=st.lists(st.integers(0, 300), max_size=6),
    chunks=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 60)), max_size=3),
    block_size=st.sampled_from([16, 32, 64]),
    heads=st.sampled_from([(6, 2), (4, 4), (5, 1)]),
    window=st.sampled_from([0, 0, 1, 7, 16, 50, 130, 1000]),
    cap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 1000),
)
def test_against_the_oracle(kind, decode, chunks, block_size, heads, window, cap, seed):
    """Ragged steps over blocks in random order, with rubbish wherever nothing was written."""
    if not decode and not chunks:
        return
    config = config_of(*heads, windows=(0, window), attn_scale=0.3, attn_soft_cap=cap)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    starts = np.array([*decode, *(start for start, _ in chunks)], np.int32)
    sizes = np.array([*(1 for _ in decode), *(size for _, size in chunks)], np.int32)
    need = -(-(starts + sizes) // block_size)
    memory = KVMemory(config, num_blocks=int(need.sum()) + 3, block_size=block_size, dtype=torch.float32)
    free = rng.permutation(np.arange(1, memory.num_blocks)).tolist()
    tables = np.array([[free.pop() for _ in range(n)] + [0] * int(need.max() - n) for n in need], np.int32)
    for pools in (memory.keys, memory.values):
        for pool in pools:
            pool[1:] = torch.nan
        for table, start in zip(tables, starts, strict=True):
            past = np.arange(start)
            pools[1][table[past // block_size], :, past % block_size] = torch.randn(start, heads[1], 16)
            if start % block_size:  # a block begun was cleared
                pools[1][table[start // block_size], :, start % block_size :] = 0
    total = int(sizes.sum())
    q, k, v = torch.randn(total, heads[0], 16), torch.randn(total, heads[1], 16), torch.randn(total, heads[1], 16)
    attention = kind(config, memory)
    attention.prepare(tables, starts, sizes, len(decode))
    got = attention(1, q, k, v)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    want = reference.paged_attention(
        q.double(),
        memory.keys[1].double(),
        memory.values[1].double(),
        torch.from_numpy(tables),
        offsets,
        torch.from_numpy(starts),
        scale=0.3,
        window=window,
        soft_cap=cap,
    )
    torch.testing.assert_close(got.view(want.shape).double(), want, atol=2e-6, rtol=1e-5)


def test_oracle_by_hand():
    """Two queries of one head over two keys: weights that can be worked out on paper."""
    keys, values = torch.zeros(2, 1, 16, 2), torch.zeros(2, 1, 16, 2)
    slots = torch.tensor([16, 17])
    reference.write_kv(keys, torch.tensor([[[0.0, 0.0]], [[np.log(3.0), 0.0]]], dtype=torch.float32), slots)
    reference.write_kv(values, torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), slots)
    q = torch.ones(2, 1, 2)
    out = reference.paged_attention(
        q, keys, values, torch.tensor([[1]]), torch.tensor([0, 2]), torch.tensor([0]), scale=1.0
    )
    torch.testing.assert_close(out[:, 0], torch.tensor([[1.0, 0.0], [0.25, 0.75]]))


def test_copied_blocks():
    pool = torch.arange(4.0)[:, None, None, None].expand(4, 2, 16, 8).clone()
    reference.copy_blocks(pool, torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert pool[:, 1, 3, 5].tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_operations(tokens):
    torch.manual_seed(tokens)
    x, weight = 3 * torch.randn(tokens, 96), torch.rand(96)
    torch.testing.assert_close(cpu.rms_norm(x, weight, torch.full((1,), 1e-5)), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(cpu.silu_mul(x), reference.silu_mul(x))
    torch.testing.assert_close(cpu.gelu_mul(x), reference.gelu_mul(x))
    torch.testing.assert_close(cpu.soft_cap_(x.clone(), 2.0), reference.soft_cap(x, 2.0))
    heads, positions = x.view(tokens, 6, 16), torch.randint(0, 500, (tokens,))
    cos, sin = reference.rope_tables(10_000.0 ** -(torch.arange(8) / 8), 500)
    turned = reference.rope(heads, cos[positions], sin[positions])
    fast = [table[positions][:, None] for table in cpu.rope_tables(cos, sin)]
    torch.testing.assert_close(cpu.rope(heads, *fast), turned)
    pairs = (
        torch.complex(*heads.chunk(2, dim=-1))
        * torch.polar(torch.ones(500, 8), torch.atan2(sin, cos))[positions][:, None]
    )
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), dim=-1), atol=1e-5, rtol=1e-5)


def logits_of(decoder, ids=(5, 6, 7)) -> torch.Tensor:
    def attend(_layer, q, _k, v):
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).reshape(q.shape[0], -1)

    with torch.inference_mode():
        return decoder.logits(decoder.forward(torch.tensor(ids), torch.arange(len(ids)), attend))


@pytest.mark.skipif(cpu_linear._operators() is None, reason="this build of PyTorch has no oneDNN")
def test_packed_weights_multiply_alike(monkeypatch):
    config = config_of()
    plain, packed = (Decoder(config, random_weights(config, torch.float32)) for _ in range(2))
    pack_weights(packed)
    pack_weights(packed)  # for another worker: nothing more happens
    assert packed.weights.lm_head.is_mkldnn
    torch.testing.assert_close(logits_of(packed), logits_of(plain), atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(cpu_linear, "_operators", lambda *_: None)
    pack_weights(plain)
    assert not plain.weights.lm_head.is_mkldnn, "without the operators weights stay as they are"


def test_splits_hold_whole_tiles_and_blocks():
    assert SPLIT % TILE == 0
    assert SPLIT % 64 == 0
