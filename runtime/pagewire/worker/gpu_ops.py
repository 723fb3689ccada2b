"""The operations of a step: what the worker asks of kernels, and the kernels for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from pagewire.models.decoder import Decoder
from pagewire.worker.gpu_layers import layers_of
from pagewire.worker.gpu_memory import GpuKV
from pagewire.worker.gpu_plans import AttentionPlans
from pagewire.worker.gpu_rows import GpuRows
from pagewire_kernels import sampling, step_input
from pagewire_kernels.activation import gelu_mul, silu_mul, soft_cap
from pagewire_kernels.block_copy import BlockPools, copy_blocks
from pagewire_kernels.kv_write import rope_write_kv
from pagewire_kernels.linear import gated_fp8, linear, linear_fp8, scratch_for
from pagewire_kernels.paged_decode import paged_decode
from pagewire_kernels.paged_prefill import PrefillTiling, paged_prefill
from pagewire_kernels.quantise import Fp8Rows, empty_rows, quantise, rms_norm_quantise
from pagewire_kernels.rms_norm import rms_norm
from pagewire_kernels.vector_linear import vector_linear

_WORD_OF: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""What a value is copied as: what it means does not matter."""


@dataclass(slots=True)
class Tokens:
    """What `Ops.step_inputs` makes; int32 [T] each."""

    ids: Tensor
    positions: Tensor
    slots: Tensor  # −1: not written
    lens: Tensor  # positions that the token sees; 0: it does not run


@dataclass(slots=True)
class Chunks:
    """Prefill entries of a step, C of them; their tokens lie one after another."""

    rows: Tensor  # int32 [C]
    query_starts: Tensor  # int32 [C + 1], indices of q's tokens
    lens: Tensor  # int32 [C], positions in the cache once the chunk is written
    num_tokens: int  # at most


