"""The CPU worker: one thread that owns all of a step's state and computes steps in the order in which they are launched.

    event loop:      launch_forward ─┐ launch_sample ─┐            handles resolve, in order
    compute thread:                  └▶ deltas, forward └▶ draw ──▶

The loop only queues. What a row's next input token is, is known to the thread alone, so a step may be queued before the
one that draws its tokens has run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire.config import Config
from pagewire.errors import ConfigError, InternalError
from pagewire.models.decoder import Decoder
from pagewire.models.load import load_model
from pagewire.models.weights import Progress
from pagewire.step.step import Int32Array, PromptLogprobRows, SampleFlag, StepPlan, StepResult
from pagewire.worker.compute_thread import ComputeThread
from pagewire.worker.cpu_attention import PagedAttention
from pagewire.worker.cpu_linear import TILE, check_place_invariance, pack_weights
from pagewire.worker.cpu_split_attention import SplitAttention
from pagewire.worker.interface import LogitMasks, WorkerShape
from pagewire.worker.kv_memory import KVMemory, num_blocks_for
from pagewire.worker.row_state import RowState
from pagewire.worker.sampler import Sampler
from pagewire.worker.sampler_logprobs import score

_T = TypeVar("_T")
_Scalar = TypeVar("_Scalar", bound=np.generic)

_DTYPES: Final = (torch.float32, torch.bfloat16)
"""Of matrices. Everything between products is computed in float32, and so are norms and biases kept."""

_PROMPT_LOGITS: Final = 64
"""Positions whose logits are held at once for prompt log-probabilities."""


@dataclass(slots=True)
class _Forward:
    """What a forward pass leaves for its sampling."""

    step: int
    logits: Tensor  # float32 [entries that are sampled, V]
    logit_rows: npt.NDArray[np.intp]  # [S] row of `logits` for each sample
    positions: npt.NDArray[np.int64]  # [S] that the new token takes
    prompt_logprobs: list[PromptLogprobRows]
    elapsed_ns: int


class CpuWorker:
    """See `pagewire.worker.interface.Worker`. Make it with `load`, or from a decoder that is loaded already.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: it cannot be served as the configuration asks.
    """

    def __init__(self, config: Config, decoder: Decoder) -> None:
        thread = _start(config)
        try:
            self._begin(thread, thread.submit(lambda: _Stepper(config, decoder)).result())
        except BaseException:
            thread.stop()
            raise

    @classmethod
    async def load(cls, config: Config, on_progress: Progress | None = None) -> CpuWorker:
        """Load the model off the loop; see `load_model` for `on_progress`."""
        thread = _start(config)
        try:
            stepper = await asyncio.wrap_future(thread.submit(lambda: _Stepper(config, _load(config, on_progress))))
        except BaseException:
            thread.stop()
            raise
        worker = cls.__new__(cls)
        worker._begin(thread, stepper)
        return worker

    def _begin(self, thread: ComputeThread, stepper: _Stepper) -> None:
        self._thread = thread
        self._stepper: _Stepper | None = stepper
        self._shape = stepper.shape
        self._failure: BaseException | None = None

    @property
    def shape(self) -> WorkerShape:
        """Sizes for the scheduler."""
        return self._shape

    def launch_forward(self, plan: StepPlan) -> Awaitable[None]:
        """Queue the plan's deltas, copies and forward pass."""
        return self._launch(lambda stepper: stepper.forward(plan))

    def launch_sample(self, plan: StepPlan, masks: LogitMasks | None = None) -> Awaitable[StepResult]:
        """Queue the draw of the plan's samples."""
        return self._launch(lambda stepper: stepper.sample(plan, masks))

    async def close(self) -> None:
        """Wait for what is queued, then free everything."""
        self._thread.stop()
        await asyncio.wrap_future(self._thread.ended)
        self._stepper = None

    def _launch(self, work: Callable[[_Stepper], _T]) -> asyncio.Future[_T]:
        """A future of our own, not `wrap_future`: cancelling that would take a step out of the order."""
        loop, stepper = asyncio.get_running_loop(), self._stepper
        handle: asyncio.Future[_T] = loop.create_future()

        def settle(result: _T | None, error: BaseException | None) -> None:
            if handle.done():
                return
            if error is None:
                handle.set_result(result)  # type: ignore[arg-type]
            else:
                handle.set_exception(error)

        def run() -> None:
            result, error = None, self._failure
            if error is None and stepper is not None:
                try:
                    with torch.inference_mode():
                        result = work(stepper)
                except BaseException as caught:  # noqa: BLE001  (goes to whoever awaits)
                    # The state may be half changed: nothing that follows could be trusted.
                    self._failure = error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._thread.submit(run)
        return handle


