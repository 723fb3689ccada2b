"""Products whose bits do not depend on the batch: the plain kernel, and how the other one is cut."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.linear_fixed import fixed_tiling, linear_fixed
from pagewire_kernels.linear_hopper import stages_that_fit
from pagewire_kernels.quantise import Fp8Rows

SHAPES = [
    *[(6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (1280, 8192), (8192, 1024)],
    *[(3584, 8192), (8192, 3584), (16032, 8192), (576, 576), (64, 64), (49152, 576), (40, 16)],
]


@pytest.fixture
def rand():
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_it_is_the_product_and_a_token_does_not_see_its_neighbours(rand, dtype, gated):
    n, k = 36, 100
    x, weight = rand(35, k).to(dtype), rand(2 * n if gated else n, k).to(dtype) * k**-0.5
    expected = x.float() @ weight.float().T
    out = linear_fixed(x, weight, None, gated=gated)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(
        out.float(), reference.silu_mul(expected) if gated else expected, rtol=tolerance, atol=tolerance
    )
    for part in (slice(0, 1), slice(34, 35), slice(3, 20)):
        assert torch.equal(linear_fixed(x[part], weight, None, gated=gated), out[part])


def test_in_e4m3(rand):
    values, x_scales = reference.quantise_rows(rand(3, 80))
    weight, scales = reference.quantise_rows(rand(20, 80))
    out = torch.full((3, 20), float("nan"))
    linear_fixed(Fp8Rows(values, x_scales), weight, None, scales=scales, out=out)
    expected = reference.linear_fp8(reference.dequantise_rows(values, x_scales), weight, scales)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_shape_can_be_cut(n, k, gated, itemsize):
    tiling = fixed_tiling(n, k, itemsize, gated=gated, programs=132)
    sides, tiles = 2 if gated else 1, -(-n // tiling.block_n)
    units = tiles * -(-k // tiling.block_k)
    assert 0 < tiling.programs <= min(132, units), "no program is without work"
    assert tiling.stages >= 3
    fitting = stages_that_fit(
        tiling.block_n, tiling.block_m, tiling.block_k, gated=gated, staged=True, most=99, itemsize=itemsize
    )
    assert tiling.stages <= fitting
    assert sides * tiling.block_n * tiling.block_m // tiling.consumers <= 16_384


def test_what_does_not_fit_is_refused(rand):
    with pytest.raises(ValueError, match="do not fit"):
        linear_fixed(rand(2, 8), rand(4, 16), None)
    with pytest.raises(ValueError, match="do not fit"):
        linear_fixed(rand(2, 8), rand(4, 8), None, scales=torch.ones(4))
