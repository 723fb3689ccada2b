"""Makes plans by hand: a clerk that hands out rows and blocks, and nothing of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagewire.step.step import RowJoin, StepPlan, StepResult
from pagewire_transport.params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@dataclass
class Tenant:
    """One sequence in a row."""

    row: int
    epoch: int
    blocks: list[int]
    length: int = 0  # positions that were planned


@dataclass
class Clerk:
    """Everything about the next plan; `plan()` makes it and begins another."""

    block_size: int = 16
    num_blocks: int = 64
    step: int = 0
    epoch: int = 0
    free: list[int] = field(default_factory=list)
    joins: list[RowJoin] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    deltas: list[tuple[int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    decodes: list[Tenant] = field(default_factory=list)
    chunks: list[tuple[Tenant, list[int], list[Tenant]]] = field(default_factory=list)
    prompt_logprobs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(np.random.default_rng(1).permutation(np.arange(1, self.num_blocks)))

    def join(
        self,
        row: int,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        outputs: Sequence[int] = (),
        eos_ids: tuple[int, ...] = (),
        blocks: Sequence[int] = (),
        max_tokens: int = 64,
    ) -> Tenant:
        """A sequence takes a row, with `blocks` first and new ones for all that it will need."""
        self.epoch += 1
        need = -(-(len(prompt) + max_tokens) // self.block_size) - len(blocks)
        tenant = Tenant(row, self.epoch, [*blocks, *(int(self.free.pop()) for _ in range(need))])
        self.joins.append(RowJoin(row, self.epoch, params, seed, int32(*prompt), int32(*outputs), eos_ids))
        self.deltas += [(row, column, block) for column, block in enumerate(tenant.blocks)]
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """It leaves its row; its blocks may be had by others."""
        self.leaves.append(tenant.row)
        self.free += tenant.blocks

    def decode(self, *tenants: Tenant) -> None:
        self.decodes += tenants

    def chunk(self, tenant: Tenant, ids: Sequence[int], *samples: Tenant, prompt_logprobs: int | None = None) -> None:
        """Compute `ids` next; draw for each of `samples` from the last position."""
        if prompt_logprobs is not None:
            self.prompt_logprobs[len(self.chunks)] = prompt_logprobs
        self.chunks.append((tenant, list(ids), list(samples)))

    def plan(self) -> StepPlan:
        tenants = self.decodes + [tenant for tenant, _, _ in self.chunks]
        sizes = [1] * len(self.decodes) + [len(ids) for _, ids, _ in self.chunks]
        num_decode = len(self.decodes)
        samples = list(enumerate(self.decodes))
        samples += [(num_decode + c, tenant) for c, (_, _, drawn) in enumerate(self.chunks) for tenant in drawn]
        deltas = int32(*np.ravel(self.deltas)).reshape(-1, 3)
        copies = int32(*np.ravel(self.copies)).reshape(-1, 2)
        plan = StepPlan(
            step=self.step,
            rows=int32(*(tenant.row for tenant in tenants)),
            starts=int32(*(tenant.length for tenant in tenants)),
            num_tokens=int32(*sizes),
            epochs=int32(*(tenant.epoch for tenant in tenants)),
            num_decode=num_decode,
            token_ids=int32(*(token for _, ids, _ in self.chunks for token in ids)),
            sample_entries=int32(*(entry for entry, _ in samples)),
            sample_rows=int32(*(tenant.row for _, tenant in samples)),
            sample_epochs=int32(*(tenant.epoch for _, tenant in samples)),
            leaves=int32(*self.leaves),
            joins=self.joins,
            block_rows=deltas[:, 0],
            block_cols=deltas[:, 1],
            block_ids=deltas[:, 2],
            copy_src=copies[:, 0],
            copy_dst=copies[:, 1],
            prompt_logprobs={num_decode + chunk: top for chunk, top in self.prompt_logprobs.items()},
        )
        for tenant, size in zip(tenants, sizes, strict=True):
            tenant.length += size
        for entry, tenant in samples:  # a fork has what its leader has
            tenant.length = tenants[entry].length
        self.step += 1
        self.joins, self.leaves, self.deltas, self.copies = [], [], [], []
        self.decodes, self.chunks, self.prompt_logprobs = [], [], {}
        return plan


async def run(worker, plan: StepPlan) -> StepResult:
    """One step, awaited."""
    await worker.launch_forward(plan)
    return await worker.launch_sample(plan)


async def generate(worker, clerk: Clerk, tenant: Tenant, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Prefill and decode one sequence, all steps queued at once."""
    handles = []
    for i in range(num_tokens):
        if i == 0:
            clerk.chunk(tenant, prompt, tenant)
        else:
            clerk.decode(tenant)
        plan = clerk.plan()
        worker.launch_forward(plan)
        handles.append(worker.launch_sample(plan))
    return [int(token) for handle in handles for token in (await handle).token_ids]
