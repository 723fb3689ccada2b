"""A modelled card: how long a step takes, from what is in it.

    step  = products + output product + attention of decode + attention of prefill + element-wise work + reductions
    products         (stream^p + compute^p)^(1/p): weights read at a rate, or tokens multiplied at a rate, and a soft knee between
    decode           bytes of K and V ÷ a rate, and a constant a layer
    prefill          4 × heads × head size × Σ (queries × context) ÷ a rate, and a constant a layer
    reductions       two a layer over the group's cards: a constant, and bytes ÷ a rate

Under tensor parallelism each card has its share of heads, columns and KV heads; the step is that of one of them. Rates are
those that were measured in whole steps on the card, not its data sheet's; `perf/simulated.py` sets them beside recorded runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Final, Literal

from pagewire.errors import ConfigError
from pagewire.scheduler.cost_prior import Card, Coefficients, Shape
from pagewire.step.step import StepPlan

Precision = Literal["bf16", "fp8"]

DECODE_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
MIXED_BUCKETS: Final = (
    64, 128, 192, 256, 320, 384, 512, 768, 1024, 1152, 1280, 1408, 1536, 1792, 2048, 2560, 3072, 4096, 6144, 8192,
)  # fmt: skip
"""Steps without and with prefill are graphs of these numbers of tokens; the rest of one is padding, which is computed too.
As the GPU worker's (`worker/gpu_graphs.py`, `worker/gpu_mixed.py`), which a machine without torch cannot ask."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder, as far as time and memory go."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    tie_embeddings: bool = False

    @property
    def layer_params(self) -> int:
        """Weights of a layer's products."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size)

    @property
    def num_params(self) -> int:
        """All weights."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.layer_params + embeddings

    def kv_token_bytes(self, precision: Precision) -> int:
        """K and V of one token in all layers, over all cards."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _ITEMSIZE[precision]

    def weight_bytes(self, precision: Precision) -> int:
        """Weights over all cards; embeddings stay in 16 bits."""
        layers = self.num_layers * self.layer_params
        return layers * _ITEMSIZE[precision] + 2 * (self.num_params - layers)


_ITEMSIZE: Final = {"bf16": 2, "fp8": 1}

LLAMA_8B: Final = ModelShape("8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
LLAMA_70B: Final = ModelShape("70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072)
MODELS: Final = {shape.name: shape for shape in (LLAMA_8B, LLAMA_70B)}


@dataclass(frozen=True, slots=True)
class Products:
    """Rates of matrix products in one precision.

    Attributes:
        single: bytes of weights a second with one token, for which there is a kernel of its own.
        stream: the same with a few tokens.
        compute: operations a second with many.
        knee: the larger, the sharper the change from one to the other.
    """

    single: float
    stream: float
    compute: float
    knee: float


@dataclass(frozen=True, slots=True)
class CardRates:
    """One kind of card. Seconds, bytes and operations a second.

    Attributes:
        memory: bytes that may be used, of all that it has.
        reserved: of these, what is neither weights nor KV.
        decode: bytes of K and V that decode attention reads a second, by precision of KV.
        prefill: operations of prefill attention a second, likewise.
        attention_s, prefill_s: constants a layer.
        elementwise_s: norms, gate, rotation and writes of KV, a layer; and …
        elementwise_token_s: … a token of hidden size 4,096.
        sample_s: drawing a token.
        step_s: what a step costs beside all that.
        reduce_s, reduce_rate: a sum over a group's cards.
        transfer_rate: bytes a second from card to card.
    """

    name: str
    memory: float
    reserved: float
    products: dict[Precision, Products]
    decode: dict[Precision, float]
    prefill: dict[Precision, float]
    attention_s: float
    prefill_s: float
    elementwise_s: float
    elementwise_token_s: float
    sample_s: float
    step_s: float
    reduce_s: float
    reduce_rate: float
    transfer_rate: float


H200: Final = CardRates(
    name="h200",
    memory=0.9 * 150.1e9,
    reserved=3e9,
    products={"bf16": Products(4.1e12, 3.6e12, 635e12, 2.1), "fp8": Products(3.8e12, 2.75e12, 1240e12, 6.0)},
    decode={"bf16": 4.1e12, "fp8": 2.8e12},
    prefill={"bf16": 480e12, "fp8": 290e12},
    attention_s=7e-6,
    prefill_s=16e-6,
    elementwise_s=2.5e-6,
    elementwise_token_s=52e-9,
    sample_s=0.9e-6,
    step_s=60e-6,
    reduce_s=9e-6,
    reduce_rate=350e9,
    transfer_rate=300e9,
)
"""NVIDIA H200 under lasting load. Reductions and transfers between cards are assumptions, all else was fitted to recorded runs."""

H100: Final = replace(
    H200,
    name="h100",
    memory=0.9 * 85.0e9,
    products={"bf16": Products(2.85e12, 2.5e12, 635e12, 2.1), "fp8": Products(2.65e12, 1.9e12, 1240e12, 6.0)},
    decode={"bf16": 2.85e12, "fp8": 1.95e12},
)
"""NVIDIA H100 with 80 GB: an H200 with that card's memory, in bytes and in bandwidth. Not measured."""

