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
from pagewire.models.decoder import Decoder
from pagewire.models.dummy import random_weights
from pagewire.models.load import load_model
from pagewire.worker.cpu_linear import check_place_invariance, pack_weights

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


def test_products_that_depend_on_the_place_are_refused(packed):
    check_place_invariance(packed)
    crooked = Decoder(packed.config, packed.weights)
    crooked.project = lambda x, weight, bias: (
        packed.project(x, weight, bias) * (1 + 1e-7 * torch.arange(len(x))[:, None])
    )
    with pytest.raises(ConfigError) as caught:
        check_place_invariance(crooked)
    assert caught.value.field == "engine.deterministic"
