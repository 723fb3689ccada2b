"""Rounding by row. The interpreter rounds float32 to E4M3 wrongly, so rows go to float32 here: the scale alone is applied."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.quantise import Fp8Rows, quantise, rms_norm_quantise, scale_product, silu_mul_quantise

NAN = float("nan")


@pytest.fixture
def rand():
    generator = torch.Generator().manual_seed(6)
    return lambda *shape: torch.randn(*shape, generator=generator)


def wide_rows(rows, n):
    return Fp8Rows(torch.full((rows, n), NAN), torch.full((rows,), NAN))


def agrees(out, expected):
    scales = reference.quantise_rows(expected)[1]
    torch.testing.assert_close(out.scales, scales)
    torch.testing.assert_close(out.values, expected / scales[:, None], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n", [16, 24, 100])
def test_each_row_has_its_scale(rand, n):
    x, out = rand(4, 2 * n)[:, :n] * torch.tensor([[1.0], [100.0], [0.0], [1e-6]]), wide_rows(4, n)
    quantise(out, x)
    agrees(out, x)


def test_a_norm_with_and_without_a_residual(rand):
    x, weight, residual, out = rand(3, 24), rand(24), rand(3, 24), wide_rows(3, 24)
    rms_norm_quantise(out, x, weight, 1e-3)
    agrees(out, reference.rms_norm(x, weight, 1e-3))
    total = x + residual
    rms_norm_quantise(out, x, weight, 1e-3, residual)
    torch.testing.assert_close(residual, total)
    agrees(out, reference.rms_norm(total, weight, 1e-3))


def test_a_gate(rand):
    x, out = rand(3, 40), wide_rows(3, 20)
    silu_mul_quantise(out, x)
    agrees(out, reference.silu_mul(x))


def test_rows_that_do_not_fit_are_refused(rand):
    with pytest.raises(ValueError, match="do not fit"):
        silu_mul_quantise(wide_rows(3, 20), rand(3, 20))
    with pytest.raises(ValueError, match="scales"):
        quantise(Fp8Rows(torch.empty(2, 4), torch.empty(3)), rand(2, 4))


@pytest.mark.parametrize("n", [16, 1100])
def test_scales_apart(rand, n):
    product, rows, columns = rand(5, n), rand(5).abs(), rand(n).abs()
    expected = product * rows[:, None] * columns[None, :]
    scale_product(product, rows, columns)
    torch.testing.assert_close(product, expected)
