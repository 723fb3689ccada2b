"""What a sequence gets does not depend on who shares its steps, nor on where its blocks lie (F35, F36, F39)."""

import torch
from tests.models.paged import Paged
from tests.models.test_against_transformers import token_ids

LENGTHS = (1, 15, 16, 17, 40, 200, 33, 64, 90)


def alone(tiny, ids, **options) -> torch.Tensor:
    paged = Paged(tiny, **options)
    return paged.prefill(paged.row(len(ids)), ids)


def test_row_of_a_batch_equals_it_alone(tiny):
    prompts = [token_ids(length + 8, seed) for seed, length in enumerate(LENGTHS)]
    paged = Paged(tiny, num_blocks=100)
    rows = [paged.row(len(ids)) for ids in prompts]
    got = [[out] for out in paged.step(chunks=[(row, ids[:-8]) for row, ids in zip(rows, prompts, strict=True)])]
    for i in range(8):
        outs = paged.step(decode=[(row, ids[i - 8]) for row, ids in zip(rows, prompts, strict=True)])
        for mine, out in zip(got, outs, strict=True):
            mine.append(out)
    for ids, mine in zip(prompts, got, strict=True):
        assert (torch.cat(mine) - alone(tiny, ids)).abs().max() < 1e-4


def test_decode_beside_a_chunked_prefill(tiny):
    short, long = token_ids(20, 1), token_ids(150, 2)
    paged = Paged(tiny)
    decoding, filling = paged.row(20), paged.row(150)
    first, second = [paged.prefill(decoding, short[:10])], []
    for i in range(10):
        one, chunk = paged.step(decode=[(decoding, short[10 + i])], chunks=[(filling, long[15 * i : 15 * i + 15])])
        first.append(one)
        second.append(chunk)
    assert (torch.cat(first) - alone(tiny, short)).abs().max() < 1e-4
    assert (torch.cat(second) - alone(tiny, long)).abs().max() < 1e-4


def test_place_of_blocks_is_of_no_consequence(tiny):
    ids = token_ids(100)
    seen = [alone(tiny, ids, seed=seed) for seed in range(5)]
    assert all(torch.equal(seen[0], other) for other in seen)


def test_cached_prefix(tiny):
    ids = token_ids(120)
    paged = Paged(tiny)
    first = paged.row(120)
    whole = paged.prefill(first, ids)
    for shared in (16, 48, 112):
        got = paged.prefill(paged.row(120, prefix=first, shared=shared), ids[shared:])
        assert (got - whole[shared:]).abs().max() < 1e-4


def test_blocks_used_before_leave_no_trace(tiny):
    """Not even NaN: masked positions have no weight, but 0 × NaN is NaN (F32)."""
    ids, paged = token_ids(70), Paged(tiny, num_blocks=8)
    for size in (70, 7):
        row = paged.row(70)
        assert (paged.prefill(row, ids, sizes=[size]) - alone(tiny, ids)).abs().max() < 1e-4
        for pool in (*paged.memory.keys, *paged.memory.values):
            pool[row.blocks.tolist()] = float("nan")
        paged.drop(row)
