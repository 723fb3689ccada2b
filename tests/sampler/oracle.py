"""What sampling means, one row at a time, in plain loops; float64 where the product's word is not float32 to the bit."""

from __future__ import annotations

import math

import numpy as np
from tests.sampler.test_philox import naive

from pagewire.step.step import RowJoin
from pagewire.worker.philox import gumbel

LEAST_TEMPERATURE = 1e-30  # what is below is taken for it


def adjusted(logits: np.ndarray, join: RowJoin, position: int) -> list[float]:
    """Logits after bias, penalties and the min_tokens mask."""
    params = join.params
    values = [float(x) for x in logits]
    for token, bias in params.logit_bias.items():
        values[token] = float(np.float32(values[token]) + np.float32(bias))
    outputs = join.output_ids.tolist()
    for token in {*join.prompt_ids.tolist(), *outputs}:
        value = np.float32(values[token])
        factor = np.float32(params.repetition_penalty)
        value = value / factor if value > 0 else value * factor
        value -= np.float32(params.frequency_penalty) * np.float32(outputs.count(token))
        value -= np.float32(params.presence_penalty) * np.float32(token in outputs)
        values[token] = float(value)
    if position - len(join.prompt_ids) < params.min_tokens:
        for token in (*join.eos_ids, *params.stop_token_ids):
            values[token] = -math.inf
    return values


def kept(values: list[float], params) -> set[int]:
    """Tokens that top-k, top-p and min-p leave, each on what the one before left."""
    temperature = float(np.float32(max(params.temperature, LEAST_TEMPERATURE)))
    tokens = set(range(len(values)))
    if 0 < params.top_k < len(values):
        kth = sorted(values, reverse=True)[params.top_k - 1]
        tokens = {t for t in tokens if values[t] >= kth}
    top = max(values)
    if params.top_p < 1:
        mass = {t: math.exp((values[t] - top) / temperature) for t in tokens}
        target = params.top_p * sum(mass.values())
        total, floor = 0.0, -math.inf
        for token in sorted(tokens, key=lambda t: -values[t]):
            total += mass[token]
            floor = values[token]
            if total >= target:
                break
        tokens = {t for t in tokens if values[t] >= floor}
    if params.min_p > 0:
        floor = np.float32(top + temperature * math.log(params.min_p))
        tokens = {t for t in tokens if values[t] >= floor}
    return tokens


def noise(seed: int, position: int, token: int) -> np.float32:
    return gumbel(np.array([naive(seed, position, token)], np.uint32))[0]


def sample(logits: np.ndarray, join: RowJoin, position: int) -> int | None:
    """The token of one row; None where no token can be drawn."""
    if any(math.isnan(x) or x == math.inf for x in logits):
        return None
    values = adjusted(logits, join, position)
    top = max(values)
    if top == -math.inf:
        return None
    if join.params.temperature == 0:
        return values.index(top)
    best, winner = -math.inf, None
    for token in sorted(kept(values, join.params)):
        scaled = (np.float32(values[token]) - np.float32(top)) / np.float32(
            max(join.params.temperature, LEAST_TEMPERATURE)
        )
        value = scaled + noise(join.seed, position, token)
        if value > best:
            best, winner = value, token
    return winner


def logprobs(logits: np.ndarray) -> list[float]:
    """Log-softmax of the raw logits."""
    top = max(float(x) for x in logits)
    total = math.log(sum(math.exp(float(x) - top) for x in logits)) + top
    return [float(x) - total for x in logits]