class _Stepper:
    """What the compute thread does, and all that it owns."""

    def __init__(self, config: Config, decoder: Decoder) -> None:
        self._decoder = decoder
        if decoder.weights.embedding.dtype not in _DTYPES:
            raise ConfigError(
                f"a CPU takes weights in float32 or bfloat16, not in {config.model.dtype}", field="model.dtype"
            )
        dtype = torch.float32  # of keys and values, whatever the weights are
        pack_weights(decoder)
        deterministic = config.engine.deterministic
        decoder.tile = TILE if deterministic else None
        if deterministic:
            check_place_invariance(decoder)
        model, max_rows, block_size = decoder.config, config.scheduler.max_rows, config.cache.block_size
        num_blocks = num_blocks_for(
            model,
            config.cache,
            max_rows=max_rows,
            max_model_len=decoder.max_model_len,
            itemsize=dtype.itemsize,
        )
        self._memory = KVMemory(model, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self._attention = (SplitAttention if deterministic else PagedAttention)(model, self._memory)
        self._rows = RowState(max_rows, -(-decoder.max_model_len // block_size))
        self._sampler = Sampler(max_rows=max_rows, vocab_size=model.vocab_size)
        self._forward: _Forward | None = None
        self.shape: Final = WorkerShape(
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=max_rows,
            max_model_len=decoder.max_model_len,
            vocab_size=model.vocab_size,
            eos_ids=decoder.eos_ids,
            kv_bytes=self._memory.num_bytes,
            model_name=decoder.name,
        )

    def forward(self, plan: StepPlan) -> None:
        """Steps 1 to 5 of `pagewire.step.step`, and the logits of the entries that are sampled."""
        begin_ns = time.perf_counter_ns()
        rows = self._rows
        if plan.leaves.size:
            self._sampler.leave(plan.leaves)
        for join in plan.joins:
            self._sampler.join(join)
        rows.update(plan)
        if plan.copy_src.size:
            self._memory.copy(plan.copy_src, plan.copy_dst)
        # Rows that stopped in an earlier step are left out: the null block stays zero, and nothing is computed for them.
        runs = ~rows.stopped[plan.rows]
        entries = np.flatnonzero(runs)
        hidden = self._hidden(plan, entries) if entries.size else torch.empty(0)
        last = np.full(plan.rows.size, -1)  # token of each entry's last position
        last[entries] = np.cumsum(plan.num_tokens[entries]) - 1
        sampled, logit_rows = np.unique(plan.sample_entries, return_inverse=True)
        logits = torch.empty(0, self.shape.vocab_size)
        if sampled.size and entries.size:
            # For an entry that was left out these are another's; its samples are dropped.
            logits = self._logits(hidden[torch.from_numpy(last[sampled])])
        self._forward = _Forward(
            step=plan.step,
            logits=logits,
            logit_rows=logit_rows,
            positions=(plan.starts + plan.num_tokens)[plan.sample_entries].astype(np.int64),
            prompt_logprobs=[
                self._prompt_logprobs(plan, entry, num_tops, hidden[last[entry] + 1 - plan.num_tokens[entry] :])
                for entry, num_tops in plan.prompt_logprobs.items()
                if runs[entry]
            ],
            elapsed_ns=time.perf_counter_ns() - begin_ns,
        )

    def sample(self, plan: StepPlan, masks: LogitMasks | None) -> StepResult:
        """Step 6 of `pagewire.step.step`."""
        begin_ns = time.perf_counter_ns()
        forward, self._forward = self._forward, None
        if forward is None or forward.step != plan.step:
            raise InternalError(f"sampling of step {plan.step} without its forward pass")
        rows = self._rows
        num_samples = plan.sample_rows.size
        flags = np.full(num_samples, SampleFlag.DROPPED, np.uint8)
        counts = np.zeros(num_samples, np.int32)
        result = StepResult(plan.step, counts, np.empty(0, np.int32), flags, prompt_logprobs=forward.prompt_logprobs)
        live = np.flatnonzero(~rows.stopped[plan.sample_rows])
        if live.size:
            drawing = plan.sample_rows[live]
            drawn = self._sampler.sample(
                _pick(forward.logits, forward.logit_rows[live]), drawing, forward.positions[live], _among(masks, live)
            )
            has_token = (drawn.flags & SampleFlag.NUMERIC) == 0
            flags[live], counts[live] = drawn.flags, has_token
            result.token_ids = drawn.token_ids[has_token]
            rows.last_token[drawing] = drawn.token_ids
            rows.stopped[drawing] = drawn.flags != SampleFlag.OK
            if drawn.logprobs is not None:
                result.logprobs = drawn.logprobs
                result.logprobs.samples = live[drawn.logprobs.samples].astype(np.int32)
        result.forward_ns = forward.elapsed_ns + time.perf_counter_ns() - begin_ns
        return result

    def _hidden(self, plan: StepPlan, entries: npt.NDArray[np.intp]) -> Tensor:
        """Hidden states of the tokens of `entries`, [their number and some padding, hidden]."""
        starts, num_tokens = plan.starts[entries], plan.num_tokens[entries]
        num_decode = int(np.searchsorted(entries, plan.num_decode))
        # A row stops at a sample, and after its first one it decodes: of the chunks none was left out.
        token_ids = np.concatenate([self._rows.last_token[plan.rows[entries[:num_decode]]], plan.token_ids])
        positions = _ranges(starts, num_tokens)
        self._attention.prepare(self._rows.block_table[plan.rows[entries]], starts, num_tokens, num_decode)
        return self._decoder.forward(
            torch.from_numpy(self._padded(token_ids)), torch.from_numpy(self._padded(positions)), self._attention
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        """[S, V] of [S, hidden]."""
        num = hidden.shape[0]
        rows = torch.from_numpy(self._padded(np.arange(num)))
        return self._decoder.logits(hidden if rows.numel() == num else hidden[rows])[:num]

    def _padded(self, values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        """The last value repeated, up to a number of tokens that the decoder takes."""
        missing = -values.size % (self._decoder.tile or 1)
        return np.pad(values, (0, missing), mode="edge") if missing else values

    def _prompt_logprobs(self, plan: StepPlan, entry: int, num_tops: int, hidden: Tensor) -> PromptLogprobRows:
        """Of an entry whose hidden states `hidden` begins with; a bounded number of logits at a time."""
        start, prompt = int(plan.starts[entry]), self._rows.prompts[int(plan.rows[entry])]
        targets = prompt[start + 1 : start + int(plan.num_tokens[entry]) + 1]
        rows = PromptLogprobRows(
            entry=entry,
            start=start,
            chosen=np.empty(targets.size, np.float32),
            top_ids=np.empty((targets.size, num_tops), np.int32),
            top_logprobs=np.empty((targets.size, num_tops), np.float32),
        )
        for at in range(0, targets.size, _PROMPT_LOGITS):
            part = slice(at, min(at + _PROMPT_LOGITS, targets.size))
            logits = self._logits(hidden[part]).numpy()
            rows.chosen[part], rows.top_ids[part], rows.top_logprobs[part] = score(logits, targets[part], num_tops)
        return rows


def _pick(logits: Tensor, rows: npt.NDArray[np.intp]) -> Tensor:
    """Rows of `logits`, without a copy where it is all of them in order (no forks, nobody dropped)."""
    if rows.size == logits.shape[0] and bool((rows == np.arange(rows.size)).all()):
        return logits
    return logits[torch.from_numpy(rows)]


def _among(masks: LogitMasks | None, live: npt.NDArray[np.intp]) -> LogitMasks | None:
    """The masks of the samples `live`, by their place among these."""
    if masks is None:
        return None
    kept = np.isin(masks.samples, live)
    return LogitMasks(np.searchsorted(live, masks.samples[kept]).astype(np.int32), masks.allowed[kept])


def _ranges(starts: Int32Array, num: Int32Array) -> npt.NDArray[np.int64]:
    """start, start + 1, … for each entry, one after another."""
    first = np.cumsum(num) - num
    positions: npt.NDArray[np.int64] = np.arange(int(num.sum()), dtype=np.int64) + np.repeat(starts - first, num)
    return positions


def _load(config: Config, on_progress: Progress | None) -> Decoder:
    return load_model(config.model, vector_dtype=torch.float32, on_progress=on_progress)


def _start(config: Config) -> ComputeThread:
    """The thread that loads, checks and computes: what is checked of the machine holds for its number of threads."""

    def prepare() -> None:
        if config.engine.threads:
            torch.set_num_threads(config.engine.threads)

    return ComputeThread("pagewire-compute", prepare)
