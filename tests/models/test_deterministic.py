"""Deterministic mode: the logits of a token have the same bits, however the work was cut and whoever shared it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.paged import Paged
from tests.models.test_against_transformers import token_ids

from pagewire.config import ModelConfig
from pagewire.errors import ConfigError
from pagewire.models.config import DecoderConfig, RopeConfig
from pagewire.models.decoder import Decoder, cut
from pagewire.models.dummy import random_weights
from pagewire.models.load import load_model
from pagewire.worker import cpu_linear
from pagewire.worker.cpu_exact import TILE, choose_pieces, padding
from pagewire.worker.cpu_linear import pack_weights

LENGTH = 300  # more than two splits of keys
IDS, OTHER = token_ids(LENGTH), token_ids(500, 1)


@pytest.fixture(scope="module")
def packed(tiny_folder) -> Decoder:
    decoder = load_model(ModelConfig(path=str(tiny_folder)))
    pack_weights(decoder)
    return decoder


@pytest.fixture(scope="module")
def expected(packed) -> torch.Tensor:
    return whole(packed, IDS)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def whole(decoder, ids) -> torch.Tensor:
    paged = Paged(decoder, exact=True)
    return paged.prefill(paged.row(len(ids)), ids)


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 150), min_size=1, max_size=6), block_size=st.sampled_from([16, 32, 64]))
def test_chunk_sizes(packed, expected, sizes, block_size):
    paged = Paged(packed, exact=True, block_size=block_size)
    assert torch.equal(paged.prefill(paged.row(LENGTH), IDS, sizes), expected)


@settings(max_examples=12, deadline=None)
@given(shared=st.integers(0, 18), data=st.data())
def test_cached_prefix_beside_a_neighbour(packed, expected, shared, data):
    start = 16 * shared
    paged = Paged(packed, exact=True, num_blocks=120, seed=shared)
    base = paged.row(LENGTH)
    paged.prefill(base, IDS)
    row, neighbour = paged.row(LENGTH, prefix=base, shared=start), paged.row(500)
    got = []
    while row.computed < LENGTH:
        size, beside = data.draw(st.integers(1, 120)), data.draw(st.integers(1, 9))
        mine = (row, IDS[row.computed : row.computed + size])
        chunks = [mine, (neighbour, OTHER[neighbour.computed : neighbour.computed + beside])]
        place = data.draw(st.integers(0, 1))
        got.append(paged.step(chunks=chunks if place == 0 else chunks[::-1])[place])
    assert torch.equal(torch.cat(got), expected[start:])


def test_token_by_token_alone_and_among_64(packed, expected):
    """Row r starts r tokens into the text, so that the batch mixes positions; all see the same text."""
    begin = LENGTH - 70
    paged = Paged(packed, exact=True, num_blocks=65 * 19 + 1)
    alone, rows = paged.row(LENGTH), [paged.row(LENGTH) for _ in range(64)]
    paged.prefill(alone, IDS[:begin])
    for r, row in enumerate(rows):
        paged.prefill(row, IDS[: begin + r])
    for position in range(begin, begin + 6):
        assert torch.equal(paged.step(decode=[(alone, IDS[position])])[0][0], expected[position])
        outs = paged.step(decode=[(row, IDS[row.computed]) for row in rows])
        for row, out in zip(rows, outs, strict=True):
            assert torch.equal(out[0], expected[row.computed - 1])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_wide_layers_of_odd_width(threads, num_threads):
    """Wide enough that PyTorch spreads elementwise operations over threads, at places that no vector divides."""
    threads(num_threads)
    config = DecoderConfig(
        architecture="llama",
        vocab_size=320,
        hidden_size=264,
        intermediate_size=5003,
        num_layers=2,
        num_heads=11,
        num_kv_heads=1,
        head_dim=24,
        max_positions=1024,
        norm_eps=1e-5,
        rope=RopeConfig(),
        tie_embeddings=False,
    )
    decoder = Decoder(config, random_weights(config, torch.float32))
    pack_weights(decoder)
    ids = IDS[:40]
    expected = whole(decoder, ids)
    for sizes in ([1], [3], [7, 2]):
        paged = Paged(decoder, exact=True)
        assert torch.equal(paged.prefill(paged.row(40), ids, sizes), expected)


@pytest.mark.skipif(cpu_linear._operators() is None, reason="this build of PyTorch has no oneDNN")
def test_oneDNN_agrees_with_itself(packed):  # noqa: N802
    """Where this fails the mode still works, but prefill is slow: worth knowing."""
    assert {64, 8} <= set(choose_pieces(packed))


@pytest.mark.parametrize("pieces", [(8,), (8, 1), (64, 8)])
def test_fewer_pieces_give_the_same_bits(packed, expected, pieces):
    """Where others are refused: whatever is left computes the same."""
    paged = Paged(packed, exact=True, pieces=pieces)
    assert torch.equal(paged.prefill(paged.row(LENGTH), IDS, [100, 1, 37]), expected)


def crooked(packed, error) -> Decoder:
    """`error(tokens)` [T, 1] is added to what its products give."""
    decoder = Decoder(packed.config, packed.weights)
    decoder.project = lambda x, weight: packed.project(x, weight) * (1 + 1e-6 * error(len(x)))
    return decoder


def test_sizes_that_differ_are_not_used(packed):
    decoder = crooked(packed, lambda num: torch.full((num, 1), float(num in (1, 32))))
    assert choose_pieces(decoder) == (64, 16, 8)


def test_products_that_depend_on_the_place_are_refused(packed):
    decoder = crooked(packed, lambda num: torch.arange(float(num))[:, None])
    with pytest.raises(ConfigError) as caught:
        choose_pieces(decoder)
    assert caught.value.field == "engine.deterministic"


@given(num=st.integers(1, 700), pieces=st.sampled_from([(64, 32, 16, 8, 1), (64, 8), (8,), (16, 8, 1)]))
def test_padded_tokens_can_be_cut(num, pieces):
    missing = padding(num, pieces)
    sizes = cut(num + missing, pieces)
    assert sum(sizes) == num + missing
    assert missing < TILE
    assert set(sizes) <= set(pieces)
    assert 1 not in sizes or num == 1
    assert padding(num, None) == 0
