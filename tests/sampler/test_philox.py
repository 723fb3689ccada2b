"""The noise: known answers, exact uniforms, and the words that a Triton kernel would draw."""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from pagewire.worker.philox import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    gumbel,
    least_word_above,
    noise_words,
    philox4x32,
    uniform,
)

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> list[np.uint64]:
    return [np.uint64(int(word, 16)) for word in text.split()]


def naive(seed: int, position: int, token_id: int) -> int:
    """One word by Python integers, written from the paper."""
    c = [token_id // 4, position, 0, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[token_id % 4]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    assert list(philox4x32(*words_of(counter), *words_of(key))) == words_of(result)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63 + 15])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**31])
def test_words_are_those_of_the_paper(seed, position):
    groups = np.array([0, 1, 7, 12287, 2**29], np.uint64)
    words = noise_words(np.uint64(seed), np.uint64(position), groups)
    for group, lanes in zip(groups.tolist(), words.T.tolist(), strict=True):
        assert lanes == [naive(seed, position, 4 * group + lane) for lane in range(4)]


def test_one_key_each_gives_what_each_key_gives_alone():
    seeds = np.array([3, 2**40 + 1, 2**63 - 1, 3], np.uint64)
    positions = np.array([9, 0, 77, 9], np.uint64)
    groups = np.array([5, 6, 7, 8], np.uint64)
    together = noise_words(seeds, positions, groups)
    for i in range(4):
        assert (together[:, i] == noise_words(seeds[i], positions[i], groups[i : i + 1])[:, 0]).all()


def test_uniform_is_exact_and_never_zero_or_one():
    words = np.array([0, 255, 256, 511, 512, 2**31, 2**32 - 1], np.uint32)
    expected = [((w >> 8) | 1) / 2**24 for w in words.tolist()]
    assert uniform(words).tolist() == expected
    assert expected[0] == 2**-24
    assert expected[-1] == 1 - 2**-24


def test_gumbel_stays_within_its_bounds():
    ends = gumbel(np.array([0, 2**32 - 1], np.uint32))
    assert ends[0] == pytest.approx(-math.log(-math.log(2**-24)), rel=1e-6)
    assert ends[1] == pytest.approx(-math.log(-math.log(1 - 2**-24)), rel=1e-6)
    assert GUMBEL_MIN < ends[0] < ends[1] < GUMBEL_MAX


def test_gumbel_does_not_depend_on_where_a_word_lies():
    """numpy may compute the tail of an array by another loop; it must not give other bits."""
    words = np.random.default_rng(1).integers(0, 2**32, 4099, dtype=np.uint32)
    whole = gumbel(words)
    for start, stop in [(0, 1), (1, 2), (3, 20), (17, 4099), (4098, 4099), (5, 1033)]:
        assert (gumbel(words[start:stop]) == whole[start:stop]).all()


@pytest.mark.parametrize("noise", [-1000.0, -2.9, -2.0, 0.0, 0.5, 3.0, 9.0, 16.0, 16.6, 17.0, 1000.0])
def test_least_word_above_leaves_out_no_word_that_counts(noise):
    least = int(least_word_above(noise))
    below = np.arange(max(0, least - 5000), least, dtype=np.uint32)
    assert (gumbel(below) <= noise).all()
    if GUMBEL_MIN < noise < GUMBEL_MAX - 0.1:
        tail = 1 - least / 2**32
        assert tail <= (1 - math.exp(-math.exp(-noise))) * 1.02 + 2**-21, "nor does it keep many that do not"


def test_gumbel_has_the_moments_of_its_distribution():
    noise = gumbel(noise_words(np.uint64(11), np.uint64(4), np.arange(50_000, dtype=np.uint64))).astype(np.float64)
    assert noise.mean() == pytest.approx(0.577216, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)


def test_a_triton_kernel_draws_the_same_words():
    pytest.importorskip("triton")
    cases = [(0, 0, 256), (2**40 + 17, 4095, 256), (2**63 - 1, 1, 64)]
    script = pathlib.Path(__file__).with_name("triton_philox.py")
    # Its own process: the interpreter must be chosen before Triton is imported.
    run = subprocess.run(
        [sys.executable, str(script), *(str(number) for case in cases for number in case)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for (seed, position, num_groups), words in zip(cases, json.loads(run.stdout), strict=True):
        ours = noise_words(np.uint64(seed), np.uint64(position), np.arange(num_groups, dtype=np.uint64))
        assert ours.T.tolist() == words
