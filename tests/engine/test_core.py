"""The engine loop around a worker that the test drives by hand."""

import asyncio
import json

import numpy as np
import pytest

from pagewire.errors import Draining, EngineFailed, InternalError, NumericError, Overloaded
from pagewire.scheduler.sequence import SequenceState
from pagewire.step.step import SampleFlag
from pagewire.worker.interface import LogitMasks


async def test_a_request_is_served_and_reported_once(bench):
    (sequence,) = bench.submit(20, max_tokens=5)
    await bench.ended(sequence)
    assert sequence.finish_reason == "length"
    assert bench.core.output(sequence).tolist() == [10, 11, 12, 13, 14]
    assert bench.core.output(sequence, 1, 3).tolist() == [11, 12]
    assert [o.starts.tolist() for o in bench.sink.outcomes] == [[0], [1], [2], [3], [4]]
    assert bench.sink.ended == [sequence]
    assert bench.core.num_live == 0


async def test_forks_report_each(bench):
    sequences = bench.submit(20, max_tokens=3, n=4)
    await bench.ended(*sequences)
    assert [s.choice for s in sequences] == [0, 1, 2, 3]
    assert all(bench.core.output(s).size == 3 for s in sequences)


async def test_the_next_step_is_queued_while_one_runs(make_bench):
    bench = make_bench()
    bench.worker.is_held = True
    bench.submit(20, max_tokens=9)
    await bench.until(lambda: len(bench.worker.plans) == 2)
    await asyncio.sleep(0.01)
    assert len(bench.worker.samples) == 2, "one step runs, one is queued, no third"
    bench.worker.release()
    await bench.until(lambda: len(bench.worker.plans) == 3)


async def test_without_overlap_nothing_is_queued(make_bench):
    bench = make_bench(scheduler={"overlap": False})
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=3)
    for step in range(3):
        await bench.until(lambda: len(bench.worker.samples) == 1)
        await asyncio.sleep(0.005)
        assert len(bench.worker.plans) == step + 1
        bench.worker.release()
    await bench.ended(sequence)


async def test_a_join_is_planned_while_a_step_runs(bench):
    bench.worker.is_held = True
    bench.submit(20, max_tokens=1)
    await bench.until(lambda: len(bench.worker.plans) == 1)
    await asyncio.sleep(0.01)
    assert len(bench.worker.plans) == 1, "one token was asked for: there is nothing more to plan"
    (second,) = bench.submit([5] * 20, max_tokens=1)
    await bench.until(lambda: len(bench.worker.plans) == 2)
    assert bench.worker.plans[1].joins[0].prompt_ids.tolist() == [5] * 20
    bench.worker.release_all()
    await bench.ended(second)


async def test_the_idle_loop_takes_no_turns(bench):
    (sequence,) = bench.submit(20, max_tokens=2)
    await bench.ended(sequence)
    await asyncio.sleep(0.01)
    turns = []
    bench.core._turn = lambda: turns.append(1)
    await asyncio.sleep(0.2)
    assert not turns


async def test_a_waiting_loop_takes_no_turns_either(bench):
    bench.worker.is_held = True
    bench.submit(20, max_tokens=9)
    await bench.until(lambda: len(bench.worker.plans) == 2)
    await asyncio.sleep(0.01)
    turns = []
    real = bench.core._turn
    bench.core._turn = lambda: turns.append(1) or real()
    await asyncio.sleep(0.1)
    assert not turns


async def test_steps_that_end_at_once_leave_the_loop_to_others(bench):
    """A worker that is always done must not keep sockets from being read."""
    ticks = []

    def launch_sample(plan, masks=None):
        done = asyncio.get_running_loop().create_future()
        done.set_result(bench.worker.result(plan))
        return done

    bench.worker.launch_sample = launch_sample

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    sequences = bench.submit(20, max_tokens=200)
    await bench.ended(*sequences)
    ticking.cancel()
    assert len(ticks) >= 200


