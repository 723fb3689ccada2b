"""What a step takes before one was seen: the coefficients of the cost model by the rates of a card and the sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

UNITS: Final = (1.0, 256.0, 256.0, 1.0, 256.0, 1e6, 64.0, 1e5)
"""Features are divided by these, so that all are of the order of 1 in a usual step."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model asks of a card (of one card, where it is split).

    Attributes:
        weight_bytes: read by every step.
        token_flops: of the products, a token.
        kv_bytes: of one token's K and V in all layers.
        pair_flops: of attention, for a token that looks at one position: 4 × heads × head size × layers.
    """

    weight_bytes: float
    token_flops: float
    kv_bytes: float
    pair_flops: float


@dataclass(frozen=True, slots=True)
class Card:
    """What a card gives: rates that kernels reach, not those of its data sheet."""

    bytes_per_s: float = 4.0e12
    product_flops_per_s: float = 0.72e15
    attention_flops_per_s: float = 0.45e15
    step_ns: float = 2.0e5
    """Of a step with nothing in it."""
    row_ns: float = 800.0
    """Of sampling, a row."""
    chunk_ns: float = 3.0e5
    """Of a step that has prefill, beyond that."""


H200: Final = Card()
SHAPE_8B: Final = Shape(weight_bytes=16.1e9, token_flops=16.1e9, kv_bytes=131_072.0, pair_flops=524_288.0)
"""32 layers, hidden 4096, 32 query and 8 KV heads of 128, bf16; embeddings, which are not multiplied, left out."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of the formula above: ns for each unit of each feature, and where the knot lies."""

    values: tuple[float, ...]
    knot: float

    @staticmethod
    def of(shape: Shape, card: Card) -> Coefficients:
        """By the ceilings: weights are read or multiplied, whichever takes longer; KV is read; pairs are multiplied."""
        weights = 1e9 * shape.weight_bytes / card.bytes_per_s
        token = 1e9 * shape.token_flops / card.product_flops_per_s
        knot = max(16.0, weights / token)
        # Below the knot a token is not free: activations move, and small products are not quite at the memory's rate.
        early = 0.3 * token
        raw = (
            weights + card.step_ns,
            early,
            token - early,
            card.chunk_ns,
            0.2 * token,  # norms, rotation, KV writes; gaps between kernels of odd sizes
            1e9 * shape.pair_flops / card.attention_flops_per_s,
            card.row_ns,
            1e9 * shape.kv_bytes / card.bytes_per_s,
        )
        return Coefficients(tuple(c * unit for c, unit in zip(raw, UNITS, strict=True)), knot)


PRIOR: Final = Coefficients.of(SHAPE_8B, H200)


def describe(coefficients: Coefficients) -> dict[str, float]:
    """In words and per single unit, ns: for people."""
    names = ("step", "token", "token_beyond_knot", "prefill", "prefill_token", "prefill_pair", "decode_row", "kv_token")
    return {name: c / u for name, c, u in zip(names, coefficients.values, UNITS, strict=True)} | {
        "knot_tokens": coefficients.knot
    }
