"""Products of few tokens on the card, each way of cutting them, in bf16 against float32."""

import pytest
import torch
from tests.kernels.oracle import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUND = 1e-2
# block_n, block_m, block_k, stages, consumers, programs, scatter, lag
TILINGS = {
    "whole tiles": (64, 64, 64, 8, 1, 12, 0, 0),
    "two groups": (128, 64, 64, 4, 2, 6, 0, 1),
    "parts of one tile": (64, 64, 128, 4, 1, 48, 0, 0),
    "a line of units": (64, 64, 64, 4, 1, 31, 0, 1),
    "several tiles each": (64, 64, 64, 7, 1, 5, 0, 0),
    "added together": (64, 64, 64, 4, 1, 48, 4, 0),
    "added together by two groups": (128, 64, 64, 4, 2, 48, 8, 1),
    "256 tokens": (128, 256, 64, 3, 2, 11, 0, 0),
}


@pytest.fixture(scope="module")
def scratch():
    from pagewire_kernels.linear_hopper import LinearScratch

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9")
    return LinearScratch("cuda")


def inputs(m, n, k, *, gated=False):
    """x, weight and the product in float32."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2 * n if gated else n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    expected = x.float() @ weight.float().t()
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    torch.cuda.synchronize()  # weights are read before the kernel before has ended
    return x, weight, expected


def poisoned(m, n, dtype):
    return torch.full((m, n), float("nan"), device="cuda", dtype=dtype)


@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize("m", [1, 17, 64])
@pytest.mark.parametrize("kind", ["", "gated", "wide"])
def test_each_way_of_cutting_gives_the_product_and_always_the_same(scratch, name, m, kind):
    from pagewire_kernels.linear_hopper import Tiling, launch

    tiling = Tiling(*TILINGS[name])
    if kind == "gated" and tiling.block_m > 128:
        pytest.skip("more sums than registers")
    n, k = 768, 1088  # 17 units of 64: cuts are uneven
    x, weight, expected = inputs(m, n, k, gated=kind == "gated")
    outs = [poisoned(m, n, torch.float32 if kind == "wide" else torch.bfloat16) for _ in range(3)]
    for out in outs:
        launch(out, x, weight, scratch, tiling, gated=kind == "gated")
    assert error(outs[0], expected) < (1e-4 if kind == "wide" else BOUND)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not scratch.flags.any()


def test_outputs_that_fill_no_whole_tile(scratch):
    from pagewire_kernels.linear_hopper import Tiling, launch

    x, weight, expected = inputs(40, 16_032, 256)
    for dtype in (torch.bfloat16, torch.float32):
        out = poisoned(40, 16_032, dtype)
        launch(out, x, weight, scratch, Tiling(128, 64, 64, 4, 1, 132, 0, 0))
        assert error(out, expected) < BOUND


def cases():
    from pagewire_kernels.linear_table import TABLE

    return [key for key in TABLE if "fp8" not in key[2]]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_each_row_of_the_table_in_a_graph_among_others(scratch, case):
    from pagewire_kernels.linear import linear
    from pagewire_kernels.rms_norm import rms_norm

    n, k, kind, bucket = case
    for m in {max(2, bucket // 2 + 1), bucket}:
        x, weight, _ = inputs(m, n, k, gated=kind == "gated")
        norm, residual = torch.ones(k, device="cuda", dtype=x.dtype), torch.zeros_like(x)
        normed = torch.empty_like(x)
        outs = [poisoned(m, n, torch.float32 if kind == "wide" else x.dtype) for _ in range(2)]

        def work(x=x, norm=norm, residual=residual, normed=normed, outs=outs, weight=weight):
            for out in outs:  # each reads what the kernel just before wrote
                rms_norm(normed, x, norm, 1e-5, residual, dependent=True)
                linear(normed, weight, scratch, gated=kind == "gated", out=out)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            work()
            graph.capture_end()
            residual.zero_()
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            stream.synchronize()
        for times, out in enumerate(outs, start=1):
            wide = x.float() * times
            expected = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)) @ weight.float().t()
            if kind == "gated":
                gate, up = expected.chunk(2, -1)
                expected = torch.nn.functional.silu(gate) * up
            assert error(out, expected) < BOUND
