"""One token a sample: the most likely one, or a draw by Gumbel noise; and what follows from it for its row.

    greedy      argmax logits
    temperature argmax (logits − max) / T + g,   g = −log(−log u) by Philox of (seed, position, token)

Of equal values the lowest token wins. The noise is that of `pagewire.worker.philox`: word number (token mod 4) of counter
(token div 4, position, 0, 0) under the row's seed. It is bounded, so what lies further below the maximum than its width
(`REACH`) at the row's temperature is never looked at; a tile without candidates costs no noise.

Logits that hold NaN or +∞, or −∞ alone, give no token.

Bytes: 4 · V a sample, once for greedy rows, twice for others (the maximum has to be known first); in three launches, the last of
which merges the tiles and writes the rows' state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

REACH = 16.64 + 2.82 + 0.01
OK, STOPPED, NUMERIC, DROPPED = 0, 1, 2, 4
"""Flags of a sample; those of `pagewire.step.step.SampleFlag`."""

_TILE = 4096


class SampleScratch:
    """Partial results of each tile, for up to `max_samples` at once."""

    def __init__(self, max_samples: int, vocab_size: int, device: torch.device | str) -> None:
        tiles = triton.cdiv(vocab_size, _TILE)
        self.values = torch.empty(2, max_samples, tiles, dtype=torch.float32, device=device)
        self.tokens = torch.empty(2, max_samples, tiles, dtype=torch.int32, device=device)


def sample(
    out_tokens: torch.Tensor,
    out_flags: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    stop_ids: torch.Tensor,
    stopped: torch.Tensor,
    last_token: torch.Tensor,
    scratch: SampleScratch,
    *,
    skip: torch.Tensor | None = None,
    logit_rows: torch.Tensor | None = None,
) -> None:
    """Draw, detect stops, and make the tokens their rows' last ones.

    Args:
        out_tokens: int32 [S]; −1 where there is none.
        out_flags: int32 [S].
        logits: fp32 [L, V], rows contiguous.
        rows: int32 [S], each once (rows that have stopped may repeat).
        positions: int32 [S], the place that the new token takes in its sequence.
        temperature: fp32 [R]; 0: greedy.
        seeds: int64 [R].
        stop_ids: int32 [R, W], padded with −1; W a power of two.
        stopped: int32 [R]; rows that have stopped get DROPPED; set where the row ends.
        last_token: int32 [R], written.
        scratch: for at least S samples.
        skip: int32 [R]; rows that are not 0 are left alone altogether. None: none.
        logit_rows: int32 [S], which row of `logits`; None: s.
    """
    num_samples, vocab_size = rows.shape[0], logits.shape[1]
    if num_samples == 0:
        return
    tiles = scratch.values.shape[2]
    common = (
        logits,
        logit_rows if logit_rows is not None else rows,
        rows,
        stopped,
        skip if skip is not None else stopped,
        scratch.values,
        scratch.tokens,
        logits.stride(0),
    )
    has = {"HAS_LOGIT_ROWS": logit_rows is not None, "HAS_SKIP": skip is not None}
    sizes = {"VOCAB": vocab_size, "TILES": tiles, "TILE": _TILE}
    part_stride = scratch.values.stride(0)
    _top_kernel[(num_samples, tiles)](*common, **has, **sizes, num_warps=8)
    _draw_kernel[(num_samples, tiles)](
        *common,
        part_stride,
        positions,
        temperature,
        seeds,
        **has,
        **sizes,
        TILES_2=triton.next_power_of_2(tiles),
        REACH=REACH,
        ON_CARD=logits.is_cuda,
        num_warps=8,
    )
    _finish_kernel[(num_samples,)](
        out_tokens,
        out_flags,
        rows,
        stopped,
        skip if skip is not None else stopped,
        last_token,
        temperature,
        stop_ids,
        scratch.values,
        scratch.tokens,
        part_stride,
        HAS_SKIP=skip is not None,
        TILES=tiles,
        TILES_2=triton.next_power_of_2(tiles),
        WIDTH=stop_ids.shape[1],
        num_warps=1,
    )


@triton.jit
def _top_kernel(
    logits_ptr,  # [L, V]
    logit_rows_ptr,  # [S]
    rows_ptr,  # [S]
    stopped_ptr,  # [R]
    skip_ptr,  # [R]
    values_ptr,  # [2, S, TILES]
    tokens_ptr,  # [2, S, TILES]
    logits_stride,
    HAS_LOGIT_ROWS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest logit of each tile and its first token; +∞ where the tile holds a NaN."""
    s = tl.program_id(0)
    row = tl.load(rows_ptr + s)
    idle = tl.load(stopped_ptr + row) != 0
    if HAS_SKIP:
        idle |= tl.load(skip_ptr + row) != 0
    if idle:
        return
    source = s
    if HAS_LOGIT_ROWS:
        source = tl.load(logit_rows_ptr + s)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + source.to(tl.int64) * logits_stride + token, mask=token < VOCAB, other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)  # noqa: PLR0124  (NaN)
    top = tl.max(x, 0)
    at = s * TILES + tl.program_id(1)
    tl.store(values_ptr + at, top)
    tl.store(tokens_ptr + at, tl.min(tl.where(x == top, token, VOCAB), 0))