class Ops(Protocol):
    """Layers are numbers from 0. Everything is launched, nothing is waited for."""

    def set_blocks(self, deltas: Tensor, num_deltas: Tensor) -> None:
        """Block deltas, int32 [≥ num, 3] of (row, column, id); num_deltas int32 [1] on the device."""
        ...

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """Whole blocks in all layers."""
        ...

    def step_inputs(self, rows: Tensor, starts: Tensor, token_ids: Tensor | None) -> Tokens:
        """See `pagewire_kernels.step_input.step_inputs`."""
        ...

    def norm(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        """RMSNorm; `x` is first added to `residual`, in place, where there is one."""
        ...

    def linear(self, x: Tensor, weight: Tensor, *, gated: bool = False, out: Tensor | None = None) -> Tensor:
        """The product x Wᵀ; gated: silu(gate) × up of it. `out` may be float32. See `pagewire_kernels.linear`."""
        ...

    def linear_of_one(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `pagewire_kernels.vector_linear`: the product, and the new residual where there is one."""
        ...

    def quantise(self, x: Tensor) -> Fp8Rows:
        """Each row in E4M3."""
        ...

    def norm_fp8(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Fp8Rows:
        """As `norm`, rounded to E4M3."""
        ...

    def linear_fp8(self, x: Fp8Rows, weight: Tensor, scales: Tensor) -> Tensor:
        """See `pagewire_kernels.linear`."""
        ...

    def gated_fp8(self, x: Fp8Rows, weight: Tensor, scales: Tensor) -> Fp8Rows:
        """silu(gate) × up of the product, rounded to E4M3."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """The model's activation of the gates × the ups: [T, n] of [T, 2 n]."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> None:
        """Cap × tanh(x / cap), in place."""
        ...

    def rope_and_write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> None:
        """Normalise and turn q, in place, and k, as the layer does, and write k and v to their slots."""
        ...

    def plan_decode(self, lens: Tensor) -> None:
        """Once a step, before the calls of `decode`."""
        ...

    def decode(self, layer: int, out: Tensor, q: Tensor, rows: Tensor, lens: Tensor) -> None:
        """Attention of one query a row."""
        ...

    def plan_prefill(self, chunks: Chunks) -> None:
        """Once a step, before the calls of `prefill`."""
        ...

    def prefill(self, layer: int, out: Tensor, q: Tensor, chunks: Chunks) -> None:
        """Attention of chunks of queries."""
        ...

    def sample(
        self,
        out: Tensor,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        *,
        logit_rows: Tensor | None = None,
        skip_special: bool = True,
    ) -> None:
        """Draw by temperature and noise; `out` int32 [2, S]: tokens, flags. Special rows are left alone unless told."""
        ...


class TritonOps:
    """`Ops` by Triton kernels, with the scratch memory that they need."""

    def __init__(
        self,
        decoder: Decoder,
        memory: GpuKV,
        rows: GpuRows,
        *,
        max_step_tokens: int,
        prefill_tiling: PrefillTiling | None = None,
    ) -> None:
        config, device = decoder.config, rows.last_token.device
        self._memory = memory
        self._rows = rows
        self._eps = config.norm_eps
        self._scale, self._soft_cap = config.attn_scale, config.attn_soft_cap
        self._act_mul = {"silu": silu_mul, "gelu_tanh": gelu_mul}[config.activation]
        self._layers = layers_of(decoder, device)
        max_rows = rows.padding
        self._plans = AttentionPlans(
            config,
            windows=[layer.window for layer in self._layers],
            kv_dtype=memory.keys[0].dtype,
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            prefill_tiling=prefill_tiling,
            device=device,
        )
        self._pools = BlockPools([pool.view(_WORD_OF[pool.itemsize]) for pool in (*memory.keys, *memory.values)])
        self._scratch = sampling.SampleScratch(max_rows, config.vocab_size, device)
        self._linear_scratch = scratch_for(device)
        self._dependent = self._linear_scratch is not None
        self._dtype = decoder.weights.embedding.dtype

    def set_blocks(self, deltas: Tensor, num_deltas: Tensor) -> None:
        """See `Ops`."""
        step_input.set_blocks(self._rows.block_table, deltas, num_deltas)

    def copy_blocks(self, src: Tensor, dst: Tensor) -> None:
        """See `Ops`."""
        copy_blocks(self._pools, src, dst)

    def step_inputs(self, rows: Tensor, starts: Tensor, token_ids: Tensor | None) -> Tokens:
        """See `Ops`."""
        size = -(-rows.numel() // 4) * 4  # every part begins at a multiple of 16 bytes
        parts = torch.empty(4, size, dtype=torch.int32, device=rows.device)[:, : rows.numel()]
        tokens = Tokens(*parts)
        state = self._rows
        step_input.step_inputs(
            tokens.ids,
            tokens.positions,
            tokens.slots,
            tokens.lens,
            rows,
            starts,
            state.last_token,
            state.stopped,
            state.block_table,
            self._memory.block_size,
            token_ids,
        )
        return tokens

    def norm(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Ops`."""
        out = torch.empty_like(x)
        rms_norm(out, x, weight, self._eps, residual, dependent=self._dependent)
        return out

    def linear(self, x: Tensor, weight: Tensor, *, gated: bool = False, out: Tensor | None = None) -> Tensor:
        """See `Ops`."""
        return linear(x, weight, self._linear_scratch, gated=gated, out=out)

    def linear_of_one(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Ops`."""
        out = x.new_empty(1, weight.shape[0] // (2 if gated else 1))
        residual_out = None if residual is None else torch.empty_like(residual)
        vector_linear(
            out,
            x,
            weight,
            norm=norm,
            eps=self._eps,
            residual=residual,
            residual_out=residual_out,
            gated=gated,
            dependent=self._dependent,
        )
        return out, residual_out

    def quantise(self, x: Tensor) -> Fp8Rows:
        """See `Ops`."""
        out = empty_rows(x.shape, x.device)
        quantise(out, x, dependent=self._dependent)
        return out

    def norm_fp8(self, x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Fp8Rows:
        """See `Ops`."""
        out = empty_rows(x.shape, x.device)
        rms_norm_quantise(out, x, weight, self._eps, residual, dependent=self._dependent)
        return out

    def linear_fp8(self, x: Fp8Rows, weight: Tensor, scales: Tensor) -> Tensor:
        """See `Ops`."""
        return linear_fp8(x, weight, scales, self._linear_scratch, dtype=self._dtype)

    def gated_fp8(self, x: Fp8Rows, weight: Tensor, scales: Tensor) -> Fp8Rows:
        """See `Ops`."""
        out = empty_rows((x.values.shape[0], weight.shape[0] // 2), weight.device)
        gated_fp8(out, x, weight, scales, self._linear_scratch, dependent=self._dependent)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Ops`."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._act_mul(out, gate_up)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> None:
        """See `Ops`."""
        soft_cap(x, cap)

    def rope_and_write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> None:
        """See `Ops`."""
        memory, own = self._memory, self._layers[layer]
        rope_write_kv(
            q,
            q,
            k,
            v,
            memory.keys[layer],
            memory.values[layer],
            tokens.positions,
            tokens.slots,
            own.cos,
            own.sin,
            q_norm=own.q_norm,
            k_norm=own.k_norm,
            eps=self._eps,
            k_scale=memory.k_scales[layer],
            v_scale=memory.v_scales[layer],
            dependent=self._dependent,
        )

    def plan_decode(self, lens: Tensor) -> None:
        """See `Ops`."""
        self._plans.plan_decode(lens)

    def decode(self, layer: int, out: Tensor, q: Tensor, rows: Tensor, lens: Tensor) -> None:
        """See `Ops`."""
        memory = self._memory
        paged_decode(
            out,
            q,
            memory.keys[layer],
            memory.values[layer],
            self._rows.block_table,
            lens,
            self._plans.decode(self._layers[layer].window),
            scale=self._scale,
            soft_cap=self._soft_cap,
            table_rows=rows,
            k_scale=memory.k_scales[layer],
            v_scale=memory.v_scales[layer],
            dependent=self._dependent,
        )

    def plan_prefill(self, chunks: Chunks) -> None:
        """See `Ops`."""
        self._plans.plan_prefill(chunks.query_starts, chunks.num_tokens)

    def prefill(self, layer: int, out: Tensor, q: Tensor, chunks: Chunks) -> None:
        """See `Ops`."""
        memory = self._memory
        paged_prefill(
            out,
            q,
            memory.keys[layer],
            memory.values[layer],
            self._rows.block_table,
            chunks.query_starts,
            chunks.lens,
            self._plans.prefill,
            scale=self._scale,
            window=self._layers[layer].window,
            soft_cap=self._soft_cap,
            table_rows=chunks.rows,
            k_scale=memory.k_scales[layer],
            v_scale=memory.v_scales[layer],
        )

    def sample(
        self,
        out: Tensor,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        *,
        logit_rows: Tensor | None = None,
        skip_special: bool = True,
    ) -> None:
        """See `Ops`."""
        state = self._rows
        sampling.sample(
            out[0],
            out[1],
            logits,
            rows,
            positions,
            state.temperature,
            state.seeds,
            state.stop_ids,
            state.stopped,
            state.last_token,
            self._scratch,
            skip=state.special if skip_special else None,
            logit_rows=logit_rows,
        )
