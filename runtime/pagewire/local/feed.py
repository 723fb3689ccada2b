"""What the engine brings, told to streams in this process: the part that sockets and the gateway play elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagewire.clock import Clock
from pagewire.engine.core import EngineCore
from pagewire.errors import InternalError, PagewireError
from pagewire.request.request import Request
from pagewire.scheduler.outcome import StepOutcome
from pagewire.scheduler.sequence import Sequence
from pagewire.step.step import LogprobRows, PromptLogprobRows
from pagewire_client.columns import Run
from pagewire_client.result import TokenLogprob
from pagewire_client.state import StreamState
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.messages import Accepted, Done, Finished, Timings, Usage

_Logprobs = tuple[TokenLogprob, ...]


@dataclass(slots=True, eq=False)
class Feed:
    """One request: its sequences on the engine's side, its stream on the caller's.

    Attributes:
        texts: one a choice; None where only token ids are wanted.
        received: tokens of each choice that its reader was given.
        is_finished: each choice's reader was told its end; a stop string may come before the engine's own end.
        num_open: sequences that the engine has not reported as ended.
    """

    state: StreamState
    texts: list[TextStream | None]
    shows_text: bool
    sequences: list[Sequence] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    is_finished: list[bool] = field(default_factory=list)
    num_open: int = 0

    def begin(self, request: Request, sequences: list[Sequence]) -> None:
        """The engine took it."""
        self.sequences = sequences
        self.num_open = len(sequences)
        self.received = [0] * len(sequences)
        self.is_finished = [False] * len(sequences)
        self.state.accepted = Accepted(
            stream=0,
            request_id=request.request_id,
            seed=request.seed,
            num_prompt_tokens=int(request.prompt_ids.size),
            max_tokens=request.max_tokens,
        )

    def take(
        self, choice: int, start: int, ids: tuple[int, ...], logprobs: _Logprobs | None, now_ns: int
    ) -> int | None:
        """More tokens of a choice; how many of all its tokens stay, if they complete a stop string."""
        if self.is_finished[choice]:
            return None  # generated before the engine knew of the stop string
        text, stop, writer = "", None, self.texts[choice]
        if writer is not None:
            delta = writer.push(ids)
            text, stop = delta.text, delta.stop
            if stop is not None:
                ids = ids[: stop.at - start]
                logprobs = logprobs[: len(ids)] if logprobs is not None else None
        self.received[choice] = start + len(ids)
        self.state.add(Run(0, choice, start, ids, text if self.shows_text else "", logprobs), now_ns)
        if stop is None:
            return None
        self._finish(Finished(stream=0, choice=choice, reason="stop", num_tokens=stop.at, stop=stop.stop))
        return stop.at

    def end(self, sequence: Sequence, now_ns: int) -> None:
        """The engine is done with one of its sequences."""
        self.num_open -= 1
        choice = sequence.choice
        if not self.is_finished[choice]:
            self._finish(self._finished(sequence))
        if self.num_open == 0:
            self.state.end(self._done(), now_ns)

    def add_prompt_logprobs(self, rows: PromptLogprobRows) -> None:
        """Log-probabilities of more of the prompt; they come in order, before the first token."""
        told = self.state.prompt_logprobs
        if told is None:
            told = self.state.prompt_logprobs = []
        ids, values = rows.top_ids.tolist(), rows.top_logprobs.tolist()
        for chosen, top_ids, top in zip(rows.chosen.tolist(), ids, values, strict=True):
            told.append(TokenLogprob(chosen, tuple(zip(top_ids, top, strict=True))))

    def _finish(self, message: Finished) -> None:
        self.is_finished[message.choice] = True
        self.received[message.choice] = message.num_tokens
        self.state.finish(message)

    def _finished(self, sequence: Sequence) -> Finished:
        reason, stop, num_tokens, text = sequence.finish_reason, sequence.stop, sequence.num_output, ""
        assert reason is not None
        named: str | int | None = stop
        writer = self.texts[sequence.choice]
        if writer is not None:
            rest = writer.flush()
            text, found = rest.text, rest.stop
            if found is not None:  # the replacement of an incomplete character completes a stop string
                reason, named, num_tokens = "stop", found.stop, found.at
        return Finished(
            stream=0,
            choice=sequence.choice,
            reason=reason,
            num_tokens=num_tokens,
            stop=named,
            text=text if self.shows_text else "",
        )

    def _done(self) -> Done:
        first, request = self.sequences[0], self.sequences[0].request
        arrival_ns = request.arrival_ns
        ended_ns = max(s.finished_ns or arrival_ns for s in self.sequences)
        scheduled = [s.first_scheduled_ns for s in self.sequences if s.first_scheduled_ns is not None]
        spoken = [s.first_token_ns for s in self.sequences if s.first_token_ns is not None]
        return Done(
            stream=0,
            seed=request.seed,
            usage=Usage(prompt=first.num_prompt, completion=sum(self.received), cached=first.num_cached),
            timings=Timings(
                queue_ns=min(scheduled, default=ended_ns) - arrival_ns,
                first_token_ns=min(spoken, default=ended_ns) - arrival_ns,
                total_ns=ended_ns - arrival_ns,
                num_preemptions=sum(s.num_preemptions for s in self.sequences),
            ),
        )


class Feeds:
    """The engine's sink in this process. A fault in one feed ends its request alone (F7)."""

    def __init__(self, core: EngineCore, clock: Clock, log: Any) -> None:
        self._core = core
        self._clock = clock
        self._log = log
        self._by_slot: dict[int, tuple[Feed, Sequence]] = {}

    def open(self, feed: Feed, request: Request) -> None:
        """Submit a request for a feed.

        Raises:
            PagewireError: the engine refuses it.
        """
        sequences = self._core.submit(request)
        feed.begin(request, sequences)
        for sequence in sequences:
            self._by_slot[sequence.slot] = feed, sequence

    def on_outcome(self, outcome: StepOutcome) -> None:
        """See `engine.core.Sink`."""
        now_ns = self._clock.now_ns()
        for sequence, rows in outcome.prompt_logprobs:
            known = self._by_slot.get(sequence.slot)
            if known is not None and sequence.choice == 0:
                self._guard(known[0], known[0].add_prompt_logprobs, rows)
        if outcome.slots.size:
            self._hand_out(outcome, now_ns)
        for sequence in outcome.ended:
            known = self._by_slot.pop(sequence.slot, None)
            if known is None:
                continue
            feed = known[0]
            if sequence.error is not None:
                self.fail(feed, sequence.error)
            elif not feed.state.is_over:
                self._guard(feed, feed.end, sequence, now_ns)

    def cancel(self, feed: Feed) -> None:
        """Its reader left."""
        for sequence in feed.sequences:
            self._core.cancel(sequence)

    def fail(self, feed: Feed, error: PagewireError) -> None:
        """Its stream ends with `error`, and whatever the engine still does for it."""
        feed.state.fail(error)
        self.cancel(feed)

    def _hand_out(self, outcome: StepOutcome, now_ns: int) -> None:
        logprobs = dict(_logprobs_of(outcome.logprobs)) if outcome.logprobs is not None else {}
        ids, at = outcome.token_ids.tolist(), 0
        entries = zip(outcome.slots.tolist(), outcome.starts.tolist(), outcome.counts.tolist(), strict=True)
        for entry, (slot, start, count) in enumerate(entries):
            run = tuple(ids[at : at + count])
            at += count
            known = self._by_slot.get(slot)
            if known is not None and not known[0].state.is_over:
                self._guard(known[0], self._take, *known, start, run, logprobs.get(entry), now_ns)

    def _take(
        self,
        feed: Feed,
        sequence: Sequence,
        start: int,
        run: tuple[int, ...],
        logprobs: _Logprobs | None,
        now_ns: int,
    ) -> None:
        keep = feed.take(sequence.choice, start, run, logprobs, now_ns)
        if keep is not None:
            self._core.finish_at(sequence, keep)

    def _guard(self, feed: Feed, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001  (F7: it ends this request, never a neighbour)
            self._log.exception("stream_failed")
            self.fail(feed, InternalError(f"{type(error).__name__} while making text of tokens: {error}"))


def _logprobs_of(rows: LogprobRows) -> Iterator[tuple[int, _Logprobs]]:
    """(entry, its log-probabilities); one token an entry, as the step's result has it."""
    ends = np.cumsum(rows.top).tolist()
    top_ids, top = rows.top_ids.tolist(), rows.top_logprobs.tolist()
    begin = 0
    for entry, chosen, end in zip(rows.samples.tolist(), rows.chosen.tolist(), ends, strict=True):
        yield entry, (TokenLogprob(chosen, tuple(zip(top_ids[begin:end], top[begin:end], strict=True))),)
        begin = end
