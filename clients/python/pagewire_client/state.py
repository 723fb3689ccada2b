"""What the client keeps of a stream. The user's handle is `stream.Stream`; this must not know it (see there)."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagewire_client.columns import Run
from pagewire_client.result import ChoiceResult, Chunk, Result, Timings, TokenLogprob, percentile
from pagewire_transport.errors import PagewireError, ProtocolError
from pagewire_transport.messages import Accepted, Cancel, Done, Finish, Finished, FinishReason, Generate, Resume


@dataclass(slots=True)
class ChoiceState:
    """One continuation so far.

    Attributes:
        first: index of the first of `token_ids`; not 0 where the stream was resumed by a client that began later.
    """

    first: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    gaps_ns: array[int] = field(default_factory=lambda: array("q"))
    heard_ns: int = 0
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    @property
    def received(self) -> int:
        """The index of the token that comes next."""
        return self.first + len(self.token_ids)


class StreamState:
    """Fed by the client, read by the handle. Bounded: at most `max_tokens` tokens a choice, read or not.

    Args:
        number: the stream's number on the connection.
        num_choices: `n`.
        now_ns: when it began.
        send: tells the server something about it.
        has_logprobs: they were asked for.
    """

    __slots__ = (
        "_first_ns",
        "_has_logprobs",
        "_over_ns",
        "_send",
        "_started_ns",
        "_waiters",
        "accepted",
        "choices",
        "chunks",
        "done",
        "ends",
        "error",
        "is_cancelled",
        "is_closed",
        "number",
        "prompt_logprobs",
        "request",
        "until",
    )

    def __init__(
        self, number: int, num_choices: int, now_ns: int, send: Callable[[Cancel | Finish], None], *, has_logprobs: bool
    ) -> None:
        self.number = number
        self.accepted: Accepted | None = None
        self.choices = [ChoiceState() for _ in range(num_choices)]
        self.chunks: deque[Chunk] = deque()
        self.done: Done | None = None
        self.error: PagewireError | None = None
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self.is_closed = False
        """Nobody reads chunks any more."""
        self.request: Generate | Resume | None = None
        """What began it, until that was accepted."""
        self.until: float | None = None
        """Its connection is lost, and by this time of the loop it must be resumed; None: it is not lost."""
        self._send = send
        self._has_logprobs = has_logprobs
        self.is_cancelled = False
        self.ends: dict[int, int] = {}
        """Where the user ended choices, by choice: told again where the connection broke."""
        self._started_ns = now_ns
        self._first_ns = 0
        self._over_ns = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_over(self) -> bool:
        """Nothing more comes."""
        return self.done is not None or self.error is not None

    # ---- from the server ---------------------------------------------------------------------------------------------

    def add(self, run: Run, now_ns: int) -> None:
        """More tokens.

        Raises:
            ProtocolError: they are not what must come next.
        """
        _, choice, start, ids, text, logprobs = run
        if choice >= len(self.choices):
            raise ProtocolError(f"tokens of choice {choice}, of {len(self.choices)}")
        state = self.choices[choice]
        if start != state.received:
            raise ProtocolError(f"tokens from {start} follow {state.received} tokens")
        if ids:
            if not self._first_ns:
                self._first_ns = now_ns
            if state.heard_ns:
                state.gaps_ns.append(now_ns - state.heard_ns)
            state.gaps_ns.extend((0,) * (len(ids) - 1))
            state.heard_ns = now_ns
            state.token_ids.extend(ids)
        if logprobs is not None:
            self._has_logprobs = True
            state.logprobs.extend(logprobs)
        if text:
            state.texts.append(text)
        self._give(Chunk(text, ids, start, choice, logprobs))

    def finish(self, message: Finished) -> None:
        """One choice ended; after a resume this may be told again.

        Raises:
            ProtocolError: tokens of it are missing.
        """
        if message.choice >= len(self.choices):
            raise ProtocolError(f"end of choice {message.choice}, of {len(self.choices)}")
        state = self.choices[message.choice]
        if message.num_tokens > state.received:
            raise ProtocolError(f"{message.num_tokens} tokens at the end, {state.received} came")
        if state.finish_reason is not None:
            return
        # Cut by `finish`: what came after the cut does not count.
        at = max(0, message.num_tokens - state.first)
        del state.token_ids[at:]
        del state.logprobs[at:]
        state.finish_reason, state.stop = message.reason, message.stop
        if message.text:
            state.texts.append(message.text)
            self._give(Chunk(message.text, (), message.num_tokens, message.choice))

    def end(self, message: Done, now_ns: int) -> None:
        """All choices ended.

        Raises:
            ProtocolError: not all of them had.
        """
        if any(choice.finish_reason is None for choice in self.choices):
            raise ProtocolError("a stream ended before its choices")
        self.done, self._over_ns = message, now_ns
        self._wake()

    def fail(self, error: PagewireError) -> None:
        """It is over, with an error. What came before can still be read. Idempotent."""
        if not self.is_over:
            self.error = error
            self._wake()

    # ---- for the handle ----------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the server to end it; the answer comes as `finish` and `end`. Idempotent."""
        if not self.is_over and not self.is_cancelled:
            self.is_cancelled = True
            self._send(Cancel(stream=self.number))

    def finish_at(self, at: int, choice: int) -> None:
        """Ask the server to cut a choice after `at` tokens."""
        if not self.is_over:
            self._send(Finish(stream=self.number, choice=choice, at=at))
            if choice < len(self.choices):  # else it is refused
                self.ends[choice] = at

    @property
    def unanswered(self) -> list[Cancel | Finish]:
        """What the user asked for and the server has not answered."""
        if self.is_cancelled:
            return [Cancel(stream=self.number)]
        ends = ((choice, at) for choice, at in self.ends.items() if self.choices[choice].finish_reason is None)
        return [Finish(stream=self.number, choice=choice, at=at) for choice, at in ends]

    def abandon(self) -> None:
        """Nobody reads it any more: end it, keep no chunks."""
        self.is_closed = True
        self.chunks.clear()
        self.cancel()
        self._wake()

    async def changed(self) -> None:
        """Wait for news. Many may wait."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def result(self) -> Result:
        """The result; only after `end`."""
        done = self.done
        assert done is not None
        gaps = sorted(gap for choice in self.choices for gap in choice.gaps_ns)
        return Result(
            request_id=self.accepted.request_id if self.accepted is not None else "",
            choices=[self._choice_result(choice) for choice in self.choices],
            usage=done.usage,
            seed=done.seed,
            timings=Timings(
                queue_ns=done.timings.queue_ns,
                ttft_ns=self._first_ns - self._started_ns if self._first_ns else None,
                itl_p50_ns=percentile(gaps, 0.50),
                itl_p95_ns=percentile(gaps, 0.95),
                itl_p99_ns=percentile(gaps, 0.99),
                total_ns=self._over_ns - self._started_ns,
                server=done.timings,
            ),
            prompt_logprobs=self.prompt_logprobs,
        )

    def _choice_result(self, state: ChoiceState) -> ChoiceResult:
        assert state.finish_reason is not None
        return ChoiceResult(
            text="".join(state.texts),
            token_ids=state.token_ids.tolist(),
            finish_reason=state.finish_reason,
            stop=state.stop,
            logprobs=list(state.logprobs) if self._has_logprobs else None,
        )

    def _give(self, chunk: Chunk) -> None:
        if not self.is_closed:
            self.chunks.append(chunk)
            if self._waiters:
                self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
