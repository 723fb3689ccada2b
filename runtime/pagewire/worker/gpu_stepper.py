"""What a step launches on the card, and all that the worker owns there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.config import Config
from pagewire.errors import ConfigError, InternalError
from pagewire.models import kv_scales
from pagewire.models.decoder import Decoder
from pagewire.step.step import Int32Array, StepPlan
from pagewire.worker.gpu_device import Device
from pagewire.worker.gpu_families import model_for
from pagewire.worker.gpu_fixed_ops import FixedOps
from pagewire.worker.gpu_graphs import Batch, DecodeGraphs, Inbox, bucket_sizes
from pagewire.worker.gpu_memory import GpuKV, num_blocks_on_card
from pagewire.worker.gpu_mixed import TOKEN_BUCKETS, MixedBatch, MixedGraphs, MixedInbox, Shape, shapes
from pagewire.worker.gpu_model import Attend, check_covered
from pagewire.worker.gpu_ops import Chunks, Ops, TritonOps
from pagewire.worker.gpu_results import Arrival, PromptScores, Results
from pagewire.worker.gpu_rows import GpuRows
from pagewire.worker.gpu_sampler import SpecialSampler, score_on_card
from pagewire.worker.gpu_staging import Staging
from pagewire.worker.interface import LogitMasks, WorkerShape

MakeOps = Callable[[Decoder, GpuKV, GpuRows, int], Ops]
"""(decoder, memory, rows, max_step_tokens)."""

_LEAST_HEAD: Final = 16
_LEAST_FP8: Final = (8, 9)
"""Compute capability."""
_PROMPT_LOGITS: Final = 256
"""Positions whose logits are held at once for prompt log-probabilities."""


def triton_ops(
    decoder: Decoder, memory: GpuKV, rows: GpuRows, max_step_tokens: int, *, deterministic: bool = False
) -> Ops:
    """The kernels of a card.

    Raises:
        ConfigError: they do not cover the model.
    """
    head_dim = decoder.config.head_dim
    if head_dim < _LEAST_HEAD or head_dim & (head_dim - 1):
        raise ConfigError(
            f"a GPU computes heads whose size is a power of two from {_LEAST_HEAD} up, not {head_dim}; a CPU does",
            field="model.device",
        )
    device = rows.last_token.device
    if decoder.weights.is_fp8 and torch.cuda.get_device_capability(device) < _LEAST_FP8:
        raise ConfigError(
            'this GPU does not multiply in FP8; Ada, Hopper and later ones do; "none" widens the weights',
            field="model.quantization",
        )
    kind = FixedOps if deterministic else TritonOps
    return kind(decoder, memory, rows, max_step_tokens=max_step_tokens)


@dataclass(slots=True)
class _Forward:
    """What a forward pass leaves for its sampling; logits lie in the buffer. After a graph, row i is sample i's."""

    step: int
    replay_sample: Callable[[], None] | None  # where a graph ran
    logit_rows: Int32Array  # [S]
    prompts: list[PromptScores] = field(default_factory=list)