async def test_a_cancel_is_reported_although_a_step_hangs(bench):
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=9)
    await bench.until(lambda: len(bench.worker.plans) == 2)
    assert bench.core.cancel(sequence)
    await bench.ended(sequence)
    assert sequence.finish_reason == "cancelled"
    assert not bench.core.cancel(sequence), "it had ended"
    assert bench.core.num_live == 0


async def test_finish_at_cuts_and_counts_the_overrun(bench):
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=9)
    for _ in range(4):
        await bench.until(lambda: bench.worker.samples)
        bench.worker.release()
    await bench.until(lambda: sequence.num_output == 4)
    assert bench.core.finish_at(sequence, 2)
    await bench.ended(sequence)
    assert (sequence.finish_reason, sequence.num_output) == ("stop", 2)
    assert bench.core.output(sequence).tolist() == [10, 11]
    assert bench.core.stats()["overrun_tokens_total"] == 2
    assert not bench.core.finish_at(sequence, 1)


async def test_a_stop_found_by_a_sink_is_not_planned_again(make_bench):
    """Sinks come before the next plan: without overlap not a single token is overrun."""
    bench = make_bench(scheduler={"overlap": False})
    (sequence,) = bench.submit(20, max_tokens=50)
    bench.sink.on = lambda outcome: sequence.num_output == 3 and bench.core.finish_at(sequence, 3)
    await bench.ended(sequence)
    assert len(bench.worker.plans) == 3
    assert bench.core.stats()["overrun_tokens_total"] == 0


async def test_max_tokens_zero_ends_without_a_step(bench):
    (sequence,) = bench.submit(20, max_tokens=0)
    await bench.ended(sequence)
    assert (sequence.finish_reason, sequence.num_output) == ("length", 0)
    assert not bench.worker.plans


async def test_pause_and_resume(bench):
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=9)
    await bench.until(lambda: len(bench.worker.plans) == 2)
    bench.core.pause(sequence)
    bench.core.pause(sequence)
    assert bench.core.stats()["sequences_paused"] == 1
    bench.worker.release_all()
    await bench.until(lambda: sequence.num_output == 2)
    await asyncio.sleep(0.02)
    assert (sequence.state, sequence.num_output) == (SequenceState.PAUSED, 2)
    bench.core.resume(sequence)
    bench.core.resume(sequence)
    await bench.ended(sequence)
    assert sequence.num_output == 9
    assert bench.core.stats()["sequences_paused"] == 0


async def test_a_paused_sequence_that_is_cancelled_is_no_longer_counted_as_paused(bench):
    (sequence,) = bench.submit(20, max_tokens=200)
    await bench.until(lambda: sequence.num_output > 2)
    bench.core.pause(sequence)
    bench.core.cancel(sequence)
    await bench.ended(sequence)
    assert bench.core.stats()["sequences_paused"] == 0


async def test_masks_are_asked_for_between_forward_and_sample(make_bench):
    order = []
    worker_masks = LogitMasks(np.zeros(1, np.int32), np.zeros((1, 32), np.uint32))

    def masks(plan):
        order.append(("masks", plan.step))
        return worker_masks if plan.step == 1 else None

    bench = make_bench(masks=masks)
    forward = bench.worker.launch_forward
    bench.worker.launch_forward = lambda plan: order.append(("forward", plan.step)) or forward(plan)
    (sequence,) = bench.submit(20, max_tokens=3)
    await bench.ended(sequence)
    assert order[:4] == [("forward", 0), ("masks", 0), ("forward", 1), ("masks", 1)]
    assert bench.worker.masks == [None, worker_masks, None]


async def test_the_queue_is_bounded(make_bench):
    bench = make_bench(scheduler={"max_waiting": 3})
    bench.worker.is_held = True
    with pytest.raises(Overloaded) as caught:
        for _ in range(20):
            bench.submit(20, max_tokens=9)
    assert caught.value.retry_after_ms
    assert bench.core.stats()["requests_refused_total"] == 1


# ---- F22: what is measured ---------------------------------------------------------------------------------------------


