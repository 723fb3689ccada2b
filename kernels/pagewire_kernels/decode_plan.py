"""How a step's decode work is laid out on the card: tiles of all rows in one line, shared evenly; see `paged_decode`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from pagewire_kernels import paged_decode_narrow


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Sizes that were measured to be good; the default is for 128 bf16 values a head on an H200."""

    block_n: int = 64
    """Positions in a tile; a multiple of the KV block size."""
    num_warps: int = 4
    num_stages: int = 3
    num_programs: int | None = None
    """Programs that share the work; None: two for each multiprocessor, as many as run at once."""
    min_share: int = 2
    """Tiles that a program takes at least: fewer programs then work on short batches, and fewer partials are merged."""
    merge: int = 128
    """Heads × partials merged at once: more loads in flight for a long context alone, until registers spill."""
    straight: bool = False
    """K and V of 8 bits go straight into registers (`paged_decode_narrow`, Hopper); tiles have 16 positions a warp."""
    max_registers: int | None = None
    """Of a thread, where `straight`."""


_FEW_UNITS = 64
_STRAIGHT = tuple(
    DecodeTiling(
        block_n=paged_decode_narrow.BLOCK_N * warps,
        num_warps=warps,
        min_share=min_share,
        straight=True,
        max_registers=registers,
    )
    for warps, min_share, registers in ((4, 1, None), (2, 2, None), (1, 4, 168))
)
"""For few units, for some, for many."""


def straight_tiling(
    kv_dtype: torch.dtype, head_dim: int, group: int, device: torch.device | str, *, num_units: int
) -> DecodeTiling | None:
    """The tiling whose 8-bit K and V go straight into registers; None where that cannot be.

    Args:
        kv_dtype: of the cache.
        head_dim: values of a head.
        group: query heads of a KV head.
        device: where.
        num_units: rows × KV heads of a step, at most. What a split unit costs, more warps save; it grows with the group.
    """
    device = torch.device(device)
    if kv_dtype != torch.float8_e4m3fn or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    if head_dim != paged_decode_narrow.HEAD_DIM or group > paged_decode_narrow.MOST_HEADS:
        return None
    few, some, many = _STRAIGHT
    tiling = few if num_units < _FEW_UNITS else some if num_units <= 64 * group else many
    # Of single warps 12 with 168 registers run at once on a multiprocessor; 8 with 255, 16 with 128 and 10, which do not divide by its four
    # parts, are slower there. Of the others 8 warps with all registers are as fast or faster.
    warps = 12 if tiling is many else 8
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return replace(tiling, num_programs=warps // tiling.num_warps * multiprocessors)


class DecodePlan:
    """The layout of one step's decode work on the device, and the scratch for partials. Allocated once, refilled by `plan_decode`.

    Layers of one window share it; kernels that use it have to be in one stream's order.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        window: int = 0,
        tiling: DecodeTiling | None = None,
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
        if head_dim < 16 or head_dim & (head_dim - 1):
            raise ValueError(f"head_dim has to be a power of two from 16 up, not {head_dim}")
        self.tiling = tiling or DecodeTiling()
        self.max_rows = max_rows
        self.num_kv_heads = num_kv_heads
        self.group = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.window = window
        programs = self.num_programs = self.tiling.num_programs or _default_programs(device)
        padded = triton.next_power_of_2(self.group)
        self.shares = torch.zeros(
            3, dtype=torch.int32, device=device
        )  # [3] all tiles, tiles a program, rows without tiles
        self.tile_starts = torch.zeros(
            max_rows + 1, dtype=torch.int32, device=device
        )  # [R + 1] tiles of one head in the rows before
        self.first_rows = torch.zeros(programs, dtype=torch.int32, device=device)  # [P] row in which program p starts
        self.partial_acc = torch.empty(2 * programs, padded, head_dim, dtype=torch.float32, device=device)
        self.partial_max_sum = torch.empty(2 * programs, 2, padded, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(
            max_rows * num_kv_heads, dtype=torch.int32, device=device
        )  # [R · H] zero between launches


def _default_programs(device: torch.device | str) -> int:
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def plan_decode(plan: DecodePlan, seq_lens: torch.Tensor) -> None:
    """Lay out the work for these lengths.

    Args:
        plan: is filled.
        seq_lens: int32 [R], positions to attend to, the new token's included; 0 for a row without work.
    """
    num_rows = seq_lens.shape[0]
    if num_rows > plan.max_rows:
        raise ValueError(f"{num_rows} rows, the plan has room for {plan.max_rows}")
    t = plan.tiling
    _plan_decode_kernel[(triton.cdiv(plan.num_programs, 32),)](
        plan.shares,
        plan.tile_starts,
        plan.first_rows,
        seq_lens,
        num_rows,
        NUM_KV_HEADS=plan.num_kv_heads,
        NUM_PROGRAMS=plan.num_programs,
        MIN_SHARE=t.min_share,
        BLOCK_N=t.block_n,
        WINDOW=plan.window,
        BLOCK_R=triton.next_power_of_2(plan.max_rows),
        BLOCK_P=32,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _plan_decode_kernel(
    shares_ptr,  # [3]
    tile_starts_ptr,  # [R + 1]
    first_rows_ptr,  # [P]
    lens_ptr,  # [R]
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    pid = tl.program_id(0)
    r = tl.arange(0, BLOCK_R)
    lens = tl.load(lens_ptr + r, mask=r < num_rows, other=0)
    tiles = (lens + BLOCK_N - 1) // BLOCK_N
    if WINDOW > 0:
        tiles -= tl.maximum(lens - WINDOW, 0) // BLOCK_N
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0) * NUM_KV_HEADS
    share = tl.maximum((total + NUM_PROGRAMS - 1) // NUM_PROGRAMS, MIN_SHARE)
    p = pid * BLOCK_P + tl.arange(0, BLOCK_P)
    # The rows that end at or before program p's first tile are those before its first row.
    before = (ends * NUM_KV_HEADS)[None, :] <= (p * share)[:, None]
    row = tl.sum((before & (r < num_rows)[None, :]).to(tl.int32), 1)
    tl.store(first_rows_ptr + p, row, mask=p < NUM_PROGRAMS)
    if pid == 0:
        tl.store(shares_ptr, total)
        tl.store(shares_ptr + 1, share)
        tl.store(shares_ptr + 2, tl.sum(((lens == 0) & (r < num_rows)).to(tl.int32), 0))
        tl.store(tile_starts_ptr + r, ends - tiles, mask=r < num_rows)
        tl.store(tile_starts_ptr + num_rows, total // NUM_KV_HEADS)
