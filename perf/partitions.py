"""Prefill beside decode: in the same steps, on multiprocessors of its own, or behind decode's priority. On one NVIDIA card.

    python perf/partitions.py [--json] [--rows 96] [--context 480] [--layers 8]

Layers of Llama-3.1-8B in bf16, in CUDA graphs: `--rows` sequences that decode, and a prompt's chunk. *Same steps*: one graph computes
both, the chunk's size sets the gap between tokens. *Partitions*: decode's graph and the chunk's replay without end beside each other,
each on its own part of the card. *Priority*: the same on two streams of the whole card, decode's being preferred. Times are those
of 32 layers, without logits and sampling. At the end: prompt tokens a second at no more than `--itl` ms between tokens, by each way.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics

import torch
from green_contexts import split
from report import Report

from kernels import BLOCK, DEVICE, DTYPE, MODELS, SCALE, D, paged
from pagewire_kernels.activation import silu_mul
from pagewire_kernels.decode_plan import DecodePlan, DecodeTiling, plan_decode
from pagewire_kernels.kv_write import rope_write_kv
from pagewire_kernels.paged_decode import paged_decode
from pagewire_kernels.paged_prefill import LONG, SHORT, PrefillPlan, paged_prefill, plan_prefill
from pagewire_kernels.rms_norm import rms_norm

HEADS, KV_HEADS, HIDDEN, MLP = MODELS["8b"]
NUM_LAYERS = 32
STEPS = (128, 192, 256, 320, 384, 512, 768, 1024, 2048)
"""Tokens of a step in which both are: where the library's tiles end."""
PARTITION_CHUNK = 2048
PARTS = (16, 24, 32, 40, 48, 64)
WINDOW_MS = 600
LONG_CHUNK = 1024