async def test_f22_no_first_token_is_counted_before_there_is_one(bench):
    """A prompt of three chunks: the time to first token is counted with the first token, not with the first chunk."""
    bench.worker.is_held = True
    (sequence,) = bench.submit(160, max_tokens=2)
    for chunk in range(2):
        await bench.until(lambda: bench.worker.samples)
        bench.worker.release()
        await bench.until(lambda n=chunk: len(bench.sink.outcomes) == n + 1)
        assert bench.core.stats()["first_token_seconds_count"] == 0
        assert sequence.first_token_ns is None
        assert all(o.token_ids.size == 0 for o in bench.sink.outcomes)
    bench.worker.release()
    await bench.until(lambda: len(bench.sink.outcomes) == 3)
    assert bench.core.stats()["first_token_seconds_count"] == 1
    assert sequence.first_token_ns is not None
    assert bench.sink.outcomes[-1].starts.tolist() == [0]


async def test_what_is_counted(bench):
    first = bench.submit(33, max_tokens=4)
    await bench.ended(*first)
    second = bench.submit(33, max_tokens=4, n=2)
    await bench.ended(*second)
    stats = bench.core.stats()
    assert stats["requests_total"] == 2
    assert stats["sequences_total"] == stats["sequences_length_total"] == 3
    assert stats["prompt_tokens_total"] == 66
    assert stats["prompt_tokens_cached_total"] == 32
    assert stats["prefilled_tokens_total"] == 33 + 1
    assert stats["output_tokens_total"] == 12
    assert stats["first_token_seconds_count"] == stats["queue_seconds_count"] == 3
    assert stats["steps_total"] == stats["step_seconds_count"] == len(bench.worker.plans)
    assert stats["kv_blocks"] == 32
    assert stats["kv_blocks_used"] == 0
    assert stats["kv_blocks_cached"] > 0
    assert stats["ready"] == 1


async def test_decisions_are_kept(make_bench):
    bench = make_bench(engine={"decision_log": 4})
    (sequence,) = bench.submit(20, max_tokens=9)
    await bench.ended(sequence)
    last = bench.core.decisions.decisions()
    assert [d.step for d in last] == [5, 6, 7, 8]
    assert all(d.decode == d.entries == d.samples == d.running == 1 for d in last)


# ---- F6, F7: faults of one request -------------------------------------------------------------------------------------


async def test_f6_a_pool_full_of_cancelled_requests_is_empty_for_the_next(make_bench):
    bench = make_bench()
    bench.worker.is_held = True
    before = bench.num_available
    sequences = [bench.submit([i] * 100, max_tokens=100)[0] for i in range(1, 20)]
    await bench.until(lambda: len(bench.worker.plans) == 2)
    for sequence in sequences:
        bench.core.cancel(sequence)
    await bench.ended(*sequences)  # although no step ended and nothing new came
    bench.worker.release_all()
    await bench.until(lambda: bench.num_available == before)
    bench.core.pipeline.check_invariants()
    (probe,) = bench.submit([999] * 200, max_tokens=50)
    await bench.ended(probe)
    assert probe.finish_reason == "length"


async def test_f6_cancelled_while_queued_is_reported_with_nothing_running(bench):
    (sequence,) = bench.submit(20, max_tokens=9)
    bench.core.cancel(sequence)  # before the loop took a turn
    await bench.ended(sequence)
    assert not bench.worker.plans


async def test_f7_a_fault_while_admitting_ends_that_request_alone(bench, monkeypatch):
    (other,) = bench.submit(20, max_tokens=30)
    real = bench.core.scheduler.submit

    def submit(request, now_ns):
        if request.prompt_ids.size == 13:
            raise ZeroDivisionError("planted")
        return real(request, now_ns)

    monkeypatch.setattr(bench.core.scheduler, "submit", submit)
    with pytest.raises(InternalError, match="planted") as caught:
        bench.submit(13, max_tokens=3)
    assert caught.value.code == "internal"
    (third,) = bench.submit(14, max_tokens=3)
    await bench.ended(other, third)
    assert (other.finish_reason, third.finish_reason) == ("length", "length")
    assert bench.core.health.ready
    assert "submit_failed" in bench.log


