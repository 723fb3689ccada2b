"""Frames filled from templates are those of the codec, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from pagewire.engine.packing import FrameTemplate, ragged_take
from pagewire_transport.codec import encode
from pagewire_transport.messages import Tokens


@pytest.mark.parametrize("num", [1, 2, 63, 64, 512, 16_383, 16_384, 20_000])
@pytest.mark.parametrize("has_choices", [False, True])
def test_a_template_gives_what_the_codec_gives(num, has_choices):
    """At every width of a length: 8, 16 and 32 bits."""
    random = np.random.default_rng(num)
    streams, starts, ids = (random.integers(0, 2**32, num, dtype=np.uint32).tobytes() for _ in range(3))
    choices = random.integers(0, 2**16, num, dtype=np.uint16).tobytes() if has_choices else b""
    expected = encode(Tokens(streams=streams, starts=starts, ids=ids, choices=choices))
    assert FrameTemplate(streams, choices).fill(starts, ids) == expected


def test_ragged_take():
    values, counts = np.arange(10), np.array([2, 0, 3, 1, 4])
    assert ragged_take(values, counts, np.array([4, 1, 0, 3])).tolist() == [6, 7, 8, 9, 0, 1, 5]
    assert ragged_take(values, counts, np.array([1])).tolist() == []
