"""Norms, activations, rotation with KV write and block copies against plain PyTorch."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.activation import gelu_mul, silu_mul, soft_cap
from pagewire_kernels.block_copy import BlockPools, copy_blocks
from pagewire_kernels.kv_write import rope_write_kv
from pagewire_kernels.rms_norm import rms_norm

BLOCK = 4


@pytest.fixture
def rand():
    generator = torch.Generator().manual_seed(3)

    def make(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    return make


@pytest.mark.parametrize("n", [16, 24, 100])
def test_rms_norm(rand, n):
    x, weight, out = rand(3, n), rand(n), torch.full((3, n), float("nan"))
    rms_norm(out, x, weight, 1e-3)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-3))


def test_rms_norm_adds_to_the_residual_first(rand):
    wide, weight, out = rand(3, 60), rand(24), torch.full((3, 24), float("nan"))
    x, residual = wide[:, :24], rand(3, 24)
    total = x + residual
    rms_norm(out, x, weight, 1e-3, residual)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, reference.rms_norm(total, weight, 1e-3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_activations(rand, dtype):
    gate_up = rand(3, 2 * 20, dtype=dtype) * 4
    gate, up = gate_up.float().chunk(2, -1)
    out = torch.full((3, 20), float("nan"), dtype=dtype)
    silu_mul(out, gate_up)
    torch.testing.assert_close(out, (torch.nn.functional.silu(gate) * up).to(dtype), rtol=2e-3, atol=1e-3)
    gelu_mul(out, gate_up)
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(out, expected.to(dtype), rtol=2e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # e^200 is inf, and x / inf is the 0 that we want
def test_activation_of_large_values_is_finite(rand):
    gate_up = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    out = torch.empty(1, 2)
    silu_mul(out, gate_up)
    torch.testing.assert_close(out, torch.tensor([[0.0, 200.0]]))


def test_soft_cap(rand):
    x = rand(3, 700) * 50
    expected = reference.soft_cap(x, 30.0)
    soft_cap(x, 30.0)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "turned"), [(4, 2, 16, 16), (3, 1, 16, 8), (20, 20, 8, 8)])
def test_rotation_and_write(rand, heads, kv_heads, head_dim, turned, norm):
    tokens = 5
    qkv = rand(tokens, (heads + 2 * kv_heads) * head_dim)
    q, k, v = (
        part.view(tokens, -1, head_dim)
        for part in qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    )
    positions = torch.tensor([0, 7, 30, 3, 1], dtype=torch.int32)
    slots = torch.tensor([9, 4, -1, 27, 2], dtype=torch.int64)
    cos, sin = reference.rope_tables(1 / 100 ** (torch.arange(turned // 2) / turned), 31)
    weights = {"q_norm": rand(head_dim), "k_norm": rand(head_dim), "eps": 1e-3} if norm else {}

    def turn(x, weight):
        x = reference.rms_norm(x, weight, 1e-3) if norm else x
        at = positions.long()
        return torch.cat([reference.rope(x[..., :turned], cos[at], sin[at]), x[..., turned:]], -1)

    expected_q, expected_k = turn(q, weights.get("q_norm")), turn(k, weights.get("k_norm"))
    pools = [torch.full((8, kv_heads, BLOCK, head_dim), float("nan")) for _ in range(4)]
    written = slots >= 0
    reference.write_kv(pools[2], expected_k[written], slots[written])
    reference.write_kv(pools[3], v[written], slots[written])
    q_out = torch.full((tokens, heads, head_dim), float("nan"))
    rope_write_kv(q_out, q, k, v, pools[0], pools[1], positions, slots, cos, sin, **weights)
    torch.testing.assert_close(q_out, expected_q)
    torch.testing.assert_close(pools[0], pools[2], equal_nan=True)
    torch.testing.assert_close(pools[1], pools[3], equal_nan=True)
    rope_write_kv(q, q, k, v, pools[0], pools[1], positions, slots, cos, sin, **weights)  # in place
    torch.testing.assert_close(q, expected_q)


@pytest.mark.parametrize("norm", [False, True])
def test_a_layer_without_rope_turns_nothing(rand, norm):
    q, k, v = rand(3, 4, 8), rand(3, 2, 8), rand(3, 2, 8)
    weights = {"q_norm": rand(8), "k_norm": rand(8), "eps": 1e-3} if norm else {}
    expected_q, expected_k = (
        reference.rms_norm(x, weights[name], 1e-3) if norm else x for name, x in (("q_norm", q), ("k_norm", k))
    )
    pools, slots = torch.zeros(4, 4, 2, BLOCK, 8), torch.tensor([5, 4, 9])
    reference.write_kv(pools[2], expected_k, slots)
    reference.write_kv(pools[3], v, slots)
    out, positions = torch.full_like(q, float("nan")), torch.tensor([3, 400, 8], dtype=torch.int32)
    rope_write_kv(out, q, k, v, pools[0], pools[1], positions, slots, None, None, **weights)
    torch.testing.assert_close(out, expected_q)
    torch.testing.assert_close(pools[0], pools[2])
    torch.testing.assert_close(pools[1], pools[3])


def test_block_copy(rand):
    pools = [rand(6, 2, BLOCK, 8) for _ in range(4)]
    expected = [pool.clone() for pool in pools]
    src, dst = torch.tensor([1, 3, 5], dtype=torch.int32), torch.tensor([4, 2, 0], dtype=torch.int32)
    for pool in expected:
        reference.copy_blocks(pool, src[:2], dst[:2])
    copy_blocks(BlockPools(pools), src, dst)
    for pool, other in zip(pools, expected, strict=True):
        assert torch.equal(pool, other)


def test_what_does_not_fit_is_refused(rand):
    with pytest.raises(ValueError, match="do not fit"):
        silu_mul(rand(2, 4), rand(2, 9))
    with pytest.raises(ValueError, match="do not fit"):
        rms_norm(rand(2, 4), rand(2, 4), rand(5), 1e-5)
    with pytest.raises(ValueError, match="one shape"):
        BlockPools([rand(2, 1, 4, 4), rand(3, 1, 4, 4)])