async def test_f7_bad_logits_end_that_request_alone(bench):
    bench.worker.is_held = True
    (bad,) = bench.submit([3] * 20, max_tokens=9)
    (good,) = bench.submit([4] * 20, max_tokens=9)
    real = bench.worker.result

    def result(plan):
        out = real(plan)
        if plan.step == 2:
            at = int(np.flatnonzero(plan.sample_rows == bad.row)[0])
            out.flags[at] = SampleFlag.NUMERIC
            out.counts[at] = 0
            out.token_ids = np.delete(out.token_ids, at)
        return out

    bench.worker.result = result
    bench.worker.release_all()
    await bench.ended(bad, good)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, NumericError)
    assert bench.core.output(bad).tolist() == [10, 11]
    assert (good.finish_reason, good.num_output) == ("length", 9)
    assert bench.core.health.ready


async def test_f7_a_sink_that_raises_fails_the_sequences_of_that_outcome_alone(bench):
    bench.worker.is_held = True
    (first,) = bench.submit(20, max_tokens=9)
    await bench.until(lambda: len(bench.worker.plans) == 2)
    bench.worker.release()
    await bench.until(lambda: first.num_output == 1)
    bench.sink.fault = ZeroDivisionError("planted")
    bench.worker.release()
    await bench.ended(first)
    assert isinstance(first.error, InternalError)
    assert "planted" in str(first.error)
    bench.worker.release_all()
    (second,) = bench.submit(20, max_tokens=9)
    await bench.ended(second)
    assert second.finish_reason == "length"
    assert bench.core.health.ready
    assert bench.core.stats()["sink_faults_total"] == 1


async def test_f7_a_sink_that_raises_keeps_nothing_from_the_other_sinks(bench):
    other = type(bench.sink)()
    bench.core.sinks.append(other)
    (sequence,) = bench.submit(20, max_tokens=9)
    bench.sink.fault = ZeroDivisionError("planted")
    await bench.ended(sequence)
    assert other.ended == [sequence]
    assert len(other.outcomes) == len(bench.sink.outcomes)


# ---- faults of the engine ----------------------------------------------------------------------------------------------


def fail_forward(worker):
    worker.forwards[-1].set_exception(RuntimeError("device lost"))


def fail_sample(worker):
    worker.samples[0][1].set_exception(RuntimeError("device lost"))


def cancel_sample(worker):
    worker.samples[0][1].cancel()


def fail_next_launch(worker):
    worker.fail_launch = RuntimeError("device lost")
    worker.release()


@pytest.mark.parametrize(
    ("break_it", "stage"),
    [
        (fail_forward, "forward of step 1"),
        (fail_sample, "sample of step 0"),
        (cancel_sample, "sample of step 0"),
        (fail_next_launch, "launch of step 2"),
    ],
)
async def test_a_fault_of_the_worker_ends_every_stream_with_the_reason(bench, break_it, stage):
    bench.worker.is_held = True
    sequences = [bench.submit([i] * 20, max_tokens=9)[0] for i in range(1, 12)]  # some run, some wait
    await bench.until(lambda: len(bench.worker.plans) == 2)
    bench.core.cancel(sequences[3])
    await bench.ended(sequences[3])
    await asyncio.sleep(0.01)  # the loop sleeps: nothing but the fault wakes it
    break_it(bench.worker)
    await bench.ended(*sequences)
    assert sequences[3].finish_reason == "cancelled", "it had ended before"
    for sequence in sequences[:3] + sequences[4:]:
        assert sequence.finish_reason == "error"
        assert isinstance(sequence.error, EngineFailed)
        assert stage in str(sequence.error)
    assert not bench.core.health.ready
    assert stage in bench.core.health.reason
    assert stage in str(await asyncio.wait_for(bench.core.wait_failed(), 1))
    with pytest.raises(EngineFailed, match=stage):
        bench.submit(20, max_tokens=2)
    assert bench.core.stats()["ready"] == 0
    assert bench.core.num_live == 0
    bench.worker.samples.clear()


