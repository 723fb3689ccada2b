"""The ring of decisions and its dump."""

import json

import numpy as np
import pytest

from pagewire.engine.decisions import DecisionLog, Load, write_dump
from pagewire.step.step import StepPlan

LOAD = Load(running=2, waiting=1, paused=0, free_blocks=9)


def plan(step):
    two = np.array([0, 1], np.int32)
    return StepPlan(step, two, two, np.array([1, 5], np.int32), two, 1, token_ids=np.arange(5, dtype=np.int32))


def test_the_ring_keeps_the_last_ones():
    log = DecisionLog(3)
    for step in range(5):
        log.planned(plan(step), 100 + step, LOAD)
    assert [d.step for d in log.decisions()] == [2, 3, 4]
    last = log.decisions()[-1]
    assert (last.now_ns, last.entries, last.decode, last.prefill_tokens) == (104, 2, 1, 5)
    assert (last.running, last.waiting, last.free_blocks) == (2, 1, 9)


def test_nothing_planned_again_only_moves_the_time():
    log = DecisionLog(10)
    log.planned(plan(0), 1, LOAD)
    for now in (2, 3, 4):
        log.nothing_planned(now, LOAD)
    log.nothing_planned(5, LOAD._replace(waiting=7))
    assert [(d.step, d.now_ns, d.waiting) for d in log.decisions()] == [(0, 1, 1), (-1, 4, 1), (-1, 5, 7)]


def test_a_dump_is_json_lines_for_its_owner_alone(tmp_path):
    log = DecisionLog(3)
    log.planned(plan(4), 1, LOAD)
    path = write_dump(tmp_path, "why", log.decisions())
    head, line = [json.loads(text) for text in path.read_text().splitlines()]
    assert head == {"reason": "why", "decisions": 1}
    assert line == log.decisions()[0]._asdict()
    assert path.stat().st_mode & 0o777 == 0o600
    assert write_dump(tmp_path, "why", []) != path


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match="missing"):
        write_dump(tmp_path / "missing", "why", [])
