"""Goodput: what counts as served and as refused, which rate is the highest, what a lack of time leaves; and the whole way."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def goodput(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("goodput")


def run_of(goodput, rows):
    processes, serve = importlib.import_module("processes"), importlib.import_module("serve")
    stats = {"steps_total": 200.0}
    answers = [
        processes.Answer(served=rows[::2], stats=stats, state={"step_prediction_error": 0.03}),
        processes.Answer(served=rows[1::2]),
    ]
    return serve.Found(answers, 10.0, 20.0, 0.5, 0.25)


def test_requests_are_told_apart_by_what_became_of_them(goodput):
    served = importlib.import_module("workload").Served
    rows = [
        served(10.0, 3, [10.1, 10.11, 10.12], [1, 1, 1]),  # within the promise
        served(12.0, 3, [12.3, 12.31, 12.32], [1, 1, 1]),  # the first token is late
        served(13.0, 3, [13.1, 13.12, 13.13], [1, 1, 1]),  # a gap is
        served(14.0, 3, error="Overloaded(…)", code="overloaded"),
        served(15.0, 3, [15.1, 15.11], [1, 1], "EngineLost(…)", "engine_lost"),
        served(9.9, 3, [10.0, 10.5, 11.0], [1, 1, 1]),  # before the window
    ]
    found = goodput.figures(run_of(goodput, rows), goodput.Promise(250.0, 12.0))
    assert {name: found[name] for name in ("offered", "served", "refused", "failed", "goodput")} == pytest.approx(
        {"offered": 0.5, "served": 0.3, "refused": 0.1, "failed": 0.1, "goodput": 0.1}
    )
    assert found["within_promise"] == pytest.approx(20)
    assert found["ttft_p95"] == math.inf
    assert found["ttft_p95_served"] == pytest.approx(300)
    assert found["itl_p99"] == pytest.approx(20)
    assert found["step_mean"] == pytest.approx(50)
    assert found["step_prediction_error"] == 0.03


def curve_of(goodput, cases):
    return goodput.Curve(
        goodput.Promise(250.0, 12.0),
        {rate: [{"ttft_p95": ttft, "itl_p99": itl} for ttft, itl in found] for rate, found in cases.items()},
    )


def test_the_highest_rate_is_the_last_before_the_first_that_is_not_within(goodput):
    good, late, slow = (100.0, 11.0), (250.0, 11.0), (100.0, 12.0)
    assert curve_of(goodput, {10: [good], 20: [good], 30: [late], 40: [good]}).highest() == 20
    assert curve_of(goodput, {10: [slow]}).highest() == 0
    assert curve_of(goodput, {}).highest() == 0
    curve = curve_of(goodput, {10: [good, good, good], 20: [good, late, good], 30: [slow, good, slow]})
    assert curve.highest() == 20
    assert curve.highest(every_seed=True) == 10
    # Two seeds, of which one is out: half of them is not most of them.
    assert curve_of(goodput, {10: [good, late]}).highest() == 0


def test_the_whole_curve_comes_before_its_second_seed(goodput):
    assert list(goodput.plan_of([40, 30], [0, 1])) == [(0, 30), (0, 40), (1, 30), (1, 40)]


def run(*flags):
    base = ["--device", "cpu", "--tiny", "--max-rows", "16", "--step-tokens", "256", "--clients", "2", "--json"]
    command = [sys.executable, str(PERF / "goodput.py"), *base, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    cases: dict[str, dict[str, float]] = {}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        cases.setdefault(row["case"], {})[row["metric"]] = row["value"]
    return cases, done.stderr


@pytest.mark.timeout(240)
def test_the_whole_way():
    cases, _ = run(
        "--rates", "6", "--seconds", "1", "--ramp", "0.5", "--seeds", "0", "1",
        "--itl-target", "2000", "--ttft-target", "60000",
    )  # fmt: skip
    found = cases["tiny, 6/s, seed 0"]
    assert found["offered"] > 0
    assert found["offered"] == pytest.approx(found["served"] + found["refused"] + found["failed"])
    assert found["failed"] == found["refused"] == 0
    assert 0 < found["ttft_p50"] <= found["ttft_p95"] == found["ttft_p95_served"]
    assert 0 < found["itl_p50"] <= found["itl_p99"]
    assert found["within_promise"] == 100
    assert 0 < found["step_prediction_error"] < 1  # planned by time: the model learnt
    assert found["offered"] != cases["tiny, 6/s, seed 1"]["offered"]  # seeds differ in their arrivals
    assert cases["tiny, 6/s"]["seeds"] == 2
    assert cases["tiny"]["rate"] == cases["tiny"]["rate_every_seed"] == 6


def test_what_there_is_no_time_for_is_left_out_and_said():
    cases, told = run("--rates", "5", "--seconds", "30", "--seeds", "0", "1", "--within", "20")
    assert "2 of 2 cases are left out" in told
    assert set(cases) == {"tiny"}
    assert cases["tiny"]["rate"] == 0
