"""The GPU worker on CPU tensors: a device without a card, and its kernels in plain PyTorch."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from pagewire.worker.gpu_ops import Tokens
from pagewire.worker.philox import gumbel, noise_words
from pagewire_kernels import reference
from pagewire_kernels.quantise import Fp8Rows
from pagewire_kernels.sampling import DROPPED, NUMERIC, OK, REACH, STOPPED


class LateEvent:
    """Reached when asked for the `patience`-th time."""

    def __init__(self, patience):
        self.patience = patience

    def query(self):
        self.patience -= 1
        return self.patience < 0


class HostDevice:
    """Work is done when launched; events are late all the same. `capture` keeps the work, to be done again."""

    device = torch.device("cpu")

    def __init__(self, *, patience=0, free_bytes=2**30):
        self.patience = patience
        self.num_free = free_bytes
        self.is_closed = False

    def computing(self):
        return contextlib.nullcontext()

    def pinned(self, size, dtype):
        return torch.full((size,), 77, dtype=dtype)  # what a buffer held before must not matter

    def mark(self):
        return LateEvent(self.patience)

    def fetch(self, pairs):
        for pinned, source in pairs:
            pinned.copy_(source)
        return LateEvent(self.patience)

    def capture(self, work, *, is_launched=True):
        work()
        if is_launched:
            work()
        return work

    def synchronise(self):
        pass

    def free_bytes(self):
        return self.num_free

    def total_bytes(self):
        return self.num_free

    def close(self):
        self.is_closed = True


class TorchOps:
    """`pagewire.worker.gpu_ops.Ops`, written to be read."""

    def __init__(self, decoder, memory, rows, max_step_tokens):
        self.decoder, self.memory, self.rows = decoder, memory, rows
        if decoder is not None:  # sampling alone needs none
            self.windows, self.outgrown = decoder.windows(), set()
            ropes = [layer.rope for layer in decoder.config.layers]
            self.turns = {rope: decoder.turns(rope) for rope in set(ropes) - {None}}

    def set_blocks(self, deltas, num_deltas):
        for row, col, block in deltas[: int(num_deltas)].tolist():
            self.rows.block_table[row, col] = block

    def copy_blocks(self, src, dst):
        for pool in (*self.memory.keys, *self.memory.values):
            reference.copy_blocks(pool, src, dst)

    def step_inputs(self, rows, starts, token_ids):
        runs = self.rows.stopped[rows] == 0
        ids = torch.where(runs, self.rows.last_token[rows], 0)
        if token_ids is not None:
            ids = torch.where(token_ids >= 0, token_ids, ids)
        positions = torch.where(runs, starts, 0)
        size = self.memory.block_size
        blocks = self.rows.block_table[rows, positions // size]
        slots = torch.where(runs, blocks * size + positions % size, -1)
        return Tokens(ids, positions, slots, torch.where(runs, positions + 1, 0))

    def norm(self, x, weight, residual=None):
        if residual is not None:
            residual += x
            x = residual
        return reference.rms_norm(x, weight, self.decoder.config.norm_eps).to(x.dtype)

    def linear(self, x, weight, *, gated=False, out=None):
        y = torch.nn.functional.linear(x, weight)
        y = reference.silu_mul(y) if gated else y
        return y if out is None else out.copy_(y)

    def linear_of_one(self, x, weight, *, norm=None, residual=None, gated=False):
        total = None if residual is None else x + residual
        x = x if total is None else total
        x = x if norm is None else self.norm(x, norm)
        y = torch.nn.functional.linear(x, weight)
        return (reference.silu_mul(y) if gated else y), total

    def quantise(self, x):
        return Fp8Rows(*reference.quantise_rows(x))

    def norm_fp8(self, x, weight, residual=None):
        return self.quantise(self.norm(x, weight, residual))

    def linear_fp8(self, x, weight, scales):
        return x.values.float() @ weight.float().t() * x.scales[:, None] * scales

    def gated_fp8(self, x, weight, scales):
        return self.quantise(reference.silu_mul(self.linear_fp8(x, weight, scales)))

    def gate(self, gate_up):
        act_mul = {"silu": reference.silu_mul, "gelu_tanh": reference.gelu_mul}
        return act_mul[self.decoder.config.activation](gate_up)

    def soft_cap(self, x, cap):
        x.copy_(reference.soft_cap(x, cap))

    def rope_and_write(self, layer, q, k, v, tokens):
        decoder = self.decoder
        norms, rope = decoder.weights.layers[layer].qk_norm, decoder.config.layers[layer].rope
        if norms is not None:
            num_heads, eps = q.shape[1], decoder.config.norm_eps
            q.copy_(reference.rms_norm(q, norms[:num_heads], eps))
            k = reference.rms_norm(k, norms[num_heads:], eps)
        if rope is not None:
            cos, sin = (table[tokens.positions] for table in self.turns[rope])
            q.copy_(reference.rope(q, cos, sin))
            k = reference.rope(k, cos, sin)
        written = tokens.slots >= 0
        slots = tokens.slots[written].long()
        memory = self.memory
        for pool, scales, x in (
            (memory.keys[layer], memory.k_scales[layer], k),
            (memory.values[layer], memory.v_scales[layer], v),
        ):
            stored = x if scales is None else (x / scales[:, None]).clamp(-448, 448)
            reference.write_kv(pool, stored[written].to(pool.dtype), slots)

    def plan_decode(self, lens):
        pass

    def decode(self, layer, out, q, rows, lens):
        out.zero_()
        for i, length in enumerate(lens.tolist()):
            if length:
                self._attend(layer, out[i : i + 1], q[i : i + 1], rows[i], length - 1)

    def plan_prefill(self, chunks):
        assert int(chunks.query_starts[-1]) <= chunks.num_tokens

    def prefill(self, layer, out, q, chunks):
        bounds = chunks.query_starts.tolist()
        for row, first, last, length in zip(chunks.rows, bounds[:-1], bounds[1:], chunks.lens.tolist(), strict=True):
            if last > first:
                self._attend(layer, out[first:last], q[first:last], row, length - (last - first))

    def _attend(self, layer, out, q, row, start):
        table = self.rows.block_table[row][None]
        offsets = torch.tensor([0, len(q)])
        memory = self.memory
        pools = [
            pool if scales is None else pool.float() * scales[:, None, None]
            for pool, scales in (
                (memory.keys[layer], memory.k_scales[layer]),
                (memory.values[layer], memory.v_scales[layer]),
            )
        ]
        config, window = self.decoder.config, self.windows[layer]
        if 0 < window < start + len(q):
            self.outgrown.add(window)
        options = {"scale": config.attn_scale, "window": window, "soft_cap": config.attn_soft_cap}
        out.copy_(reference.paged_attention(q, *pools, table, offsets, torch.tensor([start]), **options))

    def sample(self, out, logits, rows, positions, *, logit_rows=None, skip_special=True):
        state = self.rows
        for s, row in enumerate(rows.tolist()):
            if skip_special and state.special[row]:
                continue
            source = s if logit_rows is None else int(logit_rows[s])
            token, flag = -1, DROPPED
            if not state.stopped[row]:
                noise = (int(state.seeds[row]), int(positions[s]), float(state.temperature[row]))
                token = choose(logits[source].numpy(), *noise)
                flag = NUMERIC if token < 0 else STOPPED if token in state.stop_ids[row].tolist() else OK
                if token >= 0:
                    state.last_token[row] = token
                state.stopped[row] = int(flag != OK)
            out[0, s], out[1, s] = token, flag


def choose(logits, seed, position, temperature):
    """One token of one row of logits; −1 where they are broken."""
    top = logits.max()
    if not np.isfinite(top):
        return -1
    if temperature == 0:
        return int(logits.argmax())
    groups = np.arange(-(-logits.size // 4), dtype=np.uint64)
    noise = gumbel(noise_words(np.uint64(seed & 2**64 - 1), np.uint64(position), groups)).T.ravel()[: logits.size]
    with np.errstate(all="ignore"):
        values = (logits - top) / np.float32(temperature) + noise
        values[logits < top - np.float32(REACH) * np.float32(temperature)] = -np.inf
    return int(values.argmax())
