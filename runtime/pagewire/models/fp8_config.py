"""Which checkpoints in E4M3 can be read, by what their `config.json` says; see `fp8_layouts`. Imports no torch."""

from __future__ import annotations

from typing import Any, Final

from pagewire.errors import ModelError
from pagewire.models.fields import shown

METHODS: Final = ("fp8", "fbgemm_fp8", "compressed-tensors")
BLOCK: Final = 128
"""Rows and columns of a block that has a scale of its own."""


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
    if described.get("weight_block_size") not in (None, [BLOCK, BLOCK]):
        raise ModelError(
            f"quantization_config: weight_block_size {shown(described['weight_block_size'])} is not supported; "
            f"supported: [{BLOCK}, {BLOCK}]"
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