class Stepper:
    """Launches steps; never waits for one. Used on one thread, in inference mode.

    Args:
        config: sections `cache` and `scheduler`, and `engine.deterministic`.
        decoder: its weights on the device.
        device: where.
        make_ops: kernels.
        with_graphs: decode steps, and mixed ones up to a size, are captured.
    """

    def __init__(
        self, config: Config, decoder: Decoder, device: Device, make_ops: MakeOps, *, with_graphs: bool
    ) -> None:
        check_covered(decoder)  # before anything is allocated or measured
        self.device: Final = device
        model, cache, max_rows = decoder.config, config.cache, config.scheduler.max_rows
        # Larger steps than the largest graph gain nothing: the matrix units are busy with far fewer tokens.
        self._max_step_tokens = max(min(config.scheduler.max_step_tokens, TOKEN_BUCKETS[-1]), max_rows)
        self._last: _Forward | None = None
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        device.synchronise()  # weights may have come by another stream
        with device.computing():
            self._staging = Staging(device)
            self._rows = GpuRows(
                max_rows=max_rows,
                max_blocks=-(-decoder.max_model_len // cache.block_size),
                vocab_size=model.vocab_size,
                num_eos=len(decoder.eos_ids),
                device=device.device,
            )
            self._results = Results(device, max_rows=max_rows)
            self._logits = torch.zeros(max_rows, model.vocab_size, dtype=torch.float32, device=device.device)
            self.memory: Final = self._make_memory(config, decoder, make_ops)
            self._special = SpecialSampler(
                self._rows,
                self._ops,
                self._staging,
                vocab_size=model.vocab_size,
                deterministic=config.engine.deterministic,
            )
            self._inbox = Inbox(max_rows=max_rows, padding_row=self._rows.padding, device=device.device)
            if with_graphs:
                self._graphs = DecodeGraphs(
                    device, self._inbox, forward=self._batch_forward, sample=self._batch_sample, max_rows=max_rows
                )
                self._mixed_inbox = MixedInbox(max_rows=max_rows, padding_row=self._rows.padding, device=device.device)
                self._mixed = MixedGraphs(
                    device,
                    self._mixed_inbox,
                    forward=self._mixed_forward,
                    sample=self._mixed_sample,
                    max_rows=max_rows,
                    max_step_tokens=self._max_step_tokens,
                )
        device.synchronise()
        self.shape: Final = WorkerShape(
            num_blocks=self.memory.num_blocks,
            block_size=cache.block_size,
            max_rows=max_rows,
            max_model_len=decoder.max_model_len,
            vocab_size=model.vocab_size,
            eos_ids=decoder.eos_ids,
            kv_bytes=self.memory.num_bytes,
            model_name=decoder.name,
            max_step_tokens=self._max_step_tokens,
            decode_buckets=bucket_sizes(max_rows) if self._graphs is not None else (),
            mixed_buckets=tuple(sorted({shape.num_tokens for shape in shapes(max_rows, self._max_step_tokens)}))
            if self._mixed is not None
            else (),
            kv_format=kv_scales.for_model(cache.kv_scales, model).digest if cache.kv_dtype == "fp8" else "",
        )

    def kind(self, plan: StepPlan) -> Hashable:
        """Steps of the same kind take about the same time."""
        if self._fits_decode(plan):
            assert self._graphs is not None
            return self._graphs.size_for(plan.rows.size)
        return self._shape_for(plan) or ("chunks", plan.total_tokens.bit_length())

    def forward(self, plan: StepPlan) -> None:
        """Steps 1 to 5 of `pagewire.step.step`, and the logits of the entries that are sampled."""
        with self.device.computing():
            self._rows.update(plan, self._staging)
            self._special.update(plan)
            if self._fits_decode(plan):
                self._last = self._forward_decode(plan)
            elif (shape := self._shape_for(plan)) is not None:
                self._last = self._forward_mixed(plan, shape)
            else:
                self._last = self._forward_chunks(plan)

    def sample(self, plan: StepPlan, masks: LogitMasks | None) -> Arrival:
        """Step 6 of `pagewire.step.step`."""
        last, self._last = self._last, None
        if last is None or last.step != plan.step:
            raise InternalError(f"sampling of step {plan.step} without its forward pass")
        rows, out = plan.sample_rows, self._results.out
        special = np.flatnonzero(self._rows.is_special[rows]) if masks is None else np.arange(rows.size)
        replay = last.replay_sample if masks is None else None
        positions = (plan.starts + plan.num_tokens)[plan.sample_entries] if special.size or replay is None else None
        logprobs = None
        with self.device.computing():
            if replay is not None:
                replay()
            elif special.size < rows.size:
                assert positions is not None
                rows_, sources, places = self._staging.upload([rows, last.logit_rows, positions])
                self._ops.sample(out, self._logits, rows_, places, logit_rows=sources)
            if special.size:
                assert positions is not None
                logprobs = self._special.sample(
                    out, self._logits, rows[special], last.logit_rows[special], positions[special], special, masks
                )
            return self._results.send(plan, logprobs, last.prompts)

    # ---- by graph --------------------------------------------------------------------------------------------------

    def _fits_decode(self, plan: StepPlan) -> bool:
        """Decode entries alone, each with its sample."""
        return bool(
            self._graphs is not None
            and plan.token_ids.size == 0
            and plan.rows.size
            and plan.copy_src.size == 0
            and self._inbox.takes(plan)
            and (plan.sample_rows is plan.rows or np.array_equal(plan.sample_rows, plan.rows))
        )

    def _shape_for(self, plan: StepPlan) -> Shape | None:
        """Of the mixed graph that it fits."""
        if self._mixed is None or not plan.rows.size or plan.prompt_logprobs or not self._mixed_inbox.takes(plan):
            return None
        return self._mixed.shape_for(plan)

    def _forward_decode(self, plan: StepPlan) -> _Forward:
        graphs, num_rows = self._graphs, plan.rows.size
        assert graphs is not None
        self._inbox.fill(plan, graphs.size_for(num_rows), self._staging)
        graphs.forward(num_rows)
        return _Forward(plan.step, partial(graphs.sample, num_rows), plan.sample_entries)

    def _forward_mixed(self, plan: StepPlan, shape: Shape) -> _Forward:
        graphs = self._mixed
        assert graphs is not None
        if plan.copy_src.size:  # tails of forks: rare
            self._ops.copy_blocks(*self._staging.upload([plan.copy_src, plan.copy_dst]))
        self._mixed_inbox.fill(plan, shape, self._staging)
        graphs.forward(shape)
        logit_rows = np.arange(plan.sample_rows.size, dtype=np.int32)
        return _Forward(plan.step, partial(graphs.sample, shape), logit_rows)

    def _batch_forward(self, batch: Batch) -> None:
        """What a graph captures."""
        self._ops.set_blocks(batch.deltas, batch.num_deltas)
        tokens = self._ops.step_inputs(batch.rows, batch.starts, None)
        self._ops.plan_decode(tokens.lens)
        added, residual = self._model.hidden(
            tokens, lambda layer, out, q: self._ops.decode(layer, out, q, batch.rows, tokens.lens)
        )
        self._model.logits(added, residual, self._logits[: batch.rows.numel()])

    def _batch_sample(self, batch: Batch) -> None:
        """Likewise."""
        self._ops.sample(self._results.out, self._logits, batch.rows, batch.starts + 1)

    def _mixed_forward(self, batch: MixedBatch) -> None:
        """Likewise. Decode attention comes first: it clears the rows that are none of its own."""
        ops, num_rows = self._ops, batch.is_decode.numel()
        ops.set_blocks(batch.deltas, batch.num_deltas)
        tokens = ops.step_inputs(batch.rows, batch.starts, batch.token_ids)
        lens, rows = tokens.lens[:num_rows] * batch.is_decode, batch.rows[:num_rows]
        chunks = Chunks(batch.chunk_rows, batch.query_starts, batch.chunk_lens, batch.rows.numel())
        ops.plan_decode(lens)
        ops.plan_prefill(chunks)

        def attend(layer: int, out: Tensor, q: Tensor) -> None:
            ops.decode(layer, out[:num_rows], q[:num_rows], rows, lens)
            ops.prefill(layer, out, q, chunks)

        added, residual = self._model.hidden(tokens, attend)
        at = batch.sample_tokens
        self._model.logits(added.index_select(0, at), residual.index_select(0, at), self._logits[:num_rows])

    def _mixed_sample(self, batch: MixedBatch) -> None:
        """Likewise."""
        self._ops.sample(self._results.out, self._logits, batch.sample_rows, batch.sample_positions)

    # ---- everything else, launched one by one ----------------------------------------------------------------------

    def _forward_chunks(self, plan: StepPlan) -> _Forward:
        num_decode = plan.num_decode
        sampled, logit_rows = np.unique(plan.sample_entries, return_inverse=True)
        ends = np.cumsum(plan.num_tokens)
        token_ids = np.full(plan.total_tokens, -1, np.int32)
        token_ids[num_decode:] = plan.token_ids
        starts = np.arange(plan.total_tokens, dtype=np.int32) - np.repeat(
            ends - plan.num_tokens - plan.starts, plan.num_tokens
        ).astype(np.int32)
        deltas = np.stack([plan.block_rows, plan.block_cols, plan.block_ids], axis=1)
        up = self._staging.upload(
            [
                np.array([plan.block_rows.size], np.int32),
                deltas,
                plan.copy_src,
                plan.copy_dst,
                np.repeat(plan.rows, plan.num_tokens),
                starts,
                token_ids,
                plan.rows[num_decode:],
                np.concatenate([[0], ends[num_decode:] - num_decode]).astype(np.int32),
                (plan.starts + plan.num_tokens)[num_decode:],
                (ends[sampled] - 1).astype(np.int64),
            ]
        )
        if plan.block_rows.size:
            self._ops.set_blocks(up[1], up[0])
        if plan.copy_src.size:
            self._ops.copy_blocks(up[2], up[3])
        forward = _Forward(plan.step, None, logit_rows=logit_rows.reshape(-1).astype(np.int32))
        if plan.rows.size:
            chunks = Chunks(up[7], up[8], up[9], plan.token_ids.size)
            added, residual = self._hidden(up[4], up[5], up[6], chunks, num_decode)
            for entry, num_tops in plan.prompt_logprobs.items():
                part = slice(int(ends[entry] - plan.num_tokens[entry]), int(ends[entry]))
                scores = self._prompt_scores(plan, entry, num_tops, added[part], residual[part])
                forward.prompts.append(scores)
            if sampled.size:
                at = up[10]
                self._model.logits(
                    added.index_select(0, at), residual.index_select(0, at), self._logits[: sampled.size]
                )
        return forward

    def _hidden(
        self, rows: Tensor, starts: Tensor, token_ids: Tensor, chunks: Chunks, num_decode: int
    ) -> tuple[Tensor, Tensor]:
        ops = self._ops
        tokens = ops.step_inputs(rows, starts, token_ids)
        if num_decode:
            ops.plan_decode(tokens.lens[:num_decode])
        if chunks.num_tokens:
            ops.plan_prefill(chunks)

        def attend(layer: int, out: Tensor, q: Tensor) -> None:
            if num_decode:
                ops.decode(layer, out[:num_decode], q[:num_decode], rows[:num_decode], tokens.lens[:num_decode])
            if chunks.num_tokens:
                ops.prefill(layer, out[num_decode:], q[num_decode:], chunks)

        attention: Attend = attend
        return self._model.hidden(tokens, attention)

    def _prompt_scores(
        self, plan: StepPlan, entry: int, num_tops: int, added: Tensor, residual: Tensor
    ) -> PromptScores:
        """Of one entry's tokens; a bounded number of logits at a time."""
        start, prompt = int(plan.starts[entry]), self._rows.prompts[int(plan.rows[entry])]
        targets = prompt[start + 1 : start + int(plan.num_tokens[entry]) + 1].astype(np.int32)
        scores = PromptScores(entry, start)
        (on_card,) = self._staging.upload([targets])
        for at in range(0, max(targets.size, 1), _PROMPT_LOGITS):
            part = slice(at, min(at + _PROMPT_LOGITS, targets.size))
            logits = self._logits.new_empty(part.stop - at, self._logits.shape[1])
            if logits.shape[0]:
                self._model.logits(added[part], residual[part].clone(), logits)
            scores.pieces.append(score_on_card(logits, on_card[part], num_tops))
        return scores

    def _make_memory(self, config: Config, decoder: Decoder, make_ops: MakeOps) -> GpuKV:
        """KV memory of what is left once the largest step was tried, and the kernels over it."""
        model, cache, device, max_rows = decoder.config, config.cache, self.device, config.scheduler.max_rows
        is_fp8 = cache.kv_dtype == "fp8"
        dtype = torch.float8_e4m3fn if is_fp8 else decoder.weights.embedding.dtype
        scales = kv_scales.for_model(cache.kv_scales, model) if is_fp8 else None
        max_step_tokens = self._max_step_tokens

        def use(num_blocks: int) -> GpuKV:
            memory = GpuKV(
                model,
                num_blocks=num_blocks,
                block_size=cache.block_size,
                dtype=dtype,
                device=device.device,
                scales=scales,
            )
            self._ops = make_ops(decoder, memory, self._rows, max_step_tokens)
            self._model = model_for(decoder, self._ops, deterministic=config.engine.deterministic)
            return memory

        use(2)
        self._try_largest(max_step_tokens, decoder.max_model_len)
        device.synchronise()
        num_blocks = num_blocks_on_card(
            model,
            cache,
            free_bytes=device.free_bytes(),
            total_bytes=device.total_bytes(),
            itemsize=dtype.itemsize,
            max_tokens=max_rows * decoder.max_model_len,
        )
        return use(num_blocks)

    def _try_largest(self, max_step_tokens: int, max_len: int) -> None:
        """A step as large as they come, on the padding row.

        It writes nothing, but takes the memory that such steps take, which the allocator keeps, and compiles kernels.
        Its chunks see blocks of zeros.
        """
        num_rows = self._rows.padding
        out = self._results.out
        for num_decode in (0, min(num_rows, max_step_tokens - 1)):
            size = max_step_tokens - num_decode
            bounds = np.append(np.arange(0, size, max_len), size).astype(
                np.int32
            )  # of chunks no longer than a sequence
            padding = np.full(max_step_tokens, num_rows, np.int32)
            zeros: npt.NDArray[np.int32] = np.zeros(max_step_tokens, np.int32)
            rows, starts, chunk_rows, query_starts, lens, at = self._staging.upload(
                [
                    padding,
                    zeros,
                    padding[: bounds.size - 1],
                    bounds,
                    np.diff(bounds),
                    np.arange(num_rows) % max_step_tokens,
                ]
            )
            chunks = Chunks(chunk_rows, query_starts, lens, size)
            added, residual = self._hidden(rows, starts, starts, chunks, num_decode)
            self._model.logits(added.index_select(0, at), residual.index_select(0, at), self._logits)
            self._ops.sample(out, self._logits, rows[:num_rows], starts[:num_rows], logit_rows=rows[:num_rows])
        self._ops.copy_blocks(starts[:1], starts[:1])
        self._ops.sample(out, self._logits, rows[:1], starts[:1], skip_special=False)
