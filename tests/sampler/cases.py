"""Random rows for the sampler: any mix of features, logits with ties, holes and broken numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from pagewire.step.step import RowJoin
from pagewire.worker.sampler import SampleOutput, Sampler
from pagewire_transport.params import SamplingParams

VOCAB = 37  # no multiple of a vector or of the noise's four lanes
tokens = st.integers(0, VOCAB - 1)


@dataclass
class Case:
    join: RowJoin
    logits: np.ndarray

    @property
    def position(self) -> int:
        return len(self.join.prompt_ids) + len(self.join.output_ids)


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 0.1, 0.7, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, VOCAB - 1, VOCAB, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5, 100.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, 2.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.25, 100.0]), max_size=3),
    min_tokens=st.integers(0, 4),
    max_tokens=st.just(9),
    logprobs=st.sampled_from([None, None, 0, 1, 5, 20]),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
)

values = st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, 1.0, -np.inf])
broken = st.sampled_from([np.nan, np.inf])


@st.composite
def cases(draw, row: int = 0) -> Case:
    logits = np.array(draw(st.lists(values, min_size=VOCAB, max_size=VOCAB)), np.float32)
    if draw(st.integers(0, 9)) == 0:
        logits[draw(tokens)] = draw(broken)
    if draw(st.integers(0, 19)) == 0:
        logits[:] = -np.inf
    join = RowJoin(
        row=row,
        epoch=0,
        params=draw(params),
        seed=draw(st.sampled_from([0, 1, 2**32, 2**63 + 15])),
        prompt_ids=np.array(draw(st.lists(tokens, min_size=1, max_size=6)), np.int32),
        output_ids=np.array(draw(st.lists(tokens, max_size=5)), np.int32),
        eos_ids=tuple(draw(st.lists(tokens, max_size=2))),
    )
    return Case(join, logits)


def run(cases: list[Case], *, rows: list[int] | None = None) -> SampleOutput:
    """Sample `cases` in one batch, each in its row."""
    rows = list(range(len(cases))) if rows is None else rows
    sampler = Sampler(max_rows=max(rows) + 1, vocab_size=len(cases[0].logits))
    for case, row in zip(cases, rows, strict=True):
        case.join.row = row
        sampler.join(case.join)
    return sampler.sample(
        torch.from_numpy(np.stack([case.logits for case in cases])),
        np.array(rows, np.int32),
        np.array([case.position for case in cases], np.int64),
    )


def row_of(case_params: SamplingParams, *, seed: int = 0, prompt=(1,), outputs=(), eos=(), row: int = 0) -> RowJoin:
    return RowJoin(row, 0, case_params, seed, np.array(prompt, np.int32), np.array(outputs, np.int32), tuple(eos))
