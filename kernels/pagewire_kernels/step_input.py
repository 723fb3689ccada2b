"""What a step's kernels need to know of each token, made on the device from the rows' resident state.

The host says only which rows take part and at which positions. What a row's input token is, whether it has stopped and where its
blocks lie is known here first: the step that drew the token may still be running when this one is queued.

Bytes: a few words a token; launches are all that counts, so each function is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAMS = 32


def set_blocks(block_table: torch.Tensor, deltas: torch.Tensor, num_deltas: torch.Tensor) -> None:
    """block_table[row, col] = id for each delta.

    Args:
        block_table: int32 [rows, max_blocks], contiguous.
        deltas: int32 [capacity, 3], contiguous: row, col, id.
        num_deltas: int32 [1], how many of them count; on the device, so that a CUDA graph serves any number.
    """
    _set_blocks_kernel[(_PROGRAMS,)](
        block_table, deltas, num_deltas, block_table.stride(0), PROGRAMS=_PROGRAMS, BLOCK=128, num_warps=4
    )


def step_inputs(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    last_token: torch.Tensor,
    stopped: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    token_ids: torch.Tensor | None = None,
) -> None:
    """Input token, position, slot and visible length of each token.

    A token that its row's stop has overtaken gets slot −1 (not written) and length 0.

    Args:
        tokens: int32 [T], written, as are the next three.
        positions: int32 [T].
        slots: int32 [T].
        seq_lens: int32 [T].
        rows: int32 [T], the row of each token.
        starts: int32 [T], its position in its sequence.
        last_token: int32 [R].
        stopped: int32 [R], 0 or 1.
        block_table: int32 [R, max_blocks], contiguous.
        block_size: of the cache.
        token_ids: int32 [T], −1 where it is the row's last token; None: it is so everywhere.
    """
    num_tokens = rows.shape[0]
    _step_inputs_kernel[(triton.cdiv(num_tokens, 128),)](
        tokens,
        positions,
        slots,
        seq_lens,
        rows,
        starts,
        token_ids if token_ids is not None else rows,
        last_token,
        stopped,
        block_table,
        block_table.stride(0),
        num_tokens,
        BLOCK_SIZE=block_size,
        HAS_IDS=token_ids is not None,
        BLOCK=128,
        num_warps=4,
    )


@triton.jit
def _set_blocks_kernel(
    table_ptr,  # [R, max_blocks]
    deltas_ptr,  # [capacity, 3]
    num_ptr,  # [1]
    table_stride,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num = tl.load(num_ptr)
    for start in range(tl.program_id(0) * BLOCK, num, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = i < num
        row = tl.load(deltas_ptr + 3 * i, mask=mask, other=0)
        col = tl.load(deltas_ptr + 3 * i + 1, mask=mask, other=0)
        block = tl.load(deltas_ptr + 3 * i + 2, mask=mask, other=0)
        tl.store(table_ptr + row.to(tl.int64) * table_stride + col, block, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _step_inputs_kernel(
    tokens_ptr,  # [T]
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    lens_ptr,  # [T]
    rows_ptr,  # [T]
    starts_ptr,  # [T]
    ids_ptr,  # [T]
    last_ptr,  # [R]
    stopped_ptr,  # [R]
    table_ptr,  # [R, max_blocks]
    table_stride,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_tokens
    row = tl.load(rows_ptr + i, mask=mask, other=0)
    pos = tl.load(starts_ptr + i, mask=mask, other=0)
    runs = tl.load(stopped_ptr + row, mask=mask, other=1) == 0
    token = tl.load(last_ptr + row, mask=mask & runs, other=0)
    if HAS_IDS:
        given = tl.load(ids_ptr + i, mask=mask, other=0)
        token = tl.where(given >= 0, given, token)
    pos = tl.where(runs, pos, 0)
    at = table_ptr + row.to(tl.int64) * table_stride + pos // BLOCK_SIZE
    block = tl.load(at, mask=mask & runs, other=0)
    tl.store(tokens_ptr + i, token, mask=mask)
    tl.store(positions_ptr + i, pos, mask=mask)
    tl.store(slots_ptr + i, tl.where(runs, block * BLOCK_SIZE + pos % BLOCK_SIZE, -1), mask=mask)
    tl.store(lens_ptr + i, tl.where(runs, pos + 1, 0), mask=mask)
