"""What chooses a product's kernel, and the library's way. The kernel itself cannot be interpreted: `test_linear_compiles.py`."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.linear import choose, linear, linear_fp8, scratch_for
from pagewire_kernels.linear_hopper import MOST_TOKENS, Tiling, stages_that_fit
from pagewire_kernels.linear_table import APART, PROGRAMS, TABLE
from pagewire_kernels.quantise import Fp8Rows


@pytest.mark.parametrize("key", [key for key, row in TABLE.items() if row != APART], ids=str)
def test_a_row_of_the_table_can_be_launched(key):
    n, _, kind, bucket = key
    tiling = Tiling(*TABLE[key])
    sides, itemsize = 2 if "gated" in kind else 1, 1 if "fp8" in kind else 2
    assert tiling.block_m == bucket <= MOST_TOKENS
    assert tiling.block_n % (64 * tiling.consumers) == 0
    assert sides * tiling.block_n * bucket // tiling.consumers <= 16_384  # 128 registers a thread for sums
    staged = kind != "wide" and not tiling.scatter
    fitting = stages_that_fit(
        tiling.block_n, bucket, tiling.block_k, gated=sides == 2, staged=staged, most=99, itemsize=itemsize
    )
    assert 2 <= tiling.stages <= fitting
    assert 0 < tiling.programs <= PROGRAMS
    if tiling.scatter:  # one piece of one tile each, all at once
        assert tiling.programs == tiling.scatter * -(-n // tiling.block_n)
        assert bucket % tiling.scatter == 0


def test_tokens_are_rounded_up_to_the_next_row_of_the_table():
    n, k, kind, bucket = next(key for key in TABLE if key[3] == 64)
    given = {"gated": "gated" in kind, "wide": kind == "wide", "fp8": "fp8" in kind}
    assert choose(n, k, 33, **given) == choose(n, k, 64, **given) == Tiling(*TABLE[n, k, kind, bucket])
    assert choose(n, k, 2, **given) == choose(n, k, 16, **given)
    assert choose(n, k, 257, **given) is None
    assert choose(n + 8, k, 64, **given) is None


def test_without_a_card_the_library_does_it():
    assert scratch_for(torch.device("cpu")) is None
    x, weight = torch.randn(3, 48), torch.randn(14, 48)
    torch.testing.assert_close(linear(x, weight, None), x @ weight.T)
    out = torch.full((3, 14), float("nan"))
    assert linear(x, weight, None, out=out) is out
    torch.testing.assert_close(out, x @ weight.T)
    torch.testing.assert_close(linear(x, weight, None, gated=True), reference.silu_mul(x @ weight.T))


def test_what_does_not_fit_is_refused():
    x = torch.zeros(2, 8)
    for weight, given in (
        (torch.zeros(4, 16), {}),
        (torch.zeros(5, 8), {"gated": True}),
        (torch.zeros(4, 8), {"out": torch.zeros(2, 5)}),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            linear(x, weight, None, **given)


def test_the_library_multiplies_rows_in_e4m3_by_both_scales():
    x, (weight, scales) = torch.randn(5, 64), reference.quantise_rows(torch.randn(96, 64))
    product = linear_fp8(Fp8Rows(*reference.quantise_rows(x)), weight, scales, None, dtype=torch.float32)
    torch.testing.assert_close(product, reference.linear_fp8(x, weight, scales), rtol=2**-8, atol=1e-2)
