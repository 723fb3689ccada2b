"""Norm, activations, rotation with KV write and block copies on the card, in bf16 against float32."""

import pytest
import torch
from tests.kernels.oracle import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUND = 1e-2


def rand(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def poisoned(*shape):
    return torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("n", [576, 4096, 8192])
def test_rms_norm(rows, n):
    from pagewire_kernels import reference
    from pagewire_kernels.rms_norm import rms_norm

    x, residual, weight, out = rand(rows, n), rand(rows, n), rand(n), poisoned(rows, n)
    total = (x.float() + residual.float()).bfloat16()
    rms_norm(out, x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    assert error(out, reference.rms_norm(total.float(), weight.float(), 1e-5)) < BOUND


@pytest.mark.parametrize("n", [1536, 3584, 14336])
def test_gated_activations(n):
    from pagewire_kernels.activation import gelu_mul, silu_mul

    gate_up = rand(37, 2 * n) * 3
    gate, up = gate_up.float().chunk(2, -1)
    for kernel, expected in (
        (silu_mul, torch.nn.functional.silu(gate)),
        (gelu_mul, torch.nn.functional.gelu(gate, approximate="tanh")),
    ):
        out = poisoned(37, n)
        kernel(out, gate_up)
        assert error(out, expected * up) < BOUND


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (8, 1, 128), (9, 3, 64)])
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_and_write(heads, kv_heads, head_dim, norm):
    from pagewire_kernels import reference
    from pagewire_kernels.kv_write import rope_write_kv

    tokens, block_size = 50, 16
    q, k, v = rand(tokens, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = (
        x.cuda() for x in reference.rope_tables(1 / 10_000 ** (torch.arange(head_dim // 2) / (head_dim // 2)), 5000)
    )
    positions = torch.randint(0, 5000, (tokens,), device="cuda")
    slots = torch.randperm(20 * block_size, device="cuda")[:tokens] + block_size
    weights = {"q_norm": rand(head_dim), "k_norm": rand(head_dim), "eps": 1e-5} if norm else {}

    def turn(x, weight):
        x = reference.rms_norm(x.float(), weight.float(), 1e-5) if norm else x.float()
        return reference.rope(x, cos[positions], sin[positions])

    expected_q, expected_k, expected_v = turn(q, weights.get("q_norm")), turn(k, weights.get("k_norm")), v.clone()
    k_cache, v_cache = (poisoned(21, kv_heads, block_size, head_dim) for _ in range(2))
    rope_write_kv(q, q, k, v, k_cache, v_cache, positions.int(), slots.int(), cos, sin, **weights)
    assert error(q, expected_q) < BOUND
    assert error(k_cache[slots // block_size, :, slots % block_size], expected_k) < BOUND
    assert torch.equal(v_cache[slots // block_size, :, slots % block_size], expected_v)
    assert int(torch.isfinite(k_cache).sum()) == tokens * kv_heads * head_dim  # nothing else was written


def test_block_copy():
    from pagewire_kernels.block_copy import BlockPools, copy_blocks

    pools = [rand(40, 8, 16, 128) for _ in range(6)]
    order = torch.randperm(39, device="cuda") + 1
    src, dst = order[:10].int(), order[10:20].int()
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        pool[dst.long()] = pool[src.long()]
    dst = torch.cat([dst, dst.new_zeros(3)])
    copy_blocks(BlockPools(pools), torch.cat([src, src[:3]]), dst)
    for pool, other in zip(pools, expected, strict=True):
        assert torch.equal(pool, other)