async def test_a_fault_of_the_scheduler_ends_every_stream_too(bench, monkeypatch):
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=9)
    await bench.until(lambda: len(bench.worker.plans) == 2)

    def broken(now_ns):
        raise KeyError("planted")

    monkeypatch.setattr(bench.core.pipeline, "plan", broken)
    bench.worker.release()
    await bench.ended(sequence)
    assert "planted" in str(sequence.error)
    assert isinstance(await bench.core.wait_failed(), EngineFailed)
    bench.worker.samples.clear()


async def test_wait_failed_waits(bench):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bench.core.wait_failed(), 0.05)


# ---- F1, F2, F5: health ------------------------------------------------------------------------------------------------

QUICK = {"stall_timeout_ms": 100}


async def test_f1_a_step_that_hangs_turns_readiness_false_and_fails_the_open_streams(make_bench, tmp_path):
    bench = make_bench(engine=QUICK)
    before = bench.num_available
    (done,) = bench.submit(20, max_tokens=3)
    await bench.ended(done)
    bench.worker.is_held = True
    running = bench.submit([1] * 20, max_tokens=9)[0]
    await bench.until(lambda: len(bench.worker.samples) == 2)
    bench.worker.forwards[-2].set_result(None)  # the forward is done, the draw hangs
    hung = bench.worker.samples[0][0].step
    await bench.until(lambda: not bench.core.health.ready, 2.0)
    assert bench.core.health.reason.startswith(f"sample of step {hung} running for 0.")
    await bench.ended(running)
    assert isinstance(running.error, EngineFailed)
    assert f"sample of step {hung}" in str(running.error)
    with pytest.raises(EngineFailed, match="not ready") as caught:
        bench.submit(20, max_tokens=2)
    assert caught.value.retry_after_ms

    await bench.until(lambda: "decisions_written" in bench.log)
    (dump,) = tmp_path.glob("pagewire-decisions-*.jsonl")
    head, *lines = [json.loads(line) for line in dump.read_text().splitlines()]
    assert f"sample of step {hung}" in head["reason"]
    assert head["decisions"] == len(lines) == len(bench.core.decisions)
    assert {"step", "now_ns", "entries", "waiting", "free_blocks"} <= lines[0].keys()
    assert [line["step"] for line in lines if line["step"] >= 0] == list(range(hung + 2))
    assert dump.stat().st_mode & 0o077 == 0

    # The step comes to an end after all: ready again, all blocks back, requests are served.
    bench.worker.release_all()
    await bench.until(lambda: bench.core.health.ready)
    assert bench.num_available == before
    (probe,) = bench.submit(20, max_tokens=3)
    await bench.ended(probe)
    assert probe.finish_reason == "length"
    bench.core.pipeline.check_invariants()
    assert bench.core.stats()["stalls_total"] == 1


async def test_a_step_is_not_late_for_having_waited_behind_another(make_bench):
    bench = make_bench(engine={"stall_timeout_ms": 600})
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=3)
    for _ in range(3):
        await bench.until(lambda: bench.worker.samples)
        await asyncio.sleep(0.4)
        bench.worker.release()
    await bench.ended(sequence)
    assert sequence.finish_reason == "length"
    stats = bench.core.stats()
    assert stats["stalls_total"] == 0
    assert 0.39 < stats["step_seconds_p50"] <= stats["step_seconds_max"] < 0.75


async def test_f2_work_that_never_moves_fails_the_engine(make_bench, monkeypatch):
    bench = make_bench(engine=QUICK)
    monkeypatch.setattr(bench.core.pipeline, "plan", lambda now_ns: None)
    (sequence,) = bench.submit(20, max_tokens=9)
    await bench.ended(sequence)
    assert isinstance(sequence.error, EngineFailed)
    assert "no token for" in str(sequence.error)
    assert "1 waiting" in bench.core.health.reason
    assert isinstance(await bench.core.wait_failed(), EngineFailed)
    await bench.until(lambda: "decisions_written" in bench.log)


