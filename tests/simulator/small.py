"""A small deployment and a small trace, made here: nothing outside of the repository is needed."""

import json

import numpy as np

from pagewire.config import SchedulerConfig
from pagewire.simulator.card import LLAMA_8B
from pagewire.simulator.deployment import Deployment
from pagewire.simulator.traces import HASH_BLOCK, Arrival, Trace

WINDOW_NS = 1_000_000_000


def deployment(**changes) -> Deployment:
    scheduler = SchedulerConfig(
        max_rows=changes.pop("max_rows", 16),
        max_step_tokens=changes.pop("max_step_tokens", 256),
        max_waiting=changes.pop("max_waiting", 4096),
    )
    return Deployment(LLAMA_8B, **{"kv_tokens": 16_384, "max_model_len": 4096, **changes}, scheduler=scheduler)


def conversations(num=12, turns=4, seed=1) -> Trace:
    """Each turn repeats all before it, in whole blocks of the trace, and adds one or two."""
    rng = np.random.default_rng(seed)
    arrivals, next_id = [], 1
    for _ in range(num):
        ids = (0,)
        at_ns = int(rng.integers(0, 2_000_000_000))
        for _ in range(turns):
            grown = int(rng.integers(1, 3))
            ids = (*ids, *range(next_id, next_id + grown))
            next_id += grown + 1
            # The last block is not full, so the next turn has another in its place.
            prompt = len(ids) * HASH_BLOCK + int(rng.integers(1, HASH_BLOCK))
            if prompt < 3900:
                output = int(rng.integers(2, 60))
                arrivals.append(Arrival(at_ns, len(arrivals), prompt, output, (*ids, next_id - 1)))
            at_ns += int(rng.integers(500_000_000, 3_000_000_000))
    return Trace(arrivals)


def mooncake_lines(trace: Trace) -> str:
    return "".join(
        json.dumps({
            "timestamp": arrival.at_ns / 1e6,
            "input_length": arrival.num_prompt,
            "output_length": arrival.num_output,
            "hash_ids": arrival.prefix_ids,
        })
        + "\n"
        for arrival in trace
    )  # fmt: skip
