"""One token's product with norm, residual and gate against plain PyTorch."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.vector_linear import vector_linear

NAN = float("nan")


@pytest.mark.parametrize(("k", "n"), [(48, 7), (64, 8), (5000, 3)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("around", ["", "norm", "norm and residual"])
def test_is_the_product_of_what_comes_in(k, n, gated, around):
    if k > 4096 and (around or gated):
        around, gated = "norm", False  # long ones: a norm keeps all in registers
    generator = torch.Generator().manual_seed(4)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, weight, norm, residual = rand(1, k), rand(2 * n if gated else n, k), rand(k), rand(1, k)
    out, total = torch.full((1, n), NAN), torch.full((1, k), NAN)
    given, expected = {}, x
    if around == "norm and residual":
        given = {"residual": residual, "residual_out": total}
        expected = x + residual
    if around:
        given["norm"] = norm
        expected = reference.rms_norm(expected, norm, 1e-3)
    expected = expected @ weight.T
    vector_linear(out, x, weight, eps=1e-3, gated=gated, **given)
    torch.testing.assert_close(out, reference.silu_mul(expected) if gated else expected, rtol=1e-4, atol=1e-4)
    if around == "norm and residual":
        torch.testing.assert_close(total, x + residual)


def test_without_a_norm_a_long_vector_is_read_piece_by_piece():
    x, weight, out = torch.randn(1, 5000), torch.randn(5, 5000), torch.full((1, 5), NAN)
    vector_linear(out, x, weight)
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-4, atol=1e-3)


def test_what_does_not_fit_is_refused():
    x, weight, out = torch.zeros(1, 8), torch.zeros(4, 8), torch.zeros(1, 4)
    with pytest.raises(ValueError, match="do not fit"):
        vector_linear(out, x, weight, gated=True)
    with pytest.raises(ValueError, match="residual"):
        vector_linear(out, x, weight, residual=x, residual_out=x.clone())
