"""Products of few tokens for Hopper: y = x Wᵀ with W streamed once, or silu(W_gate x) · (W_up x).

For M ≤ 256 the weights are what moves, so they are the wide side of the matrix unit's tile: BLOCK_N rows of W by all M tokens. A tile's
sum over K is cut into units of BLOCK_K; all units of all tiles are one line, which the programs share evenly (stream-K), so that any
shape keeps every multiprocessor busy and no multiprocessor waits for another's last wave.

    tile         0                    1                    2
    unit         0 1 2 3 4 5 6 7 8 9  …                          NUM_K units a tile
    program      0 0 0 0 0 0 0 1 1 1  1 1 1 1 2 2 2 2 2 2  2 3 …

A program takes its units from the right: what it began of a tile that a later program ends comes first, goes to `parts` and raises its
flag; the tile that it ends itself comes last, and by then the earlier programs' parts lie ready. Waits go to programs with lower
numbers only, which were started before, and parts are added in a fixed order: the result does not depend on timing. Where
SCATTER is set each program has one piece of one tile, and the programs of a tile share the addition: each adds some of the tokens'
rows. That reads less in a row, but the programs wait for each other, so there may not be more than run at once.

Where both are in E4M3, sums are multiplied by a scale of the token and one of the output before they are gated and written.

One warp fetches tiles of W and x with the tensor copy engine, 4 or 8 warps compute. Launched as a programmatic dependent, the kernel
fills its stages with weights, which no kernel of the step writes, while the kernel before still runs.

Rejected, measured on an H200: rings of their own for W and x (in a layer 1 to 3 % slower), two programs a multiprocessor, beginning at other
columns in each program. Beyond 128 tokens cuBLAS, whose clusters share x, is mostly faster. Follows stream-K (Osama et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_BOX = 64  # columns of a box of 16 bits: 128 bytes, the widest swizzle
_NARROW = torch.float8_e4m3fn
_BOX_ROWS = 128  # tokens of an output box at most: what is staged takes room from the stages
# Triton 3.9 renamed them.
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

_SMEM = 232_448 - 512  # bytes of shared memory a program may have, less barriers and what the compiler adds
_MOST_SUMS = 32_768  # float32 sums of a tile: 128 registers of each thread of 8 warps
MOST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut.

    Attributes:
        block_n: rows of W in a tile; gated: of the gates, and as many ups.
        block_m: ≥ the tokens; a power of two from 16.
        block_k: columns of a unit, 64 (in E4M3 128) or a multiple.
        stages: units in flight.
        consumers: groups of 4 warps that compute, 1 or 2, each with its own rows of W.
        programs: that share the units.
        scatter: programs of a tile, a power of two, which add together; 0: who ends a tile adds.
        lag: units whose products are still running when the next one's are issued, 0 or 1.
    """

    block_n: int
    block_m: int
    block_k: int
    stages: int
    consumers: int
    programs: int
    scatter: int = 0
    lag: int = 1


class LinearScratch:
    """Where parts of tiles meet: 128 KiB and a flag for each program. Launches that share it belong to one stream."""

    def __init__(self, device: torch.device | str) -> None:
        programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.parts = torch.empty(programs * _MOST_SUMS, dtype=torch.float32, device=device)
        self.flags = torch.zeros(2 * programs, dtype=torch.int32, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)  # a scale that changes nothing


