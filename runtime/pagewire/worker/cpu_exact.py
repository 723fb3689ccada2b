"""Which shapes the deterministic mode may compute in, found out on the machine at hand.

A token's bits must depend neither on its place among the tokens of a step, nor on who its neighbours are, nor on how
many. Attention sees to that by itself (`cpu_split_attention`). For the rest, tokens are cut into pieces of a few fixed
sizes. oneDNN's products of packed weights give a token the same bits in a piece of any size, since every output is one
sum over the inputs in one order. That is a property of this build, this machine and this number of threads rather than a
promise, so it is measured at start with the model's own matrices: the sizes that agree with `TILE` are used.

Fixed tiles of one size alone were rejected: a single stream paid for 8 tokens a step, and prefill took twice as long.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from pagewire.errors import ConfigError
from pagewire.models.decoder import Decoder

TILE: Final = 8
"""A step's tokens are padded to a multiple of it, except where there is one and pieces of one agree."""
_OTHERS: Final = (64, 32, 16, 1)


def choose_pieces(decoder: Decoder) -> tuple[int, ...]:
    """Sizes for `Decoder.pieces`, largest first; `TILE` is among them.

    Raises:
        ConfigError: even in tiles, some bits depend on a token's place; this machine cannot serve deterministically.
    """
    probe = Decoder(
        decoder.config,
        replace(decoder.weights, layers=decoder.weights.layers[:1]),
        max_model_len=decoder.max_model_len,
    )
    probe.project = decoder.project
    num = max(_OTHERS)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(decoder.config.vocab_size, (num,), generator=generator)
    positions = torch.randint(decoder.max_model_len, (num,), generator=generator)
    expected = _compute(probe, token_ids, positions, (TILE,))
    for shift in range(1, TILE):
        shifted = _compute(probe, token_ids.roll(shift), positions.roll(shift), (TILE,))
        if not all(torch.equal(x.roll(-shift, 0), y) for x, y in zip(shifted, expected, strict=True)):
            raise ConfigError(
                "this build of PyTorch computes a token differently at different places of a tile",
                field="engine.deterministic",
            )
    agreeing = [
        size for size in _OTHERS if all(map(torch.equal, _compute(probe, token_ids, positions, (size,)), expected))
    ]
    return tuple(sorted([*agreeing, TILE], reverse=True))


def padding(num_tokens: int, pieces: tuple[int, ...] | None) -> int:
    """Tokens to add to `num_tokens`, so that they can be cut into `pieces`."""
    if pieces is None or (num_tokens == 1 and 1 in pieces):
        return 0
    return -num_tokens % TILE


def _compute(probe: Decoder, token_ids: Tensor, positions: Tensor, pieces: tuple[int, ...]) -> list[Tensor]:
    """All that one layer and the output make of the tokens, attention left out."""
    probe.pieces = pieces
    seen: list[Tensor] = []

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend((q, k, v))
        return q.reshape(q.shape[0], -1)

    hidden = probe.forward(token_ids, positions, attend)
    return [*seen, hidden, probe.logits(hidden)]
