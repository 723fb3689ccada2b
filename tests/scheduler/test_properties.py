"""Random requests, cancels, lost clients, pauses, forks, priorities, promises and late completions: the tokens are always
those of a request that is alone in the world, every reference to every block can be named after every step, and all comes
back (F13, F14, F26, F28–F30, F35)."""

from __future__ import annotations

from device import expected
from harness import Harness
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagewire.errors import Overloaded, PromptTooLong
from pagewire.request.request import NO_WISHES, Wishes
from pagewire.scheduler.sequence import Sequence

CLIENTS = ["", "a", "b", "c"]
WISHES = [
    NO_WISHES,
    NO_WISHES,
    Wishes(ttft_ms=1e-4),  # a step or two of the harness's clock: late at once
    Wishes(ttft_ms=1e3, itl_ms=6.0),
    Wishes(deadline_ms=1e-3),
]


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler under random orders."""

    @initialize(
        num_blocks=st.integers(6, 40),
        max_rows=st.integers(1, 6),
        overlap=st.booleans(),
        cache=st.booleans(),
        budget=st.integers(6, 24),
        max_preemptions=st.integers(1, 3),
        waits=st.integers(0, 5),
        promised=st.sampled_from([{}, {}, {"itl_target_ms": 5.0}, {"itl_target_ms": 1e3, "ttft_target_ms": 1e-4}]),
    )
    def start(self, num_blocks, max_rows, overlap, cache, budget, max_preemptions, waits, promised) -> None:
        self.harness = Harness(
            num_blocks=num_blocks,
            max_rows=max_rows,
            max_len=60,
            overlap=overlap,
            cache=cache,
            max_step_tokens=budget,
            max_preemptions=max_preemptions,
            max_prefix_wait_steps=waits,
            **promised,
        )
        self.asked: dict[tuple[str, int], tuple[list[int], int, int, Sequence]] = {}
        self.cut: dict[tuple[str, int], int] = {}

    @rule(
        shared=st.integers(0, 20),
        own=st.lists(st.integers(10, 12), min_size=1, max_size=12),
        max_tokens=st.integers(0, 16),
        n=st.integers(1, 3),
        seed=st.integers(0, 2),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "", "b"]),
        client=st.sampled_from(CLIENTS),
        wishes=st.sampled_from(WISHES),
    )
    def submit(self, shared, own, max_tokens, n, seed, priority, tenant, client, wishes) -> None:
        prompt = [20 + i % 5 for i in range(shared)] + own
        try:
            sequences = self.harness.submit(
                prompt,
                max_tokens=max_tokens,
                n=n,
                seed=seed,
                priority=priority,
                tenant=tenant,
                client=client,
                wishes=wishes,
            )
        except (PromptTooLong, Overloaded):
            return
        for sequence in sequences:
            self.asked[sequence.request.request_id, sequence.choice] = (prompt, seed, max_tokens, sequence)

    @rule()
    def plan(self) -> None:
        self.harness.plan()

    @rule()
    def apply(self) -> None:
        if self.harness.pipeline.num_in_flight:
            self.harness.apply()

    @rule(steps=st.integers(1, 6))
    def run(self, steps) -> None:
        for _ in range(steps):
            self.harness.step()

    def _pick(self, i: int) -> Sequence | None:
        live = [s for *_, s in self.asked.values() if s.is_live]
        return live[i % len(live)] if live else None

    @rule(i=st.integers(0, 50))
    def cancel(self, i) -> None:
        if (sequence := self._pick(i)) is not None:
            self.cut[sequence.request.request_id, sequence.choice] = sequence.num_output
            assert self.harness.scheduler.cancel(sequence, self.harness.now)
            assert not self.harness.scheduler.cancel(sequence, self.harness.now), "a second time does nothing"
            self.harness.pipeline.check_invariants()

    @rule(client=st.sampled_from(CLIENTS))
    def lose(self, client) -> None:
        """A client is gone: all that it asked for ends at once."""
        for key, (*_, sequence) in self.asked.items():
            if sequence.is_live and sequence.request.client == client:
                self.cut[key] = sequence.num_output
                self.harness.scheduler.cancel(sequence, self.harness.now)
        self.harness.pipeline.check_invariants()

    @rule(i=st.integers(0, 50), at=st.integers(0, 20))
    def finish_at(self, i, at) -> None:
        if (sequence := self._pick(i)) is not None and sequence.num_output:
            at %= sequence.num_output + 1
            self.cut[sequence.request.request_id, sequence.choice] = at
            assert self.harness.scheduler.finish_at(sequence, at, self.harness.now)
            self.harness.pipeline.check_invariants()

    @rule(i=st.integers(0, 50))
    def pause(self, i) -> None:
        if (sequence := self._pick(i)) is not None:
            self.harness.scheduler.pause(sequence)
            self.harness.pipeline.check_invariants()

    @rule(i=st.integers(0, 50))
    def resume(self, i) -> None:
        if (sequence := self._pick(i)) is not None:
            self.harness.scheduler.resume(sequence)
            self.harness.pipeline.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        for *_, sequence in self.asked.values():
            self.harness.scheduler.resume(sequence)
        self.harness.run()
        for key, (prompt, seed, max_tokens, sequence) in self.asked.items():
            want = expected(prompt, seed + key[1], max_tokens)
            got = self.harness.results[key]
            assert not sequence.is_live
            if sequence.error is not None:
                assert sequence.error.code == "deadline"
                assert sequence.request.wishes.deadline_ms
                assert got == want[: len(got)], key
                continue
            if key in self.cut:
                assert got == want[: self.cut[key]], key
            else:
                assert got == want, key
                assert sequence.finish_reason == ("stop" if want and want[-1] == 7 else "length")


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