@triton.jit(do_not_specialize=["part_stride"])
def _draw_kernel(
    logits_ptr,  # [L, V]
    logit_rows_ptr,  # [S]
    rows_ptr,  # [S]
    stopped_ptr,  # [R]
    skip_ptr,  # [R]
    values_ptr,  # [2, S, TILES]
    tokens_ptr,  # [2, S, TILES]
    logits_stride,
    part_stride,
    positions_ptr,  # [S]
    temperature_ptr,  # [R]
    seeds_ptr,  # [R] int64
    HAS_LOGIT_ROWS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILES_2: tl.constexpr,
    TILE: tl.constexpr,
    REACH: tl.constexpr,
    ON_CARD: tl.constexpr,
):
    """The best scaled and noisy logit of each tile, for rows with a temperature."""
    s = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(rows_ptr + s)
    temperature = tl.load(temperature_ptr + row)
    idle = (tl.load(stopped_ptr + row) != 0) | (temperature == 0)
    if HAS_SKIP:
        idle |= tl.load(skip_ptr + row) != 0
    if idle:
        return
    t = tl.arange(0, TILES_2)
    top = tl.max(tl.load(values_ptr + s * TILES + t, mask=t < TILES, other=float("-inf")), 0)
    floor = top - REACH * temperature
    at = part_stride + s * TILES + tile
    if (tl.load(values_ptr + s * TILES + tile) < floor) | (top == float("inf")) | (top == float("-inf")):
        tl.store(values_ptr + at, float("-inf"))
        tl.store(tokens_ptr + at, VOCAB)
        return
    source = s
    if HAS_LOGIT_ROWS:
        source = tl.load(logit_rows_ptr + s)
    group = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    zero = tl.zeros([TILE // 4], tl.uint32)
    position = zero + tl.load(positions_ptr + s).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds_ptr + row), group.to(tl.uint32), position, zero, zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # in the order of the tokens
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + source.to(tl.int64) * logits_stride + token, mask=token < VOCAB, other=float("-inf"))
    value = x - top
    if temperature != 1.0:
        value = tl.div_rn(value, temperature)
    value += _gumbel(words, ON_CARD)
    value = tl.where(x >= floor, value, float("-inf"))
    best = tl.max(value, 0)
    winner = tl.min(tl.where((value == best) & (x >= floor), token, VOCAB), 0)
    tl.store(values_ptr + at, best)
    tl.store(tokens_ptr + at, winner)


@triton.jit
def _gumbel(words, ON_CARD: tl.constexpr):
    """G = −log(−log u) of u = ((word >> 8) | 1) · 2⁻²⁴, within 1e-6, which is an ulp of those that win.

    The library's logarithms are two thirds of a draw. On a card the inner one is a polynomial in 1 − u, which is exact, where u is near 1 (the
    largest of g), and both else are the card's own, the outer one of the mantissa alone: its error is absolute.
    """
    u = ((words >> 8) | 1).to(tl.float32) * 5.9604644775390625e-08
    if not ON_CARD:
        return -tl.log(-tl.log(u))
    v = 1.0 - u
    near = 0.25782051 + v * (0.14381852 + v * 0.33995219)
    near = v * (1.0 + v * (0.50001056 + v * (0.33285478 + v * near)))
    e = tl.where(v < 0.25, near, _log2_on_card(u) * -0.6931471805599453)
    bits = e.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return exponent * -0.6931471805599453 + _log2_on_card(mantissa) * -0.6931471805599453


@triton.jit
def _log2_on_card(x):
    return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["part_stride"])
def _finish_kernel(
    out_tokens_ptr,  # [S]
    out_flags_ptr,  # [S]
    rows_ptr,  # [S]
    stopped_ptr,  # [R]
    skip_ptr,  # [R]
    last_ptr,  # [R]
    temperature_ptr,  # [R]
    stop_ids_ptr,  # [R, WIDTH]
    values_ptr,  # [2, S, TILES]
    tokens_ptr,  # [2, S, TILES]
    part_stride,
    HAS_SKIP: tl.constexpr,
    TILES: tl.constexpr,
    TILES_2: tl.constexpr,
    WIDTH: tl.constexpr,
):
    s = tl.program_id(0)
    row = tl.load(rows_ptr + s)
    if HAS_SKIP:  # noqa: SIM102  (a constant: without it the load would be compiled all the same)
        if tl.load(skip_ptr + row) != 0:
            return
    if tl.load(stopped_ptr + row) != 0:
        tl.store(out_tokens_ptr + s, -1)
        tl.store(out_flags_ptr + s, 4)
        return
    t = tl.arange(0, TILES_2)
    at = s * TILES + t
    top = tl.max(tl.load(values_ptr + at, mask=t < TILES, other=float("-inf")), 0)
    if tl.load(temperature_ptr + row) != 0:
        at += part_stride
    values = tl.load(values_ptr + at, mask=t < TILES, other=float("-inf"))
    tokens = tl.load(tokens_ptr + at, mask=t < TILES, other=2147483647)
    token = tl.min(tl.where(values == tl.max(values, 0), tokens, 2147483647), 0)
    w = tl.arange(0, WIDTH)
    ends = tl.max((tl.load(stop_ids_ptr + row.to(tl.int64) * WIDTH + w) == token).to(tl.int32), 0)
    flag = ends
    if (top == float("inf")) | (top == float("-inf")):
        flag = 2
        token = -1
    else:
        tl.store(last_ptr + row, token)
    if flag != 0:
        tl.store(stopped_ptr + row, 1)
    tl.store(out_tokens_ptr + s, token)
    tl.store(out_flags_ptr + s, flag)
