"""Checkpoints whose matrices are stored in E4M3: how their scales are called, and what they mean.

    layout                   beside `x.weight`     shape                    stands for
    fp8, fbgemm_fp8,         x.weight_scale        [], [1], [out, 1]        weight × scale
      compressed-tensors
    fp8 with blocks          x.weight_scale_inv    [out / b, in / b]        weight × scale of its block

Scales of activations are not read: they are found for each token. A scale for each output (or one for all) is kept with the
values as they are; blocks are widened, and rounded again where E4M3 is asked for.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pagewire.errors import ModelError
from pagewire.models.fields import shown

METHODS: Final = ("fp8", "fbgemm_fp8", "compressed-tensors")
_BLOCK: Final = 128


def check(described: Any) -> None:
    """Refuse what is no layout above.

    Args:
        described: `quantization_config` of a `config.json`; None: not quantised.

    Raises:
        ModelError: it names what is not supported.
    """
    if described is None:
        return
    method = described.get("quant_method") if isinstance(described, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"quantization_config of method {shown(method)} is not supported; supported: {', '.join(METHODS)}"
        )
    if described.get("weight_block_size") not in (None, [_BLOCK, _BLOCK]):
        raise ModelError(
            f"quantization_config: weight_block_size {shown(described['weight_block_size'])} is not supported; "
            f"supported: [{_BLOCK}, {_BLOCK}]"
        )
    if method == "compressed-tensors":
        _check_groups(described)


def _check_groups(described: dict[str, Any]) -> None:
    groups = described.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        kind = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
        if kind[:2] != (8, "float") or kind[2] not in ("tensor", "channel"):
            raise ModelError(
                f"quantization_config: weights of {shown(kind[0])} bits, type {shown(kind[1])}, strategy {shown(kind[2])} "
                "are not supported; supported: 8, float, tensor or channel"
            )


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
