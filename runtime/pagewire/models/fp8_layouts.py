"""Checkpoints whose matrices are stored in E4M3: how their scales are called, and what they mean.

    layout                   beside `x.weight`     shape                    stands for
    fp8, fbgemm_fp8,         x.weight_scale        [], [1], [out, 1]        weight × scale
      compressed-tensors
    fp8 with blocks          x.weight_scale_inv    [out / b, in / b]        weight × scale of its block

Scales of activations are not read: they are found for each token. A scale for each output (or one for all) is kept with the
values as they are; blocks are widened, and rounded again where E4M3 is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.errors import ModelError
from pagewire.models.fp8_config import BLOCK as _BLOCK


def scale_names(name: str) -> tuple[str, str]:
    """What a matrix's scales may be called."""
    return name + "_scale", name + "_scale_inv"


def row_scales(name: str, shape: tuple[int, ...], scales: Tensor) -> Tensor | None:
    """float32 [out] of what stands beside a matrix; None: it has blocks.

    Raises:
        ModelError: it is no scale of such a matrix.
    """
    if scales.numel() == 1:
        return _checked(name, scales).reshape(1).expand(shape[0])
    if tuple(scales.shape) in {(shape[0],), (shape[0], 1)}:
        return _checked(name, scales).reshape(-1)
    if len(shape) == 2 and tuple(scales.shape) == tuple(-(-size // _BLOCK) for size in shape):
        return None
    raise ModelError(
        f"tensor {name} of shape {shape} has scales of shape {tuple(scales.shape)}, which do not belong to it"
    )


def widen(name: str, values: Tensor, scales: Tensor) -> Tensor:
    """float32 [out, in], what E4M3 and its scales stand for."""
    rows = row_scales(name, tuple(values.shape), scales)
    if rows is not None:
        return values.float() * rows.to(values.device)[:, None]
    wide = _checked(name, scales).to(values.device).repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return wide[: values.shape[0], : values.shape[1]] * values.float()


def _checked(name: str, scales: Tensor) -> Tensor:
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise ModelError(f"tensor {name} has scales that are no positive numbers")
    return scales
