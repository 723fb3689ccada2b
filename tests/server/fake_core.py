"""An engine core without scheduler and worker: steps happen when a test says so, tokens follow from the seed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np

from pagewire.clock import MonotonicClock
from pagewire.engine.admission import Admission
from pagewire.errors import Overloaded
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.sequence import Sequence, SequenceState
from pagewire.step.step import LogprobRows, PromptLogprobRows
from pagewire.worker.interface import WorkerShape

VOCAB = 1000
MAX_LEN = 4096


def token(seed: int, index: int) -> int:
    return (seed * 31 + index * 7) % VOCAB


def tokens(seed: int, count: int, start: int = 0) -> list[int]:
    return [token(seed, index) for index in range(start, start + count)]


def logprob(seed: int, index: int, rank: int = 0) -> float:
    return float(np.float32(-(token(seed, index) + rank + 1) / 8))


class FakeCore:
    def __init__(self):
        self.clock = MonotonicClock()
        shape = WorkerShape(
            num_blocks=64,
            block_size=16,
            max_rows=1024,
            max_model_len=MAX_LEN,
            vocab_size=VOCAB,
            eos_ids=(2,),
            kv_bytes=0,
            model_name="fake",
        )
        self.worker = SimpleNamespace(shape=shape)
        self.scheduler = SimpleNamespace(max_len=MAX_LEN)
        self.health = SimpleNamespace(ready=True, reason="")
        self.admission = Admission(vocab_size=VOCAB, max_len=MAX_LEN, clock=self.clock, seed=7)
        self.sinks = []
        self.live: dict[int, Sequence] = {}
        self.requests = []
        self.cancelled = []
        self.refuse = None
        self.max_live = 10_000
        self._ended = []
        self._free = []
        self._next_slot = 0
        self._order = 0
        self._step = 0

    def submit(self, request):
        if self.refuse is not None:
            raise self.refuse
        if len(self.live) >= self.max_live:
            raise Overloaded("full", retry_after_ms=5)
        self.requests.append(request)
        made = []
        for choice in range(request.params.n):
            slot = self._free.pop() if self._free else self._next_slot
            self._next_slot = max(self._next_slot, slot + 1)
            sequence = Sequence(request, choice, request.seed + choice, self._order, slot, SequenceState.RUNNING)
            self._order += 1
            if request.output_ids:
                sequence.output = request.output_ids[choice]
            self.live[slot] = sequence
            made.append(sequence)
        return made

    def cancel(self, sequence):
        self.cancelled.append(sequence)
        return self._end(sequence, "cancelled")

    def fail(self, sequence, error):
        sequence.error = error
        return self._end(sequence, "error")

    def finish_at(self, sequence, at):
        if self._end(sequence, "stop"):
            sequence.output = sequence.output[: min(at, sequence.num_output)]
            return True
        return False

    def pause(self, sequence):
        sequence.is_paused = True

    def resume(self, sequence):
        sequence.is_paused = False

    def output(self, sequence, start=0, stop=None):
        return sequence.output[start:stop].copy()

    def stats(self):
        return {"sequences_running": float(len(self.live))}

    def _end(self, sequence, reason):
        if not sequence.is_live:
            return False
        sequence.state, sequence.finish_reason = SequenceState.FINISHED, reason
        sequence.finished_ns = self.clock.now_ns()
        del self.live[sequence.slot]
        self._ended.append(sequence)
        return True

    def take_ended(self):
        ended, self._ended = self._ended, []
        self._free.extend(sequence.slot for sequence in ended)
        return ended

    def step(self, count=1):
        """`count` tokens for every live sequence; a sequence whose limit is reached ends."""
        now_ns = self.clock.now_ns()
        outcome = StepOutcome(self._step)
        self._step += 1
        slots, starts, counts, ids = [], [], [], []
        rows = []
        for slot, sequence in list(self.live.items()):
            begin = sequence.num_output
            if sequence.first_scheduled_ns is None:
                sequence.first_scheduled_ns = now_ns
                if sequence.choice == 0 and sequence.request.params.prompt_logprobs is not None:
                    outcome.prompt_logprobs.extend(prompt_rows(sequence))
            more = 0 if sequence.is_paused else min(count, sequence.request.max_tokens - begin)
            if more > 0:
                new = tokens(sequence.seed, more, begin)
                sequence.output = np.concatenate([sequence.output, np.array(new, np.int32)]).astype(np.int32)
                if sequence.first_token_ns is None:
                    sequence.first_token_ns = now_ns
                if sequence.request.params.logprobs is not None:
                    assert more == 1
                    rows.append((len(slots), sequence, begin))
                slots.append(slot)
                starts.append(begin)
                counts.append(more)
                ids.extend(new)
            if sequence.num_output >= sequence.request.max_tokens:
                self._end(sequence, "length")
        outcome.slots, outcome.starts = np.array(slots, np.int32), np.array(starts, np.int32)
        outcome.counts, outcome.token_ids = np.array(counts, np.int32), np.array(ids, np.int32)
        outcome.samples = np.arange(len(slots), dtype=np.int32)
        if rows:
            tops = [sequence.request.params.logprobs for _, sequence, _ in rows]
            outcome.logprobs = LogprobRows(
                samples=np.array([entry for entry, _, _ in rows], np.int32),
                chosen=np.array([logprob(s.seed, i) for _, s, i in rows], np.float32),
                top=np.array(tops, np.int32),
                top_ids=np.array([r for (_, _, _), top in zip(rows, tops, strict=True) for r in range(top)], np.int32),
                top_logprobs=np.array(
                    [logprob(s.seed, i, r) for (_, s, i), top in zip(rows, tops, strict=True) for r in range(top)],
                    np.float32,
                ),
            )
        outcome.ended = self.take_ended()
        self.hand_out(outcome)

    def report(self):
        """What ended without a step."""
        self.hand_out(StepOutcome(-1, ended=self.take_ended()))

    def hand_out(self, outcome):
        for sink in list(self.sinks):
            sink.on_outcome(outcome)

    async def run(self, interval=0.0, count=1):
        while True:
            self.step(count)
            await asyncio.sleep(interval)


def prompt_rows(sequence, chunk=3):
    top = sequence.request.params.prompt_logprobs
    for start in range(0, sequence.num_prompt - 1, chunk):
        num = min(chunk, sequence.num_prompt - 1 - start)
        yield (
            sequence,
            PromptLogprobRows(
                entry=0,
                start=start,
                chosen=-np.arange(start, start + num, dtype=np.float32),
                top_ids=np.tile(np.arange(top, dtype=np.int32), (num, 1)),
                top_logprobs=np.tile(-np.arange(top, dtype=np.float32), (num, 1)),
            ),
        )