def is_supported(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `launch` can serve these: 16-bit floats or E4M3, both of one type, with rows of whole 16 bytes, on compute
    capability 9.
    """
    return (
        x.dtype in {torch.bfloat16, torch.float16, _NARROW}
        and weight.dtype == x.dtype
        and 0 < x.shape[0] <= MOST_TOKENS
        and x.stride(1) == weight.stride(1) == 1
        and all(t.stride(0) * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def stages_that_fit(
    block_n: int, block_m: int, block_k: int, *, gated: bool, staged: bool, most: int = 8, itemsize: int = 2
) -> int:
    """So many units fit in shared memory beside the output tile, `most` at most."""
    unit = ((2 if gated else 1) * block_n + block_m) * block_k * itemsize
    room = _SMEM - (min(block_m, _BOX_ROWS) * block_n * 2 if staged else 2048)
    return min(most, room // unit)


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scratch: LinearScratch,
    tiling: Tiling,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    gated: bool = False,
    dependent: bool = True,
) -> None:
    """The product; arguments as checked by `linear`.

    Args:
        out: [M, N] contiguous, of x's type or float32; bf16 where x is in E4M3.
        x: [M, K].
        weight: [N, K]; gated: [2 N, K], the gates before the ups. Not written by the kernel before.
        scratch: of this stream.
        tiling: how to cut.
        scales: float32 [M] of x's rows and [N] or [2 N] of the weight's, both in E4M3.
        gated: whether.
        dependent: launch as a programmatic dependent of the kernel before.
    """
    buffers = scratch.parts, scratch.flags
    arguments, options = _arguments(out, x, weight, buffers, tiling, gated, dependent, scales)
    _linear_hopper_kernel[(tiling.programs,)](*arguments, **options)


def compile_ahead(n: int, k: int, tiling: Tiling, dtype: torch.dtype, out_dtype: torch.dtype, *, gated: bool) -> str:
    """Compile what `launch` would need, into Triton's cache, and return its PTX. Touches no memory of the card."""
    like = torch.empty(1, device="meta")
    out, x = like.new_empty(2, n, dtype=out_dtype), like.new_empty(2, k, dtype=dtype)
    weight = like.new_empty(2 * n if gated else n, k, dtype=dtype)
    scales = (like, like) if dtype == _NARROW else None
    arguments, options = _arguments(out, x, weight, (like, like.int()), tiling, gated, True, scales)
    return str(_linear_hopper_kernel.warmup(*arguments, grid=(tiling.programs,), **options).asm["ptx"])


def _arguments(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    buffers: tuple[torch.Tensor, torch.Tensor],
    tiling: Tiling,
    gated: bool,
    dependent: bool,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[tuple[object, ...], dict[str, int]]:
    n, k = out.shape[1], x.shape[1]
    layout, out_layout = (
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8 * x.itemsize, 16)
    )
    box = 128 // x.itemsize
    x_desc = TensorDescriptor.from_tensor(x, [tiling.block_m, box], layout)
    w_desc = TensorDescriptor.from_tensor(weight, [tiling.block_n, box], layout)
    staged = out.itemsize == 2 and not tiling.scatter and n % 8 == 0
    out_box = [min(tiling.block_m, _BOX_ROWS), _BOX]
    out_desc = TensorDescriptor.from_tensor(out, out_box, out_layout) if staged else x_desc
    x_scales, w_scales = scales if scales is not None else (buffers[0], buffers[0])
    return (out, out_desc, x_desc, w_desc, x_scales, w_scales, *buffers, x.shape[0]), {
        "N": n,
        "K": k,
        "BLOCK_N": tiling.block_n,
        "BLOCK_M": tiling.block_m,
        "BLOCK_K": tiling.block_k,
        "STAGES": tiling.stages,
        "GATED": gated,
        "SCALED": scales is not None,
        "SCATTER": tiling.scatter,
        "STAGED": staged,
        "CONSUMERS": tiling.consumers,
        "LAG": tiling.lag,
        "WHOLE": tiling.programs * tiling.block_n == n,
        "num_warps": 4,
        "launch_pdl": dependent,
        # A norm's program has to fit beside: then this kernel's can start, and load weights, while the norm still runs.
        # (256 tokens need more.)
        "maxnreg": 168 if tiling.block_m > 128 else 160 if tiling.consumers == 1 else 152,
    }


@gluon.jit(do_not_specialize=["num_tokens"])
def _linear_hopper_kernel(
    out_ptr,  # [M, N]
    out_desc,  # likewise, boxes of [min(BLOCK_M, 128), 64]
    x_desc,  # [M, K], boxes of [BLOCK_M, 64], of 128 columns in E4M3
    w_desc,  # [N or 2 N, K], likewise
    x_scales_ptr,  # [M]
    w_scales_ptr,  # [N or 2 N]
    parts_ptr,  # float32 [programs, 2 if gated, BLOCK_N, BLOCK_M]
    flags_ptr,  # int32 [programs, CONSUMERS], 0 before and after
    num_tokens,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    SCALED: gl.constexpr,
    SCATTER: gl.constexpr,
    STAGED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    LAG: gl.constexpr,
    WHOLE: gl.constexpr,
):
    DTYPE: gl.constexpr = w_desc.dtype
    OUT_DTYPE: gl.constexpr = out_desc.dtype if STAGED else gl.bfloat16
    SIDES: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = BLOCK_N // CONSUMERS
    CHUNK: gl.constexpr = min(128, BLOCK_M)
    W_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_K], DTYPE)
    X_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], DTYPE)
    OUT_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, ROWS], OUT_DTYPE)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES * SIDES, BLOCK_N, BLOCK_K], W_SMEM)
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], X_SMEM)
    out_smem = gl.allocate_shared_memory(
        OUT_DTYPE, [CONSUMERS if STAGED else 1, CHUNK if STAGED else 8, ROWS if STAGED else 64], OUT_SMEM
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (
                        0, out_ptr, out_desc, w_smem, x_smem, out_smem, full, empty, x_scales_ptr, w_scales_ptr, parts_ptr,
                        flags_ptr, num_tokens, N, K, BLOCK_N, BLOCK_M, BLOCK_K, STAGES, GATED, SCALED, SCATTER, STAGED,
                        CONSUMERS, LAG, WHOLE,
                    ),
                ),
                (
                    _load_tiles,
                    (
                        x_desc, w_desc, w_smem, x_smem, full, empty, N, K, BLOCK_N, BLOCK_M, BLOCK_K, STAGES, GATED,
                    ),
                ),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _compute,
                    (
                        0, out_ptr, out_desc, w_smem, x_smem, out_smem, full, empty, x_scales_ptr, w_scales_ptr, parts_ptr,
                        flags_ptr, num_tokens, N, K, BLOCK_N, BLOCK_M, BLOCK_K, STAGES, GATED, SCALED, SCATTER, STAGED,
                        CONSUMERS, LAG, WHOLE,
                    ),
                ),
                (
                    _compute,
                    (
                        1, out_ptr, out_desc, w_smem, x_smem, out_smem, full, empty, x_scales_ptr, w_scales_ptr, parts_ptr,
                        flags_ptr, num_tokens, N, K, BLOCK_N, BLOCK_M, BLOCK_K, STAGES, GATED, SCALED, SCATTER, STAGED,
                        CONSUMERS, LAG, WHOLE,
                    ),
                ),
                (
                    _load_tiles,
                    (
                        x_desc, w_desc, w_smem, x_smem, full, empty, N, K, BLOCK_N, BLOCK_M, BLOCK_K, STAGES, GATED,
                    ),
                ),
            ],
            [4, 1],
            [208, 40],
        )  # fmt: skip