CARDS: Final = {card.name: card for card in (H200, H100)}


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step holds, the sums that its time depends on.

    Attributes:
        num_tokens: of decode and prefill.
        kv_tokens: positions that decode attention reads.
        query_context: Σ over prefill tokens of the positions that each sees.
        num_samples: tokens drawn.
    """

    num_tokens: int
    kv_tokens: int
    query_context: int
    num_samples: int


def work_of(plan: StepPlan) -> StepWork:
    """The sums of a plan."""
    num_decode = plan.num_decode
    kv_tokens = int(plan.starts[:num_decode].sum()) + num_decode
    num_tokens, query_context = num_decode, 0
    if plan.rows.size > num_decode:
        for start, n in zip(plan.starts[num_decode:].tolist(), plan.num_tokens[num_decode:].tolist(), strict=True):
            num_tokens += n
            query_context += n * start + n * (n + 1) // 2
    return StepWork(num_tokens, kv_tokens, query_context, plan.sample_rows.size)


class ModelledCard:
    """A group of `gpus` cards that run one model under tensor parallelism.

    Raises:
        ConfigError: its heads cannot be shared out, or its weights do not fit.
    """

    def __init__(
        self, model: ModelShape, rates: CardRates, *, gpus: int = 1, weights: Precision = "bf16", kv: Precision = "bf16"
    ) -> None:
        if gpus < 1 or model.num_heads % gpus:
            raise ConfigError(f"{model.num_heads} heads cannot be shared by {gpus} cards", field="gpus")
        self.model, self.rates, self.gpus, self.weights, self.kv = model, rates, gpus, weights, kv
        kv_heads = max(1, model.num_kv_heads // gpus)  # more cards than KV heads: some hold the same
        self.kv_token_bytes = 2 * model.num_layers * kv_heads * model.head_dim * _ITEMSIZE[kv]
        """On one card."""
        spare = rates.memory - rates.reserved - model.weight_bytes(weights) / gpus
        self.kv_tokens = int(spare // self.kv_token_bytes)
        """Tokens whose K and V fit."""
        if self.kv_tokens < 1:
            raise ConfigError(
                f"the weights, {model.weight_bytes(weights) / 1e9:.0f} GB, do not fit into {gpus} × {rates.name}",
                field="gpus",
            )
        products = rates.products[weights]
        params = model.num_layers * model.layer_params / gpus
        self._knee = products.knee
        self._stream = params * _ITEMSIZE[weights] / products.stream
        self._single = params * _ITEMSIZE[weights] / products.single
        self._compute = 2 * params / products.compute
        of_output = rates.products["bf16"]
        output = model.vocab_size * model.hidden_size / gpus
        self._out_knee, self._out_stream = of_output.knee, 2 * output / of_output.stream
        self._out_compute = 2 * output / of_output.compute
        self._decode = self.kv_token_bytes / rates.decode[kv]
        # K and V in FP8 are widened on the way to the matrix units, hence a rate of their own.
        self._prefill = 4 * model.num_layers * model.num_heads * model.head_dim / gpus / rates.prefill[kv]
        wide = model.hidden_size / 4096
        self._token = model.num_layers * rates.elementwise_token_s * wide
        self._reduce_token = 0.0
        self._fixed = rates.step_s + model.num_layers * rates.elementwise_s
        if gpus > 1:
            self._fixed += 2 * model.num_layers * rates.reduce_s
            moved = 2 * model.hidden_size * 2 * (gpus - 1) / gpus
            self._reduce_token = 2 * model.num_layers * moved / rates.reduce_rate

    def prior(self) -> Coefficients:
        """What the scheduler's cost model is told of this card before it has seen a step."""
        model, gpus = self.model, self.gpus
        params = model.num_layers * model.layer_params + model.vocab_size * model.hidden_size
        shape = Shape(
            weight_bytes=model.weight_bytes(self.weights) / gpus,
            token_flops=2 * params / gpus,
            kv_bytes=self.kv_token_bytes,
            pair_flops=4 * model.num_layers * model.num_heads * model.head_dim / gpus,
        )
        return Coefficients.of(shape, Card())

    def seconds(self, work: StepWork) -> float:
        """How long a step of this work takes."""
        tokens = work.num_tokens
        buckets = MIXED_BUCKETS if work.query_context else DECODE_BUCKETS
        at = bisect_left(buckets, tokens)
        padded = buckets[at] if at < len(buckets) else tokens
        took = self._fixed + (self._token + self._reduce_token) * padded
        stream = self._single if tokens == 1 else self._stream
        took += _soft_max(stream, self._compute * padded, self._knee)
        if work.num_samples:
            took += _soft_max(self._out_stream, self._out_compute * work.num_samples, self._out_knee)
            took += self.rates.sample_s * work.num_samples
        if work.kv_tokens:
            took += self.model.num_layers * self.rates.attention_s + self._decode * work.kv_tokens
        if work.query_context:
            took += self.model.num_layers * self.rates.prefill_s + self._prefill * work.query_context
        return took

    def step_ns(self, plan: StepPlan) -> int:
        """How long a plan takes, in whole nanoseconds."""
        return int(1e9 * self.seconds(work_of(plan)))

    def transfer_ns(self, num_tokens: int) -> int:
        """How long K and V of a prompt take to another group of cards."""
        return int(1e9 * num_tokens * self.kv_token_bytes / self.rates.transfer_rate)


class ReceivingCard(ModelledCard):
    """A card whose prompts were computed elsewhere: K and V arrive, and of a chunk only its last token is computed."""

    def step_ns(self, plan: StepPlan) -> int:
        """As if each prompt were one more row that decodes."""
        rows = int(plan.rows.size)
        reach = int((plan.starts + plan.num_tokens).sum())
        return int(1e9 * self.seconds(StepWork(rows, reach, 0, plan.sample_rows.size)))


def _soft_max(a: float, b: float, knee: float) -> float:
    """Above both, and far from where they meet as large as the larger."""
    small, large = (a, b) if a < b else (b, a)
    return large * math.pow(1 + math.pow(small / large, knee), 1 / knee)
