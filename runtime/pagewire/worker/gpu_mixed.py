"""Steps with prefill as CUDA graphs, by token bucket: eager launches of hundreds of kernels would hold the loop.

The tokens of a step lie side by side: decode entries first, then the chunks of prompts, then padding. How many there are
of each changes from step to step, so a graph leaves that to the device. A *shape* has room for T tokens, D decode entries
(or samples), and C chunks; decode attention reads D rows, of which `is_decode` blanks those that are none; prefill
attention lists its tiles from `query_starts`, whose unused end repeats the last value. What a step uses of its shape:

    tokens     │ decode entries │ chunks …               │ padding row …    │ T
    is_decode  │ 1 1 1 1 1 1 1 1│ 0 0 0 … │ D
    samples    │ entry of each sample, padded with the padding row │ D

Everything of a step lies in one inbox whose places do not depend on the shape; one copy fills it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pagewire.step.step import Int32Array, StepPlan
from pagewire.worker.gpu_device import Device
from pagewire.worker.gpu_staging import ALIGN, Staging, Words

TOKEN_BUCKETS: Final = (
    64, 128, 192, 256, 320, 384, 512, 768, 1024, 1152, 1280, 1408, 1536, 1792, 2048, 2560, 3072, 4096, 6144, 8192,
)  # fmt: skip
"""Close together where padding is dear, and where a step gets dearer: with 100 of the tokens decoding, 8b in bf16 takes on an H200
8.6, 9.2, 9.2, 10.4, 10.3 and 12.0 ms for 192, 224, 256, 288, 320 and 352 (the library's tiles), so those in between gain nothing.
Only as many as `max_step_tokens` asks for are captured."""
MAX_CHUNKS: Final = 64
"""Prompts in one step: more go the other way."""
_ROW_BUCKETS: Final = (32, 128, 256, 512)
"""A row that is empty costs about a microsecond, a graph a tenth of a second at the start."""
_LARGE: Final = 1024
"""In steps of more tokens it does not matter much how many rows are empty, nor what a first launch takes: fewer graphs will do."""
_LARGE_ROW_BUCKETS: Final = (256,)
_HUGE: Final = 2048
"""Nor at all in steps of more than these."""
_MAX_DELTAS: Final = 8192


@dataclass(frozen=True, slots=True)
class Shape:
    """Room of a graph: tokens, and decode entries or samples."""

    num_tokens: int
    num_rows: int


@dataclass(slots=True)
class MixedBatch:
    """What a shape's graphs read, views of the inbox, int32 all."""

    num_deltas: Tensor  # [1]
    deltas: Tensor  # [capacity, 3]
    rows: Tensor  # [T]
    starts: Tensor  # [T]
    token_ids: Tensor  # [T], −1: the row's last token
    is_decode: Tensor  # [D], 1 or 0
    chunk_rows: Tensor  # [C]
    query_starts: Tensor  # [C + 1], indices of tokens
    chunk_lens: Tensor  # [C]
    sample_tokens: Tensor  # [D], index of the token whose logits each sample is drawn from
    sample_rows: Tensor  # [D]
    sample_positions: Tensor  # [D]


def shapes(max_rows: int, max_step_tokens: int) -> list[Shape]:
    """Ascending in tokens, then rows; for each number of tokens up to as many rows as may be."""
    out = []
    for tokens in TOKEN_BUCKETS:
        most = min(tokens, max_rows)
        buckets = _ROW_BUCKETS if tokens <= _LARGE else _LARGE_ROW_BUCKETS if tokens <= _HUGE else ()
        out += [Shape(tokens, rows) for rows in (*(r for r in buckets if r < most), most)]
        if tokens >= max_step_tokens:
            break
    return out


class MixedInbox:
    """The buffer of a mixed step's inputs."""

    def __init__(self, *, max_rows: int, padding_row: int, device: torch.device) -> None:
        self._padding = padding_row
        self.max_chunks: Final = min(MAX_CHUNKS, max_rows)
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, size in (
            ("num_deltas", 1),
            ("is_decode", max_rows),
            ("sample_tokens", max_rows),
            ("sample_rows", max_rows),
            ("sample_positions", max_rows),
            ("chunk_rows", self.max_chunks),
            ("query_starts", self.max_chunks + 1),
            ("chunk_lens", self.max_chunks),
            ("rows", TOKEN_BUCKETS[-1]),
            ("starts", TOKEN_BUCKETS[-1]),
            ("token_ids", TOKEN_BUCKETS[-1]),
            ("deltas", 3 * _MAX_DELTAS),
        ):
            self._places[name] = at, size
            at += -(-size // ALIGN) * ALIGN
        self._words = torch.zeros(at, dtype=torch.int32, device=device)

    def batch(self, shape: Shape) -> MixedBatch:
        """Views for a shape."""
        tokens = {name: self._view(name, shape.num_tokens) for name in ("rows", "starts", "token_ids")}
        names = ("is_decode", "sample_tokens", "sample_rows", "sample_positions")
        rows = {name: self._view(name, shape.num_rows) for name in names}
        chunks = {name: self._view(name) for name in ("chunk_rows", "query_starts", "chunk_lens")}
        deltas = self._view("deltas").view(-1, 3)
        return MixedBatch(num_deltas=self._view("num_deltas"), deltas=deltas, **tokens, **rows, **chunks)

    def takes(self, plan: StepPlan) -> bool:
        """Whether chunks and block deltas have room; a graph's shape is another matter."""
        return plan.rows.size - plan.num_decode <= self.max_chunks and plan.block_rows.size <= _MAX_DELTAS

    def fill(self, plan: StepPlan, shape: Shape, staging: Staging) -> None:
        """One copy of all that `plan` says."""
        num_decode, num_samples, num_deltas = plan.num_decode, plan.sample_rows.size, plan.block_rows.size
        num_tokens, num_chunks = plan.total_tokens, plan.rows.size - num_decode
        ends = np.cumsum(plan.num_tokens, dtype=np.int32)
        firsts = ends - plan.num_tokens
        offsets = np.arange(num_tokens, dtype=np.int32) - np.repeat(firsts, plan.num_tokens)
        query_starts = np.full(self.max_chunks + 1, num_tokens, np.int32)
        query_starts[:num_chunks] = firsts[num_decode:]
        spare_rows, spare_tokens = shape.num_rows - num_samples, shape.num_tokens - num_tokens
        parts: list[tuple[str, Int32Array]] = [
            ("num_deltas", np.array([num_deltas], np.int32)),
            ("is_decode", _padded(np.ones(num_decode, np.int32), shape.num_rows - num_decode, 0)),
            ("sample_tokens", _padded(ends[plan.sample_entries] - 1, spare_rows, 0)),
            ("sample_rows", _padded(plan.sample_rows, spare_rows, self._padding)),
            ("sample_positions", _padded((plan.starts + plan.num_tokens)[plan.sample_entries], spare_rows, 0)),
            ("chunk_rows", _padded(plan.rows[num_decode:], self.max_chunks - num_chunks, self._padding)),
            ("query_starts", query_starts),
            ("chunk_lens", _padded((plan.starts + plan.num_tokens)[num_decode:], self.max_chunks - num_chunks, 0)),
            ("rows", _padded(np.repeat(plan.rows, plan.num_tokens), spare_tokens, self._padding)),
            ("starts", _padded(np.repeat(plan.starts, plan.num_tokens) + offsets, spare_tokens, 0)),
            ("token_ids", np.full(num_decode, -1, np.int32)),
        ]
        pieces: list[tuple[int, Words]] = [(self._places[name][0], words) for name, words in parts]
        ids_at = self._places["token_ids"][0] + num_decode
        pieces += [(ids_at, plan.token_ids), (ids_at + plan.token_ids.size, np.full(spare_tokens, -1, np.int32))]
        end = self._places["token_ids"][0] + shape.num_tokens
        if num_deltas:
            deltas = np.stack([plan.block_rows, plan.block_cols, plan.block_ids], axis=1)
            pieces.append((self._places["deltas"][0], deltas.ravel()))
            end = self._places["deltas"][0] + deltas.size
        staging.write(self._words, pieces, end)

    def clear(self, shape: Shape) -> None:
        """A step of padding alone, but for one chunk of it, for trying and capturing."""
        batch = self.batch(shape)
        self._words.zero_()
        for part in (batch.rows, batch.sample_rows, batch.chunk_rows):
            part.fill_(self._padding)
        batch.query_starts[1:].fill_(shape.num_tokens)
        batch.chunk_lens[:1].fill_(shape.num_tokens)

    def _view(self, name: str, size: int | None = None) -> Tensor:
        at, room = self._places[name]
        return self._words[at : at + (room if size is None else size)]


@dataclass(slots=True)
class _Captured:
    shape: Shape
    forward: Callable[[], None]
    sample: Callable[[], None]


class MixedGraphs:
    """Captured once for each shape, replayed for every step that has prefill and fits one.

    Args:
        device: where.
        inbox: what the graphs read.
        forward: launches the forward pass of a batch.
        sample: launches its sampling.
        max_rows: of a batch.
        max_step_tokens: of a step.
    """

    def __init__(
        self,
        device: Device,
        inbox: MixedInbox,
        *,
        forward: Callable[[MixedBatch], None],
        sample: Callable[[MixedBatch], None],
        max_rows: int,
        max_step_tokens: int,
    ) -> None:
        self._captured: dict[int, list[_Captured]] = {}
        samples: dict[int, Callable[[], None]] = {}  # by rows: nothing else of the shape matters to it
        for shape in reversed(shapes(max_rows, max_step_tokens)):  # the largest first: the others fit into its memory
            with device.computing():
                inbox.clear(shape)
            batch = inbox.batch(shape)
            replay = device.capture(partial(forward, batch), is_launched=shape.num_tokens <= _LARGE)
            if shape.num_rows not in samples:
                samples[shape.num_rows] = device.capture(partial(sample, batch))
            captured = _Captured(shape, replay, samples[shape.num_rows])
            self._captured.setdefault(shape.num_tokens, []).insert(0, captured)
        self._buckets = sorted(self._captured)

    def shape_for(self, plan: StepPlan) -> Shape | None:
        """The smallest that holds the step; None: none does."""
        num_tokens, num_rows = plan.total_tokens, max(plan.num_decode, plan.sample_rows.size)
        for bucket in self._buckets:
            if bucket >= num_tokens:
                fitting = (c.shape for c in self._captured[bucket] if c.shape.num_rows >= num_rows)
                return next(fitting, None)
        return None

    def forward(self, shape: Shape) -> None:
        """Replay on the current stream."""
        self._of(shape).forward()

    def sample(self, shape: Shape) -> None:
        """Replay on the current stream."""
        self._of(shape).sample()

    def _of(self, shape: Shape) -> _Captured:
        return next(c for c in self._captured[shape.num_tokens] if c.shape == shape)


def _padded(words: Int32Array, num: int, value: int) -> Int32Array:
    """`words` and `num` times `value`."""
    if num == 0:
        return words.astype(np.int32, copy=False)
    out = np.full(words.size + num, value, np.int32)
    out[: words.size] = words
    return out