@gluon.jit
def _first_unit(program, N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr):
    """Where a program's units begin."""
    UNITS: gl.constexpr = ((N + BLOCK_N - 1) // BLOCK_N) * ((K + BLOCK_K - 1) // BLOCK_K)
    return (program.to(gl.int64) * UNITS // gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _load_weights(
    w_desc,
    w_smem,
    bar,
    stage,
    tile,
    k,
    N: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GATED: gl.constexpr,
):
    SIDES: gl.constexpr = 2 if GATED else 1
    BOX: gl.constexpr = w_desc.block_shape[1]
    for side in gl.static_range(SIDES):
        for h in gl.static_range(BLOCK_K // BOX):
            to = w_smem.index(stage * SIDES + side).slice(h * BOX, BOX, 1)
            _tma_load(w_desc, [side * N + tile * BLOCK_N, k + h * BOX], bar, to)


@gluon.jit
def _load_tokens(x_desc, x_smem, bar, stage, k, BLOCK_K: gl.constexpr):
    BOX: gl.constexpr = x_desc.block_shape[1]
    for h in gl.static_range(BLOCK_K // BOX):
        _tma_load(x_desc, [0, k + h * BOX], bar, x_smem.index(stage).slice(h * BOX, BOX, 1))


@gluon.jit
def _load_tiles(
    x_desc,
    w_desc,
    w_smem,
    x_smem,
    full,
    empty,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """The loading warp."""
    NUM_K: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BYTES: gl.constexpr = ((2 if GATED else 1) * BLOCK_N + BLOCK_M) * BLOCK_K * (w_smem.dtype.primitive_bitwidth // 8)
    begin = _first_unit(gl.program_id(0), N, K, BLOCK_N, BLOCK_K)
    end = _first_unit(gl.program_id(0) + 1, N, K, BLOCK_N, BLOCK_K)
    high = end
    tile = (high - 1) // NUM_K
    low = gl.maximum(tile * NUM_K, begin)
    ahead = gl.minimum(high - low, STAGES)
    _launch_dependents()
    for i in range(ahead):
        mbarrier.expect(full.index(i), BYTES)
        k = (low + i - tile * NUM_K) * BLOCK_K
        _load_weights(w_desc, w_smem, full.index(i), i, tile, k, N, BLOCK_N, BLOCK_K, GATED)
    _wait_for_inputs()
    for i in range(ahead):
        k = (low + i - tile * NUM_K) * BLOCK_K
        _load_tokens(x_desc, x_smem, full.index(i), i, k, BLOCK_K)
    while high > begin:
        tile = (high - 1) // NUM_K
        low = gl.maximum(tile * NUM_K, begin)
        for i in range(ahead, high - low):
            g = end - high + i
            stage = g % STAGES
            k = (low + i - tile * NUM_K) * BLOCK_K
            mbarrier.wait(empty.index(stage), ((g // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            _load_weights(w_desc, w_smem, bar, stage, tile, k, N, BLOCK_N, BLOCK_K, GATED)
            _load_tokens(x_desc, x_smem, bar, stage, k, BLOCK_K)
        high = low
        ahead = 0


@gluon.jit
def _wait_for_inputs():
    """Until the kernel before has ended and what it wrote is seen; nothing where it has."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _compute(
    PART: gl.constexpr,
    out_ptr,
    out_desc,
    w_smem,  # [STAGES · sides, BLOCK_N, BLOCK_K]
    x_smem,  # [STAGES, BLOCK_M, BLOCK_K]
    out_smem,  # [CONSUMERS, min(BLOCK_M, 128), ROWS]
    full,
    empty,
    x_scales_ptr,
    w_scales_ptr,
    parts_ptr,
    flags_ptr,
    num_tokens,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    SCALED: gl.constexpr,
    SCATTER: gl.constexpr,
    STAGED: gl.constexpr,
    CONSUMERS: gl.constexpr,
    LAG: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """One group of computing warps: ROWS of each tile's rows, from PART · ROWS on."""
    ROWS: gl.constexpr = BLOCK_N // CONSUMERS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 256 // w_smem.dtype.primitive_bitwidth])
    NUM_K: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SIDES: gl.constexpr = 2 if GATED else 1
    SIZE: gl.constexpr = SIDES * BLOCK_N * BLOCK_M
    pid = gl.program_id(0)
    begin = _first_unit(pid, N, K, BLOCK_N, BLOCK_K)
    end = _first_unit(pid + 1, N, K, BLOCK_N, BLOCK_K)
    rows = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    tokens = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    at = rows[:, None] * BLOCK_M + tokens[None, :]
    _wait_for_inputs()
    high = end
    while high > begin:
        tile = (high - 1) // NUM_K
        low = gl.maximum(tile * NUM_K, begin)
        acc = gl.full([ROWS, BLOCK_M], 0.0, gl.float32, MMA)
        up = acc
        for i in range(high - low):
            g = end - high + i
            stage = g % STAGES
            mbarrier.wait(full.index(stage), (g // STAGES) & 1)
            x = x_smem.index(stage).permute((1, 0))
            w = w_smem.index(stage * SIDES).slice(PART * ROWS, ROWS, 0)
            acc = warpgroup_mma(w, x, acc, is_async=True)
            if GATED:
                w_up = w_smem.index(stage * SIDES + 1).slice(PART * ROWS, ROWS, 0)
                up = warpgroup_mma(w_up, x, up, is_async=True)
                acc, up = warpgroup_mma_wait(2 * LAG, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(LAG, deps=[acc])
            if LAG:
                mbarrier.arrive(empty.index((g + STAGES - 1) % STAGES), pred=i > 0)
            else:
                mbarrier.arrive(empty.index(stage))
        if LAG:
            if GATED:
                acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((end - low + STAGES - 1) % STAGES))

        if SCATTER:
            _add_together(
                PART, out_ptr, acc, up, x_scales_ptr, w_scales_ptr, parts_ptr, flags_ptr, num_tokens, pid, tile, N,
                BLOCK_N, BLOCK_M, GATED, SCALED, SCATTER, CONSUMERS,
            )  # fmt: skip
        elif WHOLE:
            _finish(
                PART, out_ptr, out_desc, out_smem, acc, up, x_scales_ptr, w_scales_ptr, num_tokens, tile, N, BLOCK_N,
                BLOCK_M, ROWS, GATED, SCALED, STAGED,
            )  # fmt: skip
        elif high < (tile + 1) * NUM_K:
            part_at = parts_ptr + pid.to(gl.int64) * SIZE + at
            gl.store(part_at, acc)
            if GATED:
                gl.store(part_at + BLOCK_N * BLOCK_M, up)
            _barrier()
            gl.atomic_xchg(flags_ptr + pid * CONSUMERS + PART, 1, sem="release")
        else:
            covered = low
            helper = pid
            while covered > tile * NUM_K:
                helper -= 1
                while gl.atomic_cas(flags_ptr + helper * CONSUMERS + PART, 1, 0, sem="acquire") == 0:
                    pass
                _barrier()
                part_at = parts_ptr + helper.to(gl.int64) * SIZE + at
                acc += gl.load(part_at, cache_modifier=".cg")
                if GATED:
                    up += gl.load(part_at + BLOCK_N * BLOCK_M, cache_modifier=".cg")
                covered = _first_unit(helper, N, K, BLOCK_N, BLOCK_K)
            _finish(
                PART, out_ptr, out_desc, out_smem, acc, up, x_scales_ptr, w_scales_ptr, num_tokens, tile, N, BLOCK_N,
                BLOCK_M, ROWS, GATED, SCALED, STAGED,
            )  # fmt: skip
        high = low
    if STAGED:
        tma.store_wait(0)


@gluon.jit
def _finish(
    PART: gl.constexpr,
    out_ptr,
    out_desc,
    out_smem,
    acc,  # [ROWS, BLOCK_M]
    up,  # likewise
    x_scales_ptr,
    w_scales_ptr,
    num_tokens,
    tile,
    N: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ROWS: gl.constexpr,
    GATED: gl.constexpr,
    SCALED: gl.constexpr,
    STAGED: gl.constexpr,
):
    """Write a tile's sums."""
    MMA: gl.constexpr = acc.type.layout
    column = tile * BLOCK_N + PART * ROWS
    if SCALED:
        row = column + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
        x_scale = gl.load(x_scales_ptr + token, mask=token < num_tokens, other=0.0)[None, :]
        acc = acc * gl.load(w_scales_ptr + row, mask=row < N, other=0.0)[:, None] * x_scale
        if GATED:
            up = up * gl.load(w_scales_ptr + N + row, mask=row < N, other=0.0)[:, None] * x_scale
    if GATED:
        acc = acc / (1.0 + gl.exp(-acc)) * up
    if STAGED:
        staging = out_smem.index(PART)
        y = acc.to(out_smem.dtype)
        if BLOCK_M > 128:
            early, late = gl.split(y.reshape([ROWS, 2, BLOCK_M // 2]).permute((0, 2, 1)))
            _store(out_desc, staging, early, 0, column, ROWS)
            _store(out_desc, staging, late, BLOCK_M // 2, column, ROWS)
        else:
            _store(out_desc, staging, y, 0, column, ROWS)
    else:
        n = column + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
        to = out_ptr + m.to(gl.int64)[None, :] * N + n[:, None]
        gl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < num_tokens)[None, :])


@gluon.jit
def _store(out_desc, staging, y, row, column, ROWS: gl.constexpr):
    """Transpose by way of shared memory, and let the copy engine write; it leaves out what is past the last token."""
    tma.store_wait(0)
    staging.permute((1, 0)).store(y)
    fence_async_shared()
    _barrier()
    for h in gl.static_range(ROWS // 64):
        _tma_store(out_desc, [row, column + h * 64], staging.slice(h * 64, 64, 1))


@gluon.jit
def _add_together(
    PART: gl.constexpr,
    out_ptr,
    acc,
    up,
    x_scales_ptr,
    w_scales_ptr,
    parts_ptr,
    flags_ptr,
    num_tokens,
    pid,
    tile,
    N: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    GATED: gl.constexpr,
    SCALED: gl.constexpr,
    SCATTER: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Write this program's part, wait for the tile's other programs', and add BLOCK_M / SCATTER tokens of all of them."""
    SIDES: gl.constexpr = 2 if GATED else 1
    SIZE: gl.constexpr = SIDES * BLOCK_N * BLOCK_M
    ROWS: gl.constexpr = BLOCK_N // CONSUMERS
    SHARE: gl.constexpr = BLOCK_M // SCATTER
    LANES_N: gl.constexpr = 32 if ROWS >= 128 else ROWS // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES_N, LANES_N], [4, 1], [1, 0])
    MMA: gl.constexpr = acc.type.layout
    n = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    part_at = parts_ptr + pid.to(gl.int64) * SIZE + m[None, :] * BLOCK_N + n[:, None]
    mask = (n < BLOCK_N)[:, None] & (m < num_tokens)[None, :]
    gl.store(part_at, acc, mask=mask)
    if GATED:
        gl.store(part_at + BLOCK_N * BLOCK_M, up, mask=mask)
    _barrier()
    flag = flags_ptr + tile * CONSUMERS + PART
    gl.atomic_add(flag, 1, sem="release")
    while gl.atomic_add(flag, 0, sem="acquire") < SCATTER:
        pass
    _barrier()
    tokens = pid % SCATTER * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, LAYOUT))
    columns = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    at = tokens[:, None] * BLOCK_N + columns[None, :]
    here = (tokens < num_tokens)[:, None] & (columns < BLOCK_N)[None, :]
    first = parts_ptr + (pid // SCATTER * SCATTER).to(gl.int64) * SIZE + at
    total = gl.full([SHARE, ROWS], 0.0, gl.float32, LAYOUT)
    total_up = total
    for i in gl.static_range(SCATTER):
        total += gl.load(first + i * SIZE, mask=here, other=0.0, cache_modifier=".cg")
        if GATED:
            total_up += gl.load(first + i * SIZE + BLOCK_N * BLOCK_M, mask=here, other=0.0, cache_modifier=".cg")
    if SCALED:
        row = tile * BLOCK_N + columns
        x_scale = gl.load(x_scales_ptr + tokens, mask=tokens < num_tokens, other=0.0)[:, None]
        total = total * gl.load(w_scales_ptr + row, mask=row < N, other=0.0)[None, :] * x_scale
        if GATED:
            total_up = total_up * gl.load(w_scales_ptr + N + row, mask=row < N, other=0.0)[None, :] * x_scale
    if GATED:
        total = total / (1.0 + gl.exp(-total)) * total_up
    to = out_ptr + tokens.to(gl.int64)[:, None] * N + tile * BLOCK_N + columns[None, :]
    gl.store(to, total.to(out_ptr.dtype.element_ty), mask=here & (tile * BLOCK_N + columns < N)[None, :])
    # Counted out by all; the last one leaves the flag as it was.
    if gl.atomic_add(flag, 1, sem="relaxed") == 2 * SCATTER - 1:
        gl.atomic_xchg(flag, 0, sem="relaxed")
