"""Weights in E4M3 on the card: rounding kernels, products, each way of cutting them."""

import pytest
import torch
from tests.kernels.oracle import error

from pagewire_kernels import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a card with FP8"
    ),
]
BOUND = 1e-2
# block_n, block_m, block_k, stages, consumers, programs, scatter, lag
TILINGS = {
    "whole tiles": (64, 64, 128, 8, 1, 12, 0, 0),
    "two groups": (128, 64, 128, 4, 2, 6, 0, 1),
    "parts of one tile": (64, 64, 256, 4, 1, 48, 0, 0),
    "a line of units": (64, 64, 128, 4, 1, 31, 0, 1),
    "several tiles each": (64, 128, 128, 6, 1, 5, 0, 0),
    "added together": (64, 64, 128, 4, 1, 48, 4, 0),
    "added together by two groups": (128, 64, 128, 4, 2, 24, 4, 1),
}


@pytest.fixture(scope="module")
def scratch():
    from pagewire_kernels.linear_hopper import LinearScratch

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    return LinearScratch("cuda")


def inputs(m, n, k, *, gated=False):
    """x in bf16, weight and scales, and the product of what both are rounded to."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight, scales = reference.quantise_rows(torch.randn(2 * n if gated else n, k, device="cuda") * k**-0.5)
    expected = reference.linear_fp8(x, weight, scales)
    torch.cuda.synchronize()  # weights are read before the kernel before has ended
    return x, weight, scales, reference.silu_mul(expected) if gated else expected


@pytest.mark.parametrize("n", [576, 4096, 14336])
@pytest.mark.parametrize("dependent", [False, True])
def test_rows_are_rounded_as_by_the_oracle(n, dependent):
    from pagewire_kernels.quantise import empty_rows, quantise, rms_norm_quantise, silu_mul_quantise

    x = (
        torch.randn(7, n, device="cuda", dtype=torch.bfloat16)
        * torch.logspace(-3, 3, 7, device="cuda")[:, None].bfloat16()
    )
    x[2] = 0
    weight, residual = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((n,), (7, n)))
    total = (x.float() + residual.float()).bfloat16()
    gate_up = torch.randn(7, 2 * n, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    outs = [empty_rows((7, n), x.device) for _ in range(4)]
    quantise(outs[0], x, dependent=dependent)
    rms_norm_quantise(outs[1], x, weight, 1e-5, dependent=dependent)
    rms_norm_quantise(outs[2], x, weight, 1e-5, residual, dependent=dependent)
    silu_mul_quantise(outs[3], gate_up, dependent=dependent)
    assert torch.equal(residual, total)
    expected = [
        x.float(),
        reference.rms_norm(x.float(), weight.float(), 1e-5),
        reference.rms_norm(total.float(), weight.float(), 1e-5),
        reference.silu_mul(gate_up.float()),
    ]
    for out, wide in zip(outs, expected, strict=True):
        values, scales = reference.quantise_rows(wide)
        torch.testing.assert_close(out.scales, scales, rtol=1e-5, atol=0)
        assert (out.values.float() != values.float()).float().mean() < 1e-3, "sums were taken in another order"


@pytest.mark.parametrize("m", [1, 5, 300])
@pytest.mark.parametrize(("n", "k"), [(768, 576), (4096, 4096)])
def test_the_library_multiplies_by_both_scales(m, n, k):
    from pagewire_kernels.linear import gated_fp8, linear_fp8
    from pagewire_kernels.quantise import Fp8Rows, empty_rows

    x, weight, scales, expected = inputs(m, n, k)
    rows = Fp8Rows(*reference.quantise_rows(x))
    assert error(linear_fp8(rows, weight, scales, None, dtype=torch.bfloat16), expected) < BOUND
    x, weight, scales, expected = inputs(m, n, k, gated=True)
    rows, out = Fp8Rows(*reference.quantise_rows(x)), empty_rows((m, n), x.device)
    gated_fp8(out, rows, weight, scales, None)
    assert error(reference.dequantise_rows(out.values, out.scales), expected) < 0.04, "rounded to three bits"


@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize("m", [1, 17, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_each_way_of_cutting_gives_the_product_and_always_the_same(scratch, name, m, gated):
    from pagewire_kernels.linear_hopper import Tiling, launch

    tiling = Tiling(*TILINGS[name])
    if gated and tiling.block_m > 64 and tiling.consumers == 1:
        pytest.skip("more sums than registers")
    x, weight, scales, expected = inputs(m, 768, 2176, gated=gated)  # 17 units of 128: cuts are uneven
    values, x_scales = reference.quantise_rows(x)
    outs = [torch.full((m, 768), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    torch.cuda.synchronize()
    for out in outs:
        launch(out, values, weight, scratch, tiling, scales=(x_scales, scales), gated=gated)
    assert error(outs[0], expected) < BOUND
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not scratch.flags.any()


def cases():
    from pagewire_kernels.linear_table import APART, TABLE

    return [key for key, row in TABLE.items() if "fp8" in key[2] and row != APART]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_each_row_of_the_table(scratch, case):
    from pagewire_kernels.linear_hopper import Tiling, launch
    from pagewire_kernels.linear_table import TABLE

    n, k, kind, bucket = case
    x, weight, scales, expected = inputs(bucket - 3, n, k, gated="gated" in kind)
    values, x_scales = reference.quantise_rows(x)
    out = torch.full((bucket - 3, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    launch(out, values, weight, scratch, Tiling(*TABLE[case]), scales=(x_scales, scales), gated="gated" in kind)
    assert error(out, expected) < BOUND


@pytest.mark.parametrize("m", [1, 16, 64, 128, 200])
@pytest.mark.parametrize("sizes", [(6144, 4096, 4096, 14336), (1280, 8192, 1024, 3584)], ids=["8b", "slice70b"])
def test_layers_in_a_graph_each_kernel_launched_while_the_one_before_ends(m, sizes):
    """What stands around attention, three layers of it, by the table: bit for bit what each kernel gives where the card is
    idle before it.

    Beside an oracle in float32 such a chain differs by 8 % for its rounding alone, whose edges values fall off to either side.
    """
    from pagewire_kernels.linear import gated_fp8, linear_fp8, scratch_for
    from pagewire_kernels.quantise import empty_rows, quantise, rms_norm_quantise

    scratch, device = scratch_for(torch.device("cuda", 0)), torch.device("cuda")
    num_qkv, hidden, num_attended, inner = sizes
    shapes = [(num_qkv, hidden), (hidden, num_attended), (2 * inner, hidden), (hidden, inner)]
    layers = [
        [reference.quantise_rows(torch.randn(n, k, device=device) * k**-0.5) for n, k in shapes] for _ in range(3)
    ]
    norm = torch.rand(hidden, device=device).bfloat16() + 0.5
    first, begun = (torch.randn(m, hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    residual, dependent, bf16 = begun.clone(), scratch is not None, torch.bfloat16

    def work(pause):
        added = first
        for qkv, attn_out, mlp, down in layers:
            rows = empty_rows((m, hidden), device)
            rms_norm_quantise(rows, added, norm, 1e-5, residual, dependent=dependent)
            pause()
            attended = linear_fp8(rows, *qkv, scratch, dtype=bf16)[:, :num_attended]
            pause()
            rows = empty_rows((m, num_attended), device)
            quantise(rows, attended, dependent=dependent)
            pause()
            projected = linear_fp8(rows, *attn_out, scratch, dtype=bf16)
            pause()
            rows = empty_rows((m, hidden), device)
            rms_norm_quantise(rows, projected, norm, 1e-5, residual, dependent=dependent)
            pause()
            gated = empty_rows((m, inner), device)
            gated_fp8(gated, rows, *mlp, scratch, dependent=dependent)
            pause()
            added = linear_fp8(gated, *down, scratch, dtype=bf16)
            pause()
        return added

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        expected = work(stream.synchronize).clone()
        total = residual.clone()
        assert torch.isfinite(expected).all()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        added = work(lambda: None)
        graph.capture_end()
        for _ in range(3):
            residual.copy_(begun)
            added.fill_(float("nan"))
            graph.replay()
            stream.synchronize()
            assert torch.equal(added, expected)
            assert torch.equal(residual, total)
