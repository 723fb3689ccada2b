"""The watchdog, on a clock that moves when told to."""

import dataclasses

import pytest

from pagewire.clock import ManualClock
from pagewire.engine.watchdog import AlarmKind, Progress, Watchdog

SECOND = 1_000_000_000
LIMIT = 10 * SECOND
INTERVAL = SECOND // 4

IDLE = Progress(
    step=None,
    stage="forward",
    step_since_ns=0,
    num_running=0,
    num_waiting=0,
    num_paused=0,
    num_committed=0,
    num_prefilled=0,
    num_ended_tokens=0,
    num_live_tokens=lambda: 0,
)


class Watched:
    """A watchdog with its clock and the state that it sees."""

    def __init__(self):
        self.clock = ManualClock()
        self.watchdog = Watchdog(LIMIT, INTERVAL)
        self.now = IDLE
        self.alarm = None

    def set(self, **changes):
        self.now = dataclasses.replace(self.now, **changes)

    def launch(self, step, stage="forward"):
        self.set(step=step, stage=stage, step_since_ns=self.clock.now_ns())

    def run(self, seconds, each=lambda i: None):
        """Check every interval for so long; the first alarm, or None."""
        for i in range(int(seconds * SECOND / INTERVAL)):
            self.clock.advance_ns(INTERVAL)
            each(i)
            self.alarm = self.watchdog.check(self.clock.now_ns(), self.now)
            if self.alarm is not None:
                return self.alarm
        return None


@pytest.fixture
def watched():
    it = Watched()
    it.run(1)
    return it


def test_f1_a_step_beyond_the_limit_is_named_with_its_stage(watched):
    watched.launch(17)
    watched.set(num_running=1)
    assert watched.run(9.9) is None
    alarm = watched.run(1)
    assert alarm.kind is AlarmKind.STALL
    assert alarm.reason == "forward of step 17 running for 10.2 s"
    watched.set(stage="sample")
    assert watched.run(1).reason.startswith("sample of step 17 running for 10.5")


def test_an_alarm_ends_with_its_step(watched):
    watched.launch(1)
    watched.set(num_running=1)
    assert watched.run(11) is not None
    watched.launch(2)
    watched.set(num_committed=1)
    assert watched.run(9) is None


def test_steps_that_each_take_long_are_no_stall(watched):
    watched.set(num_running=1)
    for step in range(20):
        watched.launch(step)
        assert watched.run(9) is None
        watched.set(num_committed=step + 1)


def test_f5_idle_for_ten_times_the_limit_is_healthy(watched):
    assert watched.run(100) is None


def test_f5_paused_sequences_alone_are_no_work(watched):
    watched.set(num_running=2, num_waiting=1, num_paused=3)
    assert watched.run(100) is None


def test_f2_steps_without_tokens_are_no_progress(watched):
    watched.set(num_running=3, num_waiting=2)
    alarm = watched.run(60, watched.launch)
    assert alarm.kind is AlarmKind.NO_PROGRESS
    assert alarm.reason == "no token for 20.2 s with 3 sequences running and 2 waiting, of which 0 paused"


def test_f2_nothing_planned_with_work_at_hand(watched):
    watched.set(num_waiting=1)
    assert watched.run(60).kind is AlarmKind.NO_PROGRESS


def test_a_long_prefill_is_progress(watched):
    watched.set(num_running=1, num_live_tokens=lambda: 100_000)
    assert watched.run(200, lambda i: watched.set(num_prefilled=(i + 1) * 120)) is None


def test_f2_computing_the_same_prompt_again_and_again_is_not(watched):
    watched.set(num_running=1, num_live_tokens=lambda: 1000)
    alarm = watched.run(200, lambda i: watched.set(num_prefilled=(i + 1) * 120))
    assert alarm.kind is AlarmKind.NO_PROGRESS


def test_recomputing_after_a_commit_is_progress(watched):
    """Preempted and computed again between two tokens: slow, but it moves."""
    watched.set(num_running=1, num_live_tokens=lambda: 10_000)

    def each(i):
        watched.set(num_prefilled=(i + 1) * 120)
        if i % 80 == 79:
            watched.set(num_committed=i)

    assert watched.run(200, each) is None


def test_prompts_that_are_cancelled_before_their_first_token_were_computed_once_all_the_same(watched):
    watched.set(num_running=1, num_live_tokens=lambda: 500)

    def each(i):  # a prompt of 480 tokens computed a second, then its client leaves
        watched.set(num_prefilled=(i + 1) * 120, num_ended_tokens=(i // 4) * 480)

    assert watched.run(100, each) is None


def test_f2_clients_that_give_up_do_not_keep_a_stuck_engine_green(watched):
    watched.set(num_waiting=1)
    alarm = watched.run(60, lambda i: watched.set(num_ended_tokens=i * 50))
    assert alarm.kind is AlarmKind.NO_PROGRESS


def test_a_process_that_was_stopped_has_not_shown_that_a_step_is_late(watched):
    watched.launch(1)
    watched.set(num_running=1)
    assert watched.run(5) is None
    watched.clock.advance_ns(3600 * SECOND)
    assert watched.watchdog.check(watched.clock.now_ns(), watched.now) is None
    assert watched.run(4) is None
    assert watched.run(2).kind is AlarmKind.STALL
