"""The queue against a plain list, and that nobody waits for ever, whatever others ask for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from timed import MS, Timed

from pagewire.request.request import Request
from pagewire.scheduler import waiting as waiting_module
from pagewire.scheduler.sequence import Sequence
from pagewire.scheduler.waiting import SHARE_TOKENS, WaitingQueue
from pagewire_transport.params import SamplingParams

NAMES = ["a", "b", "c", "d"]


def sequence(order: int, due_ns: int, share: str, priority: int = 0, tokens: int = 100) -> Sequence:
    request = Request(str(order), np.zeros(4, np.int32), SamplingParams(max_tokens=1, seed=0), 0, priority)
    return Sequence(request, 0, 0, order, order, share=share, due_ns=due_ns, num_uncached=tokens)


@given(
    orders=st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(1, 50), st.sampled_from(NAMES)),
            st.tuples(st.just("remove"), st.integers(0, 30), st.just("")),
            st.tuples(st.just("postpone"), st.integers(0, 30), st.just("")),
            st.tuples(st.just("charge"), st.integers(1, 20_000), st.sampled_from(NAMES)),
        ),
        max_size=60,
    )
)
@example(
    orders=[
        ("push", 1, "a"),
        ("push", 1, "b"),
        ("charge", 8193, "a"),
        ("push", 1, "a"),
        ("remove", 0, ""),
        ("remove", 0, ""),  # only one client waits, which is ahead of nobody
        ("push", 1, "b"),
    ]
)
@pytest.mark.parametrize("few", [0, 64])  # clients up to which a loop finds the first, beyond which arrays do
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_first_is_whom_a_plain_list_would_name(orders, few, monkeypatch):
    monkeypatch.setattr(waiting_module, "_FEW", few)
    queue, plain, served, floor = WaitingQueue(), [], {}, 0.0
    for order, (what, number, name) in enumerate(orders):
        if what == "push":
            new = sequence(order, number * 1000 + order, name)  # no two are due at once
            if not any(s.share == name for s in plain):
                served[name] = max(served.get(name, 0.0), floor)
            queue.push(new)
            queue.push(new)  # a second time does nothing
            plain.append(new)
        elif what == "charge":
            served[name] = max(served.get(name, 0.0), floor) + number
            if not any(s.share != name for s in plain):
                floor = served[name]
            queue.charge(name, number)
        elif plain:
            chosen = plain[number % len(plain)]
            if what == "remove":
                plain.remove(chosen)
                assert queue.remove(chosen)
                assert not queue.remove(chosen)
            else:
                queue.postpone(chosen, chosen.due_ns + 100_000)
        shares = {s.share for s in plain}
        if len(shares) > 1:
            floor = max(floor, min(served[share] for share in shares))
        may = [s for s in plain if served[s.share] <= min(served[share] for share in shares) + SHARE_TOKENS]
        assert queue.peek() is min(may, key=lambda s: s.due_ns, default=None)
        limit = 25_000
        ahead = [s for s in plain if s.due_ns <= limit]
        assert queue.ahead_of(limit) == (len(ahead), sum(s.num_uncached for s in ahead))
        queue.check_invariants()
    for one in plain:
        queue.remove(one)
    assert (len(queue), queue.num_clients, queue.peek()) == (0, 0, None)


def test_clients_that_come_and_go_leave_nothing_behind():
    queue = WaitingQueue()
    queue.push(sequence(0, 1, "stays"))
    for i in range(1, 20_000):
        one = sequence(i % 1000 + 1, 2, f"client-{i}")
        queue.push(one)
        queue.remove(one)
        queue.charge(one.share, 10)
    assert len(queue._served) <= 4096 + 1
    assert queue._lead.size <= 8


@given(
    seed=st.integers(0, 2**32 - 1),
    priority=st.integers(-3, 3),
    size=st.sampled_from([100, 5000]),
    client=st.sampled_from(NAMES),
)
@settings(max_examples=6, deadline=None)
def test_nobody_waits_for_ever(seed, priority, size, client):
    """More is asked for than can be served, for as long as it takes, with higher priority and tighter promises."""
    timed = Timed(itl_target_ms=15.0, max_rows=16, seed=seed)
    rng = np.random.default_rng(seed)

    def flood() -> None:
        while timed.scheduler.num_waiting < 24:
            wishes = {} if rng.random() < 0.5 else {"ttft_ms": float(rng.choice([0, 1e5]))}
            timed.submit(
                int(rng.integers(50, 1500)),
                max_tokens=8,
                priority=int(rng.integers(-3, 4)),
                client=str(rng.choice(NAMES)),
                **wishes,
            )

    flood()
    probe = timed.submit(size, max_tokens=4, priority=priority, client=client)
    while not probe.token_ns:
        assert timed.now - probe.asked_ns < 30_000 * MS, "patience, priorities, and what was due before"
        flood()
        timed.step()


@pytest.mark.parametrize("targets", [{}, {"itl_target_ms": 20.0}])
def test_f23_little_is_computed_twice(targets):
    """F23: twice as many streams as memory holds: preempted ones find most of what they had, and little is recomputed."""
    timed = Timed(num_blocks=1500, max_rows=64, max_len=2000, **targets)
    for i in range(200):
        timed.submit(int(timed.rng.integers(100, 400)), max_tokens=int(timed.rng.integers(100, 400)), client=str(i % 3))
    timed.run()
    timed.pipeline.check_invariants()
    scheduler = timed.scheduler
    computed = sum(s.num_prompt + s.num_output for s in timed.ended)
    assert scheduler.departures.num_preemptions > 10, "the case must preempt"
    assert scheduler.admission.num_recomputed_tokens / computed < 0.1
    assert max(s.num_preemptions for s in timed.ended) <= scheduler.config.max_preemptions + 1
