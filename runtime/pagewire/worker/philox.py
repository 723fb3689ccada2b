"""Philox4x32-10: noise as a function of (seed, position, token id), the same on every device and in every batch.

Counter-based, so that no state has to be kept, moved on preemption or rolled back: whoever asks for the noise of one
token gets the same bits, whatever else is asked. The algorithm and its constants are those of `tl.philox` in Triton
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11); in a kernel the same words are

    tl.philox(seed, token_id // 4, position, 0, 0)[token_id % 4]          all counters uint32

    key      (seed mod 2³², seed div 2³²)
    counter  (token id div 4, position, 0, 0)
    word     number (token id mod 4) of the four that the counter gives
    uniform  u = ((word >> 8) | 1) · 2⁻²⁴, float32
    Gumbel   g = −log(−log u), float32

u is one of 2²³ odd multiples of 2⁻²⁴. It is never 0 or 1, and both the integer and the product are exact in float32,
so u has the same bits wherever it is computed. (Rejected: (word + ½) · 2⁻³², whose top rounds to 1 in float32.)

What it costs in numpy: each of the ten rounds is ten passes over uint64 arrays that hold 32 significant bits. (Tried:
strided views of the halves instead of shifts and masks; a quarter faster for thousands of counters, slower for few.)
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
Words = UInt64Array | np.uint64
"""Words of 32 significant bits: one for all, or one each."""

LANES: Final = 4
"""Tokens that one counter serves."""

GUMBEL_MIN: Final = -2.82
GUMBEL_MAX: Final = 16.64
"""Bounds of the noise: −log(−log 2⁻²⁴) = −2.811… and −log(−log(1 − 2⁻²⁴)) = 16.635…, with room for rounding."""

_KEY_A: Final = np.uint64(0x9E3779B9)
_KEY_B: Final = np.uint64(0xBB67AE85)
_ROUND_A: Final = np.uint64(0xD2511F53)
_ROUND_B: Final = np.uint64(0xCD9E8D57)
_MASK: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)
_ZERO: Final = np.uint64(0)
_NUM_ROUNDS: Final = 10
_LOG_SLACK: Final = 0.01
_WORD_SLACK: Final = 2**10  # two steps of the uniform numbers


def philox4x32(c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words) -> tuple[Words, Words, Words, Words]:
    """The four words of counter (c0, c1, c2, c3) under key (k0, k1); arguments broadcast.

    Scalars stay scalars as long as they can, so a counter with constant parts pays for them only after they have met
    the others. Only arrays made here are changed in place.
    """
    for _ in range(_NUM_ROUNDS):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c2 = b >> _32, a >> _32
        c0 ^= c1
        c0 ^= k0
        c2 ^= c3
        c2 ^= k1
        b &= _MASK
        a &= _MASK
        c1, c3 = b, a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def noise_words(seeds: Words, positions: Words, groups: UInt64Array) -> UInt32Array:
    """Words of the noise of tokens 4·groups[i] … 4·groups[i] + 3.

    Args:
        seeds: uint64, scalar or [N].
        positions: uint64 below 2³², scalar or [N].
        groups: uint64 [N], token ids div 4.

    Returns:
        uint32 [4, N].
    """
    words = np.empty((LANES, groups.size), np.uint32)
    lanes = philox4x32(groups, positions, _ZERO, _ZERO, seeds & _MASK, seeds >> _32)
    for lane, word in enumerate(lanes):
        words[lane] = word
    return words


def least_word_above(noise: float) -> np.uint32:
    """A word such that no lesser one gives a Gumbel number above `noise`, rounding of float32 logarithms included."""
    u = math.exp(-math.exp(min(-noise + _LOG_SLACK, 700.0)))
    return np.uint32(max(0, min(int(u * 2.0**32) - _WORD_SLACK, 2**32 - 1)))


def uniform(words: UInt32Array) -> Float32Array:
    """The uniform number of each word, strictly between 0 and 1; exact."""
    odd = (words >> np.uint32(8)) | np.uint32(1)
    return odd.astype(np.float32) * np.float32(2.0**-24)


def gumbel(words: UInt32Array) -> Float32Array:
    """The Gumbel number of each word, between GUMBEL_MIN and GUMBEL_MAX."""
    noise = uniform(words)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)