async def test_f2_steps_without_tokens_fail_the_engine(make_bench):
    """Steps come and go, yet every sample is dropped."""
    bench = make_bench(engine=QUICK)
    real = bench.worker.result

    def nothing(plan):
        out = real(plan)
        out.counts[:] = 0
        out.token_ids = out.token_ids[:0]
        return out

    bench.worker.result = nothing
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=200)

    async def drive():
        while sequence.is_live:
            if bench.worker.samples:
                bench.worker.release()
            await asyncio.sleep(0.01)

    driving = asyncio.create_task(drive())
    await bench.ended(sequence)
    await driving
    assert isinstance(sequence.error, EngineFailed)
    assert "no token for" in str(sequence.error)
    bench.worker.samples.clear()


async def test_f5_idle_for_ten_times_the_limit_stays_ready(make_bench):
    bench = make_bench(engine=QUICK)
    (sequence,) = bench.submit(20, max_tokens=9)
    await bench.ended(sequence)
    seen = set()
    for _ in range(100):
        await asyncio.sleep(0.011)
        seen.add(bench.core.health.ready)
    assert seen == {True}
    assert bench.core.stats()["stalls_total"] == 0


async def test_f5_all_paused_for_long_stays_ready(make_bench):
    bench = make_bench(engine=QUICK)
    (sequence,) = bench.submit(20, max_tokens=100)
    await bench.until(lambda: sequence.num_output > 3)
    bench.core.pause(sequence)
    await asyncio.sleep(0.5)
    assert bench.core.health.ready
    bench.core.resume(sequence)
    await bench.ended(sequence)
    assert sequence.num_output == 100


async def test_a_dump_that_cannot_be_written_harms_nothing(make_bench, tmp_path):
    bench = make_bench(engine={**QUICK, "dump_dir": str(tmp_path / "missing")})
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=9)
    await bench.ended(sequence)
    await bench.until(lambda: "decisions_lost" in bench.log)
    bench.worker.release_all()
    await bench.until(lambda: bench.core.health.ready)


async def test_only_the_last_dumps_stay(make_bench, tmp_path):
    bench = make_bench()
    for _ in range(11):
        bench.core._monitor.dump("planted")
        await bench.until(lambda: not bench.core._monitor._writing)
    assert len(list(tmp_path.glob("pagewire-decisions-*.jsonl"))) == 8


# ---- the end -----------------------------------------------------------------------------------------------------------


async def test_drain_lets_open_streams_end_and_refuses_new_ones(bench):
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=9)
    draining = asyncio.create_task(bench.core.drain(5.0))
    await asyncio.sleep(0.01)
    assert bench.core.health.reason == "draining"
    with pytest.raises(Draining):
        bench.submit(20, max_tokens=9)
    bench.worker.release_all()
    assert await draining
    assert (sequence.finish_reason, sequence.num_output) == ("length", 9)


async def test_drain_ends_inside_its_deadline_although_a_step_hangs(bench):
    bench.worker.is_held = True
    sequences = [bench.submit([i] * 20, max_tokens=9)[0] for i in range(1, 12)]
    await bench.until(lambda: len(bench.worker.plans) == 2)
    async with asyncio.timeout(1.0):
        assert not await bench.core.drain(0.1)
    assert all(isinstance(s.error, Draining) for s in sequences)
    assert bench.core.num_live == 0


async def test_stop_cancels_what_is_live_and_may_be_called_twice(make_bench):
    bench = make_bench()
    bench.worker.is_held = True
    (sequence,) = bench.submit(20, max_tokens=9)
    await bench.until(lambda: len(bench.worker.plans) == 2)
    assert await bench.core.stop(1.0)
    assert sequence.finish_reason == "cancelled"
    assert bench.worker.is_closed
    assert await bench.core.stop(1.0)
    with pytest.raises(Draining):
        bench.submit(20, max_tokens=9)
    assert bench.core.health.reason == "stopped"


async def test_stop_says_when_the_worker_does_not_close(make_bench, monkeypatch):
    bench = make_bench()
    real = bench.worker.close

    async def hang():
        await asyncio.sleep(60)

    monkeypatch.setattr(bench.worker, "close", hang)
    assert not await bench.core.stop(0.05)
    assert "worker_not_closed" in bench.log
    monkeypatch.setattr(bench.worker, "close", real)