class Weights:
    """Of some layers; all chains read the same."""

    def __init__(self, num_layers: int) -> None:
        shapes = ((HEADS + 2 * KV_HEADS) * D, HIDDEN), (HIDDEN, HEADS * D), (2 * MLP, HIDDEN), (HIDDEN, MLP)
        self.layers = [
            [torch.randn(shape, device=DEVICE, dtype=DTYPE).mul_(shape[1] ** -0.5) for shape in shapes]
            for _ in range(num_layers)
        ]
        self.norm = torch.ones(HIDDEN, device=DEVICE, dtype=DTYPE)
        self.cos, self.sin = torch.randn(2, 16384, D // 2, device=DEVICE)


class Chain:
    """The layers for `rows` sequences that decode at `context`, and for a prompt of `chunk` tokens; either may be none.

    Decode attention is laid out for `num_sms` multiprocessors.
    """

    def __init__(self, weights: Weights, rows: int, context: int, chunk: int, num_sms: int) -> None:
        self.weights, self.rows, self.chunk = weights, rows, chunk
        lens = [context] * rows + [chunk] * bool(chunk)
        self.kv, self.tables = paged(lens, KV_HEADS, len(weights.layers))
        self.lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        num = rows + chunk
        self.x, self.residual = torch.randn(2, num, HIDDEN, device=DEVICE, dtype=DTYPE)
        self.q, self.out = torch.zeros(2, num, HEADS, D, device=DEVICE, dtype=DTYPE)
        self.gated = torch.empty(num, MLP, device=DEVICE, dtype=DTYPE)
        places = [(row, context - 1) for row in range(rows)] + [(rows, at) for at in range(chunk)]
        row, position = torch.tensor(places, device=DEVICE).T
        self.positions = position.int()
        self.slots = (self.tables[row, position // BLOCK] * BLOCK + position % BLOCK).int()
        self.starts = torch.tensor([0, chunk], dtype=torch.int32, device=DEVICE)
        shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "device": DEVICE}
        programs = DecodeTiling(num_programs=2 * num_sms)
        self.decode_plan = DecodePlan(max_rows=max(1, rows), head_dim=D, tiling=programs, **shape)
        tiling = LONG if chunk >= LONG_CHUNK else SHORT
        self.prefill_plan = PrefillPlan(max_tokens=max(1, chunk), max_rows=1, tiling=tiling, **shape)

    def launch(self) -> None:
        """All layers, on the current stream."""
        rows, w = self.rows, self.weights
        if rows:
            plan_decode(self.decode_plan, self.lens[:rows])
        if self.chunk:
            plan_prefill(self.prefill_plan, self.starts)
        for (k, v), layer in zip(self.kv, w.layers, strict=True):
            self._layer(k, v, *layer)

    def _layer(self, k, v, qkv, output, gate_up, down) -> None:
        rows, w = self.rows, self.weights
        made = torch.nn.functional.linear(self.x, qkv).view(-1, HEADS + 2 * KV_HEADS, D)
        q, new_k, new_v = made.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        rope_write_kv(self.q, q, new_k, new_v, k, v, self.positions, self.slots, w.cos, w.sin)
        if rows:
            paged_decode(
                self.out[:rows],
                self.q[:rows],
                k,
                v,
                self.tables[:rows],
                self.lens[:rows],
                self.decode_plan,
                scale=SCALE,
            )
        if self.chunk:
            paged_prefill(
                self.out[rows:], self.q[rows:], k, v, self.tables[rows:], self.starts, self.lens[rows:], self.prefill_plan,
                scale=SCALE,
            )  # fmt: skip
        rms_norm(self.x, torch.nn.functional.linear(self.out.flatten(1), output), w.norm, 1e-5, self.residual)
        silu_mul(self.gated, torch.nn.functional.linear(self.x, gate_up))
        rms_norm(self.x, torch.nn.functional.linear(self.gated, down), w.norm, 1e-5, self.residual)


def captured(chain: Chain, stream) -> torch.cuda.CUDAGraph:
    """Its graph; kernels run where the stream's do."""
    with torch.cuda.stream(stream):
        chain.launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            chain.launch()
    return graph


class Lane:
    """A graph that replays again and again on its stream."""

    def __init__(self, chain: Chain, stream) -> None:
        self._chain = chain  # the graph reads its buffers
        self.stream, self.graph = stream, captured(chain, stream)
        self.marks: list[torch.cuda.Event] = []
        self.alone = self.run(12)

    def begin(self) -> None:
        """Forget the replays of before."""
        self.marks = []
        self._mark()

    def replay(self) -> None:
        """Once more, and an event after it."""
        with torch.cuda.stream(self.stream):
            self.graph.replay()
        self._mark()

    def _mark(self) -> None:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(self.stream)
        self.marks.append(mark)

    def run(self, count: int) -> float:
        """Milliseconds of a replay, of so many that nothing disturbs."""
        self.begin()
        for _ in range(count):
            self.replay()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(self.marks)]
        return statistics.median(times[len(times) // 5 :])

    def ends(self, zero: torch.cuda.Event) -> list[float]:
        """When each replay was over, ms after `zero`; once all are."""
        return [zero.elapsed_time(mark) for mark in self.marks[1:]]


def beside(decode: Lane, prefill: Lane) -> tuple[float, float]:
    """Milliseconds of a replay of each, in the time in which both had work: the median gap, and the mean chunk.

    One may hold the other back so far that it is done first; what the other does after that is not counted.
    """
    zero = torch.cuda.Event(enable_timing=True)
    zero.record()
    torch.cuda.synchronize()
    decode.begin()
    prefill.begin()
    # In turns by the time that they take: a queue that is full would hold the host, and with it the other lane.
    ahead = 0.0
    for _ in range(max(4, int(WINDOW_MS / prefill.alone))):
        prefill.replay()
        ahead += prefill.alone
        while ahead > 0:
            decode.replay()
            ahead -= decode.alone
    torch.cuda.synchronize()
    tokens, chunks = decode.ends(zero), prefill.ends(zero)
    until = min(tokens[-1], chunks[-1])
    low, high = 0.1 * until, 0.9 * until
    gaps = [b - a for a, b in itertools.pairwise(tokens) if low <= a and b <= high]
    inside = [end for end in chunks if low <= end <= high]
    each = (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else math.inf
    return statistics.median(gaps), each


class Experiment:
    """All ways, and what each of them brought: (way, milliseconds between tokens, prompt tokens a second)."""

    def __init__(self, report: Report, given: argparse.Namespace) -> None:
        self.report, self.given = report, given
        self.weights = Weights(given.layers)
        self.factor = NUM_LAYERS / given.layers
        self.found: list[tuple[str, float, float]] = []

    def add(self, way: str, case: str, itl: float, chunk: int, prefill_ms: float) -> None:
        itl, rate = itl * self.factor, chunk / (prefill_ms * self.factor) * 1e3
        self.found.append((way, itl, rate))
        self.report.add(f"{way}, {case}", "itl", itl, "ms")
        self.report.add(f"{way}, {case}", "prefill", rate, "tok/s")

    def chain(self, rows: int, chunk: int, num_sms: int = 0) -> Chain:
        num_sms = num_sms or torch.cuda.get_device_properties(DEVICE).multi_processor_count
        return Chain(self.weights, rows, self.given.context, chunk, num_sms)

    def same_steps(self) -> None:
        """Mixed steps by size of the chunk."""
        for chunk in (step - self.given.rows for step in STEPS if step > self.given.rows):
            lane = Lane(self.chain(self.given.rows, chunk), torch.cuda.Stream())
            self.add("same steps", f"chunks of {chunk}", lane.alone, chunk, lane.alone)

    def partitions(self) -> None:
        """By multiprocessors of prefill."""
        for num in PARTS:
            small, large = split(num)
            decode = Lane(self.chain(self.given.rows, 0, large.num_sms), large.stream)
            prefill = Lane(self.chain(0, PARTITION_CHUNK, small.num_sms), small.stream)
            itl, time = beside(decode, prefill)
            case = f"{small.num_sms} of {small.num_sms + large.num_sms}"
            self.report.add(f"partitions, {case}", "itl_alone", decode.alone * self.factor, "ms")
            self.add("partitions", case, itl, PARTITION_CHUNK, time)

    def priority(self) -> None:
        """Both on the whole card."""
        lowest, highest = torch.cuda.Stream.priority_range()
        decode = Lane(self.chain(self.given.rows, 0), torch.cuda.Stream(priority=highest))
        for chunk in (256, PARTITION_CHUNK):
            prefill = Lane(self.chain(0, chunk), torch.cuda.Stream(priority=lowest))
            itl, time = beside(decode, prefill)
            self.add("priority", f"chunks of {chunk}", itl, chunk, time)

    def compare(self) -> None:
        """Most prompt tokens a second within the bound on the gap, by way."""
        for way in dict.fromkeys(way for way, _, _ in self.found):
            within = [rate for name, itl, rate in self.found if name == way and itl <= self.given.itl]
            self.report.add(f"within {self.given.itl:g} ms", way, max(within, default=0.0), "tok/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Report.arguments(parser)
    parser.add_argument("--rows", type=int, default=96, help="sequences that decode")
    parser.add_argument("--context", type=int, default=480, help="tokens of each")
    parser.add_argument("--layers", type=int, default=8, help="computed; times are scaled to 32")
    parser.add_argument("--itl", type=float, default=12.0, help="bound of the comparison, ms")
    given = parser.parse_args()
    torch.manual_seed(0)
    experiment = Experiment(Report("partitions"), given)
    experiment.same_steps()
    experiment.priority()
    experiment.partitions()
    experiment.compare()
    experiment.report.finish()


if __name__ == "__main__":
    main()
